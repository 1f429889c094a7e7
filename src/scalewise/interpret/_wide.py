"""Tells floats apart, and keeps 64-bit equations correct in a program lowered while x64 is off.

``emulate`` traces float64 equations inside of ``jax.enable_x64(True)``. An outer ``jax.jit`` lowers
them after that context has ended. Where JAX defines a primitive's lowering by other JAX functions
(``argmax``, ``igamma``, ``gather``), those functions are then traced without x64 and make float32
arrays. Such an equation is bound as scalewise's own primitive ``x64_scope``, whose lowering traces
the original one with x64 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, Parameter, ShapedArray, Tracer, ad, batching, jex, mlir
from .._types import PyTree
from ..primitives import having, params

T = TypeVar("T")

Value: TypeAlias = Any
"""What stands for one array, a pytree that the interpretation chooses; see Interpretation."""


class HasDtype(Protocol):
    """An array, or the abstract type of one."""

    @property
    def dtype(self) -> np.dtype: ...


_is_floating = lru_cache(maxsize=64)(lambda dtype: jnp.issubdtype(dtype, jnp.floating))


def is_float(aval: HasDtype) -> bool:
    """Returns whether arrays of this abstract type are lifted: real floats of any width."""
    return _is_floating(aval.dtype)


def is_inexact(aval: HasDtype) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def map_floats(
    f: Callable[[Value, ShapedArray], Value],
    values: Iterable[Value],
    avals: Iterable[ShapedArray],
    lifts: Callable[[ShapedArray], bool] = is_float,
) -> list[Value]:
    """Returns ``f(value, aval)`` for each value of a float's type, or of another type that
    ``lifts``, and all others unchanged."""
    return [f(x, a) if lifts(a) else x for x, a in zip(values, avals, strict=True)]


def map_in_meshes(
    f: Callable[[Value, ShapedArray], Value],
    values: Iterable[Value],
    avals: Iterable[ShapedArray],
    lifts: Callable[[ShapedArray], bool] = is_float,
) -> list[Value]:
    """Returns the same as :func:`map_floats`, where values may be of another mesh than the
    caller's."""

    def call(x: Value, aval: ShapedArray) -> Value:
        with _jax.in_mesh_of([aval]):
            return f(x, aval)

    return map_floats(call, values, avals, lifts)


def with_items(values: Iterable[T], indices: Iterable[int], items: Iterable[T]) -> list[T]:
    full = list(values)
    for i, x in zip(indices, items, strict=True):
        full[i] = x
    return full


DIRECT = having("direct")  # they need no scope; a missing name only costs time

scope_p = jex.Primitive("x64_scope")
scope_p.multiple_results = True


def bind(
    primitive: jex.Primitive, params: dict[str, Parameter], inputs: Sequence[ArrayLike]
) -> list[jax.Array]:
    """Binds a primitive to plain arrays, correctly also under an outer ``jit`` without x64."""
    traced = any(isinstance(x, Tracer) for x in inputs)
    if traced and primitive.name not in DIRECT and any(map(_jax.is_64_bit, inputs)):
        inputs = _jax.with_common_axes(inputs)
        return scope_p.bind(*inputs, operation=primitive, params=tuple(params.items()))
    return _jax.bind(primitive, params, inputs)


def _bound(
    primitive: jex.Primitive, params: Sequence[tuple[str, Parameter]], *inputs: ArrayLike
) -> list[jax.Array]:
    return _jax.bind(primitive, dict(params), inputs)


@scope_p.def_impl
def _impl(*inputs, operation, params):
    with jax.enable_x64(True):
        return _bound(operation, params, *inputs)


@scope_p.def_effectful_abstract_eval
def _abstract(*avals, operation, params):
    with jax.enable_x64(True):
        outs, effects = operation.abstract_eval(*avals, **dict(params))
    return (outs if operation.multiple_results else [outs]), effects


def _lower(ctx, *inputs, operation, params):
    with jax.enable_x64(True):
        rule = mlir.lower_fun(partial(_bound, operation, params), multiple_results=True)
        return rule(ctx, *inputs)


mlir.register_lowering(scope_p, _lower)


def _again(f: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
    """Returns ``f`` of arrays, traced, with each of its equations bound by :func:`bind`."""
    with jax.enable_x64(True):
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*inputs)
        outs = _evaluate(closed, jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _evaluate(jaxpr: Jaxpr, inputs: Sequence[ArrayLike]) -> list[ArrayLike]:
    body, consts = _jax.open_jaxpr(jaxpr)
    known: dict[jex.Var, ArrayLike] = dict(zip(body.constvars, consts, strict=True))
    known.update(zip(body.invars, inputs, strict=True))

    def read(x: jex.Var | jex.Literal) -> ArrayLike:
        return x.val if isinstance(x, jex.Literal) else known[x]

    for eqn in body.eqns:
        values = [read(x) for x in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            outs = _evaluate(params.body(eqn), values)
        else:
            outs = bind(eqn.primitive, eqn.params, values)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in body.outvars]


def _batch(inputs, dims, *, operation, params):
    outs = _again(jax.vmap(partial(_bound, operation, params), in_axes=tuple(dims)), *inputs)
    return outs, [0] * len(outs)


batching.primitive_batchers[scope_p] = _batch


def _differentiable(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _jvp(primals, tangents, *, operation, params):
    floats = [i for i, x in enumerate(primals) if _differentiable(x)]

    def both(primals, tangents):
        def of_floats(*some):
            return _bound(operation, params, *with_items(primals, floats, some))

        outs, moved = jax.jvp(of_floats, tuple(primals[i] for i in floats), tuple(tangents))
        return outs, [t for y, t in zip(outs, moved, strict=True) if _differentiable(y)]

    given = [ad.instantiate_zeros(tangents[i]) for i in floats]
    outs, moved = _again(both, list(primals), given)
    found = iter(moved)
    return outs, [
        next(found) if _differentiable(y) else ad.Zero(jax.typeof(y).to_tangent_aval())
        for y in outs
    ]


ad.primitive_jvps[scope_p] = _jvp


def _transpose(cotangents, *inputs, operation, params):
    linear = [i for i, x in enumerate(inputs) if ad.is_undefined_primal(x)]
    known = [None if i in linear else x for i, x in enumerate(inputs)]

    def pull(known, cotangents):
        def of_linear(*some):
            return _bound(operation, params, *with_items(known, linear, some))

        shapes = [jax.ShapeDtypeStruct(inputs[i].aval.shape, inputs[i].aval.dtype) for i in linear]
        return jax.linear_transpose(of_linear, *shapes)(cotangents)

    grads = _again(pull, known, [ad.instantiate_zeros(c) for c in cotangents])
    return with_items([None] * len(inputs), linear, grads)


ad.primitive_transposes[scope_p] = _transpose
