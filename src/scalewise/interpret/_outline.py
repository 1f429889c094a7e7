"""Calls that XLA's CPU compiler doesn't inline, so that their callers share compiled code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Jaxpr, Parameter, ShapedArray, ad, batching, jex, mlir
from .._types import PyTree, TreeDef

Result = TypeVar("Result")  # a pytree of arrays

outlined_p = jex.Primitive("outlined")
outlined_p.multiple_results = True


class Call(NamedTuple):
    function: Callable[..., PyTree]
    options: Hashable
    tree: TreeDef


def outlined(function: Callable[..., Result], options: Hashable, *operands: PyTree) -> Result:
    """Returns ``function(options, *operands)``, traced, lowered and (on a CPU) compiled once.

    XLA inlines calls and fuses their operations with those of each caller, differently each
    time. On a CPU, where a kernel takes 20 to 60 ms to compile, a program that rounds at each
    equation would compile for minutes. There the call is kept: its operands and results are
    stored, and calls with the same types share kernels. On other platforms, and in programs that
    XLA splits over devices, the call is inlined.

    The function is defined in a module, so that it is the same object at each call. If the
    options aren't hashable, it is called directly. Operands and results are pytrees of arrays.
    """
    if not _is_hashable(options):
        return function(options, *operands)
    if not jax.sharding.get_abstract_mesh().empty:  # types carry more than shapes and dtypes
        return _jitted(function)(options, *operands)
    arrays, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, operands))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    traced = _jitted(function).trace(options, *jax.tree.unflatten(tree, types))
    call = Call(function, options, tree)
    outs = outlined_p.bind(*arrays, jaxpr=traced.jaxpr, call=call, cpu=None)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)


def by_platform(
    function: Callable[..., Result],
    cpu: Callable[..., Result],
    options: Hashable,
    result: PyTree,
    *operands: PyTree,
) -> Result:
    """Returns ``function(options, *operands)``, or what ``cpu`` returns in a program for a CPU.

    Neither function is traced before the program is lowered, and then only the one for its
    platform: :func:`jax.lax.platform_dependent` traces both for each type of the operands.
    ``result`` is a pytree of the results' :class:`jax.ShapeDtypeStruct`. On a CPU, too,
    ``function`` is called under a transformation, on a mesh and outside of jit.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return _jitted(function)(options, *operands)
    arrays, tree = jax.tree.flatten(operands)
    outs, out_tree = jax.tree.flatten(result)
    call = Call(function, options, tree)
    types = tuple(ShapedArray(x.shape, x.dtype) for x in arrays)
    body = _Untraced(call, types, tuple(ShapedArray(x.shape, x.dtype) for x in outs))
    outs = outlined_p.bind(*arrays, jaxpr=body, call=call, cpu=cpu)
    return jax.tree.unflatten(out_tree, outs)


@dataclasses.dataclass(frozen=True)
class _Untraced:
    call: Call
    in_avals: tuple[ShapedArray, ...]
    out_avals: tuple[ShapedArray, ...]

    @property
    def closed(self) -> Jaxpr:
        function, options, tree = self.call
        return _jitted(function).trace(options, *jax.tree.unflatten(tree, self.in_avals)).jaxpr

    @property
    def jaxpr(self) -> Jaxpr:
        return self.closed.jaxpr

    @property
    def consts(self) -> Sequence[jax.Array]:
        return self.closed.consts


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


@cache
def _jitted(function: Callable[..., PyTree]) -> jax.stages.Wrapped:
    return jax.jit(function, static_argnums=0)


def _called(*arrays: jax.Array, call: Call, **params: Parameter) -> list[jax.Array]:
    function, options, tree = call
    return jax.tree.leaves(_jitted(function)(options, *jax.tree.unflatten(tree, arrays)))


def _called_on_cpu(
    *arrays: jax.Array, call: Call, cpu: Callable[..., PyTree], **params: Parameter
) -> list[jax.Array]:
    _, options, tree = call
    return jax.tree.leaves(cpu(options, *jax.tree.unflatten(tree, arrays)))


def _lower_inline(
    ctx: mlir.LoweringRuleContext, *arrays: mlir.ir.Value, **params: Parameter
) -> Sequence[mlir.ir.Value]:
    """Lowers what was traced: the types of a program in float64 outlive the switch for it."""
    body, name = params["jaxpr"], params["call"].function.__name__
    closed = body.closed if isinstance(body, _Untraced) else body
    return mlir.core_call_lowering(ctx, *arrays, name=name, call_jaxpr=closed)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext, *arrays: mlir.ir.Value, **params: Parameter
) -> Sequence[mlir.ir.Value]:
    if _jax.is_partitioned(ctx):
        return _lower_inline(ctx, *arrays, **params)
    if params["cpu"] is not None:
        return _lower_cpu_inline(ctx, *arrays, **params)
    results = _lower_inline(ctx, *arrays, **params)
    if results:
        call = cast(mlir.ir.Operation, results[0].owner)
        kept = mlir.ir.StringAttr.get("false")
        call.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"inlineable": kept})
    return results


def _batched(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], **params: Parameter
) -> tuple[list[jax.Array], list[int]]:
    outs = outlined(_over_axis, (params["call"], tuple(dims)), *arrays)
    return outs, [0] * len(outs)


def _over_axis(options: tuple[Call, tuple[int | None, ...]], *arrays: jax.Array) -> list[jax.Array]:
    call, dims = options
    return jax.vmap(partial(_called, call=call), in_axes=dims)(*arrays)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], **params: Parameter
) -> tuple[list[jax.Array], list[jax.Array]]:
    given = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(partial(_called, **params), tuple(primals), given)


_lower_cpu_inline = mlir.lower_fun(_called_on_cpu, multiple_results=True)
outlined_p.is_high = lambda *avals, **params: False  # JAX 0.12: jit lowers what its body holds
outlined_p.def_impl(_called)
outlined_p.def_abstract_eval(lambda *arrays, jaxpr, **params: jaxpr.out_avals)
batching.primitive_batchers[outlined_p] = _batched
ad.primitive_jvps[outlined_p] = _jvp
mlir.register_lowering(outlined_p, _lower_inline)
mlir.register_lowering(outlined_p, _lower_for_cpu, platform="cpu")
