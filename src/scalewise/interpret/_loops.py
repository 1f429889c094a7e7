"""The rules of loops and branches, re-issued through JAX's public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._types import PyTree
from ..primitives import params
from ._calls import is_in_place
from ._equation import Equation
from ._interpret import CONTROL, Atom, body_of, canonical, interpret_jaxpr, vary
from ._wide import map_in_meshes


def _followed(interpretation, equation: Equation, jaxpr, consts, part=()):
    """Returns a body's constants with repeated work done, and outputs equal in each iteration.

    Constants (None for values that the iteration changes) are followed through equations that an
    interpretation repeats, into inner loops and calls: a value remembers what was made of it.
    """
    body = body_of(_jax.open_jaxpr(jaxpr)[0], equation, part)
    known: dict[Atom, object] = {
        v: c
        for v, c in zip(body.inputs, consts, strict=False)
        if c is not None and interpretation.lifts(v.aval)
    }
    readers: dict[Atom, list[tuple[Equation, int]]] = {v: [] for v in known}
    for step in body.steps:
        inner, values = step.equation, [known.get(x) for x in step.reads]
        if all(x is None for x in values):
            continue
        for i, var in enumerate(step.reads):
            readers.get(var, []).append((inner, i))
        within = _called(interpretation, inner)
        if within is not None:
            _, made = _followed(interpretation, inner, within[0], values[: within[1]])
            made = made if within[1] is None else []  # a loop's results are others
        else:
            with _jax.in_mesh_of(inner.in_avals):
                made = [interpretation.repeated(inner, values)]
        for var, value in zip(step.writes, made, strict=False):
            if value is not None:
                known[var] = value
                readers.setdefault(var, [])
    found: dict[Atom, object] = {}
    for var, read_by in readers.items():
        with _jax.in_mesh_of([var.aval]):
            found[var] = interpretation.invariant(known[var], read_by, equation)
    consts = [found.get(v, c) for v, c in zip(body.inputs, consts, strict=False)]
    return consts, [known.get(v) for v in body.outputs]


def _called(interpretation, equation: Equation):
    """Returns the body of a call or scan, and how many inputs keep what they remember; or None."""
    if equation.name == "scan":
        loop = params.scan(equation)
        return loop.body, loop.consts
    if not is_in_place(interpretation, equation):
        return None
    return params.called(equation), None


def _inside(interpretation, values):
    return [interpretation.inside(v) for v in values]


def _cond(interpretation, equation: Equation, state, inputs):
    def branch(number, jaxpr) -> Callable:
        def run(state, operands):
            part = (number,)
            state, outs = interpret_jaxpr(interpretation, jaxpr, state, operands, equation, part)
            outs = canonical(interpretation, equation, outs, equation.out_avals, "branch")
            return vary(state), outs

        return run

    branches = [branch(i, jaxpr) for i, jaxpr in enumerate(params.branches(equation))]

    def run(state, inputs):
        index, *operands = inputs
        return lax.switch(index, branches, state, operands)

    if interpretation.eager_iterations(state, equation):
        index, *operands = inputs
        return branches[min(max(int(index), 0), len(branches) - 1)](state, operands)
    return interpretation.control(equation, run)(state, inputs)


def _while(interpretation, equation: Equation, state, inputs):
    state, inputs, over = _eager_while(interpretation, equation, state, inputs)
    if over:
        return state, inputs[len(inputs) - len(equation.out_avals) :]
    run = partial(_while_loop, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _eager_while(interpretation, equation: Equation, state, inputs):
    iterations = interpretation.eager_iterations(state, equation)
    consts = inputs[: len(inputs) - len(equation.out_avals)]
    again, body, to_form = _while_parts(interpretation, equation, consts)
    carry = inputs[len(consts) :]
    for iteration in range(iterations):
        carry = carry if iteration else to_form(carry)
        state, going = again(state, carry)
        if not jnp.any(going):
            return state, [*consts, *carry], True
        state, carry = body(state, carry, going)
    return state, [*consts, *carry], False


def _while_loop(interpretation, equation: Equation, state, inputs):
    consts = inputs[: len(inputs) - len(equation.out_avals)]
    again, body, to_form = _while_parts(interpretation, equation, consts)
    predicate = _jax.open_jaxpr(params.while_loop(equation).condition)[0].outvars[0].aval

    def going_on(loop):  # the condition's changes of the state are lost here
        return jnp.any(again(*loop)[1])

    def iteration(loop):
        state, carry = loop
        if not predicate.shape:
            return body(state, carry, None)
        state, going = again(state, carry)
        return body(state, carry, going)

    carry = to_form(inputs[len(consts) :])
    return lax.while_loop(going_on, iteration, (vary(state), carry))


def _while_parts(interpretation, equation: Equation, consts):
    """Returns condition and body, functions of a state and a carry, and a carry's conversion.

    The body also takes the condition's result. If that is an array, as in a vmapped loop, the loop
    runs until all are False; what has ended keeps its carry.
    """
    loop, avals = params.while_loop(equation), equation.out_avals
    m = loop.condition_consts
    cond_consts, _ = _followed(interpretation, equation, loop.condition, consts[:m], (0,))
    body_consts, _ = _followed(interpretation, equation, loop.body, consts[m:], (1,))
    to_form = partial(canonical, interpretation, equation, avals=avals, boundary="carry")
    run = partial(interpret_jaxpr, interpretation, within=equation)

    def again(state, carry):
        operands = [*_inside(interpretation, cond_consts), *carry]
        state, outs = run(loop.condition, state, operands, part=(0,))
        return state, outs[0]

    def chosen(going, new, old, aval):
        going = lax.broadcast_in_dim(going, aval.shape, range(jnp.ndim(going)))
        choose = interpretation.select if interpretation.lifts(aval) else lax.select
        return choose(going, new, old)

    def body(state, carry, going):
        operands = [*_inside(interpretation, body_consts), *carry]
        state, new = run(loop.body, state, operands, part=(1,))
        new = to_form(new)
        if going is not None and jnp.ndim(going):
            new = [chosen(going, x, y, a) for x, y, a in zip(new, carry, avals, strict=True)]
        return vary(state), new

    return again, body, to_form


def _scan(interpretation, equation: Equation, state, inputs):
    if interpretation.eager_iterations(state, equation) >= params.scan(equation).length > 0:
        return _scan_loop(interpretation, equation, state, inputs, scan=_eager_scan)
    run = partial(_scan_loop, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _scan_loop(interpretation, equation: Equation, state, inputs, scan: Callable = lax.scan):
    loop = params.scan(equation)
    m, n = loop.consts, loop.carries
    consts, carry, xs = inputs[:m], inputs[m : m + n], inputs[m + n :]
    consts, _ = _followed(interpretation, equation, loop.body, consts)
    carry_avals, ys_avals = equation.out_avals[:n], equation.out_avals[n:]
    to_form = partial(canonical, interpretation, equation)
    body_avals = _jax.avals_of(_jax.open_jaxpr(loop.body)[0].outvars[n:])

    def body(state_and_carry, xs):
        state, carry = state_and_carry
        operands = [*_inside(interpretation, consts), *carry, *xs]
        state, outs = interpret_jaxpr(interpretation, loop.body, state, operands, equation)
        carry = to_form(outs[:n], carry_avals, "carry")
        return (vary(state), carry), to_form(outs[n:], body_avals, "stacked")

    (state, carry), ys = scan(
        body,
        (vary(state), to_form(carry, carry_avals, "carry")),
        map_in_meshes(interpretation.unstack, xs, equation.in_avals[m + n :], interpretation.lifts),
        length=loop.length,
        reverse=loop.reverse,
        unroll=loop.unroll,
    )
    ys = map_in_meshes(interpretation.stack, ys, ys_avals, interpretation.lifts)
    return state, [*carry, *ys]


def _eager_scan(body: Callable, carry, xs, *, length: int, reverse: bool, unroll: int | bool):
    """Runs ``lax.scan`` by NumPy on the host, without compiling slices and stacks.

    Without a first iteration the shapes of the results are unknown.
    """
    del unroll
    ys: list[PyTree] = [None] * length
    for iteration in reversed(range(length)) if reverse else range(length):
        carry, ys[iteration] = body(carry, jax.tree.map(partial(_slice, iteration), xs))
    return carry, jax.tree.map(lambda *rows: _stack(rows), *ys)


def _slice(iteration: int, x):
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x[iteration] if key else np.asarray(np.asarray(x)[iteration])


def _stack(rows):
    key = jnp.issubdtype(rows[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(rows) if key else np.stack([np.asarray(row) for row in rows])


CONTROL.update({"cond": _cond, "while": _while, "scan": _scan})
