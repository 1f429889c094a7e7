"""Sums, products, quotients and roots: both runs, rounded and counted by one compiled program.

The operation, and which operands are arrays and which scalars, is data, as the format is: all sums,
differences and products of one size share a program, and so do quotients and roots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...interpret import Equation
from ...primitives import params
from ._compiled import Compiled
from ._pair import Flag, Pair
from ._rounding import round_by
from ._statistics import COUNT, IS_ARRAY, OPERATION, Record, count, is_tainted, sample_positions

OTHER, SAME, ADD, SUB, MUL, DIV, SQRT = range(7)  # OTHER: the exact result is passed as operand
NAMES = {
    "add": ADD, "add_any": ADD, "sub": SUB, "mul": MUL, "square": MUL, "div": DIV, "sqrt": SQRT,
}  # fmt: skip
TINY = 32  # numbers of a loop's result up to which they are counted without padding
POWERS = {1: SAME, 2: MUL}


def operation(equation: Equation) -> int:
    if equation.name == "integer_pow":
        return POWERS.get(int(params.degree(equation)), OTHER)
    return NAMES.get(equation.name, OTHER)


def product(code: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    total = jnp.where(code == MUL, a * b, a + jnp.where(code == SUB, -b, b))
    return jnp.where(code < ADD, a, total)


def quotient(code: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(code == DIV, a / b, jnp.sqrt(a))


@functools.partial(
    Compiled,
    size=lambda left, combine, op_params, arrays, scalars: arrays[0].low.size,
    static_argnums=(0, 1),
    often=True,
)
def elementary(
    left: int,
    combine: Callable,
    op_params: jax.Array,
    arrays: Sequence[Pair],
    scalars: Sequence[Pair],
):
    """Computes an operation on flat operands in both runs, rounds the low result and counts.

    Returns the result in both runs and its packed record; or what it is counted of, of which the
    first ``left`` numbers are left to be counted later. ``op_params`` selects each of two operands:
    the whole of ``arrays[i]`` or the first number of ``scalars[i]``. The taints of all four count.
    """

    def operands(run: str, at: slice | jax.Array = slice(None)) -> list[jax.Array]:
        pairs = [(getattr(x, run), getattr(c, run)) for x, c in zip(arrays, scalars, strict=True)]
        is_array = [op_params[IS_ARRAY + i] != 0 for i in range(2)]
        return [jnp.where(w, x[at], c[0]) for w, (x, c) in zip(is_array, pairs, strict=True)]

    def exact(dtype: DTypeLike) -> jax.Array:
        return combine(op_params[OPERATION], *[x.astype(dtype) for x in operands("low")])

    reference = combine(op_params[OPERATION], *operands("reference"))
    at = sample_positions(op_params[COUNT], reference.size)
    addends = [x.astype(jnp.float64) for x in operands("low", at)]
    samples = combine(op_params[OPERATION], *addends), *addends
    taints = [x.tainted for x in (*arrays, *scalars)]
    low = round_by(exact(arrays[0].low.dtype), op_params)
    samples = stack_samples(low, reference, samples, at)
    if left:
        tainted = functools.reduce(jnp.logical_or, taints)
        apart = Uncounted(op_params, low, exact(jnp.float64), reference, samples, tainted)
        return Pair(low, reference, is_tainted(low, reference)), apart.first(left)
    tally, tainted = count(low, exact, reference, op_params, taints)
    return Pair(low, reference, tainted), Record(tally, samples, op_params).packed()


class Uncounted(NamedTuple):
    """A result whose events aren't counted yet."""

    op_params: jax.Array  # float64[OP_PARAMS], with the format that the result has
    # low, exact, reference: the result in both runs, and the exact result of the low inputs, flat
    # and padded
    low: jax.Array
    exact: jax.Array
    reference: jax.Array
    samples: jax.Array  # float64[5, SAMPLE] (see :class:`Record`)
    tainted: Flag  # whether an input was

    def first(self, n: int) -> Uncounted:
        """Returns the first ``n`` numbers: the others are padding."""
        arrays = (self.low[:n], self.exact[:n], self.reference[:n], self.samples[:, :n])
        return Uncounted(self.op_params, *arrays, self.tainted)

    def counted(self) -> tuple[jax.Array, Record]:
        exact, op_params = self.exact.astype, self.op_params
        tally, tainted = count(self.low, exact, self.reference, op_params, [self.tainted])
        return tainted, Record(tally, self.samples, op_params)


def stack_samples(
    low: jax.Array, reference: jax.Array, samples: Sequence[jax.Array], at: jax.Array
) -> jax.Array:
    """Returns the samples of a :class:`Record`, of which ``samples`` has the exact result's and the
    addends'."""
    low, reference = (x[at].astype(jnp.float64) for x in (low, reference))
    return jnp.stack([low, samples[0], reference, *samples[1:]])
