"""The few operations that most numbers come from: both lanes, rounded and noted by one program.

Which operation it is, and which operands are arrays and which one number, is data, as the format
is: all sums, differences and products of one size share a program, quotients and roots another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...interpret import Equation
from ._pair import Pair
from ._rounding import round_by
from ._statistics import COUNT, OPERATION, WHOLE, Tally, counted, positions

GIVEN, SAME, ADD, SUB, MUL, DIV, SQRT = range(7)  # GIVEN: its exact result, made elsewhere
NAMES = {
    "add": ADD, "add_any": ADD, "sub": SUB, "mul": MUL, "square": MUL, "div": DIV, "sqrt": SQRT,
}  # fmt: skip
POWERS = {1: SAME, 2: MUL}


def operation(equation: Equation) -> int:
    """Which of the operations an equation is, GIVEN if none."""
    if equation.name == "integer_pow":
        return POWERS.get(equation.params["y"], GIVEN)
    return NAMES.get(equation.name, GIVEN)


def product(code: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """A sum, a difference, a product, or the first operand as it is."""
    total = jnp.where(code == MUL, a * b, a + jnp.where(code == SUB, -b, b))
    return jnp.where(code < ADD, a, total)


def quotient(code: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """A quotient, or the first operand's root."""
    return jnp.where(code == DIV, a / b, jnp.sqrt(a))


@functools.partial(jax.jit, static_argnums=0)
def elementary(
    combine: Callable,
    about: jax.Array,
    arrays: Sequence[Pair],
    scalars: Sequence[Pair],
):
    """An operation on flat operands in both lanes.

    Args:
        combine: :func:`product` or :func:`quotient`.
        about: float64[ABOUT].
        arrays, scalars: two each: where ``about`` says so the array is the operand, else the first
            number of the other. Whatever of them is no operand, its mark counts.

    Returns:
        See :func:`finished`.
    """

    def operands(lane: str, at: Any = slice(None)) -> list[jax.Array]:
        pairs = [(getattr(x, lane), getattr(c, lane)) for x, c in zip(arrays, scalars, strict=True)]
        whole = [about[WHOLE + i] != 0 for i in range(2)]
        return [jnp.where(w, x[at], c[0]) for w, (x, c) in zip(whole, pairs, strict=True)]

    def exact(dtype: Any) -> jax.Array:
        return combine(about[OPERATION], *[x.astype(dtype) for x in operands("low")])

    shadow = combine(about[OPERATION], *operands("shadow"))
    addends = [x.astype(jnp.float64) for x in operands("low", positions(about[COUNT], shadow.size))]
    samples = combine(about[OPERATION], *addends), *addends
    marks = [x.marred for x in (*arrays, *scalars)]
    return finished(about, exact, arrays[0].low.dtype, shadow, marks, samples)


def finished(
    about: jax.Array,
    exact: Callable[[Any], jax.Array],
    dtype: Any,
    shadow: jax.Array,
    marks: Sequence[Any],
    samples: Any,
) -> tuple[Pair, tuple[Tally, jax.Array]]:
    """What comes after an operation: rounding, counting, samples.

    Args:
        about: float64[ABOUT].
        exact: the low inputs' exact result (see :func:`counted`).
        dtype: of the low lane.
        shadow: its shadow, flat.
        marks: whether inputs were marred.
        samples: float64[3, SAMPLE], of the exact result and of addends.

    Returns:
        Both lanes, and tally and samples (see :class:`Note`).
    """
    low = round_by(exact(dtype), about)
    tally, marred = counted(low, exact, shadow, about, marks)
    return Pair(low, shadow, marred), (tally, joint(low, shadow, samples, about))


def joint(low: jax.Array, shadow: jax.Array, samples: Any, about: jax.Array):
    """All samples of a :class:`Note`: of both lanes, and those that there are already."""
    at = positions(about[COUNT], low.size)
    low, shadow = (x[at].astype(jnp.float64) for x in (low, shadow))
    return jnp.stack([low, samples[0], shadow, *samples[1:]])
