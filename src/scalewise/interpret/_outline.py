"""Calls that XLA's CPU compiler doesn't inline, so that their callers share compiled code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
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


class OutlinedCall(NamedTuple):
    function: Callable[..., PyTree]
    options: Hashable
    tree: TreeDef

    @property
    def name(self) -> str:
        """The name of the function, or of the default route."""
        function = self.function
        if function is _by_jax:
            function = dict(cast(tuple, self.options)[0])["default"]
        return getattr(function, "__name__", "by_platform")


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
    call = OutlinedCall(function, options, tree)
    outs = outlined_p.bind(*arrays, jaxpr=traced.jaxpr, call=call)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)


def by_platform(
    routes: Mapping[str, Callable[..., Result]],
    options: Hashable,
    result: PyTree,
    *operands: PyTree,
) -> Result:
    """Returns what :func:`jax.lax.platform_dependent` does, traced when the program is lowered, and
    only for its platform.

    Args:
        routes: functions of ``options`` and ``operands`` by platform, and ``"default"``. The one of
            ``"whole_cpu"`` is called in a jitted program for a CPU that XLA doesn't split over
            devices, but not under a transformation; it returns what the default does.
        options: of all routes, hashable.
        result: a pytree of the results' :class:`jax.ShapeDtypeStruct`.
        operands: pytrees of arrays without 64-bit dtypes.
    """
    arrays, tree = jax.tree.flatten(operands)
    outs, out_tree = jax.tree.flatten(result)
    known = all(isinstance(n, int) for x in (*arrays, *outs) for n in x.shape)
    if not known or not jax.sharding.get_abstract_mesh().empty:
        return _by_jax((tuple(routes.items()), options), *operands)
    call = OutlinedCall(_by_jax, (tuple(routes.items()), options), tree)
    types = tuple(ShapedArray(x.shape, x.dtype) for x in arrays)
    results = tuple(ShapedArray(x.shape, x.dtype) for x in outs)
    body = _Untraced(call, types, results, _jax.line_here())
    outs = outlined_p.bind(*arrays, jaxpr=body, call=call)
    return jax.tree.unflatten(out_tree, outs)


def _by_jax(options: tuple, *operands: PyTree) -> PyTree:
    given, own = options
    routes = {name: partial(f, own) for name, f in given if name != "whole_cpu"}
    if len(routes) == 1:
        return _jitted(dict(given)["default"])(own, *operands)
    return jax.lax.platform_dependent(*operands, **routes)


@dataclasses.dataclass(frozen=True)
class _Untraced:
    call: OutlinedCall
    in_avals: tuple[ShapedArray, ...]
    out_avals: tuple[ShapedArray, ...]
    line: Callable[[], AbstractContextManager[None]] = dataclasses.field(compare=False)

    @property
    def closed(self) -> Jaxpr:
        function, options, tree = self.call
        with self.line():
            return _jitted(function).trace(options, *jax.tree.unflatten(tree, self.in_avals)).jaxpr

    def __repr__(self) -> str:
        return str(self.closed)

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


def _called(*arrays: jax.Array, call: OutlinedCall, **params: Parameter) -> list[jax.Array]:
    function, options, tree = call
    return jax.tree.leaves(_jitted(function)(options, *jax.tree.unflatten(tree, arrays)))


def _lower_inline(
    ctx: mlir.LoweringRuleContext,
    *arrays: mlir.ir.Value,
    jaxpr: Jaxpr | _Untraced,
    call: OutlinedCall,
) -> Sequence[mlir.ir.Value]:
    """Lowers what was traced: the types of a program in float64 outlive the switch for it."""
    if isinstance(jaxpr, _Untraced):
        return _lower_route(ctx, arrays, call, ctx.platforms or ctx.module_context.platforms)
    return mlir.core_call_lowering(ctx, *arrays, name=call.name, call_jaxpr=jaxpr)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext,
    *arrays: mlir.ir.Value,
    jaxpr: Jaxpr | _Untraced,
    call: OutlinedCall,
) -> Sequence[mlir.ir.Value]:
    whole = not _jax.is_partitioned(ctx)
    if isinstance(jaxpr, _Untraced):
        names = ("cpu", "whole_cpu") if whole else ("cpu",)
        return _lower_route(ctx, arrays, call, names)
    results = _lower_inline(ctx, *arrays, jaxpr=jaxpr, call=call)
    if whole and results:
        kept = mlir.ir.StringAttr.get("false")
        attributes = cast(mlir.ir.Operation, results[0].owner).attributes
        attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"inlineable": kept})
    return results


def _lower_route(
    ctx: mlir.LoweringRuleContext,
    arrays: Sequence[mlir.ir.Value],
    call: OutlinedCall,
    names: Sequence[str],
) -> Sequence[mlir.ir.Value]:
    """Lowers the last route named, or the default one, of which equal calls share a function; all
    routes in a program for several platforms."""
    given, own = options = cast(tuple, call.options)
    routes = dict(given)
    name = next((n for n in reversed(names) if n in routes), "default")
    if name == "default" and _by_default(call):
        types = jax.tree.unflatten(call.tree, ctx.avals_in)
        body = _jitted(routes[name]).trace(own, *types).jaxpr
        return mlir.core_call_lowering(ctx, *arrays, name=call.name, call_jaxpr=body)
    several = len(names) > 1 and "whole_cpu" not in names
    function, options = (_by_jax, options) if several else (routes[name], own)

    def route(*arrays: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(options, *jax.tree.unflatten(call.tree, arrays)))

    with _jax.at_line_of(ctx):
        return mlir.lower_fun(route)(ctx, *arrays)


def _by_default(call: OutlinedCall) -> bool:
    return {name for name, _ in cast(tuple, call.options)[0]} <= {"default", "whole_cpu"}


def _batched(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, jaxpr: object, call: OutlinedCall
) -> tuple[list[jax.Array], list[int]]:
    options = call, tuple(dims)
    inline = isinstance(jaxpr, _Untraced) and not _by_default(call)
    outs = _over_axis(options, *arrays) if inline else outlined(_over_axis, options, *arrays)
    return outs, [0] * len(outs)


def _over_axis(
    options: tuple[OutlinedCall, tuple[int | None, ...]], *arrays: jax.Array
) -> list[jax.Array]:
    call, dims = options
    return jax.vmap(partial(_called, call=call), in_axes=dims)(*arrays)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], **params: Parameter
) -> tuple[list[jax.Array], list[jax.Array]]:
    given = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(partial(_called, **params), tuple(primals), given)


outlined_p.is_high = lambda *avals, **params: False  # JAX 0.12: jit lowers what its body holds
outlined_p.def_impl(_called)
outlined_p.def_abstract_eval(lambda *arrays, jaxpr, **params: jaxpr.out_avals)
batching.primitive_batchers[outlined_p] = _batched
ad.primitive_jvps[outlined_p] = _jvp
mlir.register_lowering(outlined_p, _lower_inline)
mlir.register_lowering(outlined_p, _lower_for_cpu, platform="cpu")
