"""Calls that stay calls where that saves compilation: one compiled function for many callers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from . import _compat

outlined_p = jex.Primitive("outlined")
outlined_p.multiple_results = True


def outlined(function: Callable[..., Any], options: Any, *arrays: jax.Array) -> list[jax.Array]:
    """``function(options, *arrays)``, traced, lowered and (on a CPU) compiled once per type.

    XLA inlines calls, and fuses what they compute with the operations of each caller, each time in
    another way. On a CPU, where a kernel takes a compiler some 20 to 60 ms, a program that rounds
    at each of its equations was compiled for minutes. There the call is kept: its operands and
    results are stored, and calls with the same types share their kernels. On other platforms, and
    in programs that XLA partitions, the call is inlined.

    Args:
        function: of a module, so that it is the same object at each call; gives a sequence of
            arrays.
        options: its first argument, hashable.
        arrays: its others.

    Example:
        >>> import jax.numpy as jnp
        >>> [y] = outlined(_scaled_sum, 2, jnp.ones(3), jnp.ones(3))
        >>> y.tolist()
        [4.0, 4.0, 4.0]
    """
    arrays = tuple(map(jnp.asarray, arrays))
    call = partial(_jitted(function), options)
    if not jax.sharding.get_abstract_mesh().empty:  # types carry more than shapes and dtypes
        return list(call(*arrays))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    jaxpr = _jitted(function).trace(options, *types).jaxpr
    return outlined_p.bind(*arrays, jaxpr=jaxpr, function=function, options=options)


def _scaled_sum(factor: float, x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [factor * (x + y)]


@cache
def _jitted(function: Callable[..., Any]) -> Any:
    return jax.jit(function, static_argnums=0)


def _called(*arrays: jax.Array, jaxpr: Any, function: Any, options: Any) -> list[jax.Array]:
    del jaxpr
    return list(_jitted(function)(options, *arrays))


def _lower_as_call(ctx: Any, *arrays: Any, **params: Any) -> Any:
    results = _lower_inline(ctx, *arrays, **params)
    if results and not _compat.is_partitioned(ctx):
        call = results[0].owner
        name = mlir.ir.StringAttr.get("false")
        call.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"inlineable": name})
    return results


def _batched(arrays: Any, dims: Any, *, jaxpr: Any, function: Any, options: Any) -> Any:
    del jaxpr
    outs = outlined(_over_axis, (function, options, tuple(dims)), *arrays)
    return outs, [0] * len(outs)


def _over_axis(options: Any, *arrays: jax.Array) -> list[jax.Array]:
    function, own, dims = options
    return list(jax.vmap(partial(function, own), in_axes=dims)(*arrays))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(partial(_called, **params), tuple(primals), tangents)


_lower_inline = mlir.lower_fun(_called, multiple_results=True)
outlined_p.def_impl(_called)
outlined_p.def_abstract_eval(lambda *arrays, jaxpr, function, options: jaxpr.out_avals)
batching.primitive_batchers[outlined_p] = _batched
ad.primitive_jvps[outlined_p] = _jvp
mlir.register_lowering(outlined_p, _lower_inline)
mlir.register_lowering(outlined_p, _lower_as_call, platform="cpu")
