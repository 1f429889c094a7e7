"""How a narrow copy lies in memory, decided when a program is lowered."""

from __future__ import annotations

import jax
import jax.extend.core as jex
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import batching, mlir

from ..interpret import is_partitioned

stored_p = jex.Primitive("stored_copy")


def stored_copy(data: jax.Array, again: bool) -> jax.Array:
    """``data``, an operand's narrow copy, as products read it.

    - On a CPU a copy that the backward pass reads (``again``) is really stored: XLA there would
      keep the wide original, or compute the copy once more.
    - On other platforms it is written in row-major order, whichever order a product asks for. XLA
      then writes it and its transpose in one kernel, where else it might transpose the wide
      original first. Not in a program that XLA partitions: its partitioner does not split an array
      with a prescribed layout, and would gather it.
    """
    return stored_p.bind(data, again=again)


def _on_cpu(data: jax.Array, *, again: bool) -> jax.Array:
    return lax.optimization_barrier(data) if again else data


def _row_major(data: jax.Array, *, again: bool) -> jax.Array:
    return with_layout_constraint(data, Layout(tuple(range(data.ndim))))


def _lower_for_device(ctx, data, *, again: bool):
    if ctx.avals_in[0].ndim < 2 or is_partitioned(ctx):
        return [data]
    return mlir.lower_fun(_row_major, multiple_results=False)(ctx, data, again=again)


stored_p.def_impl(lambda data, *, again: data)
stored_p.def_abstract_eval(lambda data, *, again: data)
batching.defvectorized(stored_p)
mlir.register_lowering(stored_p, _lower_for_device)
mlir.register_lowering(stored_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
