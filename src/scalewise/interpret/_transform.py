"""Transforms a user's function by an interpretation, differentiable from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.extend.core as jex
from jax.core import ShapedArray, Tracer

from .._types import PyTree, TreeDef
from ..primitives.params import Jaxpr
from . import _compat
from ._floats import Value, is_float, map_floats, with_items
from ._interpret import interpret_jaxpr
from ._interpretation import Argument, Interpretation
from ._objects import pure_call
from ._program import Program, check_callable, trace

STATELESS = ()


def _strong(aval: ShapedArray) -> ShapedArray:
    """Returns an array's type without its weak dtype, with the mesh axes over which it varies."""
    return aval.update(weak_type=False)


def transform(
    f: Callable,
    interpretation: Interpretation,
    *,
    name: str,
    prepare: Callable[[Callable], Callable] = lambda f: f,
) -> Callable:
    """Returns ``f`` with every equation run under an interpretation.

    Differentiating the result differentiates ``f`` first, by JAX's own rules and ``f``'s own
    custom derivatives, and interprets forward and backward pass afterwards: ``grad(T(f))`` equals
    ``T(grad(f))``. Reverse mode only: JAX refuses forward mode from outside
    (``jax.custom_vjp``); inside ``f`` every mode works.

    Args:
        f: any function of pytrees. Leaves that are arrays (or that the interpretation accepts as
            arrays) are traced; all others, of arguments and of results, are passed on as they are,
            so flags and Python numbers stay what they are. Mutable arrays (``jax.new_ref``) and
            Flax NNX objects are read before the call, and updated after it.
        interpretation: applied to each equation.
        name: the transformation's name, for error messages.
        prepare: returns the function to be traced, for ``f`` as a function of pytrees alone.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
    """
    check_callable(f, name)

    @functools.wraps(f, updated=())
    def interpreted(*args, **kwargs):
        with pure_call(f, args, kwargs, interpretation.is_argument) as call:
            program = trace(prepare(call.f), interpretation, call.args, call.kwargs, name=name)
            return call.finish(program.outputs(_Call(interpretation, program, name).run()))

    return interpreted


class _Call:
    """A call of a program under an interpretation, with a forward and a backward pass of its own.

    Attributes:
        outer: the constants that belong to an outer trace, which travel as operands, by index.
        floats: the operands that are floats, by index.
        pullback: the structure and the types of the forward pass's residuals, once it is traced.
    """

    def __init__(self, interpretation: Interpretation, program: Program, name: str):
        self.interpretation, self.paths, self.name = interpretation, program.paths, name
        self.body, self.consts = _compat.open_jaxpr(program.jaxpr)
        self.outer = [i for i, c in enumerate(self.consts) if isinstance(c, Tracer)]
        hoisted = [self.body.constvars[i] for i in self.outer]
        self.operands = [*(self.consts[i] for i in self.outer), *program.arrays]
        self.operand_avals = _compat.avals_of([*hoisted, *self.body.invars])
        self.out_avals = _compat.avals_of(self.body.outvars)
        self.floats = [i for i, a in enumerate(self.operand_avals) if is_float(a)]
        self.pullback: tuple[TreeDef, list[ShapedArray]] | None = None

    def run(self) -> list[PyTree]:
        """Calls the program under a custom derivative that interprets the program's own vjp."""
        call = jax.custom_vjp(self.call)
        call.defvjp(self.forward, self.backward)
        return call(self.operands)

    def closed(self, hoisted: Sequence[jax.Array]) -> Jaxpr:
        return jex.ClosedJaxpr(self.body, with_items(self.consts, self.outer, hoisted))

    def plain(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        n = len(self.outer)
        return jex.jaxpr_as_fun(self.closed(operands[:n]))(*operands[n:])

    def lifted(self, operands: Sequence[Argument]) -> list[Value]:
        return map_floats(self.interpretation.lift, operands, self.operand_avals)

    def emit(self, values: Iterable[Value]) -> list[PyTree]:
        outs = [
            self.interpretation.emit(v, a, path) if is_float(a) else v
            for v, a, path in zip(values, self.out_avals, self.paths, strict=True)
        ]
        pairs = zip(outs, self.out_avals, strict=True)
        return [_compat.vary(y, _compat.varying(a)) for y, a in pairs]

    def call(self, operands: list[Argument]) -> list[PyTree]:
        n = len(self.outer)
        with self.interpretation.context():
            program, values = self.closed(operands[:n]), self.lifted(operands)[n:]
            return self.emit(interpret_jaxpr(self.interpretation, program, STATELESS, values)[1])

    def primal(self, *operands: jax.Array):
        """Returns the float results, the others, and the pullback of the float operands."""

        def of_floats(*xs):
            outs = self.plain(with_items(operands, self.floats, xs))
            return (
                [y for y, a in zip(outs, self.out_avals, strict=True) if is_float(a)],
                [y for y, a in zip(outs, self.out_avals, strict=True) if not is_float(a)],
            )

        ys, pull, rest = jax.vjp(of_floats, *[operands[i] for i in self.floats], has_aux=True)
        return ys, rest, pull

    def forward(self, operands: list[Argument]):
        by, out_avals = self.interpretation, self.out_avals
        avals = map(_strong, self.operand_avals)
        jaxpr, shapes = jax.make_jaxpr(self.primal, return_shape=True)(*avals)
        n_floats, n_outs = len(shapes[0]), len(out_avals)
        residual_avals = _compat.avals_of(_compat.open_jaxpr(jaxpr)[0].outvars[n_outs:])
        self.pullback = jax.tree.structure(shapes[2]), residual_avals
        with by.context():
            _, values = interpret_jaxpr(by, jaxpr, STATELESS, self.lifted(operands))
            ys, rest = iter(values[:n_floats]), iter(values[n_floats:n_outs])
            outs = self.emit([next(ys) if is_float(a) else next(rest) for a in out_avals])
            residuals = map_floats(by.residual, values[n_outs:], residual_avals)
        return outs, (residuals, operands)

    def backward(self, saved, cotangents: Sequence[PyTree]):
        by, (residuals, operands) = self.interpretation, saved
        assert self.pullback is not None
        tree, residual_avals = self.pullback
        for ct, path in zip(cotangents, self.paths, strict=True):
            if by.is_argument(ct):
                raise TypeError(
                    f"{self.name}: output {path} is stored narrow and can't be differentiated; "
                    "differentiate inside, or leave that output out of the recipe's state"
                )
        pairs = zip(cotangents, self.out_avals, strict=True)
        cts = [c for c, a in pairs if is_float(a)]

        def pull(residuals, cts):
            return jax.tree.unflatten(tree, residuals)(cts)

        avals = [_strong(jax.typeof(c)) for c in cts]
        jaxpr = jax.make_jaxpr(pull)(residual_avals, avals)
        result: list[PyTree] = [None] * len(operands)
        with by.context():
            cts = [by.lift(c, a) for c, a in zip(cts, avals, strict=True)]
            _, grads = interpret_jaxpr(by, jaxpr, STATELESS, [*residuals, *cts])
            for i, g in zip(self.floats, grads, strict=True):
                g = by.lower(g, self.operand_avals[i])
                g = _compat.vary(g, _compat.varying(self.operand_avals[i]))
                result[i] = by.cotangent(operands[i], g)
        return (result,)
