"""Primitives that a kernel computes on NVIDIA's GPUs, and XLA everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .._jax import (
    ShapedArray,
    ad,
    batching,
    compiles_gpu_kernels,
    is_exported,
    is_partitioned,
    jex,
    mlir,
    needs_devices,
    without_varying_types,
)


def kernel_primitive(
    name: str,
    by_kernel: Callable[..., list[jax.Array]],
    by_xla: Callable[..., list[jax.Array]],
    types: Callable[..., list[jax.ShapeDtypeStruct]],
    available: Callable[[], bool] = compiles_gpu_kernels,
) -> jex.Primitive:
    """Returns a primitive that is lowered to a kernel for CUDA, and to XLA's operations elsewhere.

    XLA's operations are used as well in a program that is exported or that XLA splits over devices,
    and they are what is mapped and differentiated.

    Args:
        name: the primitive's.
        by_kernel, by_xla: functions of the operands and ``rule``, the one parameter.
        types: a function of the operands' types and ``rule`` that returns those of the results.
        available: whether the kernel can be compiled here.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True

    def lower(ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, rule: Any):
        plain = is_partitioned(ctx) or is_exported(ctx) or not available()
        with without_varying_types():  # which Pallas doesn't infer
            avals = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # pyright: ignore
            inlined = mlir.lower_fun(by_xla if plain else by_kernel)
            return inlined(ctx.replace(avals_in=avals), *operands, rule=rule)

    def batched(operands, dims, **params):
        outs = jax.vmap(partial(by_xla, **params), in_axes=dims)(*operands)
        return outs, [0] * len(outs)

    def abstract(x, *operands, rule: Any):
        found = types(x, *operands, rule=rule)
        return [x.update(shape=y.shape, dtype=y.dtype, weak_type=False) for y in found]

    primitive.def_impl(by_xla)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jax.jvp(
        partial(by_xla, **params), primals, [ad.instantiate_zeros(t) for t in tangents]
    )
    mlir.register_lowering(primitive, mlir.lower_fun(by_xla, multiple_results=True))
    mlir.register_lowering(primitive, lower, platform="cuda")
    needs_devices(primitive)
    return primitive
