"""Applies an update if a predicate holds, and selects each leaf where it is computed.

Selecting between new and old state after the update makes XLA compute the new state twice: once for
the selection, once for the results that depend on it. Here, results that depend on a leaf of the
new state get the selected leaf: the same if the predicate holds, and discarded if it doesn't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._jax import Tracer, jex
from .._types import PyTree, TreeDef
from ..interpret import Applied, Equation, Interpretation, State, Value, run, trace
from ._finite import is_array, tree_where


def update_if(
    predicate: jax.Array, update: Callable[..., tuple[PyTree, PyTree]], old: PyTree, *args: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns ``update(*args)``, results and new state; zeros and ``old`` if the predicate fails.

    Args:
        predicate: a scalar boolean array.
        update: returns a pair of pytrees, the second of the structure of ``old``.
        old: the state to return if the predicate fails; leaves that aren't arrays or numbers come
            from the new state in any case.
        args: the arguments of ``update``.

    Example:
        >>> import jax.numpy as jnp
        >>> update = lambda g, m: (-(m + g), m + g)
        >>> m, g = jnp.float32(1.0), jnp.float32(2.0)
        >>> [[float(x) for x in update_if(jnp.bool_(p), update, m, g, m)] for p in (True, False)]
        [[-3.0, 3.0], [0.0, 1.0]]
    """
    if not isinstance(predicate, Tracer):  # outside of jit
        results, state = update(*args)
        return _or_zeros(predicate, results), tree_where(predicate, state, old)
    found: list[tuple[TreeDef, list[PyTree]]] = []

    def arrays(*args: PyTree) -> list[jax.Array]:
        """Returns the array leaves of results and state."""
        leaves, tree = jax.tree.flatten(update(*args))
        found[:] = [(tree, [None if is_array(x) else x for x in leaves])]
        return [jnp.asarray(x) for x in leaves if is_array(x)]

    program = trace(arrays, Interpretation(), args, {}, name="update_if")
    ((tree, static),) = found
    kept = [x for x in jax.tree.leaves(old) if is_array(x)]
    jaxpr = getattr(program.jaxpr, "jaxpr", program.jaxpr)
    variables = jaxpr.outvars[len(jaxpr.outvars) - len(kept) :]
    select = _SelectState(predicate, variables, kept)
    _, outs = run(program, select, None)
    first = len(outs) - len(kept)
    for i, (variable, before) in enumerate(zip(variables, kept, strict=True)):
        if id(variable) not in select.done:
            outs[first + i] = jnp.where(predicate, outs[first + i], before)
    rest = iter(outs)
    results, state = jax.tree.unflatten(tree, [next(rest) if x is None else x for x in static])
    return _or_zeros(predicate, results), state


def _or_zeros(predicate: jax.Array, results: PyTree) -> PyTree:
    return tree_where(predicate, results, jax.tree.map(jnp.zeros_like, results))


class _SelectState(Interpretation):
    """Runs each equation, and replaces results that are new state by the selected state.

    Results inside of nested jits and loops, and results that are several leaves, are not replaced.
    """

    def __init__(
        self, predicate: jax.Array, variables: Sequence[jex.Var], old: Sequence[ArrayLike]
    ):
        times = Counter(map(id, variables))
        self.predicate, self.done = predicate, set()
        self.old = {id(v): x for v, x in zip(variables, old, strict=True) if times[id(v)] == 1}

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        state, outs = super().apply(state, equation, inputs)

        def selected(variable: jex.Var, x: Value) -> Value:
            if id(variable) not in self.old:
                return x
            self.done.add(id(variable))
            return jnp.where(self.predicate, x, self.old[id(variable)])

        return state, [selected(v, x) for v, x in zip(equation.eqn.outvars, outs, strict=True)]
