"""A primitive for linear functions that are transposed and differentiated by functions of ours.

The derivative of an interpreted program is one: its transpose interprets the transposed program,
rather than transpose the roundings of the interpretation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _jax
from .._jax import AxisData, Jaxpr, ShapedArray, Tracer, ad, batching, jex, mlir
from ._wide import is_inexact

Arrays = Sequence[jax.Array]

linear_p = jex.Primitive("interpreted_derivative")
linear_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A function of constants and of arrays in which it is linear.

    Attributes:
        run: returns the results for ``(constants, arrays)``.
        transposed: returns the transpose, whose constants are the same.
        derivative: returns the change of the results for ``(constants, indices, tangents,
            arrays)``, the tangents of the constants at these indices.
        in_avals, out_avals: the types of the arrays and of the results.
        constant_avals: the types of the constants, where the function is called.
    """

    run: Callable[[Arrays, Arrays], Arrays]
    transposed: Callable[[], Linear]
    derivative: Callable[[Arrays, tuple[int, ...], Arrays, Arrays], Arrays]
    in_avals: Sequence[ShapedArray]
    out_avals: Sequence[ShapedArray]
    constant_avals: Sequence[ShapedArray] = ()

    def __call__(self, constants: Arrays, arrays: Arrays) -> list[jax.Array]:
        # JAX passes on a program's literals, which are no arrays
        numbers = int | float | complex
        constants = [jnp.asarray(x) if isinstance(x, numbers) else x for x in constants]
        called = dataclasses.replace(self, constant_avals=list(map(jax.typeof, constants)))
        return linear_p.bind(*constants, *arrays, function=called, count=len(constants))

    @cached_property
    def _opened(self) -> tuple[Jaxpr, Arrays]:
        n = len(self.constant_avals)
        program = jax.make_jaxpr(lambda *xs: self.run(xs[:n], xs[n:]))
        return _jax.open_jaxpr(program(*self.constant_avals, *self.in_avals))

    # of an equation's body, as an interpretation of the derivative reads them
    jaxpr = property(lambda self: self._opened[0])
    consts = property(lambda self: self._opened[1])

    def over_axis(self, dims: Sequence[int | None], axis: AxisData) -> Linear:
        def mapped(f: Callable, *in_axes) -> Callable:
            names = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
            return jax.vmap(f, in_axes, 0, axis_size=axis.size, **names)

        def derivative(constants, indices, tangents, arrays):
            moved = mapped(
                lambda c, t, a: self.derivative(c, indices, t, a),
                list(dims), [dims[i] for i in indices], 0,
            )  # fmt: skip
            return moved(list(constants), list(tangents), list(arrays))

        def run(constants, arrays):
            return mapped(self.run, list(dims), 0)(list(constants), list(arrays))

        def stacked(aval: ShapedArray) -> ShapedArray:
            spec = PartitionSpec(None, *aval.sharding.spec)
            sharding = aval.sharding.update(spec=spec)
            return aval.update(shape=(axis.size, *aval.shape), sharding=sharding)

        types = [list(map(stacked, avals)) for avals in (self.in_avals, self.out_avals)]
        return Linear(run, lambda: self.transposed().over_axis(dims, axis), derivative, *types)


def _run(*operands: jax.Array, function: Linear, count: int) -> list[jax.Array]:
    return list(function.run(operands[:count], operands[count:]))


def _jvp(primals, tangents, *, function: Linear, count: int):
    constants, arrays = primals[:count], primals[count:]
    outs = function(constants, arrays)
    parts: list[Arrays] = []
    if not all(isinstance(t, ad.Zero) for t in tangents[count:]):
        parts.append(function(constants, [ad.instantiate_zeros(t) for t in tangents[count:]]))
    moving = tuple(i for i, t in enumerate(tangents[:count]) if not isinstance(t, ad.Zero))
    if moving:
        changes = [tangents[i] for i in moving]
        parts.append(function.derivative(constants, moving, changes, arrays))
    return outs, [sum(some[1:], start=some[0]) for some in zip(*parts, strict=True)]


def _transpose(cotangents, *operands, function: Linear, count: int):
    given = [ad.instantiate_zeros(ct) if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    found = function.transposed()(operands[:count], given)
    return [None] * count + list(found)


def _batch(axis: AxisData, operands, dims, *, function: Linear, count: int):
    if all(d is None for d in dims) and not _jax.has_name(axis):
        outs = function(operands[:count], operands[count:])
        return outs, [None] * len(outs)
    moved = zip(operands[count:], dims[count:], strict=True)
    arrays = [batching.bdim_at_front(x, d, axis.size) for x, d in moved]
    outs = function.over_axis(dims[:count], axis)(operands[:count], arrays)
    return outs, [0] * len(outs)


linear_p.def_impl(_run)
linear_p.def_abstract_eval(lambda *_, function, count: list(function.out_avals))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiated_by(pushforward: Callable, results, operands):
    """Returns results whose derivative ``pushforward`` computes from the operands."""
    del pushforward, operands
    return results


@partial(differentiated_by.defjvp, symbolic_zeros=True)
def _(pushforward, primals, tangents):
    (results, operands), (_, moved) = primals, tangents
    changes = pushforward((operands,), (moved,))[1]
    return differentiated_by(pushforward, results, operands), changes


def untransposable(name: str, x: jax.Array) -> jax.Array:
    """Returns ``x``, a result whose transposition is refused: it would transpose roundings."""
    aval = jax.typeof(x)
    if not isinstance(x, Tracer) or not is_inexact(aval):
        return x

    def refused(*_):
        raise TypeError(
            f"{name}: a function can't be transposed within jit or checkpoint: apply "
            "jax.linear_transpose to what autoscale or emulate returns, and jit the transpose"
        )

    return Linear(lambda _, arrays: arrays, refused, refused, [aval], [aval])([], [x])[0]
