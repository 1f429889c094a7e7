"""Modules in the order in which they ran, and operations that are close to overflowing."""

from __future__ import annotations

import dataclasses
import math

from ...formats import BF16, FP16, FP32, FP64, Format
from ...scalifying import scope_parts
from .._run._equation_statistics import Equations, EquationStatistics
from .._search._literals import called_at
from .._thresholds import LATENT

SHOWN = 20  # modules listed before the first non-finite number


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """Consecutive operations of one module (scope), or one function where there is no scope."""

    scope: str
    direction: str
    place: str  # ``file.py:12`` of the last one
    primitive: str  # of the last one
    operations: int  # how many they are
    smallest: float  # nonzero magnitude of the reference run, over a sample
    largest: float  # finite magnitude of the low-precision run, before it is rounded
    overflowed: int  # how many numbers overflowed
    nan: int  # and became NaN


def trace(equations: Equations) -> tuple[TraceRow, ...]:
    runs: list[list[EquationStatistics]] = []
    for e in equations:
        if not runs or _key(runs[-1][-1]) != _key(e):
            runs.append([])
        runs[-1].append(e)
        if e["overflowed"] or e["nan"]:
            break
    return tuple(map(_row, runs))


def before_first_event(equations: Equations) -> tuple[TraceRow, ...]:
    rows = trace(equations)
    return rows[-SHOWN:] if rows and (rows[-1].overflowed or rows[-1].nan) else ()


def module(equation: EquationStatistics) -> str:
    scope = "/".join(scope_parts(equation.scope))
    if scope or not equation.function:
        return scope or "elsewhere"
    called = called_at([equation.call_site] if equation.call_site else [])
    return f"{equation.name} ({called})" if called else equation.name


def _key(equation: EquationStatistics) -> tuple[str, str]:
    return module(equation), equation.direction


def _row(equations: Equations) -> TraceRow:
    last = equations[-1]
    inverse = max(e["reference_min_inverse"] for e in equations)
    return TraceRow(
        scope=module(last),
        direction=last.direction,
        place=last.short,
        primitive=last.primitive,
        operations=len(equations),
        smallest=1 / inverse if inverse else 0.0,
        largest=max(e["amax"] for e in equations),
        overflowed=int(sum(e["overflowed"] for e in equations)),
        nan=int(sum(e["nan"] for e in equations)),
    )


def latent(equations: Equations, fmt: Format) -> tuple[str, ...]:
    """Returns a sentence for each operation of a line that didn't overflow but would with values
    four times as large, the largest value first; then for those whose rounded operands would be
    cut off.

    Each result counts in the format that it is rounded to. One with a scale of its own, found from
    its numbers, can't overflow.
    """
    found: dict[tuple[str, str], tuple[float, Format]] = {}
    operands: dict[tuple[str, str], tuple[int, int]] = {}
    over = {(e.short, e.primitive) for e in equations if e["overflowed"]}
    formats = {float(f.max): f for f in (FP64, FP32, BF16, FP16, fmt)}
    for e in equations:
        key = e.short, e.primitive
        own = formats.get(e["limit"], FP64)
        if key not in over and is_latent(e["amax"], own):
            found[key] = max(found.get(key, (0.0, own)), (e["amax"], own), key=lambda x: x[0])
        near, size = operands.get(key, (0, 0))
        if e["operands_latent"]:
            operands[key] = near + int(e["operands_latent"]), size + int(e["operands"])
    results = [
        f"{place}: {primitive}, {near_maximum(amax, own)}"
        for (place, primitive), (amax, own) in sorted(found.items(), key=lambda x: -x[1][0])
    ]
    return *results, *(
        f"{place}: {primitive}, {near:,} of {size:,} numbers of its operands would be cut off with "
        f"values {LATENT} times as large"
        for (place, primitive), (near, size) in operands.items()
    )


def is_latent(amax: float, fmt: Format) -> bool:
    beyond = amax > float(fmt.max) * (1 + float(fmt.eps))  # infinite, in the reference run too
    return float(fmt.max) < LATENT * amax and not beyond


def near_maximum(amax: float, fmt: Format) -> str:
    """``largest value 2^14.5, within a factor of 4 of FP16's maximum``."""
    size = f"largest value 2^{math.log2(amax):.1f}"
    return f"{size}, within a factor of {LATENT} of {fmt.name.upper()}'s maximum"


def by_scope(equations: Equations) -> list[tuple[str, list[EquationStatistics]]]:
    found: dict[str, list[EquationStatistics]] = {}
    for e in equations:
        found.setdefault(module(e), []).append(e)
    return list(found.items())
