"""``python -m benchmarks.gpu``: casts' bits, FP8 products and step times on a GPU.

Prints one JSON line for each check, so that docs/gpu.md can say where its figures come from:

- casts: bits on the GPU against bits on the CPU, over every exponent and random mantissas;
- products: the formats in which the optimised HLO of a training step really multiplies;
- steps: a large MLP's and an attention block's training step (loss, gradients, SGD), each recipe
  beside BF16 as people write it, medians of interleaved runs in one process.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw

RECIPES = ("bf16", "fp16", "fp8", "fp8_delayed", "unit_scaling", "mxfp8")
CASTS = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "dlfloat16", "e8m0", "tf32")
ROUNDINGS = ("nearest_even", "toward_zero", "toward_positive", "to_odd")


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def device() -> None:
    first = jax.devices()[0]
    say(check="device", kind=first.device_kind, platform=first.platform, jax=jax.__version__)


# -- casts ---------------------------------------------------------------------------------------


def casts(count: int = 1 << 22) -> None:
    """Bits here against bits on the CPU; both compiled by XLA, by different backends."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, count, np.uint32)
    edges = (np.arange(256, dtype=np.uint32)[:, None] << 23) + np.arange(-64, 64).astype(np.uint32)
    x = np.concatenate([bits, edges.ravel(), edges.ravel() | np.uint32(1 << 31)]).view(np.float32)
    cpu = jax.devices("cpu")[0]
    there, here = jax.device_put(x), jax.device_put(x, cpu)
    for name in CASTS:
        for rounding in ROUNDINGS:
            for saturate in (False, True):
                if name == "e8m0" and saturate:
                    continue
                f = jax.jit(
                    lambda v, n=name, r=rounding, s=saturate: sw.cast(v, n, rounding=r, saturate=s)
                )
                got, want = np.asarray(f(there)), np.asarray(f(here))
                same = np.array_equal(got.view(np.uint8), want.view(np.uint8))
                if not same:
                    a, b = got.astype(np.float32), want.astype(np.float32)
                    unlike = ~((a == b) | (np.isnan(a) & np.isnan(b)))
                    first = x[unlike][:3].tolist()
                    say(check="cast", to=name, rounding=rounding, saturate=saturate,
                        unlike=int(unlike.sum()), first=first)  # fmt: skip
    say(check="casts", inputs=x.size, formats=CASTS, roundings=ROUNDINGS)


def cast_speed(count: int = 1 << 28, repeats: int = 15) -> None:
    """Casts beside XLA's own convert and a copy of the array."""
    x = jax.random.normal(jax.random.key(0), (count,))
    runs: dict[str, Any] = {"copy": jax.jit(lambda v: -v)}
    for name in ("fp16", "bf16", "e4m3fn", "e5m2"):
        fmt = sw.format(name)
        runs[f"{name} XLA"] = jax.jit(lambda v, d=fmt.dtype: v.astype(d))
        runs[name] = jax.jit(lambda v, f=fmt: sw.cast(v, f))
        runs[f"{name} saturating"] = jax.jit(lambda v, f=fmt: sw.cast(v, f, saturate=True))
        down = {"rounding": "toward_zero"}
        runs[f"{name} toward zero"] = jax.jit(lambda v, f=fmt, o=down: sw.cast(v, f, **o))
    e6m9 = sw.Format("e6m9", exponent_bits=6, mantissa_bits=9)
    runs["e6m9 in float32"] = jax.jit(lambda v: sw.round_to(v, e6m9))
    rows = x.reshape(-1, 4096)
    runs["mxfp8"] = jax.jit(lambda v: sw.quantize(v, "mxfp8_e4m3"))
    times = interleaved({n: (lambda f=f, a=(rows if n == "mxfp8" else x): f(a))
                         for n, f in runs.items()}, repeats)  # fmt: skip
    for name, seconds in times.items():
        say(check="cast speed", to=name, G_elements_s=round(count / seconds / 1e9, 1))


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, all taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn > 1:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


# -- training steps ------------------------------------------------------------------------------


def mlp(weights, x, y):
    for w in weights[:-1]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(jnp.square(x @ weights[-1] - y))


def mlp_arguments(width: int, batch: int, layers: int = 4):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [jax.random.normal(k, (width, width)) * width**-0.5 for k in keys[:-1]]
    x = jax.random.normal(keys[-1], (batch, width))
    return weights, x, jnp.roll(x, 1, 1)


def attention(weights, x, y):
    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)

    batch, length, width = x.shape
    heads = width // 128
    for q, k, v, o, up, down in weights:
        h = norm(x)
        split = lambda w, h=h: (h @ w).reshape(batch, length, heads, 128)  # noqa: E731
        scores = jnp.einsum("bthd,bshd->bhts", split(q), split(k)) * 128**-0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), split(v))
        x = x + mixed.reshape(x.shape) @ o
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return jnp.mean(jnp.square(x - y))


def attention_arguments(width: int, length: int, batch: int, layers: int = 2):
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 1))
    shapes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    weights = [
        [jax.random.normal(next(keys), s) * s[0] ** -0.5 for s in shapes] for _ in range(layers)
    ]
    x = jax.random.normal(next(keys), (batch, length, width))
    return weights, x, jnp.roll(x, 1, 1)


def step(loss, dtype=None):
    """Loss, gradients and SGD; in ``dtype`` as people write mixed precision by hand."""

    def cast(tree):
        return jax.tree.map(lambda a: a.astype(dtype) if dtype else a, tree)

    def f(weights, x, y):
        value, grads = jax.value_and_grad(lambda w: loss(cast(w), cast(x), cast(y)))(weights)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value

    return f


def products(compiled: Any) -> dict[str, int]:
    """How many matrix products of the optimised program have operands of which types."""
    text = compiled.as_text()
    types = {m[1]: m[2] for m in re.finditer(r"%?([\w.\-]+) = \(?(\w+)\[", text)}
    found: Counter[str] = Counter()
    for line in text.splitlines():
        call = re.search(r"(?:custom-call|dot|convolution)\(([^)]*)\)", line)
        gemm = "__cublas" in line or "__cudnn" in line or re.search(r"\b(dot|convolution)\(", line)
        if call and gemm:
            names = re.findall(r"%?([\w.\-]+)(?:,|$)", call[1])[:2]
            inline = re.findall(r"(\w+)\[[\d,]*\]", call[1])[:2]
            kinds = inline if len(inline) == 2 else [types.get(n, "?") for n in names]
            found[" x ".join(kinds)] += 1
    fusions = len(re.findall(r"__triton_gemm|__cudnn\$fusion|kind=kCustom", text))
    return dict(found) | ({"custom fusions": fusions} if fusions else {})


def steps(name: str, loss, arguments, repeats: int = 15, dump: str | None = None) -> None:
    runs, first = {}, {}
    for who in ("float32", "bf16 by hand", *RECIPES):
        if who in RECIPES and who not in sw.recipes.CATALOGUE:
            continue
        plain = step(loss, jnp.bfloat16 if who == "bf16 by hand" else None)
        f = jax.jit(sw.autoscale(plain, who) if who in RECIPES else plain)
        try:
            began = time.perf_counter()
            compiled = f.lower(*arguments).compile()
            seconds = time.perf_counter() - began
            value = float(compiled(*arguments)[1])
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:600]
            say(check="step", model=name, recipe=who, error=what)
            continue
        first[who] = value
        say(check="products", model=name, recipe=who, loss=value, compile_s=round(seconds, 1),
            temp_MiB=compiled.memory_analysis().temp_size_in_bytes >> 20,
            products=products(compiled))  # fmt: skip
        if dump:
            with open(f"{dump}/{name}_{who.replace(' ', '_')}.hlo", "w") as file:
                file.write(compiled.as_text())
        runs[who] = lambda c=compiled: c(*arguments)
    times = interleaved(runs, repeats)
    base = times["bf16 by hand"]
    for who, seconds in times.items():
        say(check="step", model=name, recipe=who, ms=round(seconds * 1e3, 2),
            to_bf16=round(seconds / base, 3), loss=first[who])  # fmt: skip


def main() -> None:
    dump = sys.argv[1] if len(sys.argv) > 1 else None
    small = jax.default_backend() == "cpu"
    device()
    if not small:
        casts()
        cast_speed()
    steps("mlp", mlp, mlp_arguments(*((64, 32) if small else (8192, 8192))), dump=dump)
    shape = (128, 16, 2) if small else (4096, 2048, 4)
    steps("attention", attention, attention_arguments(*shape), dump=dump)


if __name__ == "__main__":
    main()
