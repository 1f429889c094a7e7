"""Transforms a user's function by an interpretation, differentiable from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray, Tracer

from . import _compat
from ._floats import is_float, map_floats, with_items
from ._interpret import interpret_jaxpr
from ._interpretation import Interpretation
from ._program import check_callable, trace

STATELESS = ()


def _strong(aval: ShapedArray) -> Any:
    """Returns an array's type without its weak dtype, with the mesh axes over which it varies."""
    return aval.update(weak_type=False)


def transform(f: Callable, interpretation: Interpretation, *, name: str) -> Callable:
    """Returns ``f`` with every equation run under an interpretation.

    Differentiating the result differentiates ``f`` first, by JAX's own rules and ``f``'s own
    custom derivatives, and interprets forward and backward pass afterwards: ``grad(T(f))`` equals
    ``T(grad(f))``. Reverse mode only: JAX refuses forward mode from outside
    (``jax.custom_vjp``); inside ``f`` every mode works.

    Args:
        f: any function of pytrees. Leaves that are arrays (or that the interpretation accepts as
            arrays) are traced; all others, of arguments and of results, are passed on as they are,
            so flags and Python numbers stay what they are.
        interpretation: applied to each equation.
        name: the transformation's name, for error messages.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
    """
    check_callable(f, name)

    @functools.wraps(f)
    def interpreted(*args, **kwargs):
        program = trace(f, interpretation, args, kwargs, name=name)
        outs = _call(interpretation, program.jaxpr, program.arrays, program.paths, name)
        return program.outputs(outs)

    return interpreted


def _call(interpretation, program, arrays, paths, name):
    """Calls a program under a custom derivative that interprets the program's own vjp."""
    body, consts = _compat.open_jaxpr(program)
    outer = [i for i, c in enumerate(consts) if isinstance(c, Tracer)]

    def closed(hoisted):  # constants that belong to an outer trace travel as arguments
        return jex.ClosedJaxpr(body, with_items(consts, outer, hoisted))

    operand_avals = [body.constvars[i].aval for i in outer] + [v.aval for v in body.invars]
    out_avals = [v.aval for v in body.outvars]
    floats = [i for i, a in enumerate(operand_avals) if is_float(a)]
    pullback: dict[str, Any] = {}

    def plain(*operands):
        return jex.jaxpr_as_fun(closed(operands[: len(outer)]))(*operands[len(outer) :])

    def lifted(operands):
        return map_floats(interpretation.lift, operands, operand_avals)

    def emit(values):
        outs = [
            interpretation.emit(v, a, path) if is_float(a) else v
            for v, a, path in zip(values, out_avals, paths, strict=True)
        ]
        return [_compat.vary(y, _compat.varying(a)) for y, a in zip(outs, out_avals, strict=True)]

    @jax.custom_vjp
    def call(operands):
        with interpretation.context():
            program, values = closed(operands[: len(outer)]), lifted(operands)[len(outer) :]
            return emit(interpret_jaxpr(interpretation, program, STATELESS, values)[1])

    def forward(operands):
        def primal(*operands):
            def of_floats(*xs):
                outs = plain(*with_items(operands, floats, xs))
                return (
                    [y for y, a in zip(outs, out_avals, strict=True) if is_float(a)],
                    [y for y, a in zip(outs, out_avals, strict=True) if not is_float(a)],
                )

            ys, pull, rest = jax.vjp(of_floats, *[operands[i] for i in floats], has_aux=True)
            return ys, rest, pull

        jaxpr, shapes = jax.make_jaxpr(primal, return_shape=True)(*map(_strong, operand_avals))
        n_floats, n_outs = len(shapes[0]), len(out_avals)
        pullback["tree"] = jax.tree.structure(shapes[2])
        pullback["avals"] = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].outvars[n_outs:]]
        with interpretation.context():
            _, values = interpret_jaxpr(interpretation, jaxpr, STATELESS, lifted(operands))
            ys, rest = iter(values[:n_floats]), iter(values[n_floats:n_outs])
            outs = emit([next(ys) if is_float(a) else next(rest) for a in out_avals])
            residuals = map_floats(interpretation.residual, values[n_outs:], pullback["avals"])
        return outs, (residuals, operands)

    def backward(saved, cotangents):
        residuals, operands = saved
        cts = [c for c, a in zip(cotangents, out_avals, strict=True) if is_float(a)]
        for ct, path in zip(cotangents, paths, strict=True):
            if interpretation.is_argument(ct):
                raise TypeError(
                    f"{name}: output {path} is stored narrow and can't be differentiated; "
                    "differentiate inside, or leave that output out of the recipe's state"
                )

        def pull(residuals, cts):
            return jax.tree.unflatten(pullback["tree"], residuals)(cts)

        shapes = [_strong(jax.typeof(c)) for c in cts]
        jaxpr = jax.make_jaxpr(pull)(pullback["avals"], shapes)
        result: list[Any] = [None] * len(operands)
        with interpretation.context():
            cts = [interpretation.lift(c, a) for c, a in zip(cts, shapes, strict=True)]
            _, grads = interpret_jaxpr(interpretation, jaxpr, STATELESS, [*residuals, *cts])
            for i, g in zip(floats, grads, strict=True):
                g = interpretation.lower(g, operand_avals[i])
                g = _compat.vary(g, _compat.varying(operand_avals[i]))
                result[i] = interpretation.cotangent(operands[i], g)
        return (result,)

    call.defvjp(forward, backward)
    return call([*[consts[i] for i in outer], *arrays])
