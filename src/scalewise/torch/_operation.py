"""One ATen operation as one JAX equation: computed in float32, its results rounded once.

torch's kernels for 16-bit dtypes compute a softmax, a norm or a GELU in float32 and round the
result. A rule of several JAX operations would round after each. So such a rule becomes an equation
of its own, whose primitive has the operation's name; ``emulate`` and ``audit`` bind it to wider
arrays, as any other equation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Parameter, ShapedArray, ad, batching, jex, mlir, source_info_util
from .._types import PyTree, TreeDef
from ..interpret import InDtype, all_equations, interpret_jaxpr, is_float, is_inexact
from ..ops import Cotangent, Tangent
from ..primitives import PRIMITIVES, Family, having, names
from ._torch import torch

EXACT = having("exact")
SUMS = names(lambda row: row.autocast == "sum")  # XLA may accumulate them in 16 bits
CALLS = names(lambda row: row.family is Family.CALL)  # their bodies' equations count instead
MOVED = ("_to_copy", "to", "constant")  # elementwise operations that torch doesn't call pointwise
# Factors and terms that every format holds, so that rounding them to a dtype changes nothing.
HELD = frozenset({0.0, 0.5, 1.0, 2.0, float("inf")})


@dataclasses.dataclass(frozen=True)
class Call:
    """A rule with its Python arguments; a function of the arrays among them."""

    rule: Callable[..., PyTree]  # the rule
    tree: TreeDef  # the structure of the positional and keyword arguments
    static: tuple[Any, ...]  # the leaves, None in place of each array
    at: tuple[int, ...]  # the positions of the arrays

    def __call__(self, *arrays: jax.Array) -> PyTree:
        leaves = list(self.static)
        for i, x in zip(self.at, arrays, strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.rule(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class InSteps(InDtype):
    """Rounds the result of each step to one dtype, and each constant by a step of its own.

    A program that is traced in the dtype has rounded its constants already: a reference run
    wouldn't know them.
    """

    def constant(self, x: np.ndarray, aval: ShapedArray) -> jax.Array:
        rounded = np.asarray(x).astype(self.dtype)
        if np.array_equal(rounded.astype(x.dtype), x, equal_nan=True):
            return jnp.asarray(rounded)
        return rounded_in_program(jnp.asarray(x, jnp.float32), self.dtype)


def rounded_in_program(x: Any, dtype: Any) -> jax.Array:
    """Returns ``x`` in a narrower dtype, rounded by an equation: JAX would fold it if constant."""
    return operation("constant", _same, [jnp.dtype(dtype)], x)[0]


def _same(x: jax.Array) -> jax.Array:
    return x


def in_float32(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of arrays with float32 for each float: 16 bits may not hold a literal."""
    return [jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_float(x) else x.dtype) for x in arrays]


def in_steps(
    function: Callable[..., PyTree], dtypes: Sequence[np.dtype], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Computes a function of several JAX operations, each of which rounds its results if all floats
    have one 16-bit dtype."""
    floats = {d for d in (*dtypes, *(x.dtype for x in arrays)) if jnp.issubdtype(d, jnp.floating)}
    if len(floats) != 1 or (low := floats.pop()).itemsize != 2:
        return jax.tree.leaves(function(*arrays))
    closed = jax.make_jaxpr(function)(*in_float32(arrays))
    return _stepped(closed, low, arrays)


def _stepped(closed: Any, low: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    # JAX cuts their tracebacks off here: the steps are to have the lines of whoever calls this
    here = [x.replace(source_info=source_info_util.new_source_info()) for x in closed.eqns]
    closed = closed.replace(jaxpr=closed.jaxpr.replace(eqns=here))
    return interpret_jaxpr(InSteps(low), closed, (), arrays)[1]


@dataclasses.dataclass(frozen=True)
class Inexact:
    """The real and complex results of a function, floats as wide as its operands."""

    function: Callable[..., PyTree]  # of arrays

    def __call__(self, *arrays: jax.Array) -> list[Any]:
        outs = [y for y in jax.tree.leaves(self.function(*arrays)) if is_inexact(y)]
        wide = next(x for x in arrays if is_inexact(x)).real.dtype
        return [y.astype(wide) if is_float(y) else y for y in outs]


def tangent_of(function: Callable[..., PyTree], at: tuple[int, ...]) -> Tangent:
    return Tangent(Inexact(function), at)


class OwnTranspose(Tangent):
    """A tangent of an operation with a transpose of several equations."""

    def pulled(self, operands: Sequence[jax.Array], given: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the gradients of the moving operands from those of the results.

        Raises:
            NotImplementedError: they are those of the tangent.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Mapped(OwnTranspose):
    """A tangent for each number along the first axis of the tangents and of some operands."""

    axes: tuple[int | None, ...]  # of all operands and tangents

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.vmap(self.function, self.axes)(*arrays)

    def pulled(self, operands: Sequence[jax.Array], given: Sequence[jax.Array]) -> list[jax.Array]:
        axes = [*self.axes[: len(operands)]], 0
        return jax.vmap(self.function.pulled, axes)([*operands], [*given])


@functools.cache
def primitive_of(name: str) -> jex.Primitive:
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    vars(primitive)["elementwise"] = _is_elementwise(name)  # read where an audit shares code
    vars(primitive)["steps"] = _compute  # read where an interpretation takes it apart
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(primitive, _lower)
    batching.primitive_batchers[primitive] = functools.partial(_batch, name)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, name)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, name)
    return primitive


def _is_elementwise(name: str) -> bool:
    name = name.removeprefix("aten.").removesuffix("_jvp").removesuffix("_backward")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, x) for x in packet.overloads()] if packet is not None else []
    return name in MOVED or any(torch.Tag.pointwise in x.tags for x in overloads)


def operation(name: str, function: Callable[..., PyTree], dtypes: Sequence[np.dtype], *arrays: Any):
    """Computes a function in float32 (float64 for float64 operands), as one equation. ``function``
    is hashable; ``dtypes`` are those of the results."""
    types = {f"dtype_{i}": jnp.dtype(dtype) for i, dtype in enumerate(dtypes)}
    name = f"aten.{name}" if name in PRIMITIVES else name
    return primitive_of(name).bind(*arrays, function=function, **types)


def one_step(name: str, function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    """Returns a function's result, rounded once; equal functions have to be equal as objects."""
    return operation(name, function, [arrays[0].dtype], *arrays)[0]


def _compute(*arrays: Any, function: Any, **dtypes: np.dtype) -> list[Any]:
    # `dtype_0` and so on are parameters of their own: whoever binds the equation to floats of
    # another width replaces them
    wide = jnp.float64 if any(x.dtype == jnp.float64 for x in arrays) else jnp.float32
    outs = jax.tree.leaves(function(*[x.astype(wide) if is_float(x) else x for x in arrays]))
    found = [dtypes[f"dtype_{i}"] for i in range(len(outs))]
    return [y.astype(dtype) for y, dtype in zip(outs, found, strict=True)]


def _lower(ctx: Any, *arrays: Any, **params: Parameter) -> Any:
    wide = any(a.dtype.itemsize == 8 for a in (*ctx.avals_in, *ctx.avals_out))
    with jax.enable_x64(True) if wide else contextlib.nullcontext():  # an outer jit may be without
        return _lower_fun(ctx, *arrays, **params)


@functools.cache
def _jitted(function: Any, dtypes: tuple[tuple[str, np.dtype], ...]) -> Callable:
    return jax.jit(functools.partial(_compute, function=function, **dict(dtypes)))


_lower_fun = mlir.lower_fun(_compute, multiple_results=True)


def _run(*arrays: Any, function: Any, **dtypes: np.dtype) -> list[Any]:
    return _jitted(function, tuple(dtypes.items()))(*arrays)


def _abstract(*avals: Any, function: Any, **dtypes: np.dtype) -> list[Any]:
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    return list(
        _results(function, tuple(dtypes.items()), types, jax.dtypes.canonicalize_dtype(np.float64))
    )


@functools.lru_cache(maxsize=4096)
def _results(function: Any, dtypes: Any, types: Any, widest: np.dtype) -> tuple[ShapedArray, ...]:
    outs = jax.eval_shape(functools.partial(_compute, function=function, **dict(dtypes)), *types)
    return tuple(ShapedArray(y.shape, y.dtype) for y in outs)


def _batch(name: str, arrays: Any, dims: Any, **params: Any) -> Any:
    function = params["function"]
    if isinstance(function, OwnTranspose):
        size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
        n = len(arrays) - len(function.moving)
        given = [
            batching.bdim_at_front(x, d, size) for x, d in zip(arrays[n:], dims[n:], strict=True)
        ]
        mapped = Mapped(function, function.moving, (*dims[:n], *[0] * len(given)))
        outs = primitive_of(name).bind(*arrays[:n], *given, **params | {"function": mapped})
        return outs, [0] * len(outs)
    outs = jax.vmap(functools.partial(_compute, **params), in_axes=tuple(dims))(*arrays)
    return outs, [0] * len(outs)


def _jvp(
    name: str,
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array | ad.Zero],
    *,
    function: Any,
    **dtypes: np.dtype,
) -> Any:
    outs = primitive_of(name).bind(*primals, function=function, **dtypes)
    at = tuple(
        i
        for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        if is_inexact(x) and type(t) is not ad.Zero
    )
    moving = [y for y in outs if is_inexact(y)] if at else []
    given, found = [ad.instantiate_zeros(tangents[i]) for i in at], iter(())
    if moving:
        tangent = tangent_of(function, at)
        types = [y.dtype for y in moving]
        found = iter(operation(f"{name}_jvp", tangent, types, *primals, *given))
    return outs, [
        next(found) if moving and is_inexact(y) else ad.Zero(jax.typeof(y).to_tangent_aval())
        for y in outs
    ]


def _transpose(name: str, cotangents: Any, *inputs: Any, function: Any, **dtypes: Any) -> Any:
    assert isinstance(function, Tangent)
    n = len(inputs) - len(function.moving)
    operands, tangents = inputs[:n], inputs[n:]
    given = [ad.instantiate_zeros(c) for c in cotangents]
    types = [x.aval.dtype for x in tangents]
    if isinstance(function, OwnTranspose):
        with contextlib.suppress(NotImplementedError):
            return [None] * n + function.pulled(operands, given)
    name = f"{name.removesuffix('_jvp')}_backward"
    pulled = operation(name, Cotangent(function, len(given)), types, *operands, *given)
    return [None] * len(operands) + list(pulled)


@functools.lru_cache(maxsize=4096)
def rounds_several_times(
    call: Call, arrays: tuple[jax.ShapeDtypeStruct, ...], dtypes: tuple[np.dtype, ...]
) -> bool:
    """Returns whether a rule rounds more than once, or rounds a constant or to another dtype."""
    if any(isinstance(x, float) and abs(x) not in HELD and x == x for x in call.static):
        return True
    jaxpr: Any = jax.make_jaxpr(call)(*arrays)
    results = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    if [v.aval.dtype for v in jaxpr.jaxpr.outvars] != list(dtypes):
        return True
    rounded = 0
    for eqn in all_equations(jaxpr):
        avals: list[Any] = [v.aval for v in eqn.outvars]
        floats = [a.dtype for a in avals if is_float(a)]
        if any(d not in results for d in floats) or (results and not floats and _widens(eqn)):
            return True
        if eqn.primitive.name == "convert_element_type" and floats:
            return True
        name = eqn.primitive.name
        if name in SUMS and any(d.itemsize < 4 for d in floats):
            return True
        rounded += bool(floats) and name not in CALLS and name not in EXACT
    return rounded > 1


def _widens(eqn: Any) -> bool:
    return eqn.primitive.name == "convert_element_type" and is_float(eqn.invars[0].aval)
