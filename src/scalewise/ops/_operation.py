"""An operation as one JAX equation, which interpretations compute, round and record as a whole.

The steps that compute an operation in one format (integers, bits, powers of two) mean nothing when
each of them is rounded to another format. So every operation is one equation, with a primitive that
has the operation's name, and so are its derivatives of every order, and all of them under ``vmap``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Parameter, ShapedArray, ad, avals_of, batching, jex, mlir, open_jaxpr
from ..formats import Format
from ..formats import format as format_
from ..rounding import from_float64, round_bits

Arrays: TypeAlias = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of arrays, from its definition.

    Attributes:
        definition: a function of a module, of arrays and of the options by name.
        options: names and values. ``fmt`` is the format in which the operation computes; None: that
            of its first operand's dtype, or of the machine that an interpretation emulates.
        given: for each array of the definition's whether there is one, or None in its place.
    """

    definition: Callable[..., jax.Array]
    options: tuple[tuple[str, Hashable], ...]
    given: tuple[bool, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        filled = [next(rest) if given else None for given in self.given]
        return [self.definition(*filled, **dict(self.options))]

    def in_format(self, fmt: Format) -> Operation:
        options = ((k, fmt if k == "fmt" and v is None else v) for k, v in self.options)
        return dataclasses.replace(self, options=tuple(options))


@dataclasses.dataclass(frozen=True)
class _Derived:
    """A function made of another one, which is computed in a format if the other one can be."""

    function: Any  # an operation, derived itself, or another package's function of arrays

    def in_format(self, fmt: Format) -> _Derived:
        if not isinstance(self.function, Operation | _Derived):
            return self
        return dataclasses.replace(self, function=self.function.in_format(fmt))


@dataclasses.dataclass(frozen=True)
class Batched(_Derived):
    """A function of arrays with one more axis, or None."""

    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Arrays:
        return jax.vmap(self.function, in_axes=self.axes)(*arrays)


@dataclasses.dataclass(frozen=True)
class Tangent(_Derived):
    """The derivative of a function along tangents of some operands, which follow the operands."""

    moving: tuple[int, ...]  # the positions of these operands

    def at(self, operands: Arrays) -> tuple[Callable[..., Arrays], Arrays]:
        """Returns the function of the moving operands, and these."""

        def of_moving(*some: jax.Array) -> Arrays:
            filled = list(operands)
            for i, x in zip(self.moving, some, strict=True):
                filled[i] = x
            return self.function(*filled)

        return of_moving, [operands[i] for i in self.moving]

    def __call__(self, *arrays: jax.Array) -> Arrays:
        n = len(arrays) - len(self.moving)
        of_moving, some = self.at(arrays[:n])
        return jax.jvp(of_moving, tuple(some), tuple(arrays[n:]))[1]


@dataclasses.dataclass(frozen=True)
class Cotangent(_Derived):
    """The transpose of a :class:`Tangent`: the gradient, from the operands and that of results."""

    results: int

    def __call__(self, *arrays: jax.Array) -> Arrays:
        n = len(arrays) - self.results
        of_moving, some = self.function.at(arrays[:n])
        outs, pull = jax.vjp(of_moving, *some)
        given = [c.astype(y.dtype) for c, y in zip(arrays[n:], outs, strict=True)]
        return pull(type(outs)(given))


def operation(
    name: str,
    definition: Callable[..., jax.Array],
    *arrays: jax.Array | None,
    out: np.dtype | None = None,
    **options: Hashable,
) -> jax.Array:
    """Returns ``definition(*arrays, **options)`` as one equation, in the first array's dtype or
    ``out``."""
    given = [x for x in arrays if x is not None]
    function = Operation(definition, tuple(options.items()), tuple(x is not None for x in arrays))
    out = np.dtype(given[0].dtype if out is None else out)
    return _primitive(f"ops.{name}").bind(*given, function=function, dtype_0=out)[0]


def wide_dtype(dtype: np.dtype) -> type[np.float32 | np.float64]:
    """Returns the dtype in which derivatives are computed."""
    return np.float64 if dtype == np.float64 else np.float32


@functools.lru_cache(maxsize=4096)
def traced_once(
    function: Callable[..., Any], options: tuple[tuple[str, Hashable], ...]
) -> Callable[..., Any]:
    """Returns the function of arrays that an operation and its derivatives, equations of their own,
    trace and lower once, where they compute the same."""
    return jax.jit(functools.partial(function, **dict(options)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def with_derivative_of(
    exact: Callable[..., Any],
    function: Callable[..., Any],
    options: tuple[tuple[str, Hashable], ...],
    *arrays: jax.Array | None,
) -> Any:
    """Returns ``function(*arrays, **options)``, whose derivatives of every order are those of
    ``exact``, a differentiable function of the same arrays and options."""
    return traced_once(function, options)(*arrays)


@with_derivative_of.defjvp
def _(exact, function, options, primals, tangents):
    outs = with_derivative_of(exact, function, options, *primals)
    moved = jax.jvp(functools.partial(exact, **dict(options)), primals, tangents)[1]
    return outs, jax.tree.map(lambda t, y: t.astype(y.dtype), moved, outs)


def in_format(eqn: jex.JaxprEqn, fmt: Format) -> jex.JaxprEqn | None:
    """Returns an operation's equation in the arithmetic of a machine with one format; None for an
    equation that computes in the same way whatever the machine's format."""
    function = eqn.params.get("function")
    if not isinstance(function, Operation | _Derived):
        return None
    changed = function.in_format(fmt)
    return None if changed == function else eqn.replace(params=eqn.params | {"function": changed})


@functools.cache
def _primitive(name: str) -> jex.Primitive:
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    vars(primitive)["any_dtype"] = True  # read where an interpretation binds it to other floats
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(primitive, _lower)
    batching.primitive_batchers[primitive] = functools.partial(_batch, name)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, name)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, name)
    return primitive


# The results' dtypes are parameters `dtype_0` and so on of their own: an interpretation that binds
# an equation to floats of another width replaces them.


def _bind(name: str, function: Hashable, dtypes: Sequence[np.dtype], arrays: Arrays) -> Arrays:
    numbered = {f"dtype_{i}": np.dtype(d) for i, d in enumerate(dtypes)}
    return _primitive(name).bind(*arrays, function=function, **numbered)


@functools.lru_cache(maxsize=4096)
def _jitted(function: Callable[..., Arrays], dtypes: tuple[np.dtype, ...]) -> Callable[..., Arrays]:
    def computed(*arrays: jax.Array) -> Arrays:
        outs = function(*arrays)
        return [in_dtype(y, dtype) for y, dtype in zip(outs, dtypes, strict=True)]

    return jax.jit(computed)


def in_dtype(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts to another dtype; rounds float64 to a 16-bit format first: a backend may convert it
    by way of float32, and round twice."""
    if x.dtype != jnp.float64 or x.dtype == dtype:
        return x.astype(dtype)
    fmt = format_(dtype)
    with jax.enable_x64(True):
        return from_float64(x if fmt.bits >= 32 else round_bits(x, fmt), dtype)


def _run(*arrays: jax.Array, function: Callable[..., Arrays], **dtypes: np.dtype) -> Arrays:
    return _jitted(function, tuple(dtypes.values()))(*arrays)


def _wide(types: Sequence[Any]) -> contextlib.AbstractContextManager[object]:
    # an outer jit may be lowered without 64-bit types
    wide = any(np.dtype(t.dtype).itemsize == 8 for t in types)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _abstract(*types: ShapedArray, **params: Parameter) -> list[ShapedArray]:
    dtypes = [d for k, d in params.items() if k != "function"]
    with _wide([*types, *(jax.ShapeDtypeStruct((), d) for d in dtypes)]):
        mesh = jax.sharding.get_abstract_mesh()
        return _results(types, tuple(params.items()), mesh, jax.config.jax_enable_x64)  # pyright: ignore


@functools.lru_cache(maxsize=4096)
def _results(types: Sequence[ShapedArray], params: Any, *_: Hashable) -> list[ShapedArray]:
    traced = jax.make_jaxpr(functools.partial(_run, **dict(params)))(*types)
    return avals_of(open_jaxpr(traced)[0].outvars)


_lower_run = mlir.lower_fun(_run, multiple_results=True)


def _lower(ctx: mlir.LoweringRuleContext, *arrays: Any, **params: Parameter) -> Any:
    with _wide([*ctx.avals_in, *ctx.avals_out]):
        return _lower_run(ctx, *arrays, **params)


def _batch(
    name: str,
    arrays: Arrays,
    axes: Sequence[int | None],
    *,
    function: Callable[..., Arrays],
    **dtypes: np.dtype,
) -> tuple[Arrays, list[int]]:
    n, size = len(arrays) - _linear(function), _size(arrays, axes)
    moved = [  # what is transposed has its axis in front
        jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(arrays[n:], axes[n:], strict=True)
    ]
    batched = Batched(function, (*axes[:n], *[0] * len(moved)))
    outs = _bind(name, batched, list(dtypes.values()), [*arrays[:n], *moved])
    return outs, [0] * len(outs)


def _size(arrays: Arrays, axes: Sequence[int | None]) -> int:
    return next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)


def _linear(function: Callable[..., Arrays]) -> int:
    """Returns in how many of its last operands a function is linear."""
    if isinstance(function, Batched):
        return _linear(function.function)
    return len(function.moving) if isinstance(function, Tangent) else 0


def _transposed(function: Any, results: int) -> Cotangent | Batched:
    if isinstance(function, Batched):
        known = function.axes[: len(function.axes) - _linear(function)]
        return Batched(_transposed(function.function, results), (*known, *[0] * results))
    return Cotangent(function, results)


def _jvp(
    name: str,
    primals: Arrays,
    tangents: Sequence[Any],
    *,
    function: Callable[..., Arrays],
    **dtypes: np.dtype,
) -> tuple[Arrays, Arrays]:
    known = list(dtypes.values())
    moving = tuple(
        i
        for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        if jnp.issubdtype(x.dtype, jnp.floating) and type(t) is not ad.Zero
    )
    given = [ad.instantiate_zeros(tangents[i]) for i in moving]
    moved = _bind(f"{name}_jvp", Tangent(function, moving), known, [*primals, *given])
    return _bind(name, function, known, primals), moved


def _transpose(name: str, cotangents: Any, *inputs: Any, function: Any, **dtypes: Any) -> Any:
    n = sum(not ad.is_undefined_primal(x) for x in inputs)
    types = [x.aval.dtype for x in inputs[n:]]
    given = [ad.instantiate_zeros(c) for c in cotangents]
    name = f"{name.removesuffix('_jvp')}_backward"
    pulled = _bind(name, _transposed(function, len(given)), types, [*inputs[:n], *given])
    return [None] * n + list(pulled)
