"""Predicts what a cache's format does to a model's probabilities, and decodes to measure it.

    python -m experiments.cache_formats           # eight models in JAX, with sw.KVCache
    python -m experiments.cache_formats --torch   # two torch modules, with a cache written in torch

Each model is trained for 200 steps on the bytes of docs/concepts. The prediction decodes
nothing. One pass over whole sequences, without a cache, gives keys and values, and the linear map J
of their errors to those of the logits. A format's errors e are what a cache would hold of these
keys and values, less themselves; to second order

    KL = mean over positions of 1/2 Var_p(J e),

where p are the model's probabilities. It is a balance sheet: the covariances of J e with its parts
are the shares of each layer's keys and values. Measured is the KL of decoding token by token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import scalewise as sw
from scalewise.auditing import kl

WIDTH, HEADS, HEAD, LAYERS, BYTES = 128, 4, 32, 2, 128
SOURCE, PROMPT, LENGTH, BATCH, STEPS = 32, 16, 64, 8, 200
FORMATS = {
    "e4m3fn tensor": ("e4m3fn", "tensor"), "e4m3fn head": ("e4m3fn", "head"),
    "e4m3fn token": ("e4m3fn", "token"), "mxfp8_e4m3": ("mxfp8_e4m3", "token"),
    "nvfp4": ("nvfp4", "token"),
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {  # in place of rotary positions, RMS norms and SwiGLU
    "GPT": {"places": True, "centred": True, "gelu": True},
    "Llama, grouped queries": {"heads": 2},
    "multi-query": {"heads": 1},
    "sliding window": {"heads": 2, "window": 16},
    "ALiBi": {"slopes": True, "centred": True, "gelu": True},
    "Gemma, soft caps": {"heads": 2, "cap": 20.0, "normed": True},
    "latent cache (MLA)": {"heads": 1, "latent": True},
    "encoder and decoder": {"places": True, "crossed": True},
}
Store = Callable[..., tuple[jax.Array, jax.Array]]
"""Returns what attention reads, of a site's keys and values at some positions."""


# -- the models ------------------------------------------------------------------------------------


def norm(own, x):
    x = x - x.mean(-1, keepdims=True) if own.get("centred") else x
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


def rotated(x, at):
    angle = at[:, None] * 1e4 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attended(own, q, k, v, at, causal=True):
    """Attention of queries at positions ``at`` to keys from position 0 on."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if "cap" in own:
        scores = own["cap"] * jnp.tanh(scores / own["cap"])
    past = at[:, None] - jnp.arange(k.shape[1])
    if own.get("slopes"):
        scores -= 2.0 ** -(2 * jnp.arange(1, HEADS + 1))[:, None, None] * past
    seen = (past >= 0) & (past < own.get("window", k.shape[1])) if causal else past == past
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*q.shape[:2], -1)


def weights(own, seed=0):
    key, keys = iter(jax.random.split(jax.random.key(seed), 100)), own.get("heads", HEADS) * HEAD
    shapes = dict.fromkeys(["q", "o", "r", "xq", "xk", "xv", "xo"], (WIDTH, WIDTH))
    shapes |= {"k": (WIDTH, keys), "v": (WIDTH, keys), "down": (4 * WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH)}
    shapes |= {"latent_k": (HEAD, WIDTH), "latent_v": (HEAD, WIDTH)}

    def normal(*shape):
        return jax.random.normal(next(key), shape) * shape[0] ** -0.5

    return {
        "bytes": normal(BYTES, WIDTH) * BYTES**0.5, "places": normal(LENGTH, WIDTH),
        "head": normal(WIDTH, BYTES),
        "layers": [{n: normal(*s) for n, s in shapes.items()} for _ in range(LAYERS + 1)],
    }  # fmt: skip


def heads(x, *matrices):
    return ((x @ w).reshape(*x.shape[:2], -1, HEAD) for w in matrices)


def block(own, w, x, at, store: Store, source=None, causal=True):
    y = norm(own, x)
    q, k, v = heads(y, w["q"], w["k"], w["v"])
    q, k = (norm(own, q), norm(own, k)) if own.get("normed") else (q, k)
    if own.get("latent"):  # the cache has a latent vector, and one key with a position
        v, k = store(norm(own, v), rotated(k, at), at)
        shared, (k, v) = k, heads(v[:, :, 0], w["latent_k"], w["latent_v"])
        k = jnp.concatenate([k, jnp.broadcast_to(shared, k.shape)], -1)
        q = jnp.concatenate([q, rotated(next(heads(y, w["r"])), at)], -1)
    else:
        turned = not (own.get("places") or own.get("slopes"))
        k, v = store(rotated(k, at) if turned else k, v, at)
        q = rotated(q, at) if turned else q
    x = x + attended(own, q, k, v, at, causal) @ w["o"]
    if source is not None:
        (q,) = heads(norm(own, x), w["xq"])
        k, v = store(*heads(source, w["xk"], w["xv"]), jnp.arange(source.shape[1]))
        x = x + attended({}, q, k, v, at, causal=False) @ w["xo"]
    y = norm(own, x)
    hidden = (
        jax.nn.gelu(y @ w["up"]) if own.get("gelu") else jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
    )
    return x + hidden @ w["down"]


def logits_of(own, w, tokens, source, store: Store, first=0):
    """Logits of consecutive tokens from position ``first`` on, behind a source text if crossed."""

    def embedded(ids, at):
        return w["bytes"][ids] + (w["places"][at] if own.get("places") else 0)

    *layers, encoder = w["layers"]
    read = None
    if own.get("crossed"):
        at = jnp.arange(SOURCE)
        read = norm(own, block(own, encoder, embedded(source, at), at, unchanged, causal=False))
    at = first + jnp.arange(tokens.shape[1])
    x = embedded(tokens, at)
    for layer in layers:
        x = block(own, layer, x, at, store, read)
    return norm(own, x) @ w["head"]


def unchanged(k, v, at):
    return k, v


def batches(seed, count):
    """Pairs of a source text and the tokens behind it."""
    root, size = Path(__file__).parents[1] / "docs/concepts", SOURCE + LENGTH
    text = b"".join(p.read_bytes() for p in sorted(root.glob("*.md")))
    text, random = np.frombuffer(text, np.uint8) % BYTES, np.random.default_rng(seed)
    for _ in range(count):
        rows = np.stack([text[i : i + size] for i in random.integers(0, len(text) - size, BATCH)])
        yield jnp.asarray(rows[:, :SOURCE], jnp.int32), jnp.asarray(rows[:, SOURCE:], jnp.int32)


def trained(own):
    optimizer, w = optax.adam(optax.cosine_decay_schedule(2e-3, STEPS)), weights(own)

    @jax.jit
    def step(w, state, source, tokens):
        def loss(w):
            out = logits_of(own, w, tokens[:, :-1], source, unchanged)
            return optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(w)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(w, updates), state, value

    state, value = optimizer.init(w), jnp.nan
    for source, tokens in batches(0, STEPS):
        w, state, value = step(w, state, source, tokens)
    return w, float(value)


# -- measured and predicted ------------------------------------------------------------------------

PARTS = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))]  # the prompt, then each token


def empty(kv, name):
    fmt, scales = FORMATS[name]
    return [sw.KVCache.init(k.shape, fmt, scales=scales, dtype=jnp.float32) for k, _ in kv]


def decoded(own, w, source, tokens, kv, name):
    @jax.jit
    def some(caches, ids, first):
        written, left = [], iter(caches)

        def store(k, v, at):
            written.append(next(left).update(k, v, at[0]))
            return written[-1].read()

        return logits_of(own, w, ids, source, store, first), written

    rows, caches = [], empty(kv, name)
    for a, b in PARTS:
        out, caches = some(caches, tokens[:, a:b], a)
        rows.append(out)
    return jnp.concatenate(rows, 1)


def errors(kv, name):
    """Returns by how much caches would change keys and values that are written to them."""
    found = []
    for cache, (k, v) in zip(empty(kv, name), kv, strict=True):
        first = PROMPT if k.shape[1] == LENGTH else SOURCE  # a source's are written at once
        cache = cache.update(k[:, :first], v[:, :first], 0)
        if first < k.shape[1]:  # with a scale for each token, or the prompt's
            cache = cache.update(k[:, first:], v[:, first:], first)
        found += [a - b for a, b in zip(cache.read(), (k, v), strict=True)]
    return found


def predicted(logits, linear: Callable, e: list) -> tuple[float, str]:
    """The KL to second order, and the largest share of it."""
    own = [[x if i == j else 0 * x for j, x in enumerate(e)] for i in range(len(e))]
    parts = [np.asarray(linear(x), np.float64) for x in own]
    p, whole = np.asarray(jax.nn.softmax(logits), np.float64), sum(parts)
    centred = whole - np.sum(p * whole, -1, keepdims=True)
    shares = [float(np.mean(np.sum(p * x * centred, -1)[:, PROMPT:]) / 2) for x in parts]
    i = int(np.argmax(shares))
    return sum(shares), f"{('keys', 'values')[i % 2]} {i // 2}, {shares[i] / sum(shares):.0%}"


def measured(logits, narrow) -> float:
    return float(kl(logits, narrow)[:, PROMPT:].mean())


def rows(own) -> Iterator[tuple]:
    """Loss, format, measured and predicted KL, and the largest share of it."""
    w, loss = trained(own)
    source, tokens = next(batches(1, 1))
    kv: list = []
    logits_of(own, w, tokens, source, lambda k, v, at: kv.append((k, v)) or (k, v))

    def moved(e):
        left = iter(e)
        return logits_of(own, w, tokens, source, lambda k, v, at: (k + next(left), v + next(left)))

    logits, linear = jax.linearize(moved, [jnp.zeros_like(x) for pair in kv for x in pair])
    linear = jax.jit(linear)
    for name in FORMATS:
        narrow = decoded(own, w, source, tokens, kv, name)
        yield loss, name, measured(logits, narrow), *predicted(logits, linear, errors(kv, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", action="store_true", help="the torch modules")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="some of the models")
    given, kinds, made = parser.parse_args(), ARCHITECTURES, rows
    if given.torch:
        from .cache_formats_torch import MODELS as kinds
        from .cache_formats_torch import rows as made
    print("| model | loss | cache | KL measured | predicted | of measured | most of it from |")
    print("|---|---:|---|---:|---:|---:|---|")
    for model in given.only or kinds:
        for loss, name, kl_, guess, most in made(kinds[model]):
            cells = f"{kl_:.2e} | {guess:.2e} | {guess / kl_:.2f} | {most}"
            print(f"| {model} | {loss:.2f} | {name} | {cells} |", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
