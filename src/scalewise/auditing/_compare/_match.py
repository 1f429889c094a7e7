"""Which values of two programs are the same numbers, in any order, and where the two part."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...primitives import Family, names
from ._values import Array, Side

MOVES = names(lambda row: row.family is Family.STRUCTURAL)
# The relative difference of two values of which the same is meant: what a few constants that are
# rounded to float32 leave in float64.
SAME = 2.0**-21
Same = Mapping[int, Sequence[int]]  # by a value's number, those of the other side


def apart(a: Array, b: Array) -> float:
    """Returns how far two arrays are apart as multisets: the root mean square of their sorted
    numbers' relative differences; of numbers near zero, relative to :attr:`Array.unit`."""
    if a.array.size != b.array.size:
        return math.inf
    return relative(a.sorted, b.sorted, max(a.unit, b.unit))


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the same of two arrays of one shape, number by number."""
    x, y = (np.asarray(z, np.float64).ravel() for z in (x, y))
    return relative(x, y, 0.25 * float(np.median(np.abs(x)))) if x.size else 0.0


def relative(x: np.ndarray, y: np.ndarray, unit: float) -> float:
    if not x.size or x is y:
        return 0.0
    with np.errstate(all="ignore"):
        size = np.maximum(np.maximum(np.abs(x), np.abs(y)), unit)
        equal = (x == y) | ((x != x) & (y != y))
        found = float(np.sqrt(np.mean(np.square(np.where(equal, 0.0, np.abs(x - y) / size)))))
    return found if math.isfinite(found) else math.inf


def unlike(a: Array, b: Array) -> float:
    """Returns one less the cosine between two arrays of one size, but for their scales, in the
    order of axes in which it is largest; numbers far beyond the others count as their signs."""
    x, y = (np.asarray(z.array, np.float64) for z in (a, b))
    with np.errstate(all="ignore"):
        x, y = (z / (np.abs(z) + (unit or 1.0)) for z, unit in ((x, a.unit), (y, b.unit)))
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    norm = float(np.linalg.norm(x) * np.linalg.norm(y)) or 1.0
    return min(1 - abs(float(np.vdot(x, z))) / norm for _, z in arrangements(y, x.shape))


def laid_out(x: np.ndarray, like: np.ndarray, of: np.ndarray | None = None) -> np.ndarray | None:
    """Returns the numbers of ``x``, or of an array ``of`` its shape, in the shape of ``like`` and
    with the axes in the order in which they are closest to it; None if the sizes differ."""
    best: tuple[float, tuple[int, ...]] | None = None
    for order, moved in arrangements(x, like.shape):
        far = difference(moved, like)
        if best is None or far < best[0]:
            best = far, order
        if far <= SAME:
            break
    return best and np.transpose(x if of is None else of, best[1]).reshape(like.shape)


def arrangements(
    x: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields an array in a shape of its size, first as it is, then with its axes in the other
    orders of which the shapes fit."""
    for order in itertools.permutations(range(x.ndim)) if x.size == math.prod(shape) else ():
        moved = np.transpose(x, order)
        own = order == tuple(range(x.ndim))
        if own or (x.ndim <= 5 and (moved.shape == shape or x.ndim != len(shape))):
            yield order, moved.reshape(shape)


def matching(a: Sequence[Array], b: Sequence[Array], same: float = SAME) -> tuple[Same, Same]:
    """Returns for each side's values those of the other with the same numbers, in any order; of
    sampled values, those of the same operation."""
    groups: dict[tuple[int, bool, str], list[int]] = collections.defaultdict(list)
    for j, y in enumerate(b):
        groups[_group(y)].append(j)
    tables = {key: np.stack([b[j].few for j in some]) for key, some in groups.items()}
    found: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for i, x in enumerate(a):
        key = _group(x)
        if key not in tables:
            continue
        table, few = tables[key], x.few
        with np.errstate(all="ignore"):  # a mean square is at least one of these squares
            size = np.maximum(np.maximum(np.abs(table), np.abs(few)), x.unit)
            gaps = np.where((table == few) | (size == 0), 0.0, np.abs(table - few) / size)
        near = ~(gaps > 2 * same * math.sqrt(key[0])).any(1)
        for j in (groups[key][k] for k in np.flatnonzero(near)):
            if apart(x, b[j]) <= same:
                found[0].setdefault(i, []).append(j)
                found[1].setdefault(j, []).append(i)
    return found


def _group(x: Array) -> tuple[int, bool, str]:
    return x.array.size, x.array.dtype.kind in "fc", x.name if x.summary else ""


def cone(side: Side, same: Same) -> set[int]:
    """Returns the values without a counterpart that lead to the outputs by such values alone."""
    return side.above(side.outputs, set(range(len(side.values))) - same.keys())


def first(side: Side, inside: set[int]) -> list[int]:
    """Returns the operations of a cone whose operands all have counterparts or are arguments,
    possibly with their elements in another place."""
    given: set[int] = set()
    found = []
    for i in sorted(inside):
        x = side.values[i]
        own = [j for j in x.reads if j in inside]
        if x.entry is None or (x.name in MOVES and own and given.issuperset(own)):
            given.add(i)
        elif given.issuperset(own):
            found.append(i)
    return found
