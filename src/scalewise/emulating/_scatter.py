"""Additions to elements that indices choose: each rounds its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..interpret import Equation, Value
from ..primitives import having, params

ACCUMULATES = having("accumulates")


def rounds_each(equation: Equation) -> bool:
    """Returns whether an equation may add several numbers to one element, rounding after each.

    XLA does for ``x.at[i].add(y)``, segment sums and a gather's gradient, so that a count in BF16
    stops at 256. Its other sums accumulate in float32.
    """
    own = equation.name in ACCUMULATES and not equation.of_complex
    return own and equation.in_avals[2].size > 0 and not params.scattered(equation)[2]


def added_in_order(
    equation: Equation,
    inputs: Sequence[Value],
    exact: Callable[[Sequence[Value]], Sequence[Value]],
    rounded: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """Returns the operand with each update added and the sum rounded; ``exact`` adds them all.

    Sums of at most one update for each element aren't rounded.
    """
    operand, indices, updates = inputs
    own, clips, _ = params.scattered(equation)
    window = own.update_window_dims
    batch = [i for i in range(updates.ndim) if i not in window]
    removed = {*own.inserted_window_dims, *own.operand_batching_dims}
    lengths = iter([updates.shape[i] for i in window])
    places = lax.gather(
        jnp.arange(operand.size).reshape(operand.shape),
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=window,
            collapsed_slice_dims=own.inserted_window_dims,
            start_index_map=own.scatter_dims_to_operand_dims,
            operand_batching_dims=own.operand_batching_dims,
            start_indices_batching_dims=own.scatter_indices_batching_dims,
        ),
        [1 if i in removed else next(lengths) for i in range(operand.ndim)],
        mode=lax.GatherScatterMode.CLIP if clips else lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=operand.size,
    )

    def in_rows(x: jax.Array) -> jax.Array:
        x = x.transpose(*batch, *window)
        return x.reshape(math.prod(x.shape[: len(batch)]), -1)

    def add_row(sums: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        at, update = row
        before = sums.at[at].get(mode="fill", fill_value=0, unique_indices=True)
        after = rounded(before - update if equation.name.endswith("sub") else before + update)
        return sums.at[at].set(after, mode="drop", unique_indices=True), None

    def one_by_one(inputs: Sequence[Value]) -> list[jax.Array]:
        operand, _, updates = inputs
        sums, _ = lax.scan(add_row, operand.ravel(), (in_rows(places), in_rows(updates)))
        return [sums.reshape(operand.shape)]

    counts = jnp.zeros(operand.size, jnp.int32).at[places.ravel()].add(1, mode="drop")
    return lax.cond(counts.max() > 1, one_by_one, lambda x: list(exact(x)), list(inputs))
