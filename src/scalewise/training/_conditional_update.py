"""A step that is taken or left out, chosen result by result, as soon as there is one.

Choosing at the end, between the new state and the old, makes XLA compute the new state twice: once
to choose, once for the updates, which depend on what it was before. Here what depends on a leaf of
the new state gets the chosen one: the same where the step is taken, and of no interest where not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..interpret import Equation, Interpretation, run, trace
from ._finite import choose, is_array

Tree = Any


def update_if(
    predicate: jax.Array, update: Callable[..., tuple[Tree, Tree]], old: Tree, *args: Any
) -> tuple[Tree, Tree]:
    """``update(*args)``, results and new state; zeros and the old state where the predicate fails.

    Args:
        predicate: a scalar boolean array.
        update: returns a pair of pytrees, the second of the structure of ``old``.
        old: the state that is kept; leaves that aren't arrays or numbers are taken from the new.
        args: of ``update``.

    Example:
        >>> import jax.numpy as jnp
        >>> update = lambda g, m: (-(m + g), m + g)
        >>> m, g = jnp.float32(1.0), jnp.float32(2.0)
        >>> [[float(x) for x in update_if(jnp.bool_(p), update, m, g, m)] for p in (True, False)]
        [[-3.0, 3.0], [0.0, 1.0]]
    """
    if not isinstance(predicate, Tracer):  # eagerly nothing is computed twice
        results, state = update(*args)
        return _taken(predicate, results), choose(predicate, state, old)
    trees: list[Any] = []

    def arrays(*args: Any) -> list[Any]:
        """Results and state, array leaves only."""
        leaves, tree = jax.tree.flatten(update(*args))
        trees[:] = [tree, [None if is_array(x) else x for x in leaves]]
        return [jnp.asarray(x) for x in leaves if is_array(x)]

    program = trace(arrays, Interpretation(), args, {}, name="update_if")
    tree, static = trees
    kept = [x for x in jax.tree.leaves(old) if is_array(x)]
    jaxpr = getattr(program.jaxpr, "jaxpr", program.jaxpr)
    variables = jaxpr.outvars[len(jaxpr.outvars) - len(kept) :]
    keep = _Keep(predicate, variables, kept)
    _, outs = run(program, keep, None)
    first = len(outs) - len(kept)
    for i, (variable, before) in enumerate(zip(variables, kept, strict=True)):
        if id(variable) not in keep.done:
            outs[first + i] = jnp.where(predicate, outs[first + i], before)
    rest = iter(outs)
    results, state = jax.tree.unflatten(tree, [next(rest) if x is None else x for x in static])
    return _taken(predicate, results), state


def _taken(predicate: jax.Array, results: Tree) -> Tree:
    return choose(predicate, results, jax.tree.map(jnp.zeros_like, results))


class _Keep(Interpretation):
    """Each equation as it is, but that results which are new state are the old unless it's taken.

    That of a nested jit or a loop, or one that is several leaves, isn't chosen here.
    """

    def __init__(self, predicate: jax.Array, variables: Sequence[Any], old: Sequence[Any]):
        times = Counter(map(id, variables))
        self.predicate, self.done = predicate, set()
        self.old = {id(v): x for v, x in zip(variables, old, strict=True) if times[id(v)] == 1}

    def apply(self, state: Any, equation: Equation, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        state, outs = super().apply(state, equation, inputs)

        def chosen(variable: Any, x: Any) -> Any:
            if id(variable) not in self.old:
                return x
            self.done.add(id(variable))
            return jnp.where(self.predicate, x, self.old[id(variable)])

        return state, [chosen(v, x) for v, x in zip(equation.eqn.outvars, outs, strict=True)]
