"""Measures, without a tool, that a program of JAX fails as it says, and how good a fix is.

The reference is the program in float64, run by JAX itself with ``jax.enable_x64``, or in float32.
The low-precision run is an emulation of every operation, a policy or a recipe, or for a program
with dtypes of its own, the program as it stands, one operation at a time.
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
from scalewise.formats import format

from .low_precision import FORMATS, cast, emulated, is_emulated, recipe, repeated
from .programs import SYNONYMS, Program

FAILED = {"fp16": 0.01, "bf16": 0.05, "float32": 1e-4}  # the error of a program that has failed
FAILED_POLICY, FAILED_RECIPE = 0.05, 0.2
REPAIRED = 0.25  # the largest error of a repaired program, as a share of the failed one's
CLEAN = {"fp16": 0.005, "bf16": 0.04, "float32": 1e-5}  # the largest error of a clean program
CLEAN_POLICY, CLEAN_RECIPE = 0.04, 0.15
NEGLIGIBLE = 1e-6  # an output this small beside the largest one counts as zero

Error = tuple[int, float]


@dataclasses.dataclass(frozen=True)
class Truth:
    """What was measured of a program: the error of each variant.

    Attributes:
        failed: as it is, in low precision.
        wide: with the lines at fault in the wide format; None for policies and native dtypes.
        expert: with the expert's fix; None without one.
    """

    failed: Error
    wide: Error | None
    expert: Error | None

    def problems(self, program: Program) -> list[str]:
        """Returns what contradicts the program's record."""
        unknown = ", ".join(kind for kind in program.kinds if kind not in SYNONYMS)
        found = [f"unknown kinds of finding: {unknown}"] if unknown or not program.kinds else []
        limit = limit_of(program)
        if not self.failed[0] and self.failed[1] < limit:
            found.append(f"does not fail: {self.failed}")
        if self.wide and not repaired(self.wide, self.failed, limit):
            found.append(f"wide lines do not repair it: {self.failed} to {self.wide}")
        if self.expert and not repaired(self.expert, self.failed, limit):
            found.append(f"the expert's fix does not repair it: {self.failed} to {self.expert}")
        return found


def limits(low: Any, of_formats: dict[str, float], policy: float, recipe: float) -> float:
    if isinstance(low, str) and low in of_formats:
        return of_formats[low]
    return policy if isinstance(low, str) and "=" in low else recipe


def limit_of(program: Program) -> float:
    """Returns the error from which a program has failed."""
    return program.limit or limits(program.low, FAILED, FAILED_POLICY, FAILED_RECIPE)


def repaired(after: Error, before: Error, limit: float) -> bool:
    """Returns True if a fix leaves no non-finite number and a small part of the error."""
    worst = before[1] if not before[0] and math.isfinite(before[1]) else 10.0 * limit
    return not after[0] and after[1] <= REPAIRED * max(min(worst, 1.0), limit)


def change(program: Program, outs: Any, args: tuple[Any, ...]) -> Any:
    """Returns results, or with ``change`` their difference from the first argument."""
    if not program.change:
        return outs
    first = outs[0] if isinstance(outs, tuple) else outs
    return jax.tree.map(lambda new, old: np.float64(new) - np.float64(old), first, args[0])


def arguments(program: Program) -> tuple[Any, ...]:
    """Returns the arguments, the first one rounded if the change in it is looked at."""
    args = program.args()
    if not program.change:
        return args
    name = program.low if isinstance(program.low, str) and program.low in FORMATS else "float32"
    return (cast(cast(args[0], format(name).name), "float32"), *args[1:])


def right(program: Program, args: tuple[Any, ...], steps: int = 1) -> Any:
    """Returns the right results, as NumPy arrays."""
    call = repeated(program.call, steps)
    if program.device is not None:  # what is wrong are the sums, not the operands
        call = sw.autoscale(call, recipe(program.low))
    if program.reference == "float32" or program.device is not None:
        return jax.tree.map(np.asarray, jax.jit(call)(*args))
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


def error_of(program: Program, run: Callable, args: tuple[Any, ...], want: Any) -> Error:
    """Returns the error of a run of a program."""
    return error(change(program, run(*args), args), want)


def measure(program: Program, steps: int | None = None) -> Truth:
    """Runs a program in low precision, with its lines wide, and with the expert's fix."""
    steps = program.steps if steps is None else steps
    args = arguments(program)
    want = change(program, right(program, args, steps), args)

    def harm(call: Callable, low: Any, lines: frozenset = frozenset()) -> Error:
        return error_of(program, emulated(program, repeated(call, steps), low, lines), args, want)

    wide = harm(program.call, program.low, program.lines()) if is_emulated(program) else None
    expert = wide
    if program.fixed is not None or program.better is not None:
        expert = harm(program.fixed or program.call, program.better or program.low)
    return Truth(harm(program.call, program.low), wide, expert)


def problems(program: Program) -> list[str]:
    """Returns what contradicts a program's record; of a healthy one, that it isn't."""
    if program.kinds:
        return measure(program).problems(program)
    args = program.args()
    found = error(emulated(program, program.call, program.low)(*args), right(program, args))
    limit = limits(program.low, CLEAN, CLEAN_POLICY, CLEAN_RECIPE)
    return [f"error {found}"] if found[0] or found[1] > limit else []


def errors(program: Program, fixed: Callable) -> tuple[Error, Error | None, Error]:
    """Returns the errors of one step of a program, with an expert's fix, and with a tool's."""
    args = arguments(program)
    want = change(program, right(program, args), args)
    found = measure(program, steps=1)
    return found.failed, found.expert, error_of(program, fixed, args, want)
