"""Measures the error of a gallery's program, and the error that an expert's fix leaves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from examples.failures import Failure

import scalewise as sw
from scalewise._resolve import resolve
from scalewise.emulating._emulation import Constant, EmulationWithDraws
from scalewise.formats import FP32, FP64, Format
from scalewise.interpret import transform

Lines = frozenset[tuple[str, int]]
MARK = "# <- here"


@dataclasses.dataclass(frozen=True)
class WideLines(EmulationWithDraws):
    """Emulation that computes some lines, and the libraries called there, in another format.

    Their constants aren't rounded.
    """

    lines: Lines = frozenset()
    wide: Format = FP32

    def apply(self, state, equation, inputs):
        if not self.lines & {place[:2] for place in (equation.source, equation.caller) if place}:
            return super().apply(state, equation, inputs)
        inputs = [x.exact if isinstance(x, Constant) else x for x in inputs]
        return EmulationWithDraws(self.wide, self.saturate).apply(state, equation, inputs)


def marked(functions: Iterable[Callable]) -> Lines:
    """Returns file and number of the marked lines in some functions."""
    found: set[tuple[str, int]] = set()
    for function in functions:
        source, start = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or ""
        found |= {(file, start + i) for i, x in enumerate(source) if x.rstrip().endswith(MARK)}
    return frozenset(found)


def low_precision(case: Any, call: Callable, low: Any, lines: Lines = frozenset()) -> Callable:
    """Returns ``call`` in the arithmetic ``low``, but for some lines in the reference's format."""
    if isinstance(low, str):  # "fp16" and "bf16" name recipes too; as in an audit, the format
        low = resolve(low, "policy", "format", "recipe", where="experts")
    if isinstance(low, sw.Recipe):
        return sw.autoscale(call, low)
    if isinstance(low, sw.Policy):
        return sw.autocast(call, low)
    wide = FP64 if case.reference == "float64" else FP32
    return transform(call, WideLines(low, lines=lines, wide=wide), name="expert")


def wanted(case: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the outputs of the case's program in the precision of its reference run."""
    call = sw.emulate(case.call, "float64") if case.reference == "float64" else case.call
    return jax.jit(call)(*arguments)


def harm(case: Any) -> tuple[int, float]:
    """Returns the error of a program in low precision, in which it makes its own decisions."""
    arguments = case.arguments()
    low = low_precision(case, case.call, case.low)
    return error(jax.jit(low)(*arguments), wanted(case, arguments))


def expert_error(case: Failure) -> tuple[int, float]:
    """Returns the error that the expert's fix leaves."""
    arguments = case.arguments()
    lines = frozenset() if case.expert or case.expert_low else marked(case.at)
    low = low_precision(case, case.expert or case.call, case.expert_low or case.low, lines)
    return error(jax.jit(low)(*arguments), wanted(case, arguments))


def error(outs: Any, want: Any) -> tuple[int, float]:
    """Returns how many numbers aren't finite, and the root mean square of the relative errors."""
    lost, shares = 0, []
    for low, wide in zip(jax.tree.leaves(outs), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(wide.dtype, jnp.floating):
            continue
        low, wide = np.float64(low), np.float64(wide)
        lost += int(np.sum(~np.isfinite(low) & np.isfinite(wide)))
        finite = np.isfinite(low) & np.isfinite(wide)
        noise, signal = (np.sum(np.where(finite, x, 0.0) ** 2) for x in (low - wide, wide))
        shares.append(noise / signal if signal else noise)
    return lost, float(np.sqrt(np.mean(shares)))
