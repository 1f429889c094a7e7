"""Floors of the outputs' errors: parts of outputs that float32's own rounding makes.

The gradient of a key's bias under softmax attention is 0, and float32 returns rounding errors of
about 1e-9 for it, whose relative difference says nothing. Such outputs are found by runs in
float32, of the arguments and of some that are changed by one rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from jax.typing import ArrayLike

from ...formats import FP32
from ...interpret import Argument, is_float
from ...rounding import FP32_PARAMS
from .._tape._interpretations import TableEmulation
from .._thresholds import NOISE, NOISE_OF_ONE, RUNS
from ._outcome import Floors, Outcome, norm
from ._session import Session


def with_floors(session: Session, outcome: Outcome, limit: float) -> Outcome:
    """The error of an output without digits is measured against what its numbers were made of: the
    size at which float32's roundings would be as large as its change, or the size of the outputs
    next to it, whichever is larger. The session keeps the floors, and which changes of the state
    are nothing but roundings, for later runs. Integers and predicates that float32 decides
    otherwise are compared no more. A run without errors and lost changes needs no floors."""
    errors = [*(error for _, error in outcome.outputs), *outcome.decision_errors]
    wrong = any(error.non_finite or error.relative > limit for error in errors)
    if not (wrong or any(x.lost for x in session.updates(outcome))):
        return outcome
    for moved, turned in _roundings(session, outcome):
        session.floors = _floors(session, outcome, moved, turned)
        if session.floors == Floors():
            break
    return session.with_errors(outcome)


def _floors(
    session: Session, outcome: Outcome, moved: Sequence[np.ndarray], turned: Sequence[np.ndarray]
) -> Floors:
    undecided = {
        path: t | (t.mean() >= NOISE)
        for (path, *_), t in zip(outcome.decisions, turned, strict=True) if t.any()
    }  # fmt: skip
    norms, changes = (list(map(norm, some)) for some in (outcome.reference, moved))
    still = {x.path for x in session.updates(outcome) if changes[x.output] >= NOISE * x.change}
    paths = [path for path, _ in outcome.outputs]
    known = {
        path: own / math.sqrt(max(x.size, 1))
        for path, own, change, x in zip(paths, norms, changes, outcome.reference, strict=True)
        if change < NOISE * own
    }
    least = tuple(
        0.0 if path in known or not change < math.inf
        else max(change / session.eps, _beside(path, known) * math.sqrt(x.size))
        for path, change, x in zip(paths, changes, outcome.reference, strict=True)
    )  # fmt: skip
    masks = _without_digits(outcome, moved)
    numbers = {i: mask for i, mask in masks.items() if paths[i] in known}
    return Floors(least if any(least) else (), numbers, frozenset(still), undecided)


# of each float output how far its numbers move; of each other one which elements differ
Moved: TypeAlias = tuple[list[np.ndarray], list[np.ndarray]]


def _roundings(session: Session, outcome: Outcome) -> Iterator[Moved]:
    """Yields how much of each float output is float32's rounding, and which elements of the other
    outputs it decides: in a run of the arguments; then in this one and in one of changed arguments.
    Of an audit against float64, which no wider format measures, how far changed arguments move the
    outputs. No run stays in memory, since it holds all results."""
    if session.wide != FP32:

        def changed(seed: int) -> Moved:
            found = session.run(arrays=_changed(session, seed))
            pairs = zip(found.decisions, outcome.decisions, strict=True)
            turned = [y != s for (*_, y), (*_, s) in pairs]
            return _apart(found.reference, outcome.reference), turned

        yield _most(map(changed, range(RUNS)))
        return
    own = session.low if isinstance(session.low, TableEmulation) else TableEmulation(FP32)
    wide = session.with_low(dataclasses.replace(own, fmt=FP32, saturate=False))
    every = np.tile(FP32_PARAMS, (len(session.formats()), 1))  # the program's own casts, too

    def rounded(seed: int | None = None) -> Moved:
        found = wide.run(every, arrays=_changed(session, seed))
        return _apart(found.reference, found.low), [y != s for _, y, s in found.decisions]

    least, always = rounded()
    yield least, always
    moved, turned = _most(map(rounded, range(RUNS)))
    yield list(map(np.fmin, moved, least)), list(map(np.logical_and, turned, always))


def _most(runs: Iterable[Moved]) -> Moved:
    moved, turned = zip(*runs, strict=True)
    return (
        [np.fmax.reduce(own) for own in zip(*moved, strict=True)],
        [np.logical_or.reduce(own) for own in zip(*turned, strict=True)],
    )


def _apart(some: Sequence[ArrayLike], others: Sequence[ArrayLike]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        pairs = zip(some, others, strict=True)
        return [np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)) for x, y in pairs]


def _without_digits(outcome: Outcome, moved: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Returns for outputs that have some the numbers without digits: those of keys, for example, in
    one bias of queries, keys and values."""
    pairs = zip(moved, outcome.reference, strict=True)
    masks = [m > NOISE_OF_ONE * np.abs(np.asarray(x, np.float64)) for m, x in pairs]
    return {i: mask for i, mask in enumerate(masks) if mask.any() and not mask.all()}


def _changed(session: Session, seed: int | None = None) -> Sequence[Argument]:
    """Returns the arguments in the wide format; with a seed changed by one rounding."""
    random = np.random.default_rng(seed)
    dtype = np.float32 if session.wide == FP32 else np.float64
    found: list[Argument] = []
    for x, aval in zip(session.program.arrays, session.program.in_avals, strict=True):
        if is_float(aval) and np.ndim(x) == len(aval.shape) and hasattr(x, "dtype"):
            signs = 0.0 if seed is None else random.choice((-session.eps, session.eps), aval.shape)
            x = (np.asarray(x).astype(np.float64) * (1 + signs)).astype(dtype)
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
