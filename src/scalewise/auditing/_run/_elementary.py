"""Sums, products, quotients and roots: both runs, rounded and counted by one compiled program.

The operation, and which operands are arrays and which scalars, is data, as the format is: all sums,
differences and products of one size share a program, and so do quotients and roots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ...interpret import Equation
from ...primitives import params
from ...rounding import round_by
from ._compiled import Compiled
from ._pair import Flag, Pair
from ._statistics import (
    COUNT,
    IS_ARRAY,
    OPERATION,
    SAMPLE,
    Record,
    count,
    is_tainted,
    sample_positions,
)

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
    size=lambda combine, op_params, arrays, scalars: arrays[0].low.size,
    static_argnums=(0,),
    often=True,
)
def elementary(
    combine: Callable,
    op_params: jax.Array,
    arrays: Sequence[Pair],
    scalars: Sequence[Pair],
) -> tuple[Pair, jax.Array]:
    """Computes an operation on flat operands in both runs, rounds the low result and counts.

    Returns the result in both runs and its packed record. ``op_params`` selects each of two
    operands: the whole of ``arrays[i]`` or the first number of ``scalars[i]``. The taints of all
    four count.
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
    tally, tainted = count(low, exact, reference, op_params, taints)
    return Pair(low, reference, tainted), Record(tally, samples, op_params).packed()


COMBINED: Mapping[int, Callable[[jax.Array, jax.Array], jax.Array]] = {
    OTHER: lambda a, b: a,
    SAME: lambda a, b: a,
    ADD: lax.add,
    SUB: lax.sub,
    MUL: lax.mul,
    DIV: lax.div,
    SQRT: lambda a, b: lax.sqrt(a),
}


def elementary_uncounted(
    left: int,
    code: int,
    is_array: Sequence[bool],
    op_params: jax.Array,
    operands: Sequence[Pair],
) -> tuple[Pair, Uncounted]:
    """Computes what :func:`elementary` does and leaves the first ``left`` numbers to be counted.

    A loop that is compiled as a whole has a copy of this code for each of its operations. So the
    operation, and which operands are arrays, is known when it is traced.
    """
    combine, (length,) = COMBINED[code], operands[0 if is_array[0] else 1].low.shape

    def numbers(run: str, at: slice | jax.Array = slice(None)) -> list[jax.Array]:
        both = zip(operands, is_array, strict=True)
        return [getattr(x, run)[at] if w else getattr(x, run)[0] for x, w in both]

    own, references = (
        [jnp.broadcast_to(x, length) for x in numbers(run)] for run in ("low", "reference")
    )
    low, reference = round_by(combine(*own), op_params), combine(*references)
    at = slice(left) if left <= SAMPLE else sample_positions(op_params[COUNT], length)
    size = min(left, SAMPLE)
    addends = [jnp.broadcast_to(x.astype(jnp.float64), size) for x in numbers("low", at)]
    samples = stack_samples(low, reference, (combine(*addends), *addends), at)
    exact = combine(*[x.astype(jnp.float64) for x in own])
    tainted = functools.reduce(jnp.logical_or, [x.tainted for x in operands])
    found = Uncounted.first(left, op_params, (low, exact, reference), samples, tainted)
    return Pair(low, reference, is_tainted(low, reference)), found


class Uncounted(NamedTuple):
    """A result whose events aren't counted yet."""

    op_params: jax.Array  # float64[OP_PARAMS], with the format that the result has
    samples: jax.Array  # float64[5, SAMPLE] (see :class:`Record`), or of fewer numbers
    tainted: Flag  # whether an input was
    # the result in the low run, exactly, and in the reference run, flat; None where the samples are
    # all of it
    numbers: Sequence[jax.Array] | None

    @classmethod
    def first(
        cls,
        n: int,
        op_params: jax.Array,
        numbers: Sequence[jax.Array],
        samples: jax.Array,
        tainted: Flag,
    ) -> Uncounted:
        """Returns a result of at most ``n`` numbers: what follows is padding."""
        whole = None if n <= SAMPLE else tuple(x[:n] for x in numbers)
        return cls(op_params, samples[:, :n], tainted, whole)

    @property
    def size(self) -> int:
        return self.samples.shape[1] if self.numbers is None else self.numbers[0].size

    def counted(self) -> tuple[jax.Array, Record]:
        low, exact, reference = self.samples[:3] if self.numbers is None else self.numbers
        tally, tainted = count(low, exact.astype, reference, self.op_params, [self.tainted])
        return tainted, Record(tally, self.samples, self.op_params)


def stack_samples(
    low: jax.Array, reference: jax.Array, samples: Sequence[jax.Array], at: slice | jax.Array
) -> jax.Array:
    """Returns the samples of a :class:`Record`, of which ``samples`` has the exact result's and the
    addends'."""
    low, reference = (x[at].astype(jnp.float64) for x in (low, reference))
    return jnp.stack([low, samples[0], reference, *samples[1:]])
