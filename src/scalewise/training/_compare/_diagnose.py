"""Finds out why a step returned non-finite numbers, by running it again equation by equation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Tracer
from ..._types import PyTree
from ...interpret import Applied, Equation, Interpretation, State, Value, is_float, transform
from .._finite import all_finite
from ._program import Step


def finite_leaves(tree: PyTree) -> jax.Array:
    """Returns for each leaf whether all of it is finite; integers always are."""
    return jnp.stack([all_finite(x) for x in jax.tree.leaves(tree)])


class _Found(Exception):
    """Raised at the first equation that has finite inputs and a non-finite output."""


class _Watch(Interpretation):
    """Runs equations one by one up to the first with finite inputs and a non-finite output."""

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        outs = equation.bind(*inputs)
        if any(isinstance(x, Tracer) for x in (*inputs, *outs)):
            return state, outs
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        for out, aval in zip(outs, equation.out_avals, strict=True):
            if is_float(aval) and not _finite(out) and all(map(_finite, floats)):
                raise _Found(_sentence(equation, floats, np.asarray(out)))
        return state, outs


def _finite(x: PyTree) -> bool:
    return bool(np.isfinite(np.asarray(x).astype(np.float32)).all())


def _sentence(equation: Equation, inputs: Sequence[Value], out: np.ndarray) -> str:
    wide = out.astype(np.float32)
    kind = "NaN" if np.isnan(wide).any() else "an infinity"
    file, line, function = equation.caller or equation.source or ("?", 0, "?")
    if equation.caller and equation.source:  # the line of the library that it calls
        function += f", which calls {Path(equation.source[0]).name}:{equation.source[1]}"
    where = f"{equation.name} at {Path(file).name}:{line} ({function}), {equation.direction}"
    at = np.unravel_index(int(np.argmin(np.isfinite(wide))), wide.shape)
    elementwise = all(np.shape(x) in ((), out.shape) for x in inputs)
    if not inputs or not elementwise:
        return f"{where}, makes {kind} of finite {out.dtype} numbers"
    numbers = ", ".join(f"{float(np.asarray(x)[at] if np.ndim(x) else x):.3g}" for x in inputs)
    return f"{where}, makes {kind} of the {out.dtype} number{'s' * (len(inputs) > 1)} {numbers}"


def first_non_finite(step: Step, state: PyTree, batch: PyTree) -> str | None:
    """Describes the first equation of a step that has finite inputs and a non-finite output."""
    try:
        with jax.disable_jit():
            transform(step, _Watch(), name="compare")(state, batch)
    except _Found as found:
        return str(found)
    except Exception:  # the step only runs compiled: its state is described instead
        pass
    return None


def lost_second_moments(state: PyTree) -> str | None:
    """Describes how many second moments are zero while the first moment isn't; None if none is.

    Covers optimizer states with plain arrays `mu` and `nu`, as optax's Adam family has.
    """
    lost = total = 0

    def has_moments(x: object) -> bool:
        return hasattr(x, "mu") and hasattr(x, "nu")

    for node in filter(has_moments, jax.tree.leaves(state, is_leaf=has_moments)):
        pairs = zip(jax.tree.leaves(node.mu), jax.tree.leaves(node.nu), strict=False)
        for mu, nu in pairs:
            if np.shape(mu) == np.shape(nu):
                moving = np.asarray(mu) != 0
                lost += int((moving & (np.asarray(nu) == 0)).sum())
                total += int(moving.sum())
    if not lost:
        return None
    return f"{lost / total:.0%} of the second moments are 0 where the first moment isn't"


def diagnose(step: Step, before: PyTree, batch: PyTree, after: PyTree, loss: float) -> str:
    """Describes in one sentence why the step from `before` to `after` isn't finite."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)]
    bad = [p for p, good in zip(paths, finite_leaves(after), strict=True) if not good]
    found = [
        first_non_finite(step, before, batch),
        None if np.isfinite(loss) else f"the loss is {loss}",
        lost_second_moments(after),
    ]
    if bad:
        found.append(f"{len(bad)} of the state's {len(paths)} arrays aren't finite, first {bad[0]}")
    return "; ".join(filter(None, found))
