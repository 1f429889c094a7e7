"""Transforms a user's function by an interpretation, differentiable from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from .. import _jax
from .._jax import Jaxpr, ShapedArray, Tracer, jex
from .._types import PyTree, TreeDef
from ._equation import all_equations
from ._interpret import Argument, Interpretation, interpret_jaxpr
from ._linear import Linear, differentiated_by, untransposable
from ._objects import pure_call
from ._program import Program, check_callable, trace
from ._wide import Value, is_float, is_inexact, map_floats, with_items


def _in_own_mesh(f: Callable[[Any, ShapedArray], PyTree]) -> Callable[[Any, ShapedArray], PyTree]:
    def call(x: Any, aval: ShapedArray) -> PyTree:
        with _jax.in_mesh_of(map(jax.typeof, jax.tree.leaves(x))):
            return f(x, aval)

    return call


def transform(
    f: Callable,
    interpretation: Interpretation,
    *,
    name: str,
    prepare: Callable[[Callable], Callable] = lambda f: f,
    rewrite: Callable[[Program], Program] = lambda program: program,
) -> Callable:
    """Returns ``f`` with every equation run under an interpretation.

    Differentiating the result differentiates ``f`` first, by JAX's own rules and ``f``'s own
    custom derivatives, and interprets forward and backward pass afterwards: ``grad(T(f))``
    equals ``T(grad(f))``, in forward and reverse mode and for derivatives of derivatives.

    Leaves that are arrays (or that the interpretation accepts as arrays) are traced; all others,
    of arguments and of results, are passed on as they are, so flags and Python numbers stay what
    they are. Mutable arrays (``jax.new_ref``) and Flax NNX objects are read before the call, and
    updated after it.

    Error messages begin with ``name``. ``prepare`` takes ``f`` as a function of
    pytrees and returns the function to be traced; ``rewrite`` takes the traced program and returns
    the one to be interpreted.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
    """
    check_callable(f, name)

    @functools.wraps(f, updated=())
    def interpreted(*args, **kwargs):
        with pure_call(f, args, kwargs, interpretation.is_argument) as call:
            program = trace(prepare(call.f), interpretation, call.args, call.kwargs, name=name)
            program = rewrite(program)
            outs = _Call.run(interpretation, program.jaxpr, program.paths, name, program.arrays)
            return call.finish(program.outputs(outs))

    mark(interpreted, prepare(f), interpretation)
    return interpreted


class Transformed(NamedTuple):
    """A function that is run under an interpretation, and what :func:`transform` made of it."""

    f: Callable
    interpretation: Interpretation
    result: Callable


def mark(result: Callable, f: Callable, interpretation: Interpretation) -> None:
    """Notes which function a result runs under which interpretation, for :func:`transformed`."""
    vars(result)["_transformed"] = Transformed(f, interpretation, result)


def transformed(f: Callable) -> Transformed | None:
    """Returns what a result of a transformation runs; None for other functions."""
    found = getattr(f, "_transformed", None)
    # functools.wraps copies attributes
    return found if isinstance(found, Transformed) and found.result is f else None


class _Call:
    """A call of a program under an interpretation, with a derivative of its own.

    Attributes:
        outer: the constants that belong to an outer trace, which travel as operands, by index. They
            aren't kept here, where they would outlive that trace.
    """

    def __init__(
        self, interpretation: Interpretation, jaxpr: Jaxpr, paths: Sequence[str], name: str
    ):
        self.interpretation, self.paths, self.name = interpretation, paths, name
        self.body, consts = _jax.open_jaxpr(jaxpr)
        self.outer = [i for i, c in enumerate(consts) if isinstance(c, Tracer)]
        self.consts = with_items(consts, self.outer, [None] * len(self.outer))
        hoisted = [self.body.constvars[i] for i in self.outer]
        self.operand_avals = _jax.avals_of([*hoisted, *self.body.invars])
        self.out_avals = _jax.avals_of(self.body.outvars)

    @classmethod
    def run(
        cls,
        interpretation: Interpretation,
        jaxpr: Jaxpr,
        paths: Sequence[str],
        name: str,
        arrays: Sequence[Argument],
    ) -> list[PyTree]:
        call = cls(interpretation, jaxpr, paths, name)
        consts = _jax.open_jaxpr(jaxpr)[1]
        operands = [*(consts[i] for i in call.outer), *arrays]
        if any(map(_jax.is_to_be_transposed, operands)):
            return call.transposable(operands)
        if any(map(_jax.is_taylor_series, operands)):
            raise TypeError(
                f"{name}: jax.experimental.jet has no rules for roundings: nest jax.jvp, or take "
                "jet of the function inside"
            )
        interpreted = jax.custom_jvp(call.primal)
        interpreted.defjvp(call.pushforward, symbolic_zeros=True)
        return interpreted(operands)

    def closed(self, hoisted: Sequence[jax.Array]) -> Jaxpr:
        return jex.ClosedJaxpr(self.body, with_items(self.consts, self.outer, hoisted))

    def plain(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        n = len(self.outer)
        return jex.jaxpr_as_fun(self.closed(operands[:n]))(*operands[n:])

    def lifted(self, operands: Sequence[Argument]) -> list[Value]:
        return map_floats(_in_own_mesh(self.interpretation.lift), operands, self.operand_avals)

    def emit(self, values: Iterable[Value]) -> list[PyTree]:
        outs: list[PyTree] = []
        for value, aval, path in zip(values, self.out_avals, self.paths, strict=True):
            with _jax.in_mesh_of(map(jax.typeof, jax.tree.leaves(value))):
                y = self.interpretation.emit(value, aval, path) if is_float(aval) else value
                outs.append(_jax.typed_as(y, aval))
        return outs

    def call(self, operands: list[Argument]) -> list[PyTree]:
        n = len(self.outer)

        def run():
            program, values = self.closed(operands[:n]), self.lifted(operands)[n:]
            return self.emit(interpret_jaxpr(self.interpretation, program, (), values)[1])

        with self.interpretation.context():
            return _jax.checked(run)

    def primal(self, operands: list[Argument]) -> list[PyTree]:
        outs = self.call(operands)
        if self.interpretation.transposes:
            return outs
        return jax.tree.map(partial(untransposable, self.name), outs)

    def transposable(self, operands: Sequence[Argument]) -> list[PyTree]:
        """Calls a linear program in a form whose transpose interprets the transposed program."""
        moving = [i for i, x in enumerate(operands) if _jax.is_to_be_transposed(x)]
        types = [self.operand_avals[i] for i in moving]
        known, tree = jax.tree.flatten(with_items(operands, moving, [None] * len(moving)))

        def run(constants, arrays):
            return self.call(with_items(jax.tree.unflatten(tree, constants), moving, arrays))

        def run_transposed(constants, cotangents):
            fixed = jax.tree.unflatten(tree, constants)

            def program(*cotangents):
                plain = lambda *xs: self.plain(with_items(fixed, moving, xs))  # noqa: E731
                return list(jax.linear_transpose(plain, *types)(list(cotangents)))

            return transform(program, self.interpretation, name=self.name)(*cotangents)

        def refused(*_):
            raise TypeError(f"{self.name}: a transposed function can't be differentiated")

        forward = Linear(run, lambda: backward, refused, types, self.out_avals)
        backward = Linear(run_transposed, lambda: forward, refused, self.out_avals, types)
        return forward(known, [operands[i] for i in moving])

    def pushforward(self, primals: tuple[list[Argument]], tangents: tuple[list[PyTree]]):
        (operands,), (changes,) = primals, tangents
        by = self.interpretation
        moving = [i for i, t in enumerate(changes) if not all(map(_is_zero, jax.tree.leaves(t)))]
        given = [by.tangent(operands[i], jax.tree.map(_instantiated, changes[i])) for i in moving]
        derivative = _Derivative(self, moving)
        outs, residuals = derivative.forward(lax.stop_gradient(operands))
        for y, path in zip(outs, self.paths, strict=True):
            if by.is_argument(y):
                raise TypeError(
                    f"{self.name}: output {path} is stored narrow and can't be differentiated; "
                    "differentiate inside, or leave that output out of the recipe's state"
                )
        constants, tree = jax.tree.flatten((residuals, operands))
        moved = iter(derivative.linear(tree)(constants, given))
        outs = differentiated_by(self.pushforward, outs, operands)
        return outs, [next(moved) if is_inexact(a) else _no_tangent(a) for a in self.out_avals]


class _Derivative:
    """The derivative of a call, linear in the tangents of some operands.

    Attributes:
        moving: these operands, by index.
        in_avals, out_avals: the types of their tangents and of the results'.
    """

    def __init__(self, call: _Call, moving: Sequence[int]):
        self.call, self.moving = call, moving
        self.in_avals = [call.operand_avals[i] for i in moving]
        self.out_avals = [a for a in call.out_avals if is_inexact(a)]

    def forward(self, operands: Sequence[Argument]) -> tuple[list[PyTree], list[Value]]:
        call, by = self.call, self.call.interpretation

        def primal(*operands):
            ys, pushforward, rest = jax.linearize(
                partial(self.split, operands), *[operands[i] for i in self.moving], has_aux=True
            )
            return ys, rest, pushforward

        jaxpr, shapes = jax.make_jaxpr(primal, return_shape=True)(*call.operand_avals)
        n_outs, n_moved = len(call.out_avals), len(shapes[0])
        self.tree = jax.tree.structure(shapes[2])
        self.residual_avals = _jax.avals_of(_jax.open_jaxpr(jaxpr)[0].outvars[n_outs:])

        def run():
            _, values = interpret_jaxpr(by, jaxpr, (), call.lifted(operands))
            moved, rest = iter(values[:n_moved]), iter(values[n_moved:n_outs])
            outs = call.emit([next(moved if is_inexact(a) else rest) for a in call.out_avals])
            return outs, map_floats(_in_own_mesh(by.residual), values[n_outs:], self.residual_avals)

        with by.context():
            return _jax.checked(run, lambda found: found[0])

    def split(self, operands: Sequence[jax.Array], *moved: jax.Array):
        outs = self.call.plain(with_items(operands, self.moving, moved))
        pairs = list(zip(outs, self.call.out_avals, strict=True))
        return [y for y, a in pairs if is_inexact(a)], [y for y, a in pairs if not is_inexact(a)]

    def linear(self, tree: TreeDef, transposed: bool = False) -> Linear:
        """Returns the derivative or its transpose; its constants are residuals and operands."""
        in_avals, out_avals = self.in_avals, self.out_avals
        if transposed:
            in_avals, out_avals = out_avals, in_avals

        def run(constants, arrays):
            residuals, _ = jax.tree.unflatten(tree, constants)
            return self.interpreted(residuals, arrays, out_avals, transposed)

        def derivative(constants, indices, tangents, arrays):
            def at(some):
                operands = jax.tree.unflatten(tree, with_items(constants, indices, some))[1]
                return self.rerun(operands, arrays, transposed)

            return jax.jvp(at, (tuple(constants[i] for i in indices),), (tuple(tangents),))[1]

        transpose = functools.partial(self.linear, tree, not transposed)
        return Linear(run, transpose, derivative, in_avals, out_avals)

    def interpreted(
        self,
        residuals: PyTree,
        arrays: Sequence[jax.Array],
        out_avals: Sequence[ShapedArray],
        transposed: bool,
    ) -> list[jax.Array]:
        call, by = self.call, self.call.interpretation

        def program(residuals, arrays):
            pushforward = jax.tree.unflatten(self.tree, residuals)
            if transposed:
                return jax.linear_transpose(pushforward, *self.in_avals)(arrays)
            return pushforward(*arrays)

        types = list(map(jax.typeof, arrays))
        jaxpr = jax.make_jaxpr(program)(self.residual_avals, types)
        if any(e.primitive.name == "custom_lin" for e in all_equations(jaxpr)):
            raise TypeError(
                f"{call.name}: the function has a custom_vjp, which has no forward mode: use "
                "reverse mode (jax.grad, jax.vjp, jax.jacrev)"
            )

        def run():
            given = map_floats(_in_own_mesh(by.lift), arrays, types)
            _, outs = interpret_jaxpr(by, jaxpr, (), [*residuals, *given])
            outs = map_floats(_in_own_mesh(by.lower), outs, out_avals)
            return list(map(_jax.typed_as, outs, out_avals))

        with by.context():
            return _jax.checked(run)

    def rerun(
        self, operands: Sequence[Argument], arrays: Sequence[jax.Array], transposed: bool
    ) -> list[jax.Array]:
        """Interprets the derivative as a program of the operands, itself differentiable."""
        call = self.call

        def program(operands, arrays):
            of_moving = partial(self.split, operands)
            moved = [operands[i] for i in self.moving]
            if transposed:
                return list(jax.vjp(of_moving, *moved, has_aux=True)[1](arrays))
            return jax.jvp(of_moving, moved, list(arrays), has_aux=True)[1]

        types = list(map(jax.typeof, arrays))
        jaxpr = jax.make_jaxpr(program)(call.operand_avals, types)
        paths = [""] * len(_jax.open_jaxpr(jaxpr)[0].outvars)
        return _Call.run(call.interpretation, jaxpr, paths, call.name, [*operands, *arrays])


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)


def _instantiated(tangent):
    if not _is_zero(tangent):
        return tangent
    return _no_tangent(tangent) if tangent.dtype == float0 else jnp.zeros_like(tangent)


def _no_tangent(aval) -> np.ndarray:
    return np.zeros(aval.shape, float0)
