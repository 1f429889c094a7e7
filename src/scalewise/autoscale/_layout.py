"""The memory layout and lifetime of narrow copies, decided when a program is lowered."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import batching, mlir

from ..interpret import is_partitioned, outlined

stored_p = jex.Primitive("stored_copy")


def stored_copy(data: jax.Array) -> jax.Array:
    """``data``, an operand's narrow copy, as products read it.

    On all platforms but a CPU it is written in row-major order, whichever order a product asks for.
    XLA then writes it and its transpose in one kernel, where else it might transpose the wide
    original first. Not in a program that XLA partitions: its partitioner does not split an array
    with a prescribed layout, and would gather it.
    """
    return stored_p.bind(data)


def loaded_after(stored: Any, other: Any) -> Any:
    """``stored``, a pytree of narrow arrays from the forward pass, loaded once ``other`` is there.

    XLA on a CPU runs each operation as soon as its operands are there: it would widen and transpose
    the operands of a backward product while the forward pass is still running, and keep the wide
    arrays until the backward pass. A call that also takes ``other``, which only the backward pass
    computes, makes it wait, and the narrow arrays are kept meanwhile. On all other platforms, which
    multiply narrow arrays as they are, it is the identity.
    """
    return outlined(_first, None, stored, other)


def _first(_: None, stored: Any, other: Any) -> Any:
    del other
    return stored


def _row_major(data: jax.Array) -> jax.Array:
    return with_layout_constraint(data, Layout(tuple(range(data.ndim))))


def _lower_for_device(ctx, data):
    if ctx.avals_in[0].ndim < 2 or is_partitioned(ctx):
        return [data]
    return mlir.lower_fun(_row_major, multiple_results=False)(ctx, data)


stored_p.def_impl(lambda data: data)
stored_p.def_abstract_eval(lambda data: data)
batching.defvectorized(stored_p)
mlir.register_lowering(stored_p, _lower_for_device)
mlir.register_lowering(stored_p, lambda ctx, data: [data], platform="cpu")
