"""Why two programs mean something else: changes of one of them, each tried on its values.

Changes are made of what the other program has at the operations at which they part. The cause is
the simplest one with which all outputs agree.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._tape._both import on_host
from ._match import (
    MOVES,
    SAME,
    apart,
    arrangements,
    cone,
    difference,
    first,
    laid_out,
    matching,
    unlike,
)  # fmt: skip
from ._relations import fewer_digits, rounded_to
from ._values import Array, Side

COPIES = "function", "parameter"  # of the other's values, which agree with these anyway
LEAST, MOST = 40, 60_000  # changes that are tried at least; operations run again for them
MANY = 40  # operations behind the first ones among which a missing or another one is looked for
NAMES = "the first", "the second"

# From an operation's operands, and a function that returns any value by its number.
Replacement = Callable[[Sequence[Any], Callable[[int], Any]], Any]
Change = Mapping[int, Replacement]  # what takes the place of some values, by their numbers


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why two programs differ.

    Attributes:
        kind: "constant", "rounded constant", "weight", "quantised", "missing", "function",
            "parameter", "dtype", "order" (of a sum), "non-finite" or "unknown".
        where: the lines, or the names of recorded values, first those of the first program.
        change: what makes them agree, in words; of recordings how the values are related.
        before, after: how far the outputs are apart without and with the change; ``after`` is NaN
            where nothing could be run.
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
        return not math.isnan(self.after)

    def __str__(self) -> str:
        share = "" if self.share is None else f" makes {100 * self.share:.0f} % of the difference"
        text = f"{self.kind.capitalize()} at {' and '.join(self.where)}{share}: {self.change}"
        if not self.tried:
            return f"{text}; the difference is {self.before:.2g}."
        after = "agree" if self.after <= SAME else f"are {self.after:.2g} apart"
        return f"{text} the outputs {after} ({self.before:.2g} apart before)."


@dataclasses.dataclass(frozen=True, eq=False)
class Hypothesis:
    """A possible fault of a value, and of others that the same code makes.

    Attributes:
        value: its number.
        replacement: returns what takes the place of a value of that code, None to leave it.
        elsewhere: the lines of the other program.
        change: in words.
        together: values that change with it.
    """

    kind: str
    value: int
    replacement: Callable[[int], Replacement | None]
    elsewhere: Sequence[str]
    change: str
    together: Sequence[int] = ()


def replayed(side: Side, change: Change) -> dict[int, Any]:
    """Returns the reference values that differ with a change."""
    assert side.run is not None
    new: dict[int, Any] = {}

    def value(i: int) -> Any:
        return new.get(i, side.values[i].array)

    new |= {i: f((), value) for i, f in change.items() if side.values[i].entry is None}
    for entry, reads, own in side.steps:
        if any(i in new for i in reads) or any(i in change for i in own):
            pairs = zip(reads, entry.ins, strict=True)
            ins = [x.reference if i is None else new.get(i, x.reference) for i, x in pairs]
            for i, y in zip(own, entry.operation.compute(ins), strict=True):
                new[i] = change[i](ins, value) if i in change else np.asarray(y)
    return new


class Parting:
    """Two programs, some outputs of which may mean something else.

    Attributes:
        sides: the programs.
        changes: of each, those that belong to causes found before.
        same: by side, the values that have the same numbers as some of the other's.
        cones: by side, the values between those and the outputs.
        firsts: by side, the operations at which the cones begin.
        settled: the programs with changes with which their outputs agree; None without.
    """

    settled: Parting | None

    def __init__(self, sides: tuple[Side, Side], changes: tuple[Change, Change] = ({}, {})) -> None:
        self.original, self.changes = sides, changes
        a, b = self.sides = [
            _changed(s, c) if c else s for s, c in zip(sides, changes, strict=True)
        ]
        self.same = matching(a.values, b.values)
        pairs = list(zip(self.sides, self.same, strict=True))
        self.cones = [cone(s, m) for s, m in pairs]
        self.firsts = [first(s, c) for s, c in zip(self.sides, self.cones, strict=True)]
        self.apart = self._distance(0, {})
        self.settled = None if self.parts else self

    @property
    def parts(self) -> bool:
        return any(self.cones) or self.apart > SAME

    def _distance(self, which: int, new: Mapping[int, Any]) -> float:
        own, other = self.sides[which], self.sides[1 - which]
        found = (
            apart(own.values[i].holding(new[i]) if i in new else own.values[i], other.values[j])
            for i, j in zip(own.outputs, other.outputs, strict=True)
        )
        return max(found, default=0.0)

    def causes(self, left: int = 8) -> list[Cause]:
        """Returns the first change with which all outputs agree, and sets :attr:`settled`.

        Those with which the changed value is one of the other program's are tried first, the
        simplest kinds first. If none of these suffices, the first is a cause all the same, and the
        causes of what is left follow.
        """
        with on_host():
            made = (self._constants, self._arguments, self._operands, self._missing)
            kinds = [[(w, h) for w in (0, 1) for h in make(w)] for make in made]
            local = [row for rows in kinds for row in rows if self._agrees(*row)]
            local = local or [row for row in kinds[-1] if self._agrees_later(*row)]
            rest = [row for rows in reversed(kinds) for row in rows if row not in local]
            copies = ((w, h) for w in (0, 1) for h in self._others(w))
            for some in [local] if local else [rest, copies]:
                trials = ((w, h, c) for w, h in some for c in self._everywhere(w, h))
                most = max(LEAST, MOST // max(len(s.steps) for s in self.sides))
                for which, hypothesis, change in itertools.islice(trials, most):
                    cause = self._tried(which, hypothesis, change)
                    if cause.after <= SAME:
                        self.settled = self._with(which, change)
                        return [cause]
            if local and left:
                which, hypothesis = local[0]
                change = next(self._everywhere(which, hypothesis))
                others = self._with(which, change)
                found = [self._tried(which, hypothesis, change), *others.causes(left - 1)]
                self.settled = others.settled
                return found
        firsts = zip(self.sides, self.firsts, strict=True)
        where = tuple(s.values[f[0]].where for s, f in firsts if f)
        return [Cause("unknown", where, "no change that was tried makes them agree", self.apart)]

    def _with(self, which: int, change: Change) -> Parting:
        changes = list(self.changes)
        changes[which] = {**changes[which], **change}
        return Parting(self.original, (changes[0], changes[1]))

    def _tried(self, which: int, hypothesis: Hypothesis, change: Change) -> Cause:
        new = replayed(self.original[which], {**self.changes[which], **change})
        own, times = self.sides[which].values[hypothesis.value].where, len(change)
        where = (*hypothesis.elsewhere, own) if which else (own, *hypothesis.elsewhere)
        return Cause(
            hypothesis.kind, tuple(dict.fromkeys(where)),
            hypothesis.change + (f" ({times} times)" if times > 1 else ""), self.apart,
            self._distance(which, new),
        )  # fmt: skip

    def _agrees(self, which: int, hypothesis: Hypothesis) -> bool:
        """Returns whether the value, with the change, is one of the other's without counterpart."""
        own, other = self.sides[which].values, self.sides[1 - which].values
        x, replacement = own[hypothesis.value], hypothesis.replacement(hypothesis.value)
        ins = [] if x.entry is None else [c.reference for c in x.entry.ins]
        ins = [c if i is None else own[i].array for c, i in zip(ins, x.reads, strict=True)]
        assert replacement is not None
        new = x.holding(replacement(ins, lambda i: own[i].array))
        return any(apart(new, other[j]) <= SAME for j in self.cones[1 - which])

    def _agrees_later(self, which: int, hypothesis: Hypothesis) -> bool:
        """Returns whether a value that is computed from the changed one becomes one of the other's,
        as behind an operation that is left out, and the outputs come closer."""
        own, other = self.sides[which], self.sides[1 - which].values
        change = hypothesis.replacement(hypothesis.value)
        assert change is not None
        new = replayed(own, {hypothesis.value: change})
        if self._distance(which, new) >= self.apart:
            return False
        later = (own.values[i].holding(x) for i, x in new.items() if i != hypothesis.value)
        return any(apart(x, other[j]) <= SAME for x in later for j in self.cones[1 - which])

    def _everywhere(self, which: int, hypothesis: Hypothesis) -> Iterator[Change]:
        """Yields the change of one value, of those of the same code called from the same lines (in
        each layer), and of all of the same code."""
        one, before = [hypothesis.value, *hypothesis.together], 0
        alike = (self.sides[which].alike(one[0], depth) for depth in (None, 1))
        for some in itertools.chain([one], alike):
            change = {j: f for j in some if (f := hypothesis.replacement(j)) is not None}
            if len(change) > before:
                yield change
            before = len(change)

    # -- what may be wrong, the simplest first -----------------------------------------------------

    def _constants(self, which: int) -> Iterator[Hypothesis]:
        """Another number in place of one of the program's, one of those that the other has."""
        own, other = self.sides[which], self.sides[1 - which]
        numbers = {
            c: other.values[j].where
            for j in sorted(self.cones[1 - which], reverse=True)
            for c, _ in _constants_of(other.values[j])
        }
        for i in self.firsts[which]:
            x = own.values[i]
            for c, k in _constants_of(x):
                for new in sorted(numbers.keys() - {c}, key=lambda n: abs(n - c)):
                    kind = "rounded constant" if fewer_digits(c, new) else "constant"
                    text = f"with {new:.6g} in place of {c:.6g} in {_at(x, which)}"
                    make = _operand_of(own, k, new)
                    yield Hypothesis(kind, i, make, [numbers[new]], text)

    def _operands(self, which: int) -> Iterator[Hypothesis]:
        """An operand of the other program's operation."""
        own, other = self.sides[which], self.sides[1 - which]
        for i, n in itertools.product(self.firsts[which], self.firsts[1 - which]):
            x, y = own.values[i], other.values[n]
            if x.name != y.name or x.entry is None or y.entry is None:
                continue
            for (k, mine), (m, theirs) in itertools.product(
                enumerate(x.entry.ins), enumerate(y.entry.ins)
            ):
                if not mine.is_float or 1 in (np.size(mine.low), np.ndim(mine.low) + 1):
                    continue
                j = y.reads[m]
                array = theirs.reference if j is None else other.values[j].array
                for _, new in arrangements(array, np.shape(mine.low)):
                    kind, text = self._named(which, x.reads[k], j)
                    only = _only(i, _operand_of(own, k, new)(i))
                    text = f"with {text} in {_at(x, which)}"
                    yield Hypothesis(kind, i, only, [y.where], text)

    def _named(self, which: int, i: int | None, j: int | None) -> tuple[str, str]:
        """Returns what kind of difference two operands have, and the words for the other one."""
        own, other = self.sides[which], self.sides[1 - which]
        if i is None or j is None:
            return "constant", "the other's constant"
        p, q = own.values[i], other.values[j]
        if apart(p, q) <= SAME:
            return "weight", f"{own.name_of(i)} in another order"
        for equal in self.same[1 - which].get(j, ())[:1]:
            return "weight", f"{own.name_of(equal)} in place of {own.name_of(i)}"
        fmt = rounded_to(p, q) or rounded_to(q, p)
        if fmt:
            not_ = "" if rounded_to(p, q) else "not "
            return "quantised", f"the other's {other.name_of(j)}, {not_}rounded to {fmt},"
        return "weight", f"the other's {other.name_of(j)} in place of {own.name_of(i)}"

    def _missing(self, which: int) -> Iterator[Hypothesis]:
        """Without operations that lead from a value that both have to one of its size."""
        own, other = self.sides[which], self.sides[1 - which]
        elsewhere = [other.values[j].where for j in self.firsts[1 - which][:1]]
        for i in self._near(which):
            x = own.values[i]
            above = self._above(which, i)
            reads = {r for n in above for r in own.values[n].reads if r is not None}
            for u in sorted(reads & self.same[which].keys(), reverse=True):
                source = own.values[u]
                if source.array.size != x.array.size or not source.is_float or not x.is_float:
                    continue

                def taken(j: int, i: int = i, u: int = u) -> Replacement | None:
                    source = own.counterpart(i, u, j)
                    like = own.values[j].array
                    if source is None or own.values[source].array.size != like.size:
                        return None
                    return lambda ins, value: laid_out(value(source), like)

                kind = "quantised" if rounded_to(source, x) else "missing"
                text = f"without {self._region(which, i)} of {own.name_of(u)} in {_at(x, which)}"
                yield Hypothesis(kind, i, taken, elsewhere, text)

    def _arguments(self, which: int) -> Iterator[Hypothesis]:
        """All of the other program's arguments, if several differ."""
        own, other = self.sides[which].values, self.sides[1 - which].values
        mine = [i for i in sorted(self.cones[which]) if own[i].entry is None]
        theirs = [j for j in self.cones[1 - which] if other[j].entry is None]
        change: dict[int, Replacement] = {}
        formats = []
        for i in mine:
            near = [other[j] for j in theirs if other[j].array.size == own[i].array.size]
            if not near:
                return
            y = min(near, key=lambda y: unlike(own[i], y))
            change[i] = _constant(laid_out(y.array, own[i].array))
            formats.append(rounded_to(own[i], y) or rounded_to(y, own[i]))
        if len(mine) > 1:
            rounded = f", rounded to {formats[0]} in one of them," if all(formats) else ""
            text = f"with the other's {len(mine)} arguments, {own[mine[0]].where} ...{rounded}"
            yield Hypothesis(
                "quantised" if rounded else "weight", mine[0], change.get, [], text, mine[1:]
            )

    def _others(self, which: int) -> Iterator[Hypothesis]:
        """The second program's values, for the operations up to them."""
        own, other = self.sides[which].values, self.sides[1 - which].values
        for i in self._near(which) if not which else ():
            x = own[i]
            near = [
                (difference(array, x.array), j) for j in self._near(1 - which)
                if other[j].is_float == x.is_float and x.name not in MOVES
                and (array := laid_out(other[j].array, x.array)) is not None
            ]  # fmt: skip
            for _, j in sorted(near)[:3]:
                y = other[j]
                regions = self._region(which, i), self._region(1 - which, j)
                kind = COPIES[regions[0] == regions[1]]
                text = f"with the second's {regions[1]} in place of the first's {regions[0]}"
                if kind == "parameter":
                    text = f"with the second's {y.name} at {y.where}, of other parameters,"
                starts = self._above(1 - which, j).intersection(self.firsts[1 - which])
                begins = self._above(which, i).intersection(self.firsts[which])
                mine, theirs = (s.alike(n, 1) for s, n in zip(self.sides, (i, j), strict=True))
                pairs = {**dict(zip(mine, theirs, strict=False)), i: j}

                def copied(
                    n: int, i: int = i, j: int = j, pairs: Any = pairs
                ) -> Replacement | None:
                    theirs = j if n == i else pairs.get(n)
                    array = None if theirs is None else laid_out(other[theirs].array, own[n].array)
                    return None if array is None else _constant(array)

                where = [own[n].where for n in sorted(begins)]
                where += [other[n].where for n in sorted({*starts, j})]
                yield Hypothesis(kind, i, copied, where, text)

    # -- parts of programs -------------------------------------------------------------------------

    def _near(self, which: int) -> list[int]:
        values = self.sides[which].values
        return sorted(i for i in self.cones[which] if values[i].entry is not None)[:MANY]

    def _above(self, which: int, i: int) -> set[int]:
        """Returns the values of a cone of which another one is computed."""
        return self.sides[which].above([i], self.cones[which])

    def _region(self, which: int, i: int) -> str:
        values = self.sides[which].values
        kinds = dict.fromkeys(values[n].name for n in sorted(self._above(which, i)))
        return ", ".join([k for k in kinds if k not in MOVES][:8])


def _changed(side: Side, change: Change) -> Side:
    with on_host():
        new = replayed(side, change)
    values = [x.holding(new[i]) if i in new else x for i, x in enumerate(side.values)]
    return dataclasses.replace(side, values=values)


def _constants_of(x: Array) -> Iterator[tuple[float, int]]:
    """Yields the numbers of the program among an operation's operands, and their positions."""
    for k, read in enumerate(x.reads):
        own = x.entry.ins[k] if x.entry is not None and read is None else None
        if own is not None and own.is_float and np.size(own.reference):
            flat = np.ravel(own.reference)
            if (flat == flat[0]).all() and np.isfinite(flat[0]):
                yield float(flat[0]), k


def _operand_of(side: Side, k: int, new: Any) -> Callable[[int], Replacement]:
    """Returns the operation of any value, with another operand."""

    def make(i: int) -> Replacement:
        x = side.values[i]

        def computed(ins: Sequence[Any], value: Callable[[int], Any]) -> Any:
            assert x.entry is not None
            array = np.broadcast_to(new, np.shape(ins[k]))
            return np.asarray(x.entry.operation.compute([*ins[:k], array, *ins[k + 1 :]])[0])

        return computed

    return make


def _only(i: int, replacement: Replacement) -> Callable[[int], Replacement | None]:
    return lambda j: replacement if j == i else None


def _constant(array: Any) -> Replacement:
    return lambda ins, value: array


def _at(x: Array, which: int) -> str:
    return f"{NAMES[which]}'s {x.name} at {x.where}"
