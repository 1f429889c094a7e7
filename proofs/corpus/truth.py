"""Measures, without the audit, that a program fails as its entry says.

The reference is the program in float64, run by JAX itself with ``jax.enable_x64``. The
low-precision run is an emulation of every operation, a policy or a recipe, or for a program with
dtypes of its own, the program as it stands, one operation at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from proofs.experts import WideLines
from scalewise.formats import FP32, FP64, format
from scalewise.interpret import transform

from .entries import SYNONYMS, Clean, Entry

FAILED = {"fp16": 0.01, "bf16": 0.05, "float32": 1e-4}  # the error of a program that has failed
FAILED_POLICY, FAILED_RECIPE = 0.05, 0.2
REPAIRED = 0.25  # the largest error of a repaired program, as a share of the failed one's
CLEAN = {"fp16": 0.005, "bf16": 0.04, "float32": 1e-5}  # the largest error of a clean program
CLEAN_POLICY, CLEAN_RECIPE = 0.04, 0.15
NEGLIGIBLE = 1e-6  # an output this small beside the largest one counts as zero

Error = tuple[int, float]


@dataclasses.dataclass(frozen=True)
class Truth:
    """What was measured of an entry: the error of each variant of the program.

    Attributes:
        failed: as it is, in low precision.
        wide: with the lines at fault in the wide format; None for policies and native dtypes.
        expert: with the expert's fix.
    """

    failed: Error
    wide: Error | None
    expert: Error

    def problems(self, entry: Entry) -> list[str]:
        """Returns what contradicts the entry."""
        unknown = ", ".join(kind for kind in entry.kinds if kind not in SYNONYMS)
        found = [f"unknown kinds of finding: {unknown}"] if unknown or not entry.kinds else []
        limit = entry.limit or limits(entry.low, FAILED, FAILED_POLICY, FAILED_RECIPE)
        if not self.failed[0] and self.failed[1] < limit:
            found.append(f"does not fail: {self.failed}")
        if self.wide and not repaired(self.wide, self.failed, limit):
            found.append(f"wide lines do not repair it: {self.failed} to {self.wide}")
        if not repaired(self.expert, self.failed, limit):
            found.append(f"the expert's fix does not repair it: {self.failed} to {self.expert}")
        return found


def limits(low: Any, of_formats: dict[str, float], policy: float, recipe: float) -> float:
    if isinstance(low, str) and low in of_formats:
        return of_formats[low]
    return policy if isinstance(low, str) and "=" in low else recipe


def repaired(after: Error, before: Error, limit: float) -> bool:
    """Returns True if a fix leaves no non-finite number and a small part of the error."""
    worst = before[1] if not before[0] and math.isfinite(before[1]) else 10.0 * limit
    return not after[0] and after[1] <= REPAIRED * max(min(worst, 1.0), limit)


def low_precision(entry: Entry, call: Callable, low: Any, wide: bool = False) -> Callable:
    """Returns ``call`` in low precision; with ``wide``, but for the lines at fault."""
    if entry.native:
        return lambda *args: call(*cast(args, format(low).name))
    if isinstance(low, str) and "=" in low:
        return jax.jit(sw.autocast(call, low))
    if not isinstance(low, str) or low not in FAILED:
        return jax.jit(sw.autoscale(call, low))
    lines = entry.lines() if wide else frozenset()
    to = FP64 if low == "float32" else FP32
    return jax.jit(transform(call, WideLines(format(low), lines=lines, wide=to), name="truth"))


def cast(args: Any, dtype: Any) -> Any:
    """Returns pytrees with their float arrays in ``dtype``."""
    dtype = jnp.dtype({"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))

    def one(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return jnp.asarray(np.asarray(x), dtype)
        return x

    return jax.tree.map(one, args)


def repeated(call: Callable, steps: int) -> Callable:
    """Returns ``call`` applied to its own first result, in a loop; the last result."""

    def loop(first: Any, *rest: Any) -> Any:
        def body(state: Any, _: None) -> tuple[Any, None]:
            outs = call(state, *rest)
            return (outs[0] if isinstance(outs, tuple) else outs), None

        return jax.lax.scan(body, first, None, length=steps)[0]

    return loop if steps > 1 else call


def change(entry: Entry, outs: Any, args: tuple[Any, ...]) -> Any:
    """Returns results, or for an entry with ``change`` their difference from the first argument."""
    if not entry.change:
        return outs
    first = outs[0] if isinstance(outs, tuple) else outs
    return jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), first, args[0])


def representable(entry: Entry) -> tuple[Any, ...]:
    """Returns the arguments, the first one rounded if the change in it is looked at."""
    args = entry.args()
    if not entry.change:
        return args
    name = entry.low if isinstance(entry.low, str) and entry.low in FAILED else "float32"
    return (cast(cast(args[0], format(name).name), "float32"), *args[1:])


def reference(call: Callable, args: tuple[Any, ...]) -> Any:
    """Returns the program's results in float64, as NumPy arrays."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(call)(*cast(args, "float64")))


def error(outs: Any, want: Any) -> Error:
    """Returns how many numbers aren't finite, and the largest relative error of an output.

    The error of an output is relative in the Euclidean norm; outputs that are negligible beside
    the largest have their errors relative to that.
    """
    pairs = [
        (np.float64(low), np.float64(wide))
        for low, wide in zip(jax.tree.leaves(outs), jax.tree.leaves(want), strict=True)
        if jnp.issubdtype(jnp.result_type(wide), jnp.inexact)
    ]
    lost, finite = 0, []
    for low, wide in pairs:
        lost += int(np.sum(~np.isfinite(low) & np.isfinite(wide)))
        both = np.isfinite(low) & np.isfinite(wide)
        finite.append((np.where(both, low, 0.0), np.where(both, wide, 0.0)))
    sizes = [np.sqrt(np.mean(wide**2)) if wide.size else 0.0 for _, wide in finite]
    largest = max(sizes, default=0.0) or 1.0
    errors = [
        np.sqrt(np.mean((low - wide) ** 2)) / (size if size > NEGLIGIBLE * largest else largest)
        for (low, wide), size in zip(finite, sizes, strict=True)
        if wide.size
    ]
    return lost, float(max(errors, default=0.0))


def measure(entry: Entry) -> Truth:
    """Runs an entry's program in low precision, with its lines wide, and with the fix."""
    args = representable(entry)
    want = change(entry, reference(repeated(entry.call, entry.steps), args), args)

    def harm(call: Callable, low: Any, wide: bool = False) -> Error:
        run = low_precision(entry, repeated(call, entry.steps), low, wide)
        return error(change(entry, run(*args), args), want)

    emulated = not entry.native and isinstance(entry.low, str) and entry.low in FAILED
    wide = harm(entry.call, entry.low, wide=True) if emulated else None
    if entry.fixed is None and entry.better is None:
        if wide is None:
            raise ValueError(f"{entry.name}: expected an expert's fix")
        expert = wide
    else:
        expert = harm(entry.fixed or entry.call, entry.better or entry.low)
    return Truth(harm(entry.call, entry.low), wide, expert)


def clean_problems(program: Clean) -> list[str]:
    """Returns why a clean program isn't clean."""
    args = program.args()
    want = reference(program.call, args)
    native = Entry(program.call, "", program.low, (), (), program.args, (), native=False)
    found = error(low_precision(native, program.call, program.low)(*args), want)
    limit = limits(program.low, CLEAN, CLEAN_POLICY, CLEAN_RECIPE)
    return [f"error {found}"] if found[0] or found[1] > limit else []
