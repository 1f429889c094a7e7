"""Why two programs differ: changes of one of them, each tried by running it again with the change.

The reference values (float64) tell whether the programs mean the same. Where they don't, a change
of an operation at which they part, with which all outputs agree, is the cause. Where they do,
roundings make the difference, and the balance sheets of both programs tell which.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...rounding import format_params
from .._tape._arithmetic import nearest
from .._tape._both import on_host
from ._match import MOVES, SAME, apart, cone, difference, first, laid_out, matching, unlike
from ._relations import FORMATS, rounded_to
from ._values import Array, Side

COPIES = "function", "parameter"  # of the other's values, which agree with these anyway
MANY = 40  # operations behind the first ones among which a missing or another one is looked for


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why two programs differ.

    Attributes:
        kind: "constant", "rounded constant", "weight", "quantised", "missing", "function", "dtype"
            or "order" (of a sum).
        where: the lines, or the names of recorded values, of the first and the second program.
        change: what makes them agree, a sentence.
        before, after: how far the outputs are apart without and with the change (see
            :func:`apart`); ``after`` is NaN where nothing could be run.
        share: of a rounding, its part of the outputs' difference.
    """

    kind: str
    where: tuple[str, ...]
    change: str
    before: float
    after: float = math.nan
    share: float | None = None

    @property
    def tried(self) -> bool:
        return self.after < self.before

    def __str__(self) -> str:
        share = "" if self.share is None else f" makes {100 * self.share:.0f} % of the difference"
        text = f"{self.kind.capitalize()} at {' and '.join(self.where)}{share}: {self.change}"
        if math.isnan(self.after):
            return f"{text}; the difference is {self.before:.2g}."
        agree = "agree" if self.after <= SAME else f"differ by {self.after:.2g}"
        return f"{text} the outputs {agree}, not {self.before:.2g}."


Change = Mapping[int, Callable[[Sequence[Any]], Any]]  # functions of the operands, by value


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """A change of one program: other functions of the operands for some values, by number."""

    kind: str
    values: Change
    where: tuple[str, ...]
    change: str


def replayed(side: Side, edit: Change) -> dict[int, Any]:
    """Returns the reference values that an edit changes."""
    assert side.run is not None
    new = {i: f(()) for i, f in edit.items() if side.values[i].entry is None}
    numbers = side.numbers
    for entry in side.run.forward.tape:
        reads = [numbers.get(id(x)) for x in entry.ins]
        own = [numbers[id(y)] for y in entry.outs]
        if not (any(i in new for i in reads) or any(i in edit for i in own)):
            continue
        ins = [new.get(i, x.reference) for i, x in zip(reads, entry.ins, strict=True)]
        outs = entry.operation.compute(ins)
        for i, y in zip(own, outs, strict=True):
            new[i] = edit[i](ins) if i in edit else np.asarray(y)
    return new


@dataclasses.dataclass(eq=False)
class Parting:
    """Two programs of which some outputs mean something else.

    Attributes:
        sides: the programs.
        base: changes of each, found before, that belong to other causes.
    """

    sides: tuple[Side, Side]
    base: tuple[Change, Change] = dataclasses.field(default_factory=lambda: ({}, {}))

    def __post_init__(self) -> None:
        sides = self.sides
        if any(self.base):
            new = [replayed(s, c) for s, c in zip(sides, self.base, strict=True)]
            sides = [
                [dataclasses.replace(x, array=own.get(i, x.array)) for i, x in enumerate(s.values)]
                for s, own in zip(sides, new, strict=True)
            ]
            pairs = zip(self.sides, sides, strict=True)
            self.sides = tuple(dataclasses.replace(s, values=v) for s, v in pairs)  # pyright: ignore[reportAttributeAccessIssue]
        self.matching = matching(self.sides[0].values, self.sides[1].values)
        self.same = self.matching.of_a, self.matching.of_b
        pairs = list(zip(self.sides, self.same, strict=True))
        self.cones = [cone(s, m, s.outputs) for s, m in pairs]
        self.firsts = [first(s, c) for s, c in zip(self.sides, self.cones, strict=True)]
        self.before = self.distance(0, {})

    @property
    def parts(self) -> bool:
        return any(self.cones) or self.before > SAME

    def distance(self, which: int, new: Mapping[int, Any]) -> float:
        own, other = self.sides[which], self.sides[1 - which]
        found = 0.0
        for i, j in zip(own.outputs, other.outputs, strict=True):
            x = own.values[i]
            if i in new:
                x = dataclasses.replace(x, array=new[i])
            found = max(found, apart(x, other.values[j]))
        return found

    def causes(self) -> list[Cause]:
        """Returns the first change with which all outputs agree, the simplest kinds first.

        Without one, the first with which the changed values agree, and then the causes of what is
        left; without any, a cause of kind "unknown".
        """
        local: tuple[int, Edit, float] | None = None
        with on_host():
            for which, edit in self._edits():
                new = replayed(self.sides[which], self.base[which] | edit.values)
                after = self.distance(which, new)
                found = Cause(edit.kind, edit.where, edit.change, self.before, after)
                if after <= SAME:
                    return [found]
                if local is None and edit.kind not in COPIES and self._agree(which, edit, new):
                    local = which, edit, after
            places = tuple(s.values[f[0]].where for s, f in self._each() if f)
            unknown = Cause(
                "unknown", places, "no change that was tried makes them agree", self.before
            )
            if local is None:
                return [unknown]
            which, edit, after = local
            base = list(self.base)
            base[which] = base[which] | edit.values
            others = Parting(self.sides, (base[0], base[1]))
            if not set(others.cones[which]) < set(self.cones[which]):
                return [unknown]
            return [Cause(edit.kind, edit.where, edit.change, self.before, after), *others.causes()]

    def _agree(self, which: int, edit: Edit, new: Mapping[int, Any]) -> bool:
        own, other = self.sides[which].values, self.sides[1 - which].values
        values = [dataclasses.replace(own[i], array=new[i]) for i in edit.values if i in new]
        others = [other[j] for j in self.cones[1 - which]]
        return all(any(apart(x, y) <= SAME for y in others) for x in values)

    def _each(self) -> Iterator[tuple[Side, list[int]]]:
        return zip(self.sides, self.firsts, strict=True)

    def _edits(self) -> Iterator[tuple[int, Edit]]:
        for make in (
            self._constants, self._operands, self._swaps, self._bypasses, self._arguments,
            self._others,
        ):  # fmt: skip
            for which in (0, 1):
                if self.sides[which].run is not None:
                    yield from ((which, edit) for edit in make(which))

    # -- kinds of changes --------------------------------------------------------------------------

    def _constants(self, which: int) -> Iterator[Edit]:
        own, other = self.sides[which], self.sides[1 - which]
        numbers = {
            c: other.values[j].where
            for j in sorted(self.cones[1 - which], reverse=True)
            for c, _ in _constants_of(other.values[j])
        }
        for i in self.firsts[which]:
            x = own.values[i]
            for c, k in _constants_of(x):
                for new in sorted(numbers, key=lambda n: abs(n - c)):
                    if new == c:
                        continue
                    kind = "rounded constant" if _is_rounded(c, new) else "constant"
                    where = _places(which, x.where, numbers[new])
                    for many in self._sites(which, i):
                        values = {j: _with_operand(own.values[j], k, new) for j in many}
                        text = f"with {new:.6g} in place of {c:.6g} in {_at(x, which, len(many))}"
                        yield Edit(kind, values, where, text)

    def _operands(self, which: int) -> Iterator[Edit]:
        """Another operand, that of the other program's operation."""
        own, other = self.sides[which], self.sides[1 - which]
        for i, j in itertools.product(self.firsts[which], self.firsts[1 - which]):
            x, y = own.values[i], other.values[j]
            if x.name != y.name or x.entry is None or y.entry is None:
                continue
            for k, m in itertools.product(range(len(x.entry.ins)), range(len(y.entry.ins))):
                mine, theirs = x.entry.ins[k], y.entry.ins[m]
                if not mine.is_float or np.size(mine.low) < 2:
                    continue
                for new in _layouts(theirs.reference, mine.reference):
                    kind, text = self._named(which, x, k, y, m)
                    what = f"with {text} in {_at(x, which)}"
                    where = _places(which, x.where, y.where)
                    yield Edit(kind, {i: _with_operand(x, k, new)}, where, what)

    def _named(self, which: int, x: Array, k: int, y: Array, m: int) -> tuple[str, str]:
        """Returns what kind of difference two operands have, and the words for the other one."""
        own, other = self.sides[which], self.sides[1 - which]
        i, j = x.reads[k], y.reads[m]
        if i is None or j is None or not (_from_arguments(own, i) or _from_arguments(other, j)):
            return "constant", "the other's constant"
        p, q = own.values[i], other.values[j]
        if apart(p, q) <= SAME:
            return "weight", f"{_name(own, i)} transposed"
        equal = self.same[1 - which].get(j)
        if equal:
            return "weight", f"{_name(own, equal[0])} in place of {_name(own, i)}"
        for one, two in ((p, q), (q, p)):
            fmt = rounded_to(one, two)
            if fmt:
                return "quantised", f"{_name(own, i)} rounded to {fmt}" if two is q else (
                    f"{_name(own, i)} as the other has it, not rounded to {fmt}"
                )
        return "weight", f"the other's {_name(other, j)} in place of {_name(own, i)}"

    def _arguments(self, which: int) -> Iterator[Edit]:
        """All of the other program's arguments, if several differ."""
        own, other = self.sides[which], self.sides[1 - which]
        mine, theirs = (
            [i for i in sorted(c) if s.values[i].entry is None]
            for s, c in ((own, self.cones[which]), (other, self.cones[1 - which]))
        )
        values, formats = {}, []
        for i in mine:
            x = own.values[i]
            near = [j for j in theirs if other.values[j].array.size == x.array.size]
            if not near:
                return
            y = other.values[min(near, key=lambda j: unlike(x, other.values[j]))]
            values[i] = _constant(laid_out(y.array, x.array))
            formats.append(rounded_to(x, y) or rounded_to(y, x))
        if len(values) > 1:
            kind = "quantised" if all(formats) else "weight"
            rounded = f", rounded to {formats[0]}" if all(formats) else ""
            names = ", ".join(own.values[i].where for i in mine[:3])
            text = f"with the other's {len(mine)} arguments ({names}, ...), {rounded[2:]}"
            yield Edit(kind, values, _places(which, names), text.rstrip(", "))

    def _swaps(self, which: int) -> Iterator[Edit]:
        """Two values in each other's place."""
        own, other = self.sides[which], self.sides[1 - which]
        for i, j in itertools.product(self.firsts[which], self.firsts[1 - which]):
            x, y = own.values[i], other.values[j]
            if x.name != y.name:
                continue
            theirs = {u for r in y.reads if r is not None for u in self.same[1 - which].get(r, ())}
            for r, u in itertools.product([r for r in x.reads if r is not None], sorted(theirs)):
                p, q = own.values[r], own.values[u]
                if u in x.reads or p.array.shape != q.array.shape:
                    continue
                values = {r: _constant(q.array), u: _constant(p.array)}
                text = f"with {_name(own, r)} and {_name(own, u)} swapped"
                yield Edit(
                    "weight", values, _places(which, x.where, y.where), f"{text} in {_side(which)}"
                )

    def _bypasses(self, which: int) -> Iterator[Edit]:
        """Without the operations that lead from a value that both have to one of its size."""
        own = self.sides[which]
        for i in self._near(which):
            x = own.values[i]
            for u in self._sources(which, i):
                if (
                    own.values[u].array.size != x.array.size
                    or own.values[u].array.dtype.kind != "f"
                ):
                    continue
                other = [self.sides[1 - which].values[f].where for f in self.firsts[1 - which][:1]]
                where = _places(which, x.where, *other)
                kind = "quantised" if rounded_to(own.values[u], x) else "missing"
                text = f"without {_between(own, u, i)} in {_at(x, which)}"
                for many in self._sites(which, i):
                    values = {}
                    for j in many:
                        found = u if j == i else self._alike(which, i, u, j)
                        if found is not None:
                            values[j] = self._taken(which, found, own.values[j])
                    yield Edit(kind, values, where, text + _times(len(values)))

    def _taken(self, which: int, u: int, x: Array) -> Callable[[Sequence[Any]], Any]:
        assert x.entry is not None
        where = [k for k, r in enumerate(x.reads) if r == u]
        if where:
            return lambda ins: np.asarray(ins[where[0]]).reshape(x.array.shape)
        array = laid_out(self.sides[which].values[u].array, x.array)
        return _constant(array)

    def _alike(self, which: int, i: int, u: int, j: int) -> int | None:
        """Returns the value from which another one is computed as ``i`` is from ``u``."""
        values = self.sides[which].values
        seen, waiting = {i}, [(i, j)]
        while waiting:
            own, other = waiting.pop(0)
            if own == u:
                return other
            x, y = values[own], values[other]
            if x.name != y.name or len(x.reads) != len(y.reads):
                continue
            for a, b in zip(x.reads, y.reads, strict=True):
                if a is not None and b is not None and a not in seen:
                    seen.add(a)
                    waiting.append((a, b))
        return None

    def _others(self, which: int) -> Iterator[Edit]:
        """The other program's values, for the operations up to them."""
        own, other = self.sides[which], self.sides[1 - which]
        if which:
            return
        for i in self._near(which):
            x = own.values[i]
            if x.name in MOVES:
                continue
            near = [
                (difference(array, x.array), j)
                for j in self._near(1 - which)
                if (array := laid_out(other.values[j].array, x.array)) is not None
                and other.values[j].array.dtype.kind == "f"
            ]
            for _, j in sorted(near)[:3]:
                y = other.values[j]
                ends = (which, i), (1 - which, j)
                regions = [self._region(w, n) for w, n in ends]
                kind = "function" if regions[0] != regions[1] else "parameter"
                where = [
                    self.sides[w].values[f].where
                    for w, n in ends
                    for f in sorted({*(f for f in self.firsts[w] if f in self._above(w, n)), n})
                ]
                text = f"with the second's {regions[1]} in place of the first's {regions[0]}"
                if kind == "parameter":
                    text = f"with the second's {x.name} at {y.where}, other parameters before it,"
                for many, theirs in zip(
                    self._sites(which, i), self._sites(1 - which, j), strict=False
                ):
                    values = {
                        own_: _constant(
                            laid_out(other.values[other_].array, own.values[own_].array)
                        )
                        for own_, other_ in zip(many, theirs, strict=False)
                    }
                    yield Edit(
                        kind, values, tuple(dict.fromkeys(where)), text + _times(len(values))
                    )

    # -- parts of programs -------------------------------------------------------------------------

    def _near(self, which: int) -> list[int]:
        """Returns the first operations of a cone."""
        arguments = {i for i in self.cones[which] if self.sides[which].values[i].entry is None}
        return sorted(self.cones[which] - arguments)[:MANY]

    def _above(self, which: int, i: int) -> set[int]:
        found, waiting = set(), [i]
        while waiting:
            n = waiting.pop()
            if n in self.cones[which] and n not in found:
                found.add(n)
                waiting += [r for r in self.sides[which].values[n].reads if r is not None]
        return found

    def _region(self, which: int, i: int) -> str:
        own = sorted(self._above(which, i))
        kinds = dict.fromkeys(self.sides[which].values[n].name for n in own)
        return ", ".join([k for k in kinds if k not in MOVES][:8]) or "values"

    def _sources(self, which: int, i: int) -> list[int]:
        """Returns the values with counterparts from which a value is computed."""
        values = self.sides[which].values
        reads = {r for n in self._above(which, i) for r in values[n].reads if r is not None}
        return sorted((r for r in reads if r in self.same[which]), reverse=True)

    def _sites(self, which: int, i: int) -> list[list[int]]:
        """Returns the values that the same code makes: in this call, in all calls from the same
        lines (of each layer), and in all calls."""
        found = [[i]]
        for depth in (None, 1):
            every = next(g for g in _by_site(self.sides[which], depth).values() if i in g)
            found += [every] if len(every) > len(found[-1]) else []
        return found


def _by_site(side: Side, depth: int | None) -> Mapping[Any, list[int]]:
    """Returns the values by the lines of so many calls, and by their place among the consecutive
    operations from there."""
    found: dict[Any, list[int]] = collections.defaultdict(list)
    before, position = None, 0
    for i, x in enumerate(side.values):
        calls = x.calls[:depth]
        position = position + 1 if calls == before else 0
        before = calls
        found[calls, x.name, position].append(i)
    return found


def _constants_of(x: Array) -> Iterator[tuple[float, int]]:
    """Yields the numbers of the program among an operation's operands, and their positions."""
    if x.entry is None:
        return
    for k, (cell, read) in enumerate(zip(x.entry.ins, x.reads, strict=True)):
        if cell.is_float and read is None and np.size(cell.reference):
            flat = np.asarray(cell.reference).ravel()
            if (flat == flat[0]).all() and np.isfinite(flat[0]):
                yield float(flat[0]), k


def _with_operand(x: Array, k: int, new: Any) -> Callable[[Sequence[Any]], Any]:
    def compute(ins: Sequence[Any]) -> Any:
        assert x.entry is not None
        array = np.broadcast_to(np.asarray(new), np.shape(ins[k]))
        outs = x.entry.operation.compute([*ins[:k], array, *ins[k + 1 :]])
        return np.asarray(outs[0])

    return compute


def _constant(array: Any) -> Callable[[Sequence[Any]], Any]:
    return lambda ins: array


def _layouts(x: np.ndarray, like: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the arrangements of an array's axes that have another one's shape."""
    seen: list[np.ndarray] = []
    for order in itertools.permutations(range(np.ndim(x))) if np.ndim(x) <= 4 else ():
        moved = np.transpose(x, order)
        if moved.shape != like.shape and moved.size == like.size and order == tuple(range(x.ndim)):
            moved = moved.reshape(like.shape)
        if moved.shape == like.shape and not any(np.array_equal(moved, y) for y in seen):
            seen.append(moved)
            yield moved


def _is_rounded(a: float, b: float) -> bool:
    """Returns whether one number is the other with fewer digits, or in a narrow format."""
    for x, y in ((a, b), (b, a)):
        fewer = [float(f"{x:.{n}e}") for n in range(7)]
        fewer += [float(nearest(x, format_params(fmt))) for fmt in FORMATS]
        if any(math.isclose(z, y, rel_tol=SAME) for z in fewer):
            return True
    return False


def _from_arguments(side: Side, i: int) -> bool:
    waiting, seen = [i], set()
    while waiting:
        x = side.values[n := waiting.pop()]
        if x.entry is None:
            return True
        seen.add(n)
        waiting += [r for r in x.reads if r is not None and r not in seen]
    return False


def _name(side: Side, i: int) -> str:
    """Returns the argument of which a value is a rearrangement, or its operation and line."""
    x = side.values[i]
    while x.entry is not None and x.name in MOVES and x.reads[0] is not None:
        x = side.values[x.reads[0]]
    return x.where if x.entry is None else f"{x.name} at {x.where}"


def _side(which: int) -> str:
    return ("the first", "the second")[which]


def _at(x: Array, which: int, count: int = 1) -> str:
    return f"{_side(which)}'s {x.name} at {x.where}{_times(count)}"


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _between(side: Side, u: int, i: int) -> str:
    values, found, waiting = side.values, [], [i]
    while waiting:
        n = waiting.pop()
        if n > u and n not in found:
            found.append(n)
            waiting += [r for r in values[n].reads if r is not None]
    kinds = dict.fromkeys(values[n].name for n in sorted(found) if values[n].name not in MOVES)
    return f"the {', '.join(kinds)} of {_name(side, u)}"


def _places(which: int, own: str, *other: str) -> tuple[str, ...]:
    """Returns the lines, that of the first program first."""
    both = (own, *other) if not which else (*other, own)
    return tuple(dict.fromkeys(both))
