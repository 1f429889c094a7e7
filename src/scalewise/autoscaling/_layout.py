"""The memory layout and lifetime of narrow copies, decided when a program is lowered."""

from __future__ import annotations

from typing import TypeVar

import jax

from .._jax import Layout, batching, is_exported, is_partitioned, jex, mlir, with_layout_constraint
from .._types import PyTree
from ..interpret import outlined

Tree = TypeVar("Tree")  # of narrow arrays

stored_p = jex.Primitive("stored_copy")


def stored_copy(data: jax.Array) -> jax.Array:
    """Returns ``data``, an operand's narrow copy, in the layout in which products read it.

    On every platform but a CPU the copy is written in row-major order, whichever order a product
    asks for. XLA then writes the copy and its transpose in one kernel; otherwise it might transpose
    the wide original first. A program that XLA partitions is left as it is: the partitioner does
    not split an array with a prescribed layout, but gathers it. So is an exported one, since no
    later release need understand the prescription.
    """
    return stored_p.bind(data)


def loaded_after(stored: Tree, other: PyTree) -> Tree:
    """Returns ``stored``, a pytree of narrow arrays, and makes a CPU read it after ``other``.

    XLA on a CPU runs each operation as soon as its operands are computed. It would widen and
    transpose the operands of a backward product during the forward pass, and keep the wide arrays
    until the backward pass reads them. Here they are results of a call that also takes ``other``,
    which the backward pass computes, so the CPU keeps the narrow arrays until then. All other
    platforms multiply narrow arrays directly; there, and in a partitioned program, the call is
    inlined and changes nothing.
    """
    return outlined(_first, None, stored, other)


def _first(_: None, stored: Tree, other: PyTree) -> Tree:
    del other
    return stored


def _row_major(data: jax.Array) -> jax.Array:
    return with_layout_constraint(data, Layout(tuple(range(data.ndim))))


def _lower_for_device(ctx, data):
    if ctx.avals_in[0].ndim < 2 or is_partitioned(ctx) or is_exported(ctx):
        return [data]
    return mlir.lower_fun(_row_major, multiple_results=False)(ctx, data)


stored_p.def_impl(lambda data: data)
stored_p.def_abstract_eval(lambda data: data)
batching.defvectorized(stored_p)
mlir.register_lowering(stored_p, _lower_for_device)
mlir.register_lowering(stored_p, lambda ctx, data: [data], platform="cpu")
