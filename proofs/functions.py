"""Compares every float function of JAX's numeric modules, transformed, with float32.

``emulate`` (in FP32), ``autocast``, and ``autoscale`` with the fp16 and fp16_every_op recipes;
eager and jitted; the value and the gradient with respect to all arguments. Results are recorded in
``.prove/``, and a stopped run resumes from there. Names restrict it: ``python -m proofs.functions
jnp.sin lax`` checks one function and one module.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from proofs import records
from proofs.function_calls import Call, call, names
from proofs.fuzz import programs
from proofs.fuzz.disturbed import Model, Rounding, disturbed, traced, wide
from proofs.fuzz.programs import SAMPLES, SLACK

BATCH = 8  # functions in one jitted program

# name: (the transformation, how far it may be from float32, relative to the largest result, and
# what it rounds: where a result is further off, what random roundings of the same size explain)
TRANSFORMS: dict[str, tuple[Callable, float, Model]] = {
    "emulate": (lambda f: sw.emulate(f, "fp32"), 2e-4, programs.TRANSFORMS["emulate fp32"][1]),
    "autocast": (sw.autocast, 1e-2, Model(Rounding(10), Rounding(10), Rounding(10))),
    "fp16": (lambda f: sw.autoscale(f, "fp16"), 1e-2, programs.TRANSFORMS["fp16"][1]),
    "fp16_every_op": (
        lambda f: sw.autoscale(f, "fp16_every_op"), 5e-2, programs.TRANSFORMS["fp16_every_op"][1],
    ),
}  # fmt: skip

# Of these a rounding before decides more than a rounding of the result: only FP32 is compared.
DISCONTINUOUS = {
    "jnp": """ceil floor rint round around trunc fix sign frexp modf floor_divide divmod mod
        remainder fmod nextafter spacing unique unique_values unique_all unique_counts
        unique_inverse digitize searchsorted astype""",
    "lax": """ceil floor round rem nextafter bitcast_convert_type sign""",
    "random": """choice categorical poisson binomial geometric permutation shuffle bernoulli
        multinomial gamma loggamma beta chisquare f t dirichlet""",
}


def outputs(one: Call, gradient: bool) -> Callable:
    """Returns the function's results and the gradients of their sum."""

    def total(*arguments: Any) -> jax.Array:
        leaves = jax.tree.leaves(one.function(*arguments))
        parts = [jnp.sum(y.astype(jnp.float32)) for y in leaves if _is_float(y)]
        return sum(parts[1:], parts[0])

    def both(*arguments: Any) -> tuple[list[Any], list[Any]]:
        leaves = [y for y in jax.tree.leaves(one.function(*arguments)) if _is_number(y)]
        places = tuple(i for i, a in enumerate(arguments) if _is_float(a))
        return leaves, list(jax.grad(total, places)(*arguments)) if gradient else []

    return both


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _is_number(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def differentiable(one: Call) -> bool:
    """Returns True if JAX can differentiate the function."""
    if not any(map(_is_float, one.arguments)):
        return False
    try:
        jax.eval_shape(outputs(one, True), *one.arguments)
    except (TypeError, NotImplementedError, ValueError, IndexError, AssertionError):
        return False
    return True


def differences(
    one: Call, transform: str, got: Any, want: Any, spread: Callable[[], Any]
) -> list[str]:
    """Where a transformed function's results are not what they should be, as sentences.

    ``spread`` returns by how much random roundings move the same results: asked for only where the
    tolerance is exceeded.
    """
    tolerance, found = TRANSFORMS[transform][1], []
    module, _, function = one.name.partition(".")
    discontinuous = function in DISCONTINUOUS.get(module, "").split()
    for place, (kind, ours, theirs) in enumerate(
        zip(("value", "gradient"), got, want, strict=True)
    ):
        for number, (y, z) in enumerate(zip(ours, theirs, strict=True)):
            if y.shape != z.shape or y.dtype != z.dtype:
                found.append(f"{kind}: {y.dtype}{y.shape} for {z.dtype}{z.shape}")
                continue
            if transform != "emulate" and (not _is_float(z) or discontinuous):
                continue
            a, b = wide(y), wide(z)
            finite = np.isfinite(b)
            if not np.array_equal(np.isfinite(a), finite):
                found.append(f"{kind}: {a.ravel()[:4]} for {b.ravel()[:4]}, not finite")
                continue
            size = np.abs(b[finite]).max(initial=1e-2)
            error = np.abs(a - b)[finite].max(initial=0) / size
            if error <= tolerance:
                continue
            moved = SLACK * spread()[place][number][finite]
            if not (np.abs(a - b)[finite] <= np.maximum(tolerance * size, moved)).all():
                found.append(f"{kind}: off by {error:.2g} of the largest number, {size:.3g}")
    return found


def roundings(one: Call, gradient: bool, transform: str, want: Any) -> Callable[[], Any]:
    """Returns how much random roundings change the values and gradients of a function."""

    @functools.cache
    def spread() -> Any:
        program = traced(outputs(one, gradient), one.arguments)
        model, rng = TRANSFORMS[transform][2], np.random.default_rng(0)
        moved = [disturbed(program, model, rng) for _ in range(SAMPLES)]
        leaves, tree = jax.tree.flatten(want)
        runs = zip(*moved, strict=True)
        far = [
            np.max([np.abs(m - wide(z)) for m in some], 0)
            for some, z in zip(runs, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, far)

    return spread


def _run(f: Callable, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Explicitly requested dtype")
        warnings.filterwarnings("ignore", message=".*can't be transformed")
        return jax.tree.map(jnp.asarray, f(*arguments))


def check(calls: Sequence[Call]) -> dict[str, list[str]]:
    """Returns the failures of each function by name."""
    differentiated = {one.name: differentiable(one) for one in calls}
    jobs = {one.name: outputs(one, differentiated[one.name]) for one in calls}
    arguments = {one.name: one.arguments for one in calls}
    failures: dict[str, list[str]] = {name: [] for name in jobs}

    def together(some: Sequence[str], transform: Callable) -> Callable:
        def every(given: Any) -> Any:
            return {name: jobs[name](*given[name]) for name in some}

        return jax.jit(transform(every))

    def compiled(some: Sequence[str], transform: Callable) -> dict[str, Any]:
        """Compiles all functions as one program, or one by one if that fails."""
        try:
            return _run(together(some, transform), {name: arguments[name] for name in some})
        except Exception as error:
            if len(some) == 1:
                return {some[0]: error}
            parts = [compiled([name], transform) for name in some]
            return {name: result for part in parts for name, result in part.items()}

    want = compiled(list(jobs), lambda f: f)
    for name in [n for n, result in want.items() if isinstance(result, Exception)]:
        failures[name] = [f"float32: {want[name]!r:.200}"]
        del jobs[name]
    if not jobs:
        return failures
    for transform, (apply, _, _) in TRANSFORMS.items():
        found = compiled(list(jobs), apply)
        for one in (one for one in calls if one.name in jobs):
            name, job = one.name, jobs[one.name]
            spread = roundings(one, differentiated[name], transform, want[name])
            try:
                eager = _run(apply(job), *arguments[name])
            except Exception as error:
                eager = error
            for mode, got in (("jitted", found[name]), ("eager", eager)):
                what = (
                    [f"{type(got).__name__}: {str(got).splitlines()[0][:160]}"]
                    if isinstance(got, Exception)
                    else differences(one, transform, got, want[name], spread)
                )
                failures[name] += [f"{transform}, {mode}: {w}" for w in what]
    return failures


def main(arguments: Sequence[str]) -> int:
    """Checks the functions named, all by default; returns 1 if one failed or has no call."""
    jax.config.update("jax_disable_most_optimizations", True)
    chosen = [n for n in names() if not arguments or {n, n.partition(".")[0]} & set(arguments)]
    record = records.folder(Path(__file__)) / "functions.json"
    done: dict[str, list[str]] = json.loads(record.read_text()) if record.exists() else {}
    began = time.perf_counter()
    todo = [n for n in chosen if n not in done]
    for i in range(0, len(todo), BATCH):
        some = {n: call(n) for n in todo[i : i + BATCH]}
        known = [c for c in some.values() if c is not None]
        done |= check(known) | {n: ["no call"] for n, c in some.items() if c is None}
        record.write_text(json.dumps(done))
        for n in some:
            for failure in done[n]:
                print(f"{n}: {failure}", flush=True)
        seconds = time.perf_counter() - began
        print(f"functions: {i + len(some)} of {len(todo)}, {seconds:.0f} s", flush=True)
        if i // BATCH % 8 == 7:  # memory; what eager equations have in common is compiled once
            jax.clear_caches()
    failed = [n for n in chosen if done[n]]
    print(f"functions: {len(chosen)} checked, {len(failed)} failed: {' '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
