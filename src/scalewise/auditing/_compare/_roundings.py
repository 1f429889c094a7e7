"""Whose roundings make two programs differ that mean the same: a balance sheet of both."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...primitives import Family, having, names
from .._sheet._balance import balance
from .._tape._both import on_host
from ._explain import NAMES, Cause
from ._match import Same, difference, laid_out
from ._values import Array, Side, of_program

SUMS = having("adds") | having("accumulates") | names(
    lambda row: row.family is Family.CONTRACTION or row.autocast == "sum"
)  # fmt: skip
WIDE = 32  # bits: the order of a sum of such numbers is no difference


def bits(dtype: str) -> int:
    """Returns the bits of a float dtype; those of float64 for others, which aren't rounded."""
    kind = jnp.dtype(dtype)
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

    def causes(self) -> list[Cause]:
        """Returns the line whose roundings make most of the difference, if the other program has
        them not at all or in a wider dtype, and the difference is smaller without them.

        Values that both round to the same dtype make a difference only by their operands, and sums
        in float32 have any order: then there is no cause.
        """
        shares = self.shares()
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
        if bits(self.sides[1 - which].values[j].dtype) > own:
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
        exact = frozenset(entry.operation.equation.path for entry in entries)
        again = of_program(side.title, side.run.program, exact=exact)
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
