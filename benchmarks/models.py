"""Programs that nobody tuned recipes to: a Llama in its usual variants, a ViT and a ResNet.

Each is written as its users write it, in bfloat16 with float32 parameters, without scalewise. Sizes
are Llama 8B's widths, ViT-L's and ResNet-50's blocks, in few layers; ``small`` divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import scalewise as sw

Tree = Any
Make = Callable[[], Any]
HEAD = 128


def half(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)


def training(loss: Callable, rate: float = 1e-3) -> tuple[Callable, Callable]:
    """The AdamW step of a loss of (parameters, *batch), and the initial state of parameters."""
    optimizer = optax.adamw(rate)

    def step(state, *batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, lambda params: (params, optimizer.init(params))


# -- a Llama -------------------------------------------------------------------------------------


def rms_norm(x, gain):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * gain


def rotated(x, first=0):
    """RoPE of ``[batch, tokens, heads, HEAD]``; ``first`` is the first token's position."""
    frequency = 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angle = (first + jnp.arange(x.shape[1]))[:, None] * frequency
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def experts(w, x, kind: str):
    """SwiGLU of two of the experts of each token, by dense einsums or by ``ragged_dot``."""
    tokens = x.reshape(-1, x.shape[-1])
    count, top = w["gate"].shape[0], 2
    scores, chosen = lax.top_k(tokens @ w["router"], top)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    if kind == "einsum":  # each expert takes as many tokens as fit
        capacity = tokens.shape[0] * top // count
        chosen = jax.nn.one_hot(chosen, count, dtype=jnp.int32).sum(1)
        place = jnp.cumsum(chosen, axis=0) * chosen - 1
        dispatch = jax.nn.one_hot(place, capacity, dtype=x.dtype)
        given = jnp.einsum("tec,td->ecd", dispatch, tokens)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", given, w["gate"]))
        hidden = hidden * jnp.einsum("ecd,edf->ecf", given, w["up"])
        out = jnp.einsum("ecf,efd->ecd", hidden, w["down"])
        return jnp.einsum("tec,ecd->td", dispatch, out).reshape(x.shape)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    given = tokens[order // top]
    hidden = jax.nn.silu(lax.ragged_dot(given, w["gate"], sizes))
    hidden = hidden * lax.ragged_dot(given, w["up"], sizes)
    out = lax.ragged_dot(hidden, w["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[order // top].add(out).reshape(x.shape)


def layer(w, x, attention: str, moe: str = ""):
    batch, tokens, width = x.shape
    y = rms_norm(x, w["norm1"])
    q, k, v = ((y @ w[n]).reshape(batch, tokens, -1, HEAD) for n in ("wq", "wk", "wv"))
    mixed = jax.nn.dot_product_attention(
        rotated(q),
        rotated(k),
        v,
        is_causal=True,
        implementation=attention,  # pyright: ignore
    )
    x = x + mixed.reshape(batch, tokens, width) @ w["wo"]
    y = rms_norm(x, w["norm2"])
    if moe:
        return x + experts(w, y, moe)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def entropy(logits, targets):
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def llama_weights(width, hidden, layers, vocabulary, groups=4, experts=0, **_):
    """Parameters: ``layers`` are a list."""
    key = iter(jax.random.split(jax.random.key(0), 16 * layers + 2))

    def normal(*shape):
        return jax.random.normal(next(key), shape) * shape[-2] ** -0.5

    def one():
        own = (experts,) if experts else ()
        shapes = {
            "wq": (width, width), "wk": (width, width // groups), "wv": (width, width // groups),
            "wo": (width, width), "gate": (*own, width, hidden), "up": (*own, width, hidden),
            "down": (*own, hidden, width),
        }  # fmt: skip
        shapes |= {"router": (width, experts)} if experts else {}
        gains = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
        return {name: normal(*shape) for name, shape in shapes.items()} | gains

    return {
        "embedding": normal(vocabulary, width), "head": normal(width, vocabulary),
        "norm": jnp.ones(width), "layers": [one() for _ in range(layers)],
    }  # fmt: skip


def llama_logits(w, tokens, attention="xla", moe="", scan=False):
    x = w["embedding"][tokens]
    if scan:  # as MaxText: layers are stacked, and computed again in the backward pass

        @jax.checkpoint
        def body(x, own):
            return layer(half(own), x, attention, moe), None

        x, _ = lax.scan(body, x.astype(jnp.bfloat16), w["layers"])
    else:
        for own in w["layers"]:
            x = layer(own, x, attention, moe)
    return rms_norm(x, half(w["norm"])) @ half(w["head"])


def llama(sizes, *, attention="xla", moe="", scan=False, accumulate=0, lora=False):
    """A training step of a Llama, and how to make its arguments."""

    def loss(params, tokens):
        weights = params if scan else half(params)
        logits = llama_logits(weights, tokens[:, :-1], attention, moe, scan)
        return entropy(logits, tokens[:, 1:])

    def batch():
        shape = sizes["batch"], sizes["tokens"] + 1
        return jax.random.randint(jax.random.key(1), shape, 0, sizes["vocabulary"])

    def weights():
        w = llama_weights(**sizes, experts=8 if moe else 0)
        if scan:
            w["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *w["layers"])
        return w

    if lora:
        return lora_step(sizes, attention, weights, batch)
    step, state = training(loss)
    if accumulate:
        step, state = accumulating(loss, accumulate)
    return step, lambda: (state(weights()), batch())


def accumulating(loss, parts):
    """An AdamW step that adds up the gradients of several parts of the batch in a scan."""
    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        params, moments = state

        def part(total, tokens):
            value, grads = jax.value_and_grad(loss)(params, tokens)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, values = lax.scan(part, zeros, batch.reshape(parts, -1, batch.shape[-1]))
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), jnp.mean(values)

    return step, lambda params: (params, optimizer.init(params))


def lora_step(sizes, attention, weights, batch, rank=16):
    """A step of low-rank adapters of all matrices of the layers, beside a frozen base."""
    names = ("wq", "wk", "wv", "wo", "gate", "up", "down")

    def applied(own, adapters, x):  # the layer's products, with an adapter beside each
        class WithAdapter:
            def __init__(self, name):
                self.name = name

            def __rmatmul__(self, y):
                a, b = adapters[self.name]
                return y @ own[self.name] + (y @ a) @ b

        return layer({n: WithAdapter(n) if n in names else own[n] for n in own}, x, attention)

    def loss(adapters, base, tokens):
        x = base["embedding"][tokens[:, :-1]]
        for own, beside in zip(base["layers"], half(adapters), strict=True):
            x = applied(own, beside, x)
        return entropy(rms_norm(x, base["norm"]) @ base["head"], tokens[:, 1:])

    step, state = training(loss)

    def make():
        base = half(weights())
        zeros = [
            {n: (jnp.ones((w[n].shape[0], rank)), jnp.zeros((rank, w[n].shape[1]))) for n in names}
            for w in base["layers"]
        ]
        return state(zeros), base, batch()

    return step, make


def prefill(sizes, attention="xla"):
    """Logits of a prompt; weights in bfloat16, which an argument may hold quantized."""

    def step(weights, tokens):
        return llama_logits(weights, tokens, attention)[:, -1]

    def make():
        shape = sizes["batch"], sizes["tokens"]
        tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes["vocabulary"])
        return half(llama_weights(**sizes)), tokens

    return step, make


def decode(sizes, batch=8):
    """One token for each of a batch of sequences, whose keys and values are cached."""

    def step(weights, caches, token, position):
        x = weights["embedding"][token][:, None]
        found = []
        for w, (keys, values) in zip(weights["layers"], caches, strict=True):
            y = rms_norm(x, w["norm1"])
            q, k, v = ((y @ w[n]).reshape(len(y), 1, -1, HEAD) for n in ("wq", "wk", "wv"))
            q, k = rotated(q, position), rotated(k, position)
            keys = lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), position, 1)
            values = lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), position, 1)
            found.append((keys, values))
            mask = (jnp.arange(keys.shape[1]) <= position)[None, None, None]
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)
            mixed = jax.nn.dot_product_attention(q, keys, values, mask=mask)
            x = x + mixed.reshape(x.shape) @ w["wo"]
            y = rms_norm(x, w["norm2"])
            x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return rms_norm(x, weights["norm"])[:, 0] @ weights["head"], found

    def make():
        weights = half(llama_weights(**sizes))
        heads = sizes["width"] // 4 // HEAD
        empty = jnp.zeros((batch, sizes["tokens"], heads, HEAD), jnp.bfloat16)
        caches = [(empty, empty) for _ in weights["layers"]]
        return weights, caches, jnp.zeros(batch, jnp.int32), jnp.int32(sizes["tokens"] // 2)

    return step, make


# -- images --------------------------------------------------------------------------------------


def vit(width, layers, batch, tokens=256, **_):
    """A ViT's training step: pre-norm attention and GELU layers with biases."""

    def normed(x, g):
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return y.astype(x.dtype) * g[0] + g[1]

    def block(w, x):
        y = normed(x, w["n1"]) @ w["qkv"] + w["b1"]
        q, k, v = jnp.split(y.reshape(*x.shape[:2], -1, 64), 3, axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + mixed @ w["out"] + w["b2"]
        return x + jax.nn.gelu(normed(x, w["n2"]) @ w["up"] + w["b3"]) @ w["down"] + w["b2"]

    def loss(params, x, y):
        w = half(params)
        x = half(x) @ w["patch"]
        for own in w["layers"]:
            x = block(own, x)
        return entropy(x.mean(1) @ w["head"], y)

    def make():
        def random(*shape):
            return jax.random.normal(jax.random.key(0), shape) * shape[0] ** -0.5

        one = {
            "n1": random(2, width), "n2": random(2, width), "qkv": random(width, 3 * width),
            "b1": random(3 * width), "out": random(width, width), "b2": random(width),
            "up": random(width, 4 * width), "b3": random(4 * width),
            "down": random(4 * width, width),
        }  # fmt: skip
        params = {
            "patch": random(768, width), "head": random(width, 1024), "layers": [one] * layers,
        }  # fmt: skip
        images = jax.random.normal(jax.random.key(1), (batch, tokens, 768))
        return state(params), images, jnp.zeros(batch, jnp.int32)

    step, state = training(loss)
    return step, make


def resnet(width, layers, batch, size=56, **_):
    """A training step of ResNet's bottleneck blocks, NHWC, with batch norm."""

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def normed(x, g):
        y = x.astype(jnp.float32)
        mean, mean2 = y.mean((0, 1, 2)), jnp.square(y).mean((0, 1, 2))
        y = (y - mean) * lax.rsqrt(mean2 - jnp.square(mean) + 1e-5)
        return y.astype(x.dtype) * g[0] + g[1]

    def loss(params, x, y):
        w = half(params)
        x = half(x)
        for own in w["layers"]:
            z = jax.nn.relu(normed(conv(x, own["a"]), own["n1"]))
            z = jax.nn.relu(normed(conv(z, own["b"]), own["n2"]))
            x = jax.nn.relu(x + normed(conv(z, own["c"]), own["n3"]))
        return entropy(x.mean((1, 2)) @ w["head"], y)

    def make():
        def random(*shape):
            return jax.random.normal(jax.random.key(0), shape) * 0.05

        inner = width // 4
        one = {
            "a": random(1, 1, width, inner), "b": random(3, 3, inner, inner),
            "c": random(1, 1, inner, width), "n1": random(2, inner), "n2": random(2, inner),
            "n3": random(2, width),
        }  # fmt: skip
        params = {"layers": [one] * layers, "head": random(width, 1024)}
        images = jax.random.normal(jax.random.key(1), (batch, size, size, width))
        return state(params), images, jnp.zeros(batch, jnp.int32)

    step, state = training(loss)
    return step, make


def one_attention(tokens, heads, few):
    """cuDNN's attention, causal, of computed queries, keys and values, with its gradients."""

    def step(q, k, v, gradient):
        def attend(*given):
            q, k, v = (2 * x for x in given)
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

        out, backward = jax.vjp(attend, q, k, v)
        return out, *backward(gradient)

    def make():
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(1, tokens, n, 128) for n in (heads, few, few, heads)]
        drawn = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
        return tuple(x.astype(jnp.bfloat16) for x in drawn)

    return step, make


SIZES = {
    "small": {
        "width": 1024, "hidden": 3584, "layers": 2, "vocabulary": 2048, "batch": 2, "tokens": 512,
    },
    "full": {
        "width": 4096, "hidden": 14336, "layers": 2, "vocabulary": 32768, "batch": 4,
        "tokens": 2048,
    },
}  # fmt: skip
IMAGES = {
    "small": {"width": 256, "layers": 2, "batch": 16},
    "full": {"width": 1024, "layers": 4, "batch": 128},
}
ATTENTION = {
    "small": {"tokens": 512, "heads": 4, "few": 2},
    "full": {"tokens": 8192, "heads": 32, "few": 8},
}

MODELS: dict[str, Callable[[str], tuple[Callable, Make]]] = {
    "llama": lambda size: llama(SIZES[size]),
    "llama_cudnn": lambda size: llama(SIZES[size], attention="cudnn"),
    "llama_scan": lambda size: llama(SIZES[size], scan=True),
    "llama_scan_cudnn": lambda size: llama(SIZES[size], attention="cudnn", scan=True),
    "accumulation": lambda size: llama(SIZES[size] | {"batch": 4}, accumulate=4),
    "lora": lambda size: llama(SIZES[size], lora=True),
    "moe_einsum": lambda size: llama(SIZES[size] | {"hidden": 3584}, moe="einsum"),
    "moe_ragged": lambda size: llama(SIZES[size] | {"hidden": 3584}, moe="ragged"),
    "moe_ragged_cudnn": lambda size: llama(
        SIZES[size] | {"hidden": 3584}, attention="cudnn", moe="ragged"
    ),
    "prefill": lambda size: prefill(SIZES[size]),
    "prefill_cudnn": lambda size: prefill(SIZES[size], attention="cudnn"),
    "decode": lambda size: decode(SIZES[size]),
    "decode_fp8_cache": lambda size: decode(SIZES[size]),
    "attention_cudnn": lambda size: one_attention(**ATTENTION[size]),
    "vit": lambda size: vit(**IMAGES[size]),
    "resnet": lambda size: resnet(**IMAGES[size]),
}
STORED = {"lora": 1, "prefill": 0, "prefill_cudnn": 0, "decode": 0, "decode_fp8_cache": 0}
"""Programs whose weights a recipe gets quantized, and the argument that holds them."""


def model(name: str, size: str, recipe: str) -> tuple[Callable, Make]:
    """The step of a model, and a function that makes its arguments, quantized for a recipe."""
    step, make = MODELS[name](size)
    if recipe == "plain" or name not in STORED:
        return step, make

    def stored():
        arguments = list(make())
        arguments[STORED[name]] = sw.quantize_params(arguments[STORED[name]], recipe.split("+")[0])
        if name == "decode_fp8_cache":  # keys and values, with a scale for each head
            arguments[1] = jax.tree.map(lambda x: sw.quantize(x, "e4m3fn", axis=2), arguments[1])
        return tuple(arguments)

    return step, stored


def without_driver() -> None:
    """Lets JAX lower cuDNN's attention where no driver tells it of a device."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    attention.check_cudnn_version = lambda: 91100
    attention.check_compute_capability = lambda *_: True
