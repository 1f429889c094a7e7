"""Which values of two programs are the same numbers, in any order, and where the two part."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...primitives import Family, names
from ._values import Array, Side

MOVES = names(lambda row: row.family is Family.STRUCTURAL)

# The relative difference of two values of which the same is meant: what a few constants that are
# rounded to float32 leave in float64.
SAME = 2.0**-21


def apart(a: Array, b: Array) -> float:
    """Returns how far two arrays are apart as multisets: the root mean square of their sorted
    numbers' relative differences; of numbers near zero, relative to :attr:`Array.unit`."""
    if a.sorted.size != b.sorted.size:
        return math.inf
    return _relative(a.sorted, b.sorted, max(a.unit, b.unit))


def unlike(a: Array, b: Array) -> float:
    """Returns one less the cosine between two arrays of one size, but for their scales, in the
    order of axes in which it is largest; numbers far beyond the others count as their signs."""
    x, y = (np.asarray(z.array, np.float64) for z in (a, b))
    with np.errstate(all="ignore"):
        x, y = (z / (np.abs(z) + (unit or 1.0)) for z, unit in ((x, a.unit), (y, b.unit)))
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    norm = float(np.linalg.norm(x) * np.linalg.norm(y)) or 1.0
    return min(1 - abs(float(np.vdot(x, z))) / norm for _, z in _arrangements(y, x.shape))


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the same of two arrays of one shape, number by number."""
    x, y = (np.asarray(z, np.float64).ravel() for z in (x, y))
    return _relative(x, y, 0.25 * float(np.median(np.abs(x)))) if x.size == y.size else math.inf


def _relative(x: np.ndarray, y: np.ndarray, unit: float) -> float:
    if not x.size or x is y:
        return 0.0
    with np.errstate(all="ignore"):
        size = np.maximum(np.maximum(np.abs(x), np.abs(y)), unit)
        equal = (x == y) | ((x != x) & (y != y))
        each = np.where(equal, 0.0, np.abs(x - y) / size)
        found = float(np.sqrt(np.mean(np.square(each))))
    return found if math.isfinite(found) else math.inf


def laid_out(x: np.ndarray, like: np.ndarray, of: np.ndarray | None = None) -> np.ndarray | None:
    """Returns the numbers of ``x``, or of an array ``of`` its shape, in the shape of ``like`` and
    with the axes in the order in which they are closest to it; None if the sizes differ."""
    if x.size != like.size:
        return None
    best = None
    for order, moved in _arrangements(x, like.shape):
        far = difference(moved, like)
        if best is None or far < best[0]:
            best = far, order
        if far <= SAME:
            break
    assert best is not None
    return np.transpose(x if of is None else of, best[1]).reshape(like.shape)


def _arrangements(
    x: np.ndarray, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields an array in a shape, first as it is, then with its axes in the other orders of which
    the shapes fit."""
    for order in itertools.permutations(range(x.ndim)):
        moved = np.transpose(x, order)
        own = order == tuple(range(x.ndim))
        if own or (x.ndim <= 5 and (moved.shape == shape or x.ndim != len(shape))):
            yield order, moved.reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Matching:
    """The values of two sides that have the same numbers.

    Attributes:
        of_a, of_b: by a value's number those of the other side, the first computed first.
    """

    of_a: Mapping[int, Sequence[int]]
    of_b: Mapping[int, Sequence[int]]


def matching(a: Sequence[Array], b: Sequence[Array], same: float = SAME) -> Matching:
    groups: dict[tuple[int, bool], tuple[list[int], list[int]]] = {}
    for position, values in enumerate((a, b)):
        for i, x in enumerate(values):
            if x.array.size:
                key = x.array.size, x.array.dtype.kind in "fc"
                groups.setdefault(key, ([], []))[position].append(i)
    of_a, of_b = collections.defaultdict(list), collections.defaultdict(list)
    for own, other in groups.values():
        if not own or not other:
            continue
        table = np.stack([b[j].few for j in other])
        for i in own:
            unit = max(a[i].unit, np.abs(a[i].few).max() * 1e-12)
            with np.errstate(all="ignore"):
                size = np.maximum(np.maximum(np.abs(table), np.abs(a[i].few)), unit)
                gaps = np.where(table == a[i].few, 0.0, np.abs(table - a[i].few) / size)
            few = 10 * same * math.sqrt(max(a[i].array.size, 1))
            for k in np.flatnonzero(~(gaps > few).any(1)):
                if apart(a[i], b[other[k]]) <= same:
                    of_a[i].append(other[k])
                    of_b[other[k]].append(i)
    return Matching(dict(of_a), dict(of_b))


def cone(side: Side, same: Mapping[int, Sequence[int]], outputs: Iterable[int]) -> set[int]:
    """Returns the values without a counterpart that lead to some outputs by such values alone."""
    found, waiting = set(), [i for i in outputs if i not in same]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [j for j in side.values[i].reads if j is not None and j not in same]
    return found


def first(side: Side, inside: set[int]) -> list[int]:
    """Returns the operations of a cone whose operands all have counterparts or are arguments,
    possibly with their elements in another place."""
    given: set[int] = set()
    found = []
    for i in sorted(inside):
        x = side.values[i]
        moved = x.name in MOVES and all(j in given for j in x.reads if j in inside)
        if x.entry is None or (moved and any(j in given for j in x.reads)):
            given.add(i)
        elif all(j in given for j in x.reads if j in inside):
            found.append(i)
    return found
