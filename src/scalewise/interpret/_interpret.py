"""The one loop over a jaxpr's equations; control flow is re-issued through public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..primitives import params
from . import _compat
from ._body import Atom, Body, Number, body_of
from ._equation import Equation, is_float
from ._interpretation import Interpretation

SMALL_CALL = 32  # equations up to which a nested jit is inlined, as XLA would


def interpret_jaxpr(
    interpretation: Interpretation,
    jaxpr: _compat.Jaxpr,
    state: Any,
    values: Sequence[Any],
    within: Equation | None = None,
    part: tuple[int, ...] = (),
) -> tuple[Any, list[Any]]:
    """Every equation of a jaxpr, in order, under an interpretation.

    Args:
        interpretation: what values are and what equations do to them.
        jaxpr: open without constants, or closed.
        state: the interpretation's state, any pytree of fixed shape.
        values: one for each of the jaxpr's inputs; a lifted value where the input is a float.
        within, part: the equation whose body it is, and which of its bodies (see :func:`body_of`).

    Returns:
        The new state, and a value for each output.
    """
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    return interpret_body(interpretation, body_of(jaxpr, within, part), consts, state, values)


def interpret_body(
    interpretation: Interpretation,
    body: Body,
    consts: Sequence[Any],
    state: Any,
    values: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """The same of a body that was made before, with its jaxpr's constants."""
    environment: dict[Any, Any] = dict(zip(body.inputs, values, strict=True))
    for var, const in zip(body.constants, consts, strict=True):
        environment[var] = interpretation.lift(const, var.aval) if is_float(var.aval) else const

    def read(atom: Atom):
        if isinstance(atom, Number):
            known = atom.number
            return interpretation.constant(known, atom.aval) if is_float(atom.aval) else known
        return environment[atom]

    for step in body.steps:
        equation = step.equation
        with _compat.provenance(equation.eqn):
            calls = _call if params.is_call(equation) else _apply
            rule = CONTROL.get(equation.name, calls)
            state, outs = rule(interpretation, equation, state, [read(x) for x in step.reads])
        environment.update(zip(step.writes, outs, strict=True))
        del outs
        for var in step.last:
            environment.pop(var, None)
    return state, [read(x) for x in body.outputs]


def _apply(interpretation, equation: Equation, state, inputs):
    if equation.lifted:
        return interpretation.apply(state, equation, inputs)
    return interpretation.unlifted(state, equation, inputs)


def _canonical(interpretation, equation, values, avals, boundary):
    values = [
        interpretation.canonical(v, a, boundary, equation) if is_float(a) else v
        for v, a in zip(values, avals, strict=True)
    ]
    if not _compat.manual_now():
        return values
    return [_compat.vary(v, _compat.varying(a)) for v, a in zip(values, avals, strict=True)]


def _everywhere(state):
    """A loop's state, whatever mesh axes its body makes it vary over."""
    return _compat.vary(state, _compat.manual_now())


def _invariant(interpretation, equation: Equation, jaxpr, consts):
    """A loop's constants, after what each turn would do to them alike has been done once."""
    body, _ = _compat.open_jaxpr(jaxpr)
    readers: dict[Any, set[str]] = {v: set() for v in body.invars[: len(consts)]}
    for eqn in body.eqns:
        for var in eqn.invars:
            if isinstance(var, jex.Var) and var in readers:
                readers[var].add(eqn.primitive.name)
    return [
        interpretation.invariant(c, names, equation) if is_float(v.aval) else c
        for c, (v, names) in zip(consts, readers.items(), strict=True)
    ]


def _inside(interpretation, values):
    """Values of a trace as one within it sees them."""
    return [interpretation.inside(v) for v in values]


def _inline(interpretation, equation: Equation, state, inputs, *, jaxpr):
    jaxpr = _compat.close_jaxpr(jaxpr)
    return interpret_jaxpr(interpretation, jaxpr, state, inputs, equation)


def _call(interpretation, equation: Equation, state, inputs):
    """A call as its body: no derivative of it is asked for any more, since a function is
    differentiated before it is interpreted (see _transform.py)."""
    return _inline(interpretation, equation, state, inputs, jaxpr=params.call_body(equation))


def _remat(interpretation, equation: Equation, state, inputs):
    """A recomputation: behind a barrier, or XLA would merge it with the first computation."""
    if params.is_barrier(equation):
        inputs = lax.optimization_barrier(inputs)
    return _inline(interpretation, equation, state, inputs, jaxpr=params.body(equation))


def _jit(interpretation, equation: Equation, state, inputs):
    """A nested jit: inlined if it is small, its shardings and compiler options kept."""
    call = params.jit(equation)
    body, _ = _compat.open_jaxpr(call.body)
    options = call.compiler_options
    inputs = _sharded(inputs, equation.in_avals, call.in_shardings)

    def run(state, inputs):
        return _inline(interpretation, equation, state, inputs, jaxpr=call.body)

    run.__name__ = call.name
    if options or (len(body.eqns) > SMALL_CALL and not interpretation.inline):
        run = jax.jit(run, compiler_options=options or None)
    state, outs = run(state, inputs)
    return state, _sharded(outs, equation.out_avals, call.out_shardings)


def _sharded(values, avals, shardings):
    """Values whose arrays lie as the user asked for; what a sharding leaves open stays open."""

    def constrained(value, aval, sharding):
        types = getattr(getattr(sharding, "mesh", None), "axis_types", ())
        explicit = jax.sharding.AxisType.Explicit in types
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint

        def leaf(x):
            return place(x, sharding) if jnp.shape(x) == aval.shape else x

        return jax.tree.map(leaf, value)

    if not any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return values
    return [
        constrained(v, a, s) if isinstance(s, jax.sharding.Sharding) else v
        for v, a, s in zip(values, avals, shardings, strict=True)
    ]


def _cond(interpretation, equation: Equation, state, inputs):
    def branch(number, jaxpr) -> Callable:
        def run(state, operands):
            state, outs = interpret_jaxpr(
                interpretation, jaxpr, state, operands, equation, (number,)
            )
            outs = _canonical(interpretation, equation, outs, equation.out_avals, "branch")
            return _everywhere(state), outs

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
    state, inputs, over = _while_turns(interpretation, equation, state, inputs)
    if over:
        return state, inputs[len(inputs) - len(equation.out_avals) :]
    run = partial(_while_loop, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _while_turns(interpretation, equation: Equation, state, inputs):
    """The first turns of a loop, one by one; whether it was over by then."""
    turns = interpretation.eager_iterations(state, equation)
    consts = inputs[: len(inputs) - len(equation.out_avals)]
    again, body, canonical = _while_parts(interpretation, equation, consts)
    carry = inputs[len(consts) :]
    for turn in range(turns):
        carry = carry if turn else canonical(carry)
        state, going = again(state, carry)
        if not jnp.any(going):
            return state, [*consts, *carry], True
        state, carry = body(state, carry)
    return state, [*consts, *carry], False


def _while_loop(interpretation, equation: Equation, state, inputs):
    consts = inputs[: len(inputs) - len(equation.out_avals)]
    again, body, canonical = _while_parts(interpretation, equation, consts)
    return lax.while_loop(  # the condition can't hand a state on: what it notes is lost
        lambda loop: jnp.any(again(*loop)[1]),
        lambda loop: body(*loop),
        (_everywhere(state), canonical(inputs[len(consts) :])),
    )


def _while_parts(interpretation, equation: Equation, consts):
    """Condition and body on a state and a carry, and what makes a carry canonical."""
    loop, avals = params.while_loop(equation), equation.out_avals
    m = loop.condition_consts
    cond_consts = _invariant(interpretation, equation, loop.condition, consts[:m])
    body_consts = _invariant(interpretation, equation, loop.body, consts[m:])
    canonical = partial(_canonical, interpretation, equation, avals=avals, boundary="carry")
    run = partial(interpret_jaxpr, interpretation, within=equation)

    def again(state, carry):
        operands = [*_inside(interpretation, cond_consts), *carry]
        state, outs = run(loop.condition, state, operands, part=(0,))
        return state, outs[0]

    def body(state, carry):
        going = again(state, carry)[1] if batched else None
        operands = [*_inside(interpretation, body_consts), *carry]
        state, new = run(loop.body, state, operands, part=(1,))
        new = canonical(new)
        if batched:  # a vmapped loop runs until its last row is done; a row that is done stays
            new = [
                interpretation.select(_widen(going, a.shape), x, y) if is_float(a)
                else lax.select(_widen(going, a.shape), x, y)
                for x, y, a in zip(new, carry, avals, strict=True)
            ]  # fmt: skip
        return _everywhere(state), new

    predicate = _compat.open_jaxpr(loop.condition)[0].outvars[0].aval
    batched = bool(predicate.shape)
    return again, body, canonical


def _widen(predicate, shape):
    return lax.broadcast_in_dim(predicate, shape, range(predicate.ndim))


def _scan(interpretation, equation: Equation, state, inputs):
    if interpretation.eager_iterations(state, equation) >= params.scan(equation).length > 0:
        return _scan_loop(interpretation, equation, state, inputs, scan=_scan_turns)
    run = partial(_scan_loop, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _scan_loop(interpretation, equation: Equation, state, inputs, scan: Callable = lax.scan):
    loop = params.scan(equation)
    m, n = loop.consts, loop.carries
    consts, carry, xs = inputs[:m], inputs[m : m + n], inputs[m + n :]
    consts = _invariant(interpretation, equation, loop.body, consts)
    carry_avals, ys_avals = equation.out_avals[:n], equation.out_avals[n:]
    canonical = partial(_canonical, interpretation, equation)
    body_avals = [v.aval for v in _compat.open_jaxpr(loop.body)[0].outvars][n:]

    def body(state_and_carry, xs):
        state, carry = state_and_carry
        operands = [*_inside(interpretation, consts), *carry, *xs]
        state, outs = interpret_jaxpr(interpretation, loop.body, state, operands, equation)
        carry = canonical(outs[:n], carry_avals, "carry")
        return (_everywhere(state), carry), canonical(outs[n:], body_avals, "stacked")

    xs = [
        interpretation.unstack(x, a) if is_float(a) else x
        for x, a in zip(xs, equation.in_avals[m + n :], strict=True)
    ]
    (state, carry), ys = scan(
        body,
        (_everywhere(state), canonical(carry, carry_avals, "carry")),
        xs,
        length=loop.length,
        reverse=loop.reverse,
        unroll=loop.unroll,
    )
    ys = [
        interpretation.stack(y, a) if is_float(a) else y for y, a in zip(ys, ys_avals, strict=True)
    ]
    return state, [*carry, *ys]


def _scan_turns(body: Callable, carry, xs, *, length: int, reverse: bool, unroll: Any):
    """``lax.scan`` turn by turn, its slices cut and stacked on the host, so that nothing compiles.

    What has no first turn to tell its shape isn't walked: ``length`` is at least 1.
    """
    del unroll
    ys: list[Any] = [None] * length
    for turn in reversed(range(length)) if reverse else range(length):
        carry, ys[turn] = body(carry, jax.tree.map(partial(_slice, turn), xs))
    return carry, jax.tree.map(lambda *rows: _stack(rows), *ys)


def _slice(turn: int, x):
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x[turn] if key else np.asarray(np.asarray(x)[turn])


def _stack(rows):
    key = jnp.issubdtype(rows[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(rows) if key else np.stack([np.asarray(row) for row in rows])


def _shard_map(interpretation, equation: Equation, state, inputs):
    """A map over a mesh: each leaf of a value lies as its array does, all others everywhere.

    What is varying over which axes was checked when the user's function was traced.
    """
    run = partial(_mapped, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _mapped(interpretation, equation: Equation, state, inputs):
    mapping, here = params.shard_map(equation), jax.sharding.PartitionSpec()
    body = _compat.open_jaxpr(mapping.body)[0]

    def spread(value, aval, spec):
        return jax.tree.map(lambda x: spec if jnp.shape(x) == aval.shape else here, value)

    def form(aval):  # what canonical makes of any value of that type
        plain = jnp.zeros(aval.shape, aval.dtype)
        if not is_float(aval):
            return plain
        value = interpretation.lift(plain, aval)
        return interpretation.canonical(value, aval, "mapped", equation)

    def run(state, inputs):
        state, outs = interpret_jaxpr(interpretation, mapping.body, state, inputs, equation)
        state = interpretation.meet(state, tuple(mapping.axes))
        return state, _canonical(interpretation, equation, outs, out_avals, "mapped")

    out_avals = [_local(v.aval) for v in body.outvars]
    inputs = _canonical(interpretation, equation, inputs, equation.in_avals, "mapped")
    in_specs = [
        spread(x, a, s) for x, a, s in zip(inputs, equation.in_avals, mapping.in_specs, strict=True)
    ]
    forms = [jax.eval_shape(partial(form, a)) for a in out_avals]
    out_specs = [
        spread(x, a, s) for x, a, s in zip(forms, out_avals, mapping.out_specs, strict=True)
    ]
    mapped = jax.shard_map(
        run,
        mesh=mapping.mesh,
        in_specs=(jax.tree.map(lambda _: here, state), in_specs),
        out_specs=(jax.tree.map(lambda _: here, state), out_specs),
        axis_names=mapping.axes,
        check_vma=False,
    )
    return mapped(state, inputs)


def _local(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _same(interpretation, equation: Equation, state, inputs):
    """What only tells JAX over which axes of a mesh a value varies: arrays are cast where they are
    used (:func:`_compat.bind`), and a value keeps what it remembers."""
    return state, inputs


CONTROL: dict[str, Callable] = {
    **dict.fromkeys(params.BODIES, _call),
    "remat2": _remat,
    "checkpoint": _remat,
    "jit": _jit,
    "pjit": _jit,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _shard_map,
    "pvary": _same,
    "pcast": _same,
}
