"""All that depends on JAX's version or internals: parameters that moved, source frames, contexts.

Nothing else in scalewise imports ``jax._src``. JAX 0.10.2 is the floor; what changed since then is
read by looking at the parameters that are there, so that a new release needs no table of versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax._src import core, dispatch, source_info_util
from jax._src.interpreters import pxla
from jax.core import ShapedArray

Jaxpr = Any  # jex.Jaxpr or jex.ClosedJaxpr: one class since JAX 0.12


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """The open jaxpr and its constants, whether it was open, closed or (JAX 0.12) both."""
    consts = getattr(jaxpr, "consts", ())
    return (jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr), consts


def close_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """A closed jaxpr without constants from an open one that has none."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def without_references(jaxpr: Jaxpr) -> Jaxpr:
    """A closed jaxpr whose own mutable arrays (``jax.new_ref``) are values that it hands on."""
    if not any(isinstance(e, core.InternalMutableArrayEffect) for e in jaxpr.effects):
        return jaxpr
    return pxla._discharge_internal_refs(jaxpr)


class provenance:
    """Equations traced inside keep ``eqn``'s source line, its scope and its context (mesh, x64).

    A class, since it is entered for each equation of each run.
    """

    __slots__ = ("managers",)

    def __init__(self, eqn: jex.JaxprEqn):
        info = eqn.source_info
        scope = source_info_util.current_name_stack() + info.name_stack
        line = source_info_util.user_context(info.traceback, name_stack=scope)
        wide = (jax.enable_x64(True),) if _is_wide(eqn) else ()
        self.managers = (line, eqn.ctx.manager, *wide)

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*error)


def _is_wide(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation has 64-bit arrays though x64 is off: it was traced where it was on."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return False
    return any(is_64_bit(v.aval) for v in eqn.outvars + eqn.invars)


def is_64_bit(x: Any) -> bool:
    """Whether an array or abstract array has a dtype that JAX has with x64 alone.

    A complex64 and a random key have elements of 64 bits, and are made without.
    """
    return str(getattr(x, "dtype", "")) in ("float64", "int64", "uint64", "complex128")


def user_frame(eqn: jex.JaxprEqn) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that made the equation; None if unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return frame and (frame.file_name, frame.start_line, frame.function_name)


def user_frames(eqn: jex.JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """All of the frames outside of JAX on the way to the equation, innermost first."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def manual_now() -> frozenset[str]:
    """The mesh axes that a ``shard_map`` around the caller maps over."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which a ``shard_map`` that checks them says an array, or type, varies."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    manual = getattr(aval, "mat", aval)  # JAX 0.10.2 keeps them with other manual types
    return frozenset(getattr(manual, "varying", None) or getattr(manual, "vma", ()))


def vary(value: Any, axes: Iterable[str]) -> Any:
    """A pytree of arrays, each of which varies over ``axes`` at least; outside of a checking
    ``shard_map`` the pytree itself."""
    if not axes:
        return value

    def leaf(x: Any) -> Any:
        missing = tuple(a for a in axes if a not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, value)


def gather_invariant(x: jax.Array, axis_name: Any) -> jax.Array:
    """``lax.all_gather`` whose result a ``shard_map`` that checks knows to be equal everywhere."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    x = per_device(x, axes)
    tracked = bool(axes) and set(axes) <= varying(x)
    return lax.all_gather(x, axis_name, to="invarying") if tracked else lax.all_gather(x, axis_name)


def per_device(tree: Any, axis_name: Any) -> Any:
    """A pytree as one member of a ``shard_map`` has it, so that its gradient is that member's own.

    A ``shard_map`` that checks what varies sums the gradient of what is equal on all members.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return vary(tree, manual_now() & set(axes))


def type_like(shape: Sequence[int], dtype: Any, array: Any) -> Any:
    """The type of an array that lies and varies over a mesh as ``array`` of that shape does."""
    if not isinstance(array, jax.Array) or array.shape != shape:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.typeof(array).update(dtype=jnp.dtype(dtype), weak_type=False)


# Collectives of a shard_map that tracks what varies over which axes; ours, whose program was
# checked when it was traced, doesn't.
UNTRACKED = {
    "psum_invariant": lambda x, axes, **_: lax.psum(x, axes),
    "all_gather_invariant": lambda x, axis_name, all_gather_dimension, tiled, **_: lax.all_gather(
        x, axis_name, axis=all_gather_dimension, tiled=tiled
    ),
}


def with_common_axes(inputs: Any) -> Any:
    """A pytree of arrays, each of which varies over all mesh axes that one of them varies over.

    Within a ``shard_map`` that checks what varies, arrays made here (a constant, a scale) vary over
    no axis: they are cast to the axes of the others, as JAX's own functions do.
    """
    if not manual_now():
        return inputs
    return vary(inputs, frozenset().union(*map(varying, jax.tree.leaves(inputs))))


def bind(primitive: jex.Primitive, params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """A primitive's results on plain arrays, from an equation's parameters."""
    inputs = with_common_axes(inputs)
    if primitive.name in UNTRACKED and not any(map(varying, inputs)):
        return [UNTRACKED[primitive.name](*inputs, **params)]
    outs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(outs) if primitive.multiple_results else [outs]


def is_partitioned(ctx: Any) -> bool:
    """Whether XLA partitions the program that a primitive is lowered in over several devices.

    Within a ``shard_map`` over all axes of its mesh it doesn't: each device has its own arrays.

    Args:
        ctx: what a lowering rule is given.
    """
    axes = ctx.module_context.axis_context
    manual, mesh = getattr(axes, "manual_axes", frozenset()), getattr(axes, "mesh", None)
    if mesh is not None:
        return mesh.size > 1 and frozenset(mesh.axis_names) != frozenset(manual)
    return getattr(axes, "num_devices", None) != 1


def needs_devices(primitive: jex.Primitive) -> None:
    """Says of a primitive that its lowering rule reads the devices of a program."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def has_explicit_mesh() -> bool:
    """Whether types carry how arrays are split over a mesh (``AxisType.Explicit``)."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return any(t == jax.sharding.AxisType.Explicit for t in types)
