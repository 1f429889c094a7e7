"""Whose roundings make two programs differ that mean the same: a balance sheet of both."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._output import counted
from ..._resolve import as_format
from ...primitives import Family, having, names
from .._sheet._balance import balance
from .._tape._arithmetic import OwnArithmetic
from .._tape._both import on_host
from ._explain import NAMES, Cause
from ._match import Same, difference, laid_out
from ._values import Array, Side

SUMS = having("adds") | having("accumulates") | names(
    lambda row: row.family is Family.CONTRACTION or row.autocast == "sum"
)  # fmt: skip
WIDE = 32  # bits: the order of a sum of such numbers is no difference


def bits(formats: str) -> int:
    """Returns the bits of the narrowest of an operation's formats, of the elements in blocks; those
    of float64 for dtypes of no floats, which aren't rounded."""
    return min(map(_bits, formats.split(" x ")))


def _bits(name: str) -> int:
    try:
        kind = jnp.dtype(name)
    except TypeError:
        return as_format(name, "compare", blocks=True).element.bits
    return jnp.finfo(kind).bits if jnp.issubdtype(kind, jnp.floating) else 64


@dataclasses.dataclass(eq=False)
class Roundings:
    """Two programs whose reference values agree in all outputs.

    Attributes:
        seeds: the functional: by side its multiplier of each output, in the output's layout.
    """

    sides: tuple[Side, Side]
    same: tuple[Same, Same]
    seeds: Sequence[Sequence[np.ndarray]]

    def overflow(self) -> list[Cause]:
        """Returns the first operation whose results are finite in one program alone; without the
        rounding of all such operations of that program the outputs may agree."""
        found: list[tuple[int, Array, Array]] = []
        for i, x in enumerate(self.sides[0].values):
            j = self._counterpart(0, i)
            y = None if j is None else self.sides[1].values[j]
            if y is not None and bool(x.non_finite) != bool(y.non_finite):
                found.append((0, x, y) if x.non_finite else (1, y, x))
        if not found:
            return []
        which, made, other = found[0]
        side, dtype = self.sides[which], made.dtype
        again = side.again({path_of(x): None for own, x, _ in found if own == which})
        where = (made.where, other.where)[:: 1 - 2 * which]
        return [
            Cause(
                "non-finite",
                tuple(dict.fromkeys(where)),
                f"without the rounding of {NAMES[which]}'s {made.name} to {dtype}",
                low_difference(self.sides),
                low_difference((again, self.sides[1 - which])),
            )
        ]

    def causes(self) -> list[Cause]:
        """Returns the line whose roundings make most of the difference, if the other program has
        them not at all or in a wider dtype, and the difference is smaller without them.

        Values that both round to the same dtype make a difference only by their operands, and sums
        in float32 have any order: then there is no cause.
        """
        shares = self.shares()
        if (cause := self._formats(shares)) is not None:
            return [cause]
        lines: dict[tuple[int, str], float] = collections.defaultdict(float)
        for (which, i), share in shares.items():
            if self._kind(which, i):
                lines[which, self.sides[which].values[i].where] += share
        for (which, where), share in sorted(lines.items(), key=lambda row: -row[1]):
            cause = self._named(which, [where], share, shares)
            if share > 0 and cause.after < cause.before:
                others = [w for (side, w) in lines if side == which and w != where]
                if cause.after > 0.5 * cause.before and others:  # one of many
                    total = sum(s for (side, _), s in lines.items() if side == which)
                    every = self._named(which, [where, *others], total, shares)
                    cause = every if every.after < cause.after else cause
                return [cause]
        return []

    def _formats(self, shares: Mapping[tuple[int, int], float]) -> Cause | None:
        """Returns the first line whose operations have other formats, of programs of which a
        recipe, a policy or an emulation rounds one, with the other's formats there; with those at
        all such lines, if the first makes less than half of the difference."""
        if not any(isinstance(side.arithmetic, OwnArithmetic) for side in self.sides):
            return None
        lines: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for i, x in enumerate(self.sides[0].values):
            j = self._counterpart(0, i)
            y = None if j is None else self.sides[1].values[j]
            if j is None or y is None or x.entry is None or y.entry is None or x.dtype == y.dtype:
                continue
            if x.entry.operation.floats and (x.name, x.array.shape) == (y.name, y.array.shape):
                lines[x.where].append((i, j))
        first, found = list(lines)[:1], []
        ways = [(some, which) for some in (first, list(lines)) if lines for which in (0, 1)]
        for some, which in ways:  # an emulation rounds what takes the place of a result
            found.append(self._exchanged([p for line in some for p in lines[line]], which, shares))
            if found[-1].after < 0.5 * found[-1].before:
                break
        best = min(found, key=lambda cause: cause.after, default=None)
        return best if best is not None and best.after < best.before else None

    def _exchanged(
        self, pairs: Sequence[tuple[int, int]], which: int,
        shares: Mapping[tuple[int, int], float],
    ) -> Cause:  # fmt: skip
        """Returns what the other program's arithmetic makes of some operations of one."""
        side, other = self.sides[which], self.sides[1 - which]
        values = [(side.values[p[which]], other.values[p[1 - which]]) for p in pairs]
        instead = {
            path_of(x): (y.entry.operation.equation, other.arithmetic)
            for x, y in values if y.entry is not None and other.arithmetic is not None
        }  # fmt: skip
        (x, y), lines = values[0], len({x.where for x, _ in values})
        others = f" and at {counted(lines - 1, 'other line')}" if lines > 1 else ""
        where = (x.where, y.where)[:: 1 - 2 * which]
        return Cause(
            "quantised" if min(map(bits, (x.dtype, y.dtype))) <= 8 else "dtype",
            tuple(dict.fromkeys(where)),
            f"with {y.dtype} in place of {x.dtype} in {NAMES[which]}'s {x.name} at "
            f"{x.where}{others}",
            low_difference(self.sides), low_difference((side.again(instead), other)),
            sum(s for (w, n), s in shares.items() if path_of(self.sides[w].values[n]) in instead),
        )  # fmt: skip

    def shares(self) -> Mapping[tuple[int, int], float]:
        """Returns the shares of the difference by side and by the number of a value, added up over
        both sides for values that both have, and given to the narrower one."""
        found: dict[tuple[int, int], float] = collections.defaultdict(float)
        with on_host():
            for which, side in enumerate(self.sides):
                run = side.run
                assert run is not None
                cells = [x.cell for x in run.outputs]
                sheet = balance(
                    run.forward.tape, list(zip(cells, self.seeds[which], strict=True)), 0.0,
                    run.forward.arithmetic.top,
                )  # fmt: skip
                by_equation = {
                    x.entry.operation.equation: i
                    for i, x in reversed(list(enumerate(side.values))) if x.entry is not None
                }  # fmt: skip
                for (what, _), share in sheet.shares.items():
                    i = by_equation.get(what)  # pyright: ignore[reportArgumentType]
                    if i is not None:
                        found[self._charged(which, i)] += share
        return found

    def _charged(self, which: int, i: int) -> tuple[int, int]:
        j = self._counterpart(which, i)
        if j is None or bits(self.sides[which].values[i].dtype) <= bits(
            self.sides[1 - which].values[j].dtype
        ):
            return which, i
        return 1 - which, j

    def _counterpart(self, which: int, i: int) -> int | None:
        """Returns the other side's value with the same numbers, the one in the narrowest dtype."""
        values = self.sides[1 - which].values
        return min(self.same[which].get(i, ()), key=lambda j: bits(values[j].dtype), default=None)

    def _kind(self, which: int, i: int) -> str:
        x = self.sides[which].values[i]
        own, j = bits(x.dtype), self._counterpart(which, i)
        if own >= WIDE:
            return ""
        if j is None:
            return "quantised" if own <= 8 else "order" if x.name in SUMS else "dtype"
        other = self.sides[1 - which].values[j].dtype
        if other != x.dtype and bits(other) >= own:
            return "quantised" if own <= 8 else "dtype"
        return ""

    def _named(self, which: int, lines: Sequence[str], share: float, shares: Mapping) -> Cause:
        """Returns the cause that is the roundings of some lines, the first of which is named."""
        side, other = self.sides[which], self.sides[1 - which]
        rows = [(s, i) for (w, i), s in shares.items() if w == which and self._kind(w, i)]
        own = [i for _, i in sorted(rows, reverse=True) if side.values[i].where in lines]
        there = [i for i in own if side.values[i].where == lines[0]]
        kinds = [self._kind(which, i) for i in there]
        kind = next(k for k in ("quantised", "order", "dtype") if k in kinds)
        x = side.values[there[kinds.index(kind)]]
        assert side.run is not None
        entries = filter(None, (side.values[i].entry for i in own))
        again = side.again({entry.operation.equation.path: None for entry in entries})
        counterparts = (self._counterpart(which, i) for i in there)
        found = (other.values[j] for j in counterparts if j is not None)
        places = [lines[0], *[y.where for y in found if y.entry is not None][:1]]
        what = f"{'partial sums' if kind == 'order' else x.name} at {lines[0]}"
        if len(lines) > 1:
            what += f" and of {len(lines) - 1} other lines"
        return Cause(
            kind, tuple(dict.fromkeys(places if not which else places[::-1])),
            f"without the rounding of {NAMES[which]}'s {what} to {x.dtype}",
            low_difference(self.sides), low_difference((again, other)), share,
        )  # fmt: skip


def path_of(x: Array) -> tuple[int, ...]:
    return () if x.entry is None else x.entry.operation.equation.path


def low_difference(sides: tuple[Side, Side]) -> float:
    """Returns how far the outputs are apart, in the programs' own dtypes."""
    a, b = sides
    found = 0.0
    for i, j in zip(a.outputs, b.outputs, strict=True):
        x, y = a.values[i], b.values[j]
        found = max(found, difference(x.low, aligned(x, y)[1]))
    return found


def aligned(x: Array, y: Array) -> tuple[np.ndarray, Any]:
    """Returns the positions of ``y``'s numbers in the layout of ``x``, and its numbers so."""
    positions = np.arange(y.array.size).reshape(y.array.shape)
    order = laid_out(y.array, x.array, positions)
    assert order is not None
    return order, y.low.ravel()[order]
