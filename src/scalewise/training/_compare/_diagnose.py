"""Why a step went non-finite: found by looking at it, not by knowing the program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...interpret import Equation, Interpretation, is_float, transform
from ._program import Step, Tree


def finite_leaves(tree: Tree) -> jax.Array:
    """For each leaf whether all of it is finite; integers always are. Jittable."""
    floats = (jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(tree))
    return jnp.stack(
        [
            jnp.isfinite(jnp.asarray(x).astype(jnp.float32)).all() if f else jnp.array(True)
            for x, f in zip(jax.tree.leaves(tree), floats, strict=True)
        ]
    )


class _Found(Exception):
    """The first equation that made something non-finite of finite inputs."""


class _Watch(Interpretation):
    """Runs equations one by one and stops at the first that leaves the finite numbers."""

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        outs = equation.bind(*inputs)
        if any(isinstance(x, Tracer) for x in (*inputs, *outs)):
            return state, outs
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        for out, aval in zip(outs, equation.out_avals, strict=True):
            if is_float(aval) and not _finite(out) and all(map(_finite, floats)):
                raise _Found(_sentence(equation, floats, np.asarray(out)))
        return state, outs


def _finite(x: Any) -> bool:
    return bool(np.isfinite(np.asarray(x).astype(np.float32)).all())


def _sentence(equation: Equation, inputs: Sequence[Any], out: np.ndarray) -> str:
    wide = out.astype(np.float32)
    kind = "NaN" if np.isnan(wide).any() else "an infinity"
    file, line, function = equation.source or ("?", 0, "?")
    where = f"{equation.name} at {Path(file).name}:{line} ({function}), {equation.direction}"
    at = np.unravel_index(int(np.argmin(np.isfinite(wide))), wide.shape)
    elementwise = all(np.shape(x) in ((), out.shape) for x in inputs)
    if not inputs or not elementwise:
        return f"{where}, makes {kind} of finite {out.dtype} numbers"
    numbers = ", ".join(f"{float(np.asarray(x)[at] if np.ndim(x) else x):.3g}" for x in inputs)
    return f"{where}, makes {kind} of the {out.dtype} number{'s' * (len(inputs) > 1)} {numbers}"


def first_non_finite(step: Step, state: Tree, batch: Any) -> str | None:
    """The equation that first leaves the finite numbers, when the step runs one at a time.

    Returns:
        Primitive, user's line, direction and offending numbers in one sentence; None where no
        single equation does, or where the step can't be run so.
    """
    try:
        with jax.disable_jit():
            transform(step, _Watch(), name="compare")(state, batch)
    except _Found as found:
        return str(found)
    except Exception:  # a step that only runs compiled is still described by its state
        return None
    return None


def lost_second_moments(state: Tree) -> str | None:
    """The share of second moments that are zero where the first moment isn't.

    Looks at every optimizer state with plain arrays `mu` and `nu`, as optax's Adam family has.
    """
    lost = total = 0
    for node in _nodes(state):
        pairs = zip(jax.tree.leaves(node.mu), jax.tree.leaves(node.nu), strict=False)
        for mu, nu in pairs:
            if np.shape(mu) == np.shape(nu):
                moving = np.asarray(mu) != 0
                lost += int((moving & (np.asarray(nu) == 0)).sum())
                total += int(moving.sum())
    if not lost:
        return None
    return f"{lost / total:.0%} of the second moments are 0 where the first moment isn't"


def _nodes(tree: Tree) -> list[Any]:
    def has_moments(x: Any) -> bool:
        return hasattr(x, "mu") and hasattr(x, "nu")

    return [x for x in jax.tree.leaves(tree, is_leaf=has_moments) if has_moments(x)]


def diagnose(step: Step, before: Tree, batch: Any, after: Tree, loss: float) -> str:
    """Why the step from `before` to `after` isn't finite: one sentence of things found.

    Args:
        step: the method's step, not compiled.
        before, after: states, of which `before` is finite.
        batch: what the step was given.
        loss: what it returned.
    """
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)]
    bad = [p for p, good in zip(paths, finite_leaves(after), strict=True) if not good]
    found = []
    equation = first_non_finite(step, before, batch)
    if equation:
        found.append(equation)
    if not np.isfinite(loss):
        found.append(f"the loss is {loss}")
    moments = lost_second_moments(after)
    if moments:
        found.append(moments)
    if bad:
        found.append(f"{len(bad)} of the state's {len(paths)} arrays aren't finite, first {bad[0]}")
    return "; ".join(found)
