"""Outputs whose errors say nothing, since the reference run has no number to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...interpret import Program, is_float, is_inexact
from ...primitives import having
from ._equation_statistics import EquationStatistics
from ._outcome import Floors, Outcome, output_name

# Operations that return infinities and zeros only of infinite and zero operands.
PASSES = having("exact") | {"convert_element_type"}


def decides(program: Program) -> bool:
    """Returns whether no output is of floats or complex numbers, so that integers and predicates
    are compared."""
    return not any(map(is_inexact, program.out_avals))


def incomparable(program: Program, outcome: Outcome) -> Iterator[str]:
    """Yields the outputs of which the reference run computes infinities, and zeros beside them,
    alone; not masks."""
    if any(np.isinf(size).any() for _, size in float_arguments(program)):
        return
    for i, (path, _) in enumerate(outcome.outputs):
        infinite = np.isinf(outcome.reference[i])
        alone = infinite.any() and not np.any(outcome.reference[i], where=~infinite)
        if alone and any(e["reference_non_finite"] for e in _computed_by(outcome, i)):
            yield output_name(path)


def without_digits(floors: Floors, outcome: Outcome) -> Iterator[str]:
    """Yields the outputs without a correct digit in the reference run: rounding errors alone, or
    zeros where the exact results of the low-precision run's operands aren't zero. Without floats
    among the outputs, those that rounding errors decide."""
    if outcome.error.decided:
        yield from (output_name(path) for path, x in floors.undecided.items() if x.all())
    norms = floors.norms or [0.0] * len(outcome.outputs)
    for i, (path, _) in enumerate(outcome.outputs):
        reference = np.asarray(outcome.reference[i])
        zero = reference.size and not reference.any()
        if norms[i] or (zero and any(e["flushed"] for e in _computed_by(outcome, i))):
            yield output_name(path)


def _computed_by(outcome: Outcome, output: int) -> Iterator[EquationStatistics]:
    """Yields the operations that compute an output's numbers, behind reshapes and casts."""
    equations = {e.index: e for e in outcome.equations}
    seen, pending = set(), {i for i in outcome.origins[output] if i in equations}
    while pending:
        seen |= pending
        passes = (i for i in pending if equations[i].primitive in PASSES)
        pending = {e.index for i in passes for e in outcome.causes.producers(i)} - seen
    yield from (equations[i] for i in seen if equations[i].primitive not in PASSES)


def float_arguments(program: Program) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the path of each float argument, and the magnitudes of its numbers in float64."""
    for path, x, aval in zip(program.arguments, program.arrays, program.in_avals, strict=True):
        if is_float(aval):
            yield path, np.abs(np.asarray(x).astype(np.float64))
