"""The rules of calls: nested jits, recomputation, custom derivatives, maps over a mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from ..primitives import params
from ._equation import Equation
from ._interpret import CONTROL, canonical, interpret_jaxpr

SMALL_CALL = 32  # equations up to which a nested jit is inlined, as XLA would


def _call(interpretation, equation: Equation, state, inputs):
    """A function is differentiated before it is interpreted, so the call needs no derivative."""
    return interpret_jaxpr(interpretation, params.call_body(equation), state, inputs, equation)


def _remat(interpretation, equation: Equation, state, inputs):
    """Interprets a recomputation behind a barrier, so that XLA doesn't reuse the original one."""
    if params.is_barrier(equation):
        behind = lax.optimization_barrier(inputs)
        inputs = list(map(interpretation.behind, inputs, behind))
    return interpret_jaxpr(interpretation, params.body(equation), state, inputs, equation)


def is_in_place(interpretation, equation: Equation) -> bool:
    if equation.name in ("jit", "pjit"):
        call = params.jit(equation)
        body, _ = _jax.open_jaxpr(call.body)
        large = len(body.eqns) > SMALL_CALL and not interpretation.inline
        return not call.compiler_options and not large
    known = equation.name in ("remat2", "checkpoint", *params.BODIES) or params.is_call(equation)
    return known and equation.name != "outlined"


def _jit(interpretation, equation: Equation, state, inputs):
    call = params.jit(equation)
    options = call.compiler_options
    inputs = _sharded(inputs, equation.in_avals, call.in_shardings)

    def run(state, inputs):
        return interpret_jaxpr(interpretation, call.body, state, inputs, equation)

    run.__name__ = call.name
    if not is_in_place(interpretation, equation):
        run = jax.jit(run, compiler_options=options or None)
    state, outs = run(state, inputs)
    return state, _sharded(outs, equation.out_avals, call.out_shardings)


def _sharded(values, avals, shardings):
    def constrained(value, aval, sharding):
        if not isinstance(sharding, jax.sharding.Sharding):
            return value
        types = getattr(getattr(sharding, "mesh", None), "axis_types", ())
        explicit = jax.sharding.AxisType.Explicit in types
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint

        def leaf(x):
            return place(x, sharding) if jnp.shape(x) == aval.shape else x

        return jax.tree.map(leaf, value)

    return list(map(constrained, values, avals, shardings)) if shardings else values


def _shard_map(interpretation, equation: Equation, state, inputs):
    """Leaves of other shapes than their arrays' are replicated."""
    run = partial(_mapped, interpretation, equation)
    return interpretation.control(equation, run)(state, inputs)


def _mapped(interpretation, equation: Equation, state, inputs):
    mapping, here = params.shard_map(equation), jax.sharding.PartitionSpec()
    body = _jax.open_jaxpr(mapping.body)[0]

    def spread(value, aval, spec):
        return jax.tree.map(lambda x: spec if jnp.shape(x) == aval.shape else here, value)

    def form(aval):  # the canonical form of any value of that type
        plain = jnp.zeros(aval.shape, aval.dtype)
        if not interpretation.lifts(aval):
            return plain
        value = interpretation.lift(plain, aval)
        return interpretation.canonical(value, aval, "mapped", equation)

    def run(state, inputs):
        state, outs = interpret_jaxpr(interpretation, mapping.body, state, inputs, equation)
        state = interpretation.merge(state, tuple(mapping.axes))
        return state, canonical(interpretation, equation, outs, out_avals, "mapped")

    out_avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.outvars]

    def entering(value, aval, spec):
        """Returns a value and its specs; one that knows how a mesh splits it stays as it is."""
        if (found := getattr(value, "split_over", lambda *_: None)(mapping.mesh, spec)) is not None:
            return found
        (value,) = canonical(interpretation, equation, [value], [aval], "mapped")
        return value, spread(value, aval, spec)

    given = zip(inputs, equation.in_avals, mapping.in_specs, strict=True)
    entered = [entering(*each) for each in given]
    inputs, in_specs = [value for value, _ in entered], [specs for _, specs in entered]
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


def _reshard(interpretation, equation: Equation, state, inputs):
    """Reshards an array of a value; its other leaves follow to a mesh with axes of other types.

    ``jax.sharding.auto_axes`` and ``explicit_axes`` reshard from one such mesh to another.
    """
    (value,), (before,) = inputs, equation.in_avals
    target = params.target_sharding(equation)

    def leaf(x):
        if jnp.shape(x) == before.shape:
            return equation.bind(x)[0]
        if target.mesh == before.sharding.mesh:
            return x
        whole = target.update(spec=jax.sharding.PartitionSpec(*[None] * jnp.ndim(x)))
        return equation.with_params(dst_sharding=whole).bind(x)[0]

    with _jax.in_mesh(before.sharding.mesh):
        leaves, tree = jax.tree.flatten(value)  # computes a deferred value
    return state, [jax.tree.unflatten(tree, map(leaf, leaves))]


def _same(interpretation, equation: Equation, state, inputs):
    """Arrays are cast where they are used (:func:`_jax.bind`), and a value keeps its memo."""
    return state, inputs


CONTROL.update(dict.fromkeys(params.BODIES, _call))
CONTROL.update(
    remat2=_remat, checkpoint=_remat, jit=_jit, pjit=_jit, shard_map=_shard_map,
    pvary=_same, pcast=_same, reshard=_reshard,
)  # fmt: skip
