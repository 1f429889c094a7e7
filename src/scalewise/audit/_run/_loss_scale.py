"""A loss scale: a power of two that the backward pass carries, from its first number to its last.

It enters where a backward pass begins, at the literal 1 that is the loss's own gradient; goes along
with all that is linear in it; and leaves, in float32, where anybody else reads a gradient: an
optimizer, a clipping, an output. What isn't linear in the gradient is computed on plain numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast, Policy
from ...autoscale import RULES, Family
from ...formats import Format
from ...interpret import Boundary, Equation, Interpretation, Program, is_float, run
from ._rows import Row
from ._statistics import LOWEST

POWERS = range(-40, 41)
# Linear in one operand, given the others, and in no family.
BILINEAR = frozenset({"ragged_dot", "ragged_dot_general", "select_and_scatter_add"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """A value of ``low``, and whether it is a gradient times the loss scale."""

    value: Any
    scaled: bool = dataclasses.field(metadata={"static": True})

    @property
    def neutral(self) -> bool:
        """Whether a scale changes nothing: all of it is zero, or infinite."""
        uniform = self.value.uniform
        return uniform is not None and (uniform == 0 or math.isinf(uniform))


@dataclasses.dataclass(frozen=True)
class LossScaled(Interpretation):
    """A lane of autocast whose backward pass carries ``2**power``.

    Attributes:
        low: the lane without it.
        power: of two.
        note: called with each equation whose result carries the scale.
    """

    low: Autocast
    power: int
    note: Callable[[Equation], None] | None = None

    def lift(self, x: Any, aval: Any) -> Carried:
        return Carried(self.low.lift(x, aval), False)

    def constant(self, x: np.ndarray, aval: Any) -> Carried:
        return Carried(self.low.constant(x, aval), False)

    def lower(self, value: Carried, aval: Any) -> jax.Array:
        return self.low.lower(self.brought(value, False).value, aval)

    def canonical(
        self, value: Carried, aval: Any, boundary: Boundary, equation: Equation
    ) -> Carried:
        backward = equation.direction == "backward" and boundary != "mapped"
        scaled = value.scaled if boundary == "stacked" else backward
        value = self.brought(value, scaled)
        return Carried(self.low.canonical(value.value, aval, boundary, equation), scaled)

    def select(self, predicate: jax.Array, on_true: Carried, on_false: Carried) -> Carried:
        chosen = self.low.select(predicate, on_true.value, on_false.value)
        return Carried(chosen, on_true.scaled)

    def spread(self, value: Carried, aval: Any) -> Carried:
        return Carried(self.low.spread(value.value, aval), value.scaled)

    def gather(self, value: Carried, aval: Any) -> Carried:
        return Carried(self.low.gather(value.value, aval), value.scaled)

    def brought(self, x: Carried, scaled: bool) -> Carried:
        """A value with the scale or without it, in float32 (float64) if that changes it."""
        if x.scaled == scaled or x.neutral:
            return Carried(x.value, scaled)
        factor = 2.0 ** (self.power if scaled else -self.power)
        uniform, data = x.value.uniform, x.value.data
        data = data.astype(jnp.float64 if data.dtype == jnp.float64 else jnp.float32)
        value = dataclasses.replace(
            x.value,
            data=data * jnp.asarray(factor, data.dtype),
            uniform=None if uniform is None else uniform * factor,
        )
        return Carried(value, scaled)

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        inputs = self._begun(equation, inputs)
        scaled, wanted = carried(equation, [x for x in inputs if isinstance(x, Carried)])
        rest = iter(wanted)
        plain = [self.brought(x, next(rest)).value if isinstance(x, Carried) else x for x in inputs]
        state, outs = self.low.apply(state, equation, plain)
        if scaled and self.note is not None:
            self.note(equation)
        return state, [
            Carried(y, scaled) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]

    def _begun(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs, the scale on the literal 1 that a backward pass begins with."""
        floats = [i for i, x in enumerate(inputs) if isinstance(x, Carried)]
        if equation.direction != "backward" or any(inputs[i].scaled for i in floats):
            return inputs
        ones = [i for i in floats if inputs[i].value.uniform == 1.0]
        return [self.brought(x, True) if i in ones[:1] else x for i, x in enumerate(inputs)]


def carried(equation: Equation, floats: Sequence[Carried]) -> tuple[bool, list[bool]]:
    """Whether a result carries the scale, and which of the operands have to.

    A scale that several operands bring is one, not its power: then all are freed of it.
    """
    scaled, free = [x.scaled for x in floats], [False] * len(floats)
    if equation.direction != "backward" or not any(scaled):
        return False, free
    match RULES[equation.name].family:
        case Family.STRUCTURAL | Family.HOMOGENEOUS if len(floats) == 1:
            return True, scaled
        case Family.ALIGNED | Family.COMPARISON | Family.ORDERED:
            if all(x.scaled or x.neutral for x in floats):
                return True, [True] * len(floats)
        case Family.INVARIANT:
            return False, scaled
        case Family.PRODUCT | Family.CONTRACTION if sum(scaled) == 1:
            if equation.name != "div" or scaled[0]:
                return True, scaled
        case _ if equation.name in BILINEAR and sum(scaled) == 1:
            return True, scaled
    return False, free


def carrying(program: Program) -> frozenset[tuple[int, ...]]:
    """The paths of the equations whose results a loss scale would multiply; nothing is computed."""
    paths: set[tuple[int, ...]] = set()
    lane = LossScaled(Autocast(Policy(compute=jnp.float32)), 1, lambda e: paths.add(e.path))

    def dry(arrays):
        pairs = zip(arrays, program.in_avals, strict=True)
        values = [lane.lift(x, a) if is_float(a) else x for x, a in pairs]
        return run(program, lane, (), values=values)[1]

    jax.eval_shape(dry, list(program.arrays))
    return frozenset(paths)


def shares(
    rows: Sequence[Row], smallest: float, largest: float, powers: Sequence[int] | range
) -> dict[int, tuple[float, float]]:
    """Of the rows' nonzero numbers times ``2**k``, those below a number and above another, for each
    k: shares, from the shadow's histograms, whole binades."""
    counts = np.sum([row.histogram for row in rows], axis=0) if rows else np.zeros(1)
    whole, bins = max(float(counts.sum()), 1.0), LOWEST + np.arange(len(counts))
    bottom, top = math.log2(smallest), math.log2(largest)
    return {
        k: (
            float(counts[bins + k < bottom].sum()) / whole,
            float(counts[bins + k > top].sum()) / whole,
        )
        for k in powers
    }


def best_power(rows: Sequence[Row], fmt: Format) -> int:
    """The loss scale 2^k that loses least of these rows' numbers, 0 if none is better than none.

    Of those k that leave the largest number a binade of headroom, the one with the fewest numbers
    below the lowest normal one; among equals the smallest change.
    """
    top = max((max(r["amax"], r["shadow_max"]) for r in rows), default=0.0)
    if not 0 < top < math.inf:
        return 0
    room = math.floor(math.log2(float(fmt.max) / top)) - 1
    table = shares(rows, float(fmt.smallest_normal), float(fmt.max), POWERS)
    safe = [k for k in POWERS if k <= room]
    return min(safe, key=lambda k: (table[k][0], abs(k)), default=0)
