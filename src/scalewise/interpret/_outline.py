"""Calls that XLA's CPU compiler doesn't inline, so that their callers share compiled code."""

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


def outlined(function: Callable[..., Any], options: Any, *operands: Any) -> Any:
    """Returns ``function(options, *operands)``, traced, lowered and (on a CPU) compiled once.

    XLA inlines calls and fuses their operations with those of each caller, differently each time.
    On a CPU, where a kernel takes 20 to 60 ms to compile, a program that rounds at each equation
    would compile for minutes. There the call is kept: its operands and results are stored, and
    calls with the same types share kernels. On other platforms, and in programs that XLA splits
    over devices, the call is inlined.

    Args:
        function: defined in a module, so that it is the same object at each call.
        options: its first argument. If it isn't hashable, the function is called directly.
        operands: its other arguments, pytrees of arrays.

    Returns:
        The function's result, a pytree of arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> outlined(_scaled_sum, 2, jnp.ones(3), jnp.ones(3)).tolist()
        [4.0, 4.0, 4.0]
    """
    if not _is_hashable(options):
        return function(options, *operands)
    if not jax.sharding.get_abstract_mesh().empty:  # types carry more than shapes and dtypes
        return _jitted(function)(options, *operands)
    arrays, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, operands))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    traced = _jitted(function).trace(options, *jax.tree.unflatten(tree, types))
    outs = outlined_p.bind(*arrays, jaxpr=traced.jaxpr, call=(function, options, tree))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _scaled_sum(factor: float, x: jax.Array, y: jax.Array) -> jax.Array:
    return factor * (x + y)


@cache
def _jitted(function: Callable[..., Any]) -> Any:
    return jax.jit(function, static_argnums=0)


def _called(*arrays: jax.Array, jaxpr: Any, call: Any) -> list[jax.Array]:
    del jaxpr
    function, options, tree = call
    return jax.tree.leaves(_jitted(function)(options, *jax.tree.unflatten(tree, arrays)))


def _lower_as_call(ctx: Any, *arrays: Any, **params: Any) -> Any:
    results = _lower_inline(ctx, *arrays, **params)
    if results and not _compat.is_partitioned(ctx):
        call = results[0].owner
        kept = mlir.ir.StringAttr.get("false")
        call.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"inlineable": kept})
    return results


def _batched(arrays: Any, dims: Any, **params: Any) -> Any:
    call, dims = params["call"], tuple(dims)
    outs = outlined(_over_axis, (call, dims), *arrays)
    return outs, [0] * len(outs)


def _over_axis(options: Any, *arrays: jax.Array) -> list[jax.Array]:
    call, dims = options
    return jax.vmap(partial(_called, jaxpr=None, call=call), in_axes=dims)(*arrays)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(partial(_called, **params), tuple(primals), tangents)


_lower_inline = mlir.lower_fun(_called, multiple_results=True)
outlined_p.def_impl(_called)
outlined_p.def_abstract_eval(lambda *arrays, jaxpr, call: jaxpr.out_avals)
batching.primitive_batchers[outlined_p] = _batched
ad.primitive_jvps[outlined_p] = _jvp
mlir.register_lowering(outlined_p, _lower_inline)
mlir.register_lowering(outlined_p, _lower_as_call, platform="cpu")
