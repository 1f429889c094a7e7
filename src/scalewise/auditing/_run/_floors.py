"""Floors of the outputs' errors: parts of outputs that the reference run's own rounding makes.

The gradient of a key's bias under softmax attention is 0, and each run returns other rounding
errors of about 1e-9 for it, whose relative difference says nothing. Such outputs are found by
runs with arguments changed by one rounding of the reference run, and one in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from ..._jax import ShapedArray, avals_of
from ...interpret import Argument, Program, all_equations, is_float, is_inexact, lifted, run
from .._thresholds import NOISE, NOISE_OF_ONE, RUNS
from ._compiled import Compiled
from ._equation import is_discrete
from ._interpretations import Reference, TableEmulation
from ._outcome import Floors, Outcome, in_parts, squared_norm
from ._session import Session


def with_floors(session: Session, outcome: Outcome, limit: float) -> Outcome:
    """The error of an output without digits is measured against what its numbers were made of: the
    size at which the reference run's roundings would be as large as its change, or the size of the
    outputs next to it, whichever is larger. The session keeps the floors, and which changes of
    the state are nothing but roundings, for later runs. Integers and predicates that change are
    compared no more."""
    errors = [*(error for _, error in outcome.outputs), *outcome.decision_errors]
    if not any(error.non_finite or error.relative > limit for error in errors):
        return outcome
    moved = [np.zeros(np.shape(x)) for x in outcome.reference]
    turned = [np.zeros(np.shape(x), bool) for _, _, x in outcome.decisions]
    for seed in range(RUNS):
        again = session.run(arrays=_changed(session, seed))
        moved = [
            np.fmax(m, _apart(y, x))
            for m, y, x in zip(moved, again.reference, outcome.reference, strict=True)
        ]
        both = zip(again.decisions, outcome.decisions, strict=True)
        turned = [t | (y != x) for t, ((*_, y), (*_, x)) in zip(turned, both, strict=True)]
    exact = _Exact(session)
    undecided = _undecided(outcome, turned, exact)
    norms, changes = (list(map(_norm, some)) for some in (outcome.reference, moved))
    still = {x.path for x in session.updates(outcome) if changes[x.output] >= NOISE * x.change}
    if any(c >= NOISE * n for c, n in zip(changes, norms, strict=True)) or _without_digits(
        outcome, moved
    ):
        moved = _of_rounding(outcome, moved, exact)
        changes = list(map(_norm, moved))
    paths = [path for path, _ in outcome.outputs]
    known = {
        path: norm / math.sqrt(max(x.size, 1))
        for path, norm, change, x in zip(paths, norms, changes, outcome.reference, strict=True)
        if change < NOISE * norm
    }
    eps = float(np.finfo(session.reference.dtype).eps)
    least = tuple(
        0.0 if path in known or not change < math.inf
        else max(change / eps, _beside(path, known) * math.sqrt(x.size))
        for path, change, x in zip(paths, changes, outcome.reference, strict=True)
    )  # fmt: skip
    masks = _without_digits(outcome, moved)
    numbers = {i: mask for i, mask in masks.items() if paths[i] in known}
    session.floors = Floors(least, numbers, frozenset(still), undecided)
    return session.with_errors(outcome)


def _apart(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))


def _without_digits(outcome: Outcome, moved: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Returns for outputs that have some the numbers without digits: those of keys, for example, in
    one bias of queries, keys and values."""
    pairs = zip(moved, outcome.reference, strict=True)
    masks = [m > NOISE_OF_ONE * np.abs(np.asarray(x, np.float64)) for m, x in pairs]
    return {i: mask for i, mask in enumerate(masks) if mask.any() and not mask.all()}


@dataclasses.dataclass(frozen=True)
class _WideReference(Reference):
    """A reference run in float64 that has the numbers of the one in float32."""

    low: Any = None  # the interpretation of the low-precision run

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Any:
        own = self.low.in_float32(x) if isinstance(self.low, TableEmulation) else x
        return super().constant(own, aval)


class _Exact:
    """The outputs in float64, computed when they are first needed."""

    def __init__(self, session: Session):
        self.session = session

    @functools.cached_property
    def outputs(self) -> list[jax.Array] | None:
        """None if the reference run is in float64 itself."""
        session, program = self.session, self.session.program
        if session.reference.dtype != np.float32:
            return None
        wide = _WideReference(np.dtype(np.float64), low=session.low)
        with wide.context():
            values = lifted(program, wide, program.arrays)
            call = Compiled(
                lambda values: run(program, wide, (), values=values)[1], _largest(program)
            )
            outs, n = call(values), session.state_size
            for step in range(1, session.steps):
                outs = call(session.inputs(step, outs[:n], values, wide))
        return outs

    def where(self, kind: Callable[[ShapedArray], bool]) -> list[np.ndarray] | None:
        if self.outputs is None:
            return None
        pairs = zip(self.outputs, self.session.program.out_avals, strict=True)
        return [in_parts(y) for y, a in pairs if kind(a)]


def _of_rounding(outcome: Outcome, changes: list[np.ndarray], exact: _Exact) -> list[np.ndarray]:
    """Returns the changes, without those that aren't roundings': of decisions, that the changed
    arguments turn where they are exact. Float64 decides such as float32 does."""
    outs = exact.where(is_inexact)
    if outs is None:
        return changes
    apart = map(_apart, outcome.reference, outs)
    return [np.fmin(*pair) for pair in zip(changes, apart, strict=True)]


def _undecided(
    outcome: Outcome, turned: Sequence[np.ndarray], exact: _Exact
) -> dict[str, np.ndarray]:
    """Returns which elements of integers and predicates are turned by changed arguments, and are
    others in float64; all of an output of which these are many."""
    outs = exact.where(is_discrete) if any(map(np.any, turned)) else None
    if outs is not None:
        pairs = zip(outcome.decisions, outs, strict=True)
        others = [np.asarray(y) != x for (*_, x), y in pairs]
        turned = [t & other for t, other in zip(turned, others, strict=True)]
    paths = (path for path, *_ in outcome.decisions)
    some = {path: t for path, t in zip(paths, turned, strict=True) if t.any()}
    return {path: t | (t.mean() >= NOISE) for path, t in some.items()}


def _largest(program: Program) -> float:
    """The size of the largest result; infinite with loops, which run what is compiled often."""
    equations = list(all_equations(program.jaxpr))
    if any(e.primitive.name in ("scan", "while") for e in equations):
        return math.inf
    return max((math.prod(a.shape) for e in equations for a in avals_of(e.outvars)), default=0)


def _changed(session: Session, seed: int) -> Sequence[Argument]:
    random = np.random.default_rng(seed)
    eps = float(np.finfo(session.reference.dtype).eps)
    found: list[Argument] = []
    for x, aval in zip(session.program.arrays, session.program.in_avals, strict=True):
        if is_float(aval) and np.ndim(x) == len(aval.shape) and hasattr(x, "dtype"):
            signs = random.choice((-eps, eps), aval.shape)
            wide = np.asarray(x).astype(np.float64) * (1 + signs)
            dtype = session.reference.dtype if session.adjustable else aval.dtype
            x = wide.astype(dtype)
        found.append(x)
    return found


def _beside(path: str, known: dict[str, float]) -> float:
    keys = path
    while keys:
        keys = keys[: max(keys.rfind("["), keys.rfind("."), 0)]
        near = [size for other, size in known.items() if other.startswith(keys)]
        if near:
            return math.sqrt(sum(x * x for x in near) / len(near))
    return 0.0


def _norm(x: ArrayLike) -> float:
    return math.sqrt(squared_norm(x))
