"""Rules that pull multipliers back from an operation's results to its operands.

A rule finds multipliers whose products with the operands' differences between the runs add up to
that of the results' exact values: secants, where reverse differentiation has derivatives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...interpret import Equation, all_equations, operation_body
from ...primitives import Family, having, names, params
from ._cells import Cell, Entry, Multipliers, inner, is_key
from ._kernels import computed, pulled

CLOSE = 1e-13  # a relative difference of rounding errors of float64, without a slope
PLAYERS = 5  # operands whose Shapley values are found; each doubles the evaluations
POINTS = (1, 6)  # at which derivatives are taken between the runs, until their mean is a secant
EXACT = 1e-9  # of what is carried: the rest at which a mean of derivatives is one
RESCALED = 5.0  # the largest factor that makes up for the rest
COMPOSED = {"broadcast_in_dim", "convert_element_type", "custom_jvp_call", "jit", "pjit"}
MARK = 0.5  # tells positions from a number that a gather fills in

ELEMENTWISE = having("elementwise") | {"name"}
MOVING = names(
    lambda row: "exact" in row.facts
    and (row.family is Family.STRUCTURAL or row.facts & {"chooses", "keeps_scale"})
) - having("elementwise") - {"name"}  # fmt: skip
ACCUMULATES = having("accumulates")
JOINS = having("chooses") & having("keeps_scale")
EXTREMES = names(lambda row: row.facts >= {"exact", "direct", "reduces"})
INDICES = names(lambda row: row.family is Family.INVARIANT and "indexes" in row.facts)
ADDING = ACCUMULATES | names(
    lambda row: (
        row.family is Family.CONTRACTION
        or (row.autocast == "sum" and row.family is Family.HOMOGENEOUS)
    )
)


def rule_of(equation: Equation) -> Any:
    """Returns the rule for an equation, by what the table of primitives says of it."""
    if equation.name in ELEMENTWISE or _composes_elementwise(equation):
        return secants
    if equation.name in MOVING:
        return moved
    return extremes if equation.name in EXTREMES | INDICES else smooth


def _composes_elementwise(equation: Equation) -> bool:
    """Returns whether another library's operation computes each number from those at its place."""
    body = operation_body(equation)
    if body is None or len(equation.out_avals) != 1:
        return False
    shapes = {a.shape for a in equation.in_avals} <= {equation.out_avals[0].shape, ()}
    inner = (e.primitive.name for e in all_equations(body))
    return shapes and {*inner} <= ELEMENTWISE | COMPOSED


def unbroadcast(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Sums over the axes along which an operand of this shape was repeated."""
    if np.shape(x) == tuple(shape):
        return x
    if not shape:
        return np.sum(x)
    if np.shape(x)[: len(shape)] == tuple(shape):  # a predicate of leading axes
        return np.sum(x, tuple(range(len(shape), np.ndim(x))))
    x = np.sum(x, tuple(range(np.ndim(x) - len(shape))))
    return np.sum(x, tuple(i for i, n in enumerate(shape) if n != np.shape(x)[i]), keepdims=True)


def slope(part: np.ndarray, x: Cell) -> np.ndarray:
    """Returns the multiplier of ``x`` whose product with its difference is ``part``."""
    d = x.end - x.start
    part = unbroadcast(part, np.shape(d))
    close = np.abs(d) <= CLOSE * np.maximum(np.abs(x.end), np.abs(x.start))
    return np.where(close, 0.0, part / np.where(close, 1.0, d))


def secants(entry: Entry, bars: Sequence[Any], top: float) -> Multipliers:
    """Each operand's Shapley value: its effect averaged over the orders in which the operands
    change from the reference run's numbers to the low-precision run's."""
    (bar,), ins, out = bars, entry.ins, entry.outs[0]
    moving = [i for i, x in enumerate(ins) if x.differs][:PLAYERS]
    values = {frozenset(moving): out.middle, frozenset(): out.start}
    raw: dict[frozenset[int], np.ndarray] = {}
    if len(moving) == 1:
        parts = {moving[0]: out.middle - out.start}
    else:
        count = len(moving)
        for k in range(1, count):
            for some in map(frozenset, itertools.combinations(moving, k)):
                mixed = [x.low if i in some else x.reference for i, x in enumerate(ins)]
                raw[some] = np.asarray(entry.operation.compute(mixed)[0])
                values[some] = _bounded(raw[some], out, top)
        parts = dict.fromkeys(moving, np.zeros(()))
        for k in range(count):
            weight = math.factorial(k) * math.factorial(count - 1 - k) / math.factorial(count)
            for some in map(frozenset, itertools.combinations(moving, k)):
                for i in set(moving) - some:
                    parts[i] = parts[i] + weight * (values[some | {i}] - values[some])
        parts = _of_nans(parts, raw, out)
    return [slope(bar * parts[i], x) if i in parts else None for i, x in enumerate(ins)]


def _bounded(x: np.ndarray, out: Cell, top: float) -> np.ndarray:
    x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64, copy=False)
    if np.isfinite(x).all():
        return x
    reach = np.maximum(np.maximum(np.abs(out.middle), np.abs(out.start)), 2.0 * top)
    return np.where(np.isnan(x), (out.middle + out.start) / 2, np.clip(np.real(x), -reach, reach))


def _of_nans(
    parts: dict[int, np.ndarray], raw: dict[frozenset[int], np.ndarray], out: Cell
) -> dict[int, np.ndarray]:
    """Charges a NaN in equal parts to the operands that alone make the result non-finite, or to
    all that differ if none does: an order of changes from one NaN to another has no meaning."""
    exact, reference = (np.asarray(x) for x in (out.exact, out.reference))
    if exact.dtype.kind != "f" or not (born := np.isnan(exact) & ~np.isnan(reference)).any():
        return parts
    alone = {i: ~np.isfinite(raw[frozenset({i})]) for i in parts}
    some = np.any(list(alone.values()), 0)
    weights = {i: np.where(some, alone[i], True).astype(np.float64) for i in parts}
    total = np.sum(list(weights.values()), 0)
    jump = out.middle - out.start
    return {i: np.where(born, jump * weights[i] / total, parts[i]) for i in parts}


def copied(entry: Entry, bars: Sequence[Any], top: float) -> Multipliers:
    return [bars[0]]


def moved(entry: Entry, bars: Sequence[Any], top: float) -> Multipliers:
    """Returns each result's multiplier to the element that it is. Where the indices differ between
    the runs: half to the element of either run, and the rest to the indices."""
    ins, outs, data = entry.ins, entry.outs, _moved_operands(entry)
    if not data:
        return smooth(entry, bars, top)
    indices = [i for i, x in enumerate(ins) if i not in data and x.differs]
    found = [_positions(entry, data, low=True)]
    if indices:
        found.append(_positions(entry, data, low=False))
    multipliers: list[Any] = [None] * len(ins)
    # without other indices, slopes: a stand-in for infinity may be another one than the operand's
    parts = zip(bars, outs, strict=True)
    parts = [np.asarray(b if indices else b * (y.middle - y.start)) for b, y in parts]
    flat = np.concatenate([x.ravel() for x in parts])
    starts = np.cumsum([0, *(np.size(ins[i].low) for i in data)])
    for positions in found:
        inside = positions >= 0
        at, weights = positions[inside], flat[inside] / len(found)
        whole = np.zeros(starts[-1], flat.dtype)
        np.add.at(whole, at, weights)
        for k, i in enumerate(data):
            own = whole[starts[k] : starts[k + 1]].reshape(np.shape(ins[i].low))
            if not ins[i].differs:
                continue
            own = own if indices else slope(own, ins[i])
            multipliers[i] = own if multipliers[i] is None else multipliers[i] + own
    if indices:
        carried = sum(inner(b, y.middle - y.start) for b, y in zip(bars, outs, strict=True))
        moving = [i for i in data if ins[i].differs]
        kept = sum(inner(multipliers[i], ins[i].end - ins[i].start) for i in moving)
        _spread(multipliers, ins, indices, carried - kept)
    return multipliers


def _moved_operands(entry: Entry) -> list[int]:
    """Returns the operands whose elements the results are, not indices; [] if that isn't known."""
    equation = entry.operation.equation
    kind = np.asarray(entry.outs[0].low).dtype.kind
    data = [i for i, x in enumerate(entry.ins) if np.asarray(x.low).dtype.kind == kind]
    known = kind not in "iu" or len(data) == 1 or equation.name in JOINS
    return data if known else []


def _positions(entry: Entry, data: Sequence[int], *, low: bool) -> np.ndarray:
    """Returns for each result the number of the element that it is, over all operands; -1 for
    another number."""
    inputs, start = [x.low if low else x.reference for x in entry.ins], 0
    for i in data:
        shape, count = np.shape(inputs[i]), np.size(inputs[i])
        inputs[i] = (np.arange(start, start + count) + MARK).reshape(shape)
        start += count
    results = entry.operation.compute(inputs)
    found = np.concatenate([np.real(np.asarray(y)).ravel() for y in results])
    marked = np.isfinite(found) & (found - np.floor(found) == MARK)
    return np.where(marked, np.where(marked, found, 0.0) - MARK, -1.0).astype(np.int64)


def extremes(entry: Entry, bars: Sequence[Any], top: float) -> Multipliers:
    """The result's difference lies between those of the elements that are extreme in either run."""
    (bar,), (x,), out = bars, entry.ins, entry.outs[0]
    equation = entry.operation.equation
    axes = params.reduced_axes(equation)
    find = np.argmin if equation.name.endswith("min") else np.argmax
    order = (*(i for i in range(np.ndim(x.end)) if i not in axes), *axes)
    shape = np.shape(out.end)
    rows = [np.transpose(v, order).reshape(*shape, -1) for v in (x.end, x.start)]
    at = [np.expand_dims(find(row, -1), -1) for row in rows]
    own, other = (
        (np.take_along_axis(rows[0], i, -1) - np.take_along_axis(rows[1], i, -1))[..., 0]
        for i in at
    )
    apart, jump = own - other, out.middle - out.start
    safe = np.where(apart != 0, apart, 1.0)
    if equation.name in INDICES:  # the margin between them decides
        first = np.where(apart != 0, bar * jump / safe, 0.0)
        weights = first, -first
    else:
        share = np.clip(np.where(apart != 0, (jump - other) / safe, 0.5), 0.0, 1.0)
        weights = bar * share, bar * (1.0 - share)
    found = np.zeros(rows[0].shape)
    for i, weight in zip(at, weights, strict=True):
        before = np.take_along_axis(found, i, -1)
        np.put_along_axis(found, i, before + weight[..., None], -1)
    found = found.reshape([np.shape(x.end)[i] for i in order])
    return [np.transpose(found, np.argsort(order))]


def smooth(entry: Entry, bars: Sequence[Any], top: float) -> Multipliers:
    """The mean of the derivatives between the runs: exact in the middle for linear and bilinear
    operations, at several points for others, and scaled where the mean misses by a small factor."""
    ins, outs, equation = entry.ins, entry.outs, entry.operation.equation
    multipliers: list[Any] = [None] * len(ins)
    carried = sum(inner(b, y.middle - y.start) for b, y in zip(bars, outs, strict=True))
    decided = [i for i, x in enumerate(ins) if x.differs and not x.is_float]
    floats = [i for i, x in enumerate(ins) if x.differs and x.is_float]
    if not floats or not all(y.is_float for y in outs):
        _spread(multipliers, ins, [*decided, *floats], carried)
        return multipliers
    if decided:
        mixed = [x.low if i in decided else x.reference for i, x in enumerate(ins)]
        found = zip(bars, computed(equation, mixed), outs, strict=True)
        jump = sum(inner(b, np.nan_to_num(z) - y.start) for b, z, y in found)
        _spread(multipliers, ins, decided, jump)
        carried -= jump
    bars = list(bars)
    tainted, whole = _tainted(entry, bars, floats)
    carried -= whole
    guess, mean = 0.0, {}
    for points in POINTS:
        try:
            mean = _mean_derivative(entry, bars, floats, points)
        except (NotImplementedError, ValueError):  # a kernel has no derivative
            guess = np.nan
            break
        guess = sum(inner(g, ins[i].end - ins[i].start) for i, g in mean.items())
        if abs(carried - guess) <= EXACT * abs(carried):
            break
    if not np.isfinite(guess):  # nor has a matrix that isn't definite, say
        _spread(multipliers, ins, floats, carried)
        mean = {i: 0.0 if multipliers[i] is None else multipliers[i] for i in floats}
        guess = carried
    factor = carried / guess if guess else 0.0
    factor = factor if 1 / RESCALED < factor < RESCALED else 1.0
    for i in floats:
        multipliers[i] = mean[i] * factor + tainted.get(i, 0.0)
    return multipliers


_gauss = functools.cache(np.polynomial.legendre.leggauss)


def _mean_derivative(
    entry: Entry, bars: Sequence[Any], floats: Sequence[int], points: int
) -> dict[int, np.ndarray]:
    nodes, weights = _gauss(points)
    found = dict.fromkeys(floats, np.zeros(()))
    for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        at = [
            x.low if x.end is None or not x.is_float
            else np.asarray(x.start + t * (x.end - x.start)) for x in entry.ins
        ]  # fmt: skip
        there = pulled(entry.operation.equation, bars, at)
        found = {i: found[i] + weight * there[i] for i in floats}
    return found


def _tainted(
    entry: Entry, bars: list[Any], floats: Sequence[int]
) -> tuple[dict[int, np.ndarray], float]:
    """Charges results that aren't finite, in equal parts, to the operands that aren't and that
    they are made of; takes them out of ``bars``. Returns multipliers, and how much they carry."""
    ins, outs, equation = entry.ins, entry.outs, entry.operation.equation
    bad = [~np.isfinite(y.low) & ~np.isfinite(y.exact) & np.isfinite(y.reference) for y in outs]
    marks = {i: ~np.isfinite(ins[i].low) & np.isfinite(ins[i].reference) for i in floats}
    marks = {i: mark for i, mark in marks.items() if mark.any()}
    if not marks or not any(mask.any() for mask in bad):
        return {}, 0.0
    parts = [b * (y.middle - y.start) * mask for b, y, mask in zip(bars, outs, bad, strict=True)]
    bars[:] = [np.where(mask, 0.0, b) for b, mask in zip(bars, bad, strict=True)]
    found: list[Any] = [None] * len(ins)
    if equation.name not in ADDING or is_key(outs[0].low):
        whole = float(sum(np.sum(np.real(part)) for part in parts))
        _spread(found, ins, list(marks), whole)
        return {i: found[i] for i in marks}, whole
    ones = [np.ones(np.shape(x.low)) if x.is_float else x.low for x in ins]
    # of each result, how many of its operands aren't finite; the operation is linear in each
    adds = equation.name in ACCUMULATES
    ones = [o * 0.0 if adds and x.is_float else o for o, x in zip(ones, ins, strict=True)]
    count = 0.0
    for some in [set(marks)] if adds else [{i} for i in marks]:
        inputs = [marks[i] * 1.0 if i in some else o for i, o in enumerate(ones)]
        count = count + np.abs(computed(equation, inputs)[0])
    each = parts[0] / np.where(count > 0, count, 1.0) * (count > 0)
    back = pulled(equation, [each], ones)
    if equation.name.endswith("sub"):
        back[-1] = -back[-1]
    multipliers = {i: slope(back[i] * mark, ins[i]) for i, mark in marks.items()}
    return multipliers, float(np.sum(np.real(each * count)))


def _spread(
    multipliers: list[Any], ins: Sequence[Cell], where: Sequence[int], share: float
) -> None:
    """Charges operands for a decision, each element in proportion to its difference."""
    whole = sum(float(np.sum(np.abs(ins[i].end - ins[i].start))) for i in where)
    for i in where if whole else ():
        multipliers[i] = np.sign(ins[i].end - ins[i].start) * share / whole
