"""``python -m benchmarks.gpu``: casts' bits, matrix units and step times on a GPU.

Prints one JSON line for each check, so that docs/gpu.md can say where its figures come from:

- casts: bits on the GPU against bits on the CPU, over every exponent and random mantissas;
- units: products of the device against those of `scalewise.devices.matrix_unit`, bit for bit;
- blocks: the kernel that rounds to blocks against XLA's operations on the CPU, and its speed;
- groups: the kernel for grouped products against XLA's, of numbers whose sums are exact, and the
  speed of both in FP8 and bfloat16;
- attention: cuDNN's attention in FP8 against the same rule by XLA's operations on the CPU, and its
  speed beside bfloat16's;
- speed: casts beside XLA's convert and a copy;
- train: the example GPT's loss in float32 and on the device's FP8 units;
- steps: the steps of `benchmarks.programs` under recipes, beside bfloat16 (``plain``), FP8
  written by hand and Flax's FP8 layers, medians of interleaved runs in one process.

``--parts`` chooses checks, ``--programs`` and ``--ways`` those of ``steps``. No program is begun
later than ``--seconds`` after the start. Programs compile one after the other, since XLA times
candidates while it compiles. Steps that train are timed from the state after two steps: Flax's
scales come from its first steps, and a unit multiplies zeros faster than other numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw
from benchmarks import hlo, programs
from scalewise.autoscaling import _block_kernel as kernel
from scalewise.autoscaling import _grouped_kernel as grouped
from scalewise.devices import matrix_unit
from scalewise.formats import MXFP8_E4M3, NVFP4

WAYS = {
    "mlp": ("plain", "fp8", "fp8_delayed", "bf16", "fp16", "mxfp8", "hand", "flax"),
    "gpt": ("plain", "fp8", "fp8_delayed"),
    "llama_cudnn": ("plain", "fp8", "fp8_delayed"),
    "llama": ("plain", "fp8"),
    "decode": ("plain", "fp8"),
    "prefill_cudnn": ("plain", "fp8"),
    "vit": ("plain", "fp8"),
    "moe_ragged": ("plain", "fp8"),
}
DEVICE = hlo.Device(3.35e12, {8: 1979e12, 16: 989e12, 32: 494e12})  # an H100's rates
CASTS = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "dlfloat16", "e8m0", "tf32")
ROUNDINGS = ("nearest_even", "toward_zero", "toward_positive", "to_odd")
UNITS = ("fp16", "bf16", "e4m3fn")


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def on_cpu() -> Any:
    return jax.default_device(jax.devices("cpu")[0])


def attempt(check: str, part: Callable[[], None]) -> None:
    """Runs one check; its error is printed, and the others go on."""
    began = time.perf_counter()
    try:
        part()
    except Exception as error:
        say(check=check, error=f"{type(error).__name__}: {error}"[:900])
    say(check=check, seconds=round(time.perf_counter() - began, 1))


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
    here, there = jax.device_put(x, jax.devices("cpu")[0]), jax.device_put(x)

    def differences(name: str, rounding: str) -> int:
        def every(v: jax.Array) -> list[Any]:
            saturations = (False,) if name == "e8m0" else (False, True)
            return [sw.cast(v, name, rounding=rounding, saturate=s) for s in saturations]

        compiled = jax.jit(every)
        unlike = 0
        for got, want in zip(compiled(there), compiled(here), strict=True):
            got, want = np.asarray(got), np.asarray(want)
            different = got.view(np.uint8) != want.view(np.uint8)
            if different.any():
                a, b = got.astype(np.float32), want.astype(np.float32)
                wrong = ~((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b)))
                say(check="cast", to=name, rounding=rounding, unlike=int(wrong.sum()),
                    other_nan=int(np.isnan(a).sum()), first=x[wrong][:3].tolist())  # fmt: skip
                unlike += int(wrong.sum())
        return unlike

    pairs = [(name, rounding) for name in CASTS for rounding in ROUNDINGS]
    with ThreadPoolExecutor(12) as pool:
        unlike = sum(pool.map(lambda pair: differences(*pair), pairs))
    say(check="casts", inputs=x.size, formats=CASTS, roundings=ROUNDINGS, unlike=unlike)


def speed(count: int = 1 << 28, repeats: int = 15) -> None:
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
    given = {name: rows if name == "mxfp8" else x for name in runs}
    times = interleaved({n: partial(f, given[n]) for n, f in runs.items()}, repeats)
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


# -- matrix units --------------------------------------------------------------------------------


def units(rows: int = 128, depths: tuple[int, ...] = (32, 128, 512, 4096)) -> None:
    """Products of the device against the published arithmetic of its units, bit for bit."""
    rng = np.random.default_rng(0)
    for name in UNITS:
        narrow, dtype = name.startswith("e"), sw.format(name).dtype
        for depth in depths:
            # products of many magnitudes, so that the order of a sum and its cuts show
            a, b = (
                jnp.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, shape), dtype)
                for shape in ((rows, depth), (depth, rows))
            )
            promotions = (None, 128) if narrow else (None,)
            expected = {}
            with on_cpu():
                for promote in promotions:
                    unit = matrix_unit("h100", name, promote=promote)
                    x, y = np.asarray(a), np.asarray(b)
                    expected[f"promote {promote}"] = np.asarray(
                        sw.ops.matmul(x, y, accumulator=unit, out=jnp.float32)
                    )
                exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
            for precision in ("default", "highest") if narrow else ("default",):
                product = jax.jit(
                    lambda a, b, p=precision: lax.dot(
                        a, b, precision=p, preferred_element_type=jnp.float32
                    )
                )
                compiled = product.lower(a, b).compile()
                found = np.asarray(compiled(a, b))
                scale = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64))
                error = float(np.max(np.abs(found - exact) / scale))
                for schedule, want in expected.items():
                    same = float(np.mean(found.view(np.uint32) == want.view(np.uint32)))
                    apart = float(np.max(np.abs(found - want) / scale))
                    say(check="unit", operands=name, depth=depth, precision=precision,
                        schedule=schedule, same_bits=round(same, 4), apart=apart, error=error,
                        of_model=float(np.max(np.abs(want - exact) / scale)),
                        by=sorted(product_calls(compiled.as_text())))  # fmt: skip


def product_calls(text: str) -> set[str]:
    """The functions that compute products, as the optimised program names them."""
    marks = ("__cublas$lt$matmul$f8", "__cublas$lt$matmul", "__cublas$gemm", "__triton", "__cudnn")
    return {next((m for m in marks if m in line), "fusion") for line in text.splitlines()
            if " custom-call(" in line or "__triton" in line or " dot(" in line}  # fmt: skip


# -- the kernel that rounds to blocks ------------------------------------------------------------


def blocks() -> None:
    rules = {
        "mxfp8": kernel.BlockRounding(MXFP8_E4M3, None, (1, 0), jnp.bfloat16),
        "nvfp4, squares": kernel.BlockRounding(NVFP4, None, (1, 0), jnp.bfloat16, tile=16),
    }
    rng = np.random.default_rng(0)
    for name, rule in rules.items():
        x = (rng.standard_normal((512, 768)) * 2.0 ** rng.integers(-20, 21, (512, 48)).repeat(16, 1)
             ).astype(np.float32)  # fmt: skip
        x[:32, :64], x[90, 3] = 0, np.nan
        operands: list[Any] = []
        if rule.fmt is NVFP4:
            with on_cpu():
                largest = kernel.largest(rule, jnp.asarray(x), None)
                operands = [kernel.tensor_scale_of(largest, rule.fmt, rule.scaling)]
            rule = dataclasses.replace(rule, operands=("whole",))
        run = jax.jit(partial(kernel.by_kernel, rule=rule))
        given = [np.asarray(o) for o in operands]
        found = run(jnp.asarray(x), *given)
        with on_cpu():
            expected = kernel.by_xla(jnp.asarray(x), *given, rule=rule)
        unlike = sum(
            int(np.sum(np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)))
            for a, b in zip(found, expected, strict=True)
        )
        say(check="block kernel", rule=name, elements=x.size, unlike_bytes=unlike)
        big = jax.random.normal(jax.random.key(0), (8192, 8192))
        there = [jnp.asarray(o) for o in given]
        by_xla = jax.jit(partial(kernel.by_xla, rule=rule))
        runs = {"kernel": partial(run, big, *there), "XLA": partial(by_xla, big, *there)}
        times = interleaved(runs, 15)
        say(check="block kernel speed", rule=name, size=big.shape,
            us={k: round(t * 1e6) for k, t in times.items()})  # fmt: skip


# -- the kernel for grouped products -------------------------------------------------------------

FORMS = {
    "forward": ((((1,), (1,)), ((), ())), [0]),
    "rows' gradient": ((((1,), (2,)), ((), ())), [0]),
    "matrices' gradient": ((((0,), (0,)), ((), ())), []),
}


def groups() -> None:
    rows, width, hidden, count = 16384, 4096, 3584, 8
    rng = np.random.default_rng(0)
    for form, (dot, group) in FORMS.items():
        numbers = lax.RaggedDotDimensionNumbers(dot, [0], group)
        rule, run = grouped.GroupedProduct(numbers, jnp.bfloat16), {}
        left = rows, hidden if form.startswith("rows") else width
        right = (count, width, hidden) if group else (rows, hidden)
        # integers, whose sums are exact in any order; not all rows belong to a group
        x, w = (rng.integers(-2, 3, s).astype(np.float32) for s in (left, right))
        sizes = np.bincount(rng.integers(0, count, rows - 100), minlength=count).astype(np.int32)
        sizes[3], sizes[4] = 0, sizes[3] + sizes[4]
        for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
            given = jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes), jnp.ones(2)
            for name, f in (("kernel", grouped.by_kernel), ("XLA", grouped.by_xla)):
                run[f"{name}, {jnp.dtype(dtype)}"] = partial(jax.jit(partial(f, rule=rule)), *given)
        found = [np.asarray(f()[0], np.float32) for f in run.values()]
        unlike = {name: int(np.sum(y != found[-1])) for name, y in zip(run, found, strict=True)}
        say(check="grouped kernel", form=form, unlike=unlike, times_ms={
            k: round(t * 1e3, 3) for k, t in interleaved(run, 15).items()})  # fmt: skip


# -- attention -----------------------------------------------------------------------------------


def attention() -> None:
    ways = ("plain", "fp8+attention", "fp8_delayed+attention")
    for size in ("small", "full"):
        run = {}
        for way in ways:
            program = programs.variant("attention_cudnn", size, way, narrow="always")
            arguments, step = program.make(), jax.jit(program.step)
            run[way] = partial(step, *arguments)
            if way == "plain" or size == "full":
                continue
            with on_cpu():
                there = step(*jax.device_put(arguments, jax.devices("cpu")[0]))
            pairs = zip(*(jax.tree.leaves(x)[:4] for x in (run[way](), there)), strict=True)
            pairs = [[np.asarray(z, np.float64) for z in pair] for pair in pairs]
            error = [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]
            unlike = [float(np.mean(x != y)) for x, y in pairs]
            say(check="attention", way=way, unlike=unlike, error=error)
        times = {k: round(t * 1e3, 3) for k, t in interleaved(run, 15).items()}
        say(check="attention speed", size=size, times_ms=times)


# -- training ------------------------------------------------------------------------------------


def train(count: int = 200) -> None:
    """Trains the example GPT on the same batches in float32 and with products of FP8 operands."""
    model: Any = importlib.import_module("examples.gpt")
    text = b"".join(path.read_bytes() for path in sorted(Path(np.__file__).parent.rglob("*.py")))
    given = [b for b, _ in zip(model.batches(text, 0), range(count), strict=False)]
    final = {}
    for who in ("float32", "fp8", "fp8_rowwise", "mxfp8"):
        step = model.train_step
        if who != "float32":
            recipe = dataclasses.replace(sw.recipes.CATALOGUE[who], narrow="always")
            step = sw.autoscale(step, recipe)
        state = model.init(0)
        compiled = jax.jit(step).lower(state, given[0]).compile()
        losses = []
        for batch in given:
            state, loss = compiled(state, batch)
            losses.append(loss)
        final[who] = float(np.mean(np.asarray(losses[-50:])))
        found = hlo.summary(hlo.parse(compiled.as_text()), DEVICE)
        say(check="train", recipe=who, steps=count, final_loss=final[who],
            of_float32=round(final[who] / final["float32"], 5), products=found.lines)  # fmt: skip


# -- training steps ------------------------------------------------------------------------------


def compile_step(name: str, size: str, who: str) -> tuple[programs.Program, Any, float]:
    """Returns a program, its compiled step, and the seconds that compiling took."""
    program, device = programs.variant(name, size, who), jax.devices()[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    began = time.perf_counter()
    step = programs.compiled(program, [device], platform, donate=False)
    return program, step, time.perf_counter() - began


def steps(name: str, ways: Iterable[str], size: str, dump: Path | None = None) -> None:
    """Products and times of a program's step under each recipe and by hand, in one process."""
    runs, losses = {}, {}
    for who in ways:
        try:
            program, step, seconds = compile_step(name, size, who)
            formats, _ = step.input_formats
            arguments = jax.device_put(jax.jit(program.make)(), formats)
            for _ in range(2 if name in TRAINED else 0):
                outputs = step(*arguments)
                losses[who] = program.loss(outputs)
                arguments = program.after(outputs, arguments)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:600]
            say(check="step", program=name, recipe=who, error=what)
            continue
        text = step.as_text()
        found = hlo.summary(hlo.parse(text), DEVICE)
        say(check="products", program=name, recipe=who, loss=losses.get(who),
            compile_s=round(seconds, 1), products=found.lines, kernels=found.kernels,
            bound_ms=round(found.seconds * 1e3, 3),
            temporary_MiB=step.memory_analysis().temp_size_in_bytes >> 20)  # fmt: skip
        if dump:
            (dump / f"{name}_{who}.hlo").write_text(text)
        runs[who] = partial(step, *arguments)
    times = interleaved(runs, 15)
    for who, run in runs.items() if dump else ():
        profile(run, dump / f"{name}_{who}.xplane.pb")
    for who, seconds in times.items():
        say(check="step", program=name, size=size, recipe=who, ms=round(seconds * 1e3, 3),
            of_plains_speed=round(times["plain"] / seconds, 3), loss=losses.get(who))  # fmt: skip


def profile(run: Callable[[], Any], path: Path) -> None:
    """Writes the profiler's record of three runs, and prints the kernels that take most time."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(3):
                jax.block_until_ready(run())
        found = next(Path(folder).rglob("*.xplane.pb"))
        path.write_bytes(found.read_bytes())
    total: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                total[event.name] += event.duration_ns
    kernels = {name: round(ns / 3e3, 1) for name, ns in total.most_common(40)}
    say(check="profile", file=path.name, us=round(sum(total.values()) / 3e3), kernels_us=kernels)


TRAINED = {"mlp", "gpt", "llama", "llama_cudnn", "vit", "moe_ragged"}
PARTS = {
    "casts": casts,
    "units": units,
    "blocks": blocks,
    "groups": groups,
    "attention": attention,
    "speed": speed,
    "train": train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="*", default=[*PARTS, "steps"])
    parser.add_argument("--programs", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--ways", nargs="*", help="of each program's variants")
    parser.add_argument("--size", default="full", choices=("tiny", "small", "full"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--dump", type=Path, help="a folder for HLO texts and profiles")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.dump:
        options.dump.mkdir(parents=True, exist_ok=True)
    device()
    for name, part in PARTS.items():
        if name in options.parts:
            attempt(name, part)
    for name in options.programs if "steps" in options.parts else ():
        if time.perf_counter() - began < options.seconds:
            ways = [w for w in WAYS[name] if not options.ways or w in options.ways]
            attempt(f"steps {name}", partial(steps, name, ways, options.size, options.dump))


if __name__ == "__main__":
    main()
