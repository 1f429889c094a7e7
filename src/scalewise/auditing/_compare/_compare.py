"""``compare``: where two programs, or recordings of their values, part, by how much, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from ..._check import checked
from ..._output import Rows, Tabular, counted
from ...rounding import format_params
from .._tape._arithmetic import nearest
from ._explain import NAMES, Cause, Parting
from ._gap import Gap, gap
from ._match import MOVES, Same, apart, matching, unlike
from ._relations import relation
from ._roundings import WIDE, Roundings, aligned, bits, low_difference
from ._values import Array, Side, side_of

EPS: dict[Literal["fp16", "bf16"], float] = {"fp16": 2.0**-11, "bf16": 2.0**-8}
MEANS = 1e-5  # of all of an array's numbers, which devices add up in float32 in any order
ROUNDINGS = 8  # of a recorded value's dtype for each value before it, that need no explanation


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two values that belong together.

    Attributes:
        a, b: their names: the operation or argument, or the recorded value's name.
        where_a, where_b: their lines.
        dtype: "float32", or "float32 -> bfloat16".
        difference: the relative difference of their numbers (root mean square).
    """

    a: str
    b: str
    where_a: str
    where_b: str
    dtype: str
    difference: float


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """Where two programs or recordings part, by how much, and why.

    Attributes:
        a, b: their names.
        causes: why, each with a change that was tried; () where they mean the same, and all that
            differs is the order of sums.
        values: those that belong together, in the first program's order.
        unmatched: how many values of each have no counterpart.
        output_difference: the largest relative difference of an output.
        gap: of logits, how far the tokens' probabilities are apart as the programs run.
        predicted: the same, from results that are each rounded once.
    """

    most: ClassVar[int | None] = 12
    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    a: str
    b: str
    causes: tuple[Cause, ...]
    values: tuple[Difference, ...]
    unmatched: tuple[int, int]
    output_difference: float
    gap: Gap | None = None
    predicted: Gap | None = None

    @property
    def cause(self) -> Cause | None:
        """The first of the causes."""
        return next(iter(self.causes), None)

    @property
    def where(self) -> tuple[str, ...]:
        """The lines, or recorded names, at which they part."""
        return () if self.cause is None else self.cause.where

    @property
    def verdict(self) -> str:
        if self.cause is None:
            size = f"{self.output_difference:.2g}"
            return f"No cause: the two compute the same; the last values differ by {size}."
        return str(self.cause)

    @property
    def title(self) -> str:
        return f"{self.a} and {self.b}"

    @property
    def heading(self) -> str:
        return f"compare  {self.a} -> {self.b}"

    def sentences(self) -> list[str]:
        found = [self.verdict, *(f"Then: {x}" for x in self.causes[1:])]
        for what, x in (("", self.gap), (" (predicted)", self.predicted)):
            if x is not None and math.isfinite(x.kl):
                found.append(
                    f"If the results are logits{what}: KL {x.kl:.2g} nats; log probabilities differ"
                    f" by {x.mean:.2g}, at most {x.largest:.2g}; {100 * x.clipped:.2g} % of the "
                    "tokens are more than 20 % apart."
                )
        if any(self.unmatched):
            found.append(
                f"{self.unmatched[0]:,} and {counted(self.unmatched[1], 'value')} have no "
                "counterpart."
            )
        return found

    def tables(self, *, everything: bool = True) -> list[Rows]:
        rows = [
            (x.a, x.where_a, x.b, x.where_b, x.dtype, f"{x.difference:.2g}")
            for x in self.values if everything or x.difference > 0
        ]  # fmt: skip
        headings = ("first", "where", "second", "where", "dtype", "difference")
        return [Rows("Values that belong together, in the first's order", headings, rows)]

    def __repr__(self) -> str:
        return f"<Comparison of {self.title}: {self.verdict} show()>"


@checked
def compare(a: Any, b: Any) -> Comparison:
    """Compares two programs, or recordings of their values: where they part, and why.

    Each side is one of:

    - ``(f, *args)``: a JAX function with its arguments, or a torch module with its inputs;
    - a folder of ``.npy`` and ``.safetensors`` files, or one such file: the values of an engine or
      a device, by name, in the order of the names (layer 10 comes after layer 2);
    - a :class:`Recording`, or a path of a saved one; then both are. They hold samples of each
      array: a difference between these, or between the means of all numbers, is found.

    Programs run once in float64 and once as written, each result rounded once to its dtype. Values
    belong together if they have the same numbers in float64, in any order: names, layouts, fused
    products and orders of heads don't matter. If outputs differ in float64, the programs mean
    something else, and changes of the operations at which they part are tried until the outputs
    agree. Otherwise roundings make the difference, and a balance sheet of both programs finds the
    line that makes most of it. Sums in float32 may be added in any order.

    Raises:
        ValueError: the outputs' sizes or numbers don't match, an argument has a NaN, or a path
            holds no values.
        TypeError: a side is none of these.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def f(x, eps):
        ...     return x / jnp.sqrt(jnp.mean(x * x) + eps)
        >>> x = jnp.linspace(0.0, 1.0, 50)
        >>> found = sw.auditing.compare((f, x, 1e-5), (f, x, 1e-6))
        >>> found.cause.kind, found.cause.after
        ('constant', 0.0)
    """
    sides = side_of(a, "a"), side_of(b, "b")
    _check(sides)
    if sides[0].run is None or sides[1].run is None:
        return _of_recorded(sides)
    return _of_programs(sides)


def _check(sides: tuple[Side, Side]) -> None:
    a, b = sides
    if (a.is_sampled or b.is_sampled) and not (a.is_sampled and b.is_sampled):
        raise TypeError(
            "compare: one side is a Recording, which holds samples of each array: compare it "
            "with another one, made by record()"
        )
    if a.is_sampled:
        shapes = [{x.at: x.summary.shape for x in s.values if x.summary} for s in sides]
        for name in [x.at for x in a.values if x.name == "argument" and x.at in shapes[1]]:
            if shapes[0][name] != shapes[1][name]:
                raise ValueError(
                    f"compare: {name} has the shape {shapes[0][name]} in a and {shapes[1][name]} "
                    "in b; record both with the same inputs"
                )
    for which, side in zip("ab", sides, strict=True):
        for x in side.values if side.run is not None else ():
            if x.name.startswith("argument") and np.isnan(x.array).any():
                raise ValueError(
                    f"compare: {which}'s {x.name} has a NaN, with which nothing agrees"
                )
    if a.run is None or b.run is None:
        return
    shapes = [[s.values[i].array.shape for i in s.outputs] for s in sides]
    if [math.prod(x) for x in shapes[0]] != [math.prod(x) for x in shapes[1]]:
        raise ValueError(
            f"compare: a returns arrays of the shapes {shapes[0]} and b of {shapes[1]}, which "
            "can't match; call both with the same inputs, and return the same results"
        )


# -- two programs ----------------------------------------------------------------------------------


def _of_programs(sides: tuple[Side, Side]) -> Comparison:
    a, b = sides
    parting = Parting(sides)
    causes = parting.causes() if parting.parts else []
    if parting.settled is not None:
        seeds = _seeds(sides)
        roundings = Roundings(sides, parting.settled.same, seeds or [])
        found = roundings.overflow() if math.isinf(low_difference(sides)) else []
        found = found or (roundings.causes() if seeds is not None else [])
        small = parting.apart < 0.5 * low_difference(sides)  # what the programs mean
        causes = [*found, *causes] if small else [*causes, *found]
    measured = predicted = None
    if len(a.outputs) == 1 and _is_logits(a.values[a.outputs[0]]):
        logits = [s.values[s.outputs[0]] for s in sides]
        order = aligned(*logits)[0]
        measured = gap(a.returned[0], np.ravel(b.returned[0])[order])
        if causes and not parting.parts:
            predicted = gap(logits[0].low, logits[1].low.ravel()[order])
    rows = [
        _difference(x, b.values[j]) for i, j in _paired(a.values, b.values, parting.same)
        if (x := a.values[i]).name not in MOVES
    ]  # fmt: skip
    left = len(a.values) - len(parting.same[0]), len(b.values) - len(parting.same[1])
    return Comparison(
        a.title, b.title, tuple(causes), tuple(rows), left, low_difference(sides), measured,
        predicted,
    )  # fmt: skip


def _is_logits(x: Array) -> bool:
    return x.is_float and x.array.ndim > 1 and x.array.shape[-1] > 1 and x.array.size > 0


def _seeds(sides: tuple[Side, Side]) -> list[list[np.ndarray]] | None:
    """Returns the outputs' multipliers; their products with both programs' errors add up to 1.

    They are of the tokens' log probabilities, or of arrays other than logits of all differences.
    None if no number differs.
    """
    a, b = sides
    outs = [(a.values[i], b.values[j]) for i, j in zip(a.outputs, b.outputs, strict=True)]
    pairs = [(x, y, *aligned(x, y)) for x, y in outs]
    bars, total = [], 0.0
    for x, _, _, theirs in pairs:
        bar = d = np.zeros(x.array.shape)
        if x.is_float:
            with np.errstate(all="ignore"):
                finite = np.isfinite(x.low) & np.isfinite(theirs)
                bar = d = np.where(finite, x.low - theirs, 0.0)
        if len(pairs) == 1 and _is_logits(x):
            p = np.mean([np.asarray(jax.nn.softmax(z)) for z in (x.low, theirs)], 0)
            token = np.arange(x.array.shape[-1]) == np.argmax(theirs, -1)[..., None]
            slope = token - p
            bar = slope * (slope * d).sum(-1, keepdims=True)
        bars.append(bar)
        total += float((bar * d).sum())
    if total <= 0:
        return None
    of_a = [bar / total for bar in bars]
    of_b = []
    for bar, (_, y, order, _) in zip(of_a, pairs, strict=True):
        back = np.zeros(y.array.size)
        back[order.ravel()] = -bar.ravel()
        of_b.append(back.reshape(y.array.shape))
    return [of_a, of_b]


def _difference(x: Array, y: Array) -> Difference:
    low = [z.holding(z.low) for z in (x, y)]
    found = apart(*low)
    if x.summary and y.summary and (size := max(x.summary.rms, y.summary.rms)) > 0:
        means = (abs(p - q) / size for p, q in zip(x.summary[2:], y.summary[2:], strict=True))
        found = max(found, *(far if far > MEANS else 0.0 for far in means))
    dtype = x.dtype if x.dtype == y.dtype else f"{x.dtype} -> {y.dtype}"
    return Difference(x.name, y.name, x.where, y.where, dtype, found)


def _paired(
    a: Sequence[Array], b: Sequence[Array], same: tuple[Same, Same]
) -> Iterator[tuple[int, int]]:
    """Yields the values that belong together, in the first side's order: those with the same
    numbers; of others those of one size that are closest, if possible between such neighbours."""
    used: set[int] = set()
    ahead = [min(same[0].get(i, (len(b),))) for i in range(len(a))]
    behind = -1
    for i, x in enumerate(a):
        # an operation of a recording has one counterpart; programs may compute a value twice
        equal = [j for j in same[0].get(i, ()) if not (x.summary and j in used)]
        if equal:
            like = x.name, x.where
            j = min((j in used, (b[j].name, b[j].where) != like, j) for j in equal)[-1]
        else:
            most = min(ahead[i:])
            near = [
                (not behind < j < most, unlike(x, y), j)
                for j, y in enumerate(b)
                if (x.summary or j not in same[1]) and j not in used
                and y.array.size == x.array.size and y.is_float == x.is_float
                and (y.name == x.name or x.is_named or y.is_named)
            ]  # fmt: skip
            if not near or not x.array.size:
                continue
            j = min(near)[-1]
        used.add(j)
        behind = max(behind, j) if equal else behind
        yield i, j


# -- recordings ------------------------------------------------------------------------------------


def _of_recorded(sides: tuple[Side, Side]) -> Comparison:
    """Compares values without the operations between them: two arrays alone tell why.

    Each recorded value has a counterpart; of a program and a recording, this is therefore first.
    """
    sides = sides if sides[0].run is None else (sides[1], sides[0])
    own, other = ([x.holding(x.low) for x in side.values] for side in sides)
    most = ROUNDINGS * math.sqrt(max(map(len, (own, other))))
    units = _units(own), _units(other)
    same = matching(own, other, most * max(map(median, units)))
    pairs = list(_paired(own, other, same))
    if not pairs:
        raise ValueError(
            "compare: a and b have no values of the same size; record both with the same inputs"
        )
    rows = [_difference(own[i], other[j]) for i, j in pairs]
    found: list[tuple[bool, int, Cause]] = []
    unit = 0.0  # of the narrowest of the values up to here that differ
    for n, (row, (i, j)) in enumerate(zip(rows, pairs, strict=True)):
        unit = max(unit, units[0][i], units[1][j]) if row.difference else unit
        cause = _related(own[i], other[j], row.difference, most * unit)
        found += [] if cause is None else [(cause.kind == "dtype", n, cause)]
    first = min(found, key=lambda x: x[:2], default=None)
    causes: tuple[Cause, ...] = ()
    if first is not None:
        _, n, cause = first
        sampled = sides[0].is_sampled
        causes = (_missing(cause, own, other, pairs[: n + 1]) if sampled else cause,)
    left = len(own) - len(pairs), len(other) - len({j for _, j in pairs})
    ends = [r.difference for r, (i, _) in zip(rows, pairs, strict=True) if i in sides[0].outputs]
    return Comparison(
        sides[0].title, sides[1].title, causes, tuple(rows), left,
        max(ends, default=rows[-1].difference),
    )  # fmt: skip


def _related(x: Array, y: Array, apart: float, noise: float) -> Cause | None:
    """Returns how two recorded values are related that should be equal; None if they are."""
    if bool(x.non_finite) != bool(y.non_finite):
        which = "first" if x.non_finite else "second"
        kind, text = "non-finite", f"only the {which} has numbers that aren't finite"
    elif apart <= noise:
        if x.dtype == y.dtype or not apart:
            return None
        kind, text = "dtype", f"{x.dtype} in the first, {y.dtype} in the second"
    else:
        unknown = "unknown", "no simple relation of the two"
        kind, text = relation(x, y, noise) or unknown
    return Cause(kind, tuple(dict.fromkeys((x.at, y.at))), text, apart)


def _missing(
    cause: Cause, own: Sequence[Array], other: Sequence[Array], pairs: Sequence[tuple[int, int]]
) -> Cause:
    """Returns a cause, or the operations that one recording alone has before it."""
    (*before, last), found = pairs, []
    for which, values in enumerate((own, other)):
        start = max((pair[which] for pair in before), default=-1)
        found.append([x for x in values[start + 1 : last[which]] if x.name != "argument"])
    if cause.kind == "dtype" or bool(found[0]) == bool(found[1]):
        return cause
    which = int(bool(found[1]))
    where = dict.fromkeys(x.at for x in found[which])
    text = f"only {NAMES[which]} has it; then {cause.change} of {cause.where[-1]}"
    return dataclasses.replace(cause, kind="missing", where=tuple(where), change=text)


def _units(values: Sequence[Array]) -> list[float]:
    """Returns the rounding units of values: of a recording those of their dtypes; of an engine's
    files, which may be wider than what it computes with, that of the format that holds most."""
    if values[0].summary:
        half = {"float16": EPS["fp16"]}
        wide = [bits(x.dtype) >= WIDE for x in values]
        narrow = [half.get(x.dtype, EPS["bf16"]) for x in values]
        return [2.0**-24 if w else n for w, n in zip(wide, narrow, strict=True)]
    floats = [x.array for x in values if x.is_float]
    unit = 2.0**-24
    for name, own in EPS.items():
        held = [
            x for x in floats if np.array_equal(nearest(x, format_params(name)), x, equal_nan=True)
        ]
        unit = own if len(held) > len(floats) / 2 else unit
    return [unit] * len(values)
