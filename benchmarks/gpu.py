"""``python -m benchmarks.gpu``: casts' bits, FP8 products and step times on a GPU.

Prints one JSON line for each check, so that docs/gpu.md can say where its figures come from:

- casts: bits on the GPU against bits on the CPU, over every exponent and random mantissas;
- products: the formats in which the optimised HLO of a training step multiplies, kernels, bound;
- steps: the steps of `benchmarks.programs` under each recipe, beside bfloat16 (``plain``), FP8
  written by hand and Flax's FP8 layers, medians of interleaved runs in one process.

The argument, if there is one, is a folder for the HLO texts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import scalewise as sw
from benchmarks import hlo
from benchmarks.programs import BY_HAND, PROGRAMS, variant

WAYS = ("plain", "bf16", "fp16", "fp8", "fp8_delayed", "unit_scaling", "mxfp8", "hand", "flax")
DEVICE = hlo.Device(3.35e12, {8: 1979e12, 16: 989e12, 32: 494e12})  # an H100's rates
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


def steps(name: str, size: str, repeats: int = 15, dump: Path | None = None) -> None:
    """Products and times of a program's step under each recipe and by hand, in one process."""
    runs, losses = {}, {}
    for who in WAYS:
        if name != "mlp" and who in BY_HAND[1:]:
            continue
        try:
            program = variant(name, size, who)
            arguments = jax.jit(program.make)()
            began = time.perf_counter()
            compiled: Any = jax.jit(program.step).lower(*arguments).compile()
            seconds = time.perf_counter() - began
            losses[who] = program.loss(compiled(*arguments))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:600]
            say(check="step", program=name, recipe=who, error=what)
            continue
        text = compiled.as_text()
        found = hlo.summary(hlo.parse(text), DEVICE)
        say(check="products", program=name, recipe=who, loss=losses[who],
            compile_s=round(seconds, 1), products=found.lines, kernels=found.kernels,
            bound_ms=round(found.seconds * 1e3, 3),
            temporary_MiB=compiled.memory_analysis().temp_size_in_bytes >> 20)  # fmt: skip
        if dump:
            (dump / f"{name}_{who}.hlo").write_text(text)
        runs[who] = lambda c=compiled, a=arguments: c(*a)
    times = interleaved(runs, repeats)
    for who, seconds in times.items():
        say(check="step", program=name, size=size, recipe=who, ms=round(seconds * 1e3, 3),
            of_plains_speed=round(times["plain"] / seconds, 3), loss=losses[who])  # fmt: skip


def main() -> None:
    dump = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    on_cpu = jax.default_backend() == "cpu"
    device()
    if not on_cpu:
        casts()
        cast_speed()
    for name in PROGRAMS:
        steps(name, "tiny" if on_cpu else "full", dump=dump)


if __name__ == "__main__":
    main()
