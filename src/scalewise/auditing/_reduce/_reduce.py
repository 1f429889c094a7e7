"""Finds the smallest slice of a program that shows a finding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...interpret import Equation, Program, Value
from ...primitives import having, params
from .._bisect import fewest
from .._run._equation_statistics import Equations, EquationStatistics
from .._search._findings import Finding
from .._search._kinds import FINDING_KINDS
from ._graph import LinkedRun, Origin, after, before
from ._reduction import ReducedArithmetic, Reduction, results
from ._render import Slice, rendered

ELEMENTWISE = having("elementwise")
ELEMENTS = 4  # kept of results that are computed one by one
SHRINKING = 24  # smaller inputs that are tried: each has a shape of its own, which is compiled
Arrays = dict[str, np.ndarray]


def shrunk(
    piece: Slice, arrays: Arrays, low: Any, wide: Any, shows: Callable[[Arrays], bool]
) -> Arrays:
    """Returns the inputs of the worst elements, or rows and columns; then as few as show it."""
    *first, last = piece.operations
    equation = last.equation
    assert equation is not None
    if not all(o.equation is not None and o.equation.name in ELEMENTWISE for o in first):
        return arrays
    if equation.name in ELEMENTWISE:
        at = _worst(low, wide)[:ELEMENTS]
        few = _of_shape(arrays, wide.shape, lambda x: x.reshape(-1)[at])
        return few if few is not None and shows(few) else arrays
    if equation.name == "dot_general" and not first:
        return _product(piece, arrays, low, wide, shows)
    if equation.name.startswith("reduce_") and len(equation.in_avals) == 1:
        return _reduced(equation, arrays, low, wide, shows)
    return arrays


def _worst(low: Any, wide: Any) -> np.ndarray:
    low, wide = (np.asarray(x).astype(np.float64).reshape(-1) for x in (low, wide))
    with np.errstate(all="ignore"):
        error = np.abs(low - wide) / np.where(wide == 0, 1, np.abs(wide))
    lost = np.isfinite(wide) & ~np.isfinite(low)
    return np.argsort(-np.where(lost, np.inf, np.nan_to_num(error, posinf=0)), kind="stable")


def _of_shape(
    arrays: Arrays, shape: tuple[int, ...], take: Callable[[np.ndarray], np.ndarray]
) -> Arrays | None:
    """Returns the inputs with those of one shape reduced; None if another isn't a scalar."""
    if not all(x.shape in (shape, ()) for x in arrays.values()):
        return None
    return {name: take(x) if x.shape == shape and shape else x for name, x in arrays.items()}


def _reduced(equation: Any, arrays: Arrays, low: Any, wide: Any, shows: Any) -> Arrays:
    shape = equation.in_avals[0].shape
    axes = params.reduced_axes(equation)
    free = [axis for axis in range(len(shape)) if axis not in axes]
    at = np.unravel_index(_worst(low, wide)[0], np.shape(wide)) if np.shape(wide) else ()
    keys: list[Any] = [slice(None)] * len(shape)
    for axis, i in zip(free, at, strict=True):
        keys[axis] = slice(i, i + 1)
    few = _of_shape(arrays, shape, lambda x: x[tuple(keys)])
    if few is None or not shows(few):
        return arrays
    for axis in axes:
        few = _halved(few, dict.fromkeys(few, axis), shows)
    return few


def _product(piece: Slice, arrays: Arrays, low: Any, wide: Any, shows: Any) -> Arrays:
    equation, names = piece.operations[-1].equation, list(piece.inputs)
    if equation is None or len(names) != 2:
        return arrays
    contracted, batch = params.dot_dimensions(equation)
    at = list(np.unravel_index(_worst(low, wide)[0], wide.shape)) if wide.shape else []
    few, position = {}, len(batch[0])
    for side, name in enumerate(names):
        keys: list[Any] = [slice(None)] * arrays[name].ndim
        for i, axis in enumerate(batch[side]):
            keys[axis] = slice(at[i], at[i] + 1)
        for axis in range(arrays[name].ndim):
            if axis not in (*batch[side], *contracted[side]):
                keys[axis] = slice(at[position], at[position] + 1)
                position += 1
        few[name] = arrays[name][tuple(keys)]
    if not shows(few):
        return arrays
    for left, right in zip(*contracted, strict=True):
        few = _halved(few, dict(zip(names, (left, right), strict=True)), shows)
    return few


def _halved(arrays: Arrays, axes: dict[str, int], shows: Callable[[Arrays], bool]) -> Arrays:
    size = max((x.shape[axes[n]] for n, x in arrays.items() if x.ndim), default=1)
    calls = iter(range(SHRINKING))

    def few(at: list[int]) -> Arrays:
        return {n: np.take(x, at, axes[n]) if x.ndim else x for n, x in arrays.items()}

    def still(at: list[int]) -> bool:
        return bool(at) and next(calls, None) is not None and shows(few(at))

    return few(fewest(range(size), still))


DEPTH = 12  # operations before the finding that a slice goes back at most
BEHIND = 4  # operations behind it whose result may show it
ENDS = 8  # results that are tried
COUNTED = ("nan", "overflow", "underflow")


@dataclasses.dataclass(frozen=True, eq=False)
class Audited:
    """The parts of an audit that reduce its findings."""

    program: Program  # with its arguments
    arithmetic: ReducedArithmetic  # of the low-precision run
    paths: Mapping[int, tuple[int, ...]]  # of the equations, by their index in the report
    steps: int = 1  # how often the program was called


@dataclasses.dataclass(frozen=True)
class Event:
    """The event that a slice has to show."""

    kind: str  # of the finding
    error: float  # the relative error of which it has to show half
    largest: bool = False  # whether that is an element's, not that of the whole result

    def strength(self, low: Any, wide: Any) -> float:
        """Returns how many numbers aren't finite, are zero, or differ; or the relative error."""
        low, wide = np.asarray(low), np.asarray(wide)
        if not np.issubdtype(wide.dtype, np.floating):
            return float(np.sum(low != wide))
        y, s = low.astype(np.float64), wide.astype(np.float64)
        lost = np.isfinite(s) & ~np.isfinite(y)
        if self.kind in ("nan", "overflow"):
            return float(lost.sum())
        if self.kind == "underflow":
            return float(((y == 0) & (s != 0)).sum()) or float(lost.sum())
        if lost.any():
            return math.inf
        finite = np.isfinite(y) & np.isfinite(s)
        y, s = y[finite], s[finite]
        if self.largest:
            return float(np.max(np.abs(y - s) / np.maximum(np.abs(s), 1e-300), initial=0))
        norm = float(np.linalg.norm(s))
        return float(np.linalg.norm(y - s)) / norm if norm else float(np.abs(y).max(initial=0))

    def shows(self, low: Any, wide: Any) -> bool:
        strength = self.strength(low, wide)
        counted = self.kind in COUNTED or not np.issubdtype(np.asarray(wide).dtype, np.floating)
        return strength >= 1 if counted else strength >= self.error / 2 and strength > 0


def reduce(audited: Audited, finding: Finding, equations: Equations) -> Reduction:
    text = f"{finding.kind} in {finding.primitive} at {finding.where}: {finding.evidence}"
    if audited.steps > 1:
        raise ValueError(f"reduce: {text}: expected an audit of one step, not of {audited.steps}")
    statistics = {audited.paths[e.index]: e for e in equations if e.index in audited.paths}
    with jax.enable_x64(True):
        graph, found = _traced(audited, finding)
        for start in found:
            for end, event in _ends(start, graph.origins, finding, statistics):
                try:
                    reduction = _slice(audited, graph, (start, end), event, text)
                except ValueError as error:
                    raise ValueError(f"reduce: {text}: {error}") from None
                if reduction is not None:
                    return reduction
    why = "it is in a loop that is compiled as a whole, or in a branch that float32 doesn't take"
    if found:
        why = f"no slice of up to {DEPTH} operations from the float32 run's numbers shows it alone"
    raise ValueError(f"reduce: {text}: {why}")


def _traced(audited: Audited, finding: Finding) -> tuple[LinkedRun, list[Origin]]:
    paths = {audited.paths[i] for i in finding.equations if i in audited.paths}
    event = Event(finding.kind, finding.introduced, largest=not finding.equations)
    found: list[tuple[float, Origin]] = []

    def visit(
        equation: Equation,
        arrays: Sequence[ArrayLike],
        outs: Sequence[Value],
        origins: Sequence[Origin],
    ) -> None:
        if equation.path not in paths and not (not paths and _is_at(equation, finding)):
            return
        lows = audited.arithmetic.apply(equation, arrays)
        strengths = [event.strength(y, s) for y, s in zip(lows, outs, strict=True)]
        found.append((strengths[0], origins[0]))

    graph = LinkedRun(audited.arithmetic.dtype, visit=visit)
    graph.trace(audited.program)
    found.sort(key=lambda x: -x[0])
    return graph, [origin for _, origin in found[:2]]


def _is_at(equation: Equation, finding: Finding) -> bool:
    where = equation.source or (None, 0, "")
    return (*where[:2], equation.name) == (finding.file, finding.line, finding.primitive)


def _ends(
    start: Origin,
    origins: Sequence[Origin],
    finding: Finding,
    statistics: Mapping[tuple[int, ...], EquationStatistics],
) -> Iterator[tuple[Origin, Event]]:
    carried = FINDING_KINDS[finding.kind].carried_in
    known = statistics.get(start.equation.path) if start.equation else None
    of_operands = known is not None and known["operands"] and not known["flushed"]
    own = Event(
        "precision" if of_operands else finding.kind,  # flushed operands show in its error
        finding.inherited if carried else finding.introduced,
        largest=not finding.equations,
    )
    behind = []
    for origin in after(start, origins, DEPTH if carried else BEHIND):
        known = statistics.get(origin.equation.path) if origin.equation else None
        if known is not None:
            behind.append((origin, known))
    if not carried:
        yield start, own
    for origin, known in behind[:ENDS] if not carried else behind:
        grown = known["differ"] or known.inherited > 4 * max(finding.introduced, 1e-30)
        if not carried or grown:
            yield origin, dataclasses.replace(own, error=known.inherited, largest=False)
    if carried:
        yield start, own


def _slice(
    audited: Audited,
    graph: LinkedRun,
    ends: tuple[Origin, Origin],
    event: Event,
    text: str,
) -> Reduction | None:
    (start, end), arithmetic = ends, audited.arithmetic
    pieces = []
    for depth in range(DEPTH + 1):
        piece = rendered(before(end, depth), arithmetic.holds)
        if piece is None:
            return None
        is_new = not pieces or piece.lines != pieces[-1].lines
        if is_new and any(o is start for o in piece.operations):
            pieces.append(piece)
    if not pieces:
        return None
    wanted = {o.serial for piece in pieces for o in piece.inputs.values()} | {end.serial}
    kept = LinkedRun(arithmetic.dtype, keep=frozenset(wanted))
    kept.trace(audited.program)
    if not wanted <= kept.kept.keys():
        return None
    for piece in pieces:
        arrays = {name: kept.kept[origin.serial] for name, origin in piece.inputs.items()}
        found = results(arithmetic, piece, arrays)
        if not _agrees(found[1], kept.kept[end.serial]):
            return None  # an expression doesn't compute what the equation does
        if event.shows(*found):
            ran = sum(o.equation is not None for o in graph.origins[: end.serial + 1])
            return _verified(piece, arrays, arithmetic, event, text, ran)
    return None


def _agrees(found: Any, expected: Any) -> bool:
    if found.shape != expected.shape:
        return False
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return bool(np.array_equal(found, expected))
    return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-30, equal_nan=True))


def _verified(
    piece: Slice,
    arrays: Any,
    arithmetic: ReducedArithmetic,
    event: Event,
    text: str,
    operations: int,
) -> Reduction | None:
    """Returns the program with small inputs, after running it; with all of them if need be."""

    def shows(smaller: Any) -> bool:
        return event.shows(*results(arithmetic, piece, smaller))

    low, wide = results(arithmetic, piece, arrays)
    for some in (shrunk(piece, arrays, low, wide, shows), arrays):
        few = Reduction(text, arithmetic, piece, some, operations, low, wide)
        with jax.enable_x64(False):
            ran = few.run()
        if event.shows(*ran):
            return dataclasses.replace(few, low=ran[0], wide=ran[1])
    return None
