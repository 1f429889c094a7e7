"""Comparisons of errors, and of settings and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from ...autoscaling import Boundaries
from .._run._equation_statistics import Equations
from .._run._outcome import OutputError
from .._thresholds import ENOUGH, SLIGHT
from ._apply import FormatChoice
from ._findings import Finding


def lost_updates(equations: Equations) -> float:
    """Returns the share of the optimizer's additions that change nothing, over a sample.

    Only those count that make an output: weights, moments, averages. A decay that is too small
    beside a gradient, say, doesn't keep the weights as they are, and neither does an epsilon.
    """
    makes = (e for e in equations if e.is_output and not e.adds_constant)
    found = [e for e in makes if e.direction == "optimizer" and e["added"]]
    return sum(e["swamped"] for e in found) / max(sum(e["added"] for e in found), 1.0)


def same(a: Finding, b: Finding) -> bool:
    if a.equations or b.equations:
        return a.equations == b.equations
    return (a.file, a.line, a.evidence) == (b.file, b.line, b.evidence)


def key_of(setting: Any) -> Hashable:
    if isinstance(setting, FormatChoice):
        return setting.formats.tobytes(), setting.constants
    return setting.recipe if isinstance(setting, Boundaries) else setting


def near(error: OutputError, floor: OutputError) -> bool:
    return error.non_finite <= floor.non_finite and error.relative <= 1.5 * floor.relative + 1e-7


def is_slight(error: OutputError, eps: float) -> bool:
    """Returns True if an error may be that of a gradient, a sum of many roundings that cancels."""
    return not error.non_finite and error.relative <= min(SLIGHT * eps, 0.25)


def better(after: OutputError, before: OutputError, share: float) -> bool:
    """Returns True if an error is at most ``share`` of another.

    Non-finite numbers are compared first; from a share of a half on, to make one of several outputs
    finite is enough, however few numbers it has. Outputs that became finite with a relative error
    above 1 aren't better than non-finite ones.
    """
    if before.non_finite:
        fewer = after.non_finite < before.non_finite and after.spoiled < before.spoiled
        few = after.non_finite <= share * before.non_finite or (fewer and share >= ENOUGH)
        return few and bool(after.non_finite or after.relative <= 1)
    return after.non_finite == 0 and after.relative <= share * before.relative


def fixed(what: Finding, order: int, before: OutputError, after: OutputError) -> Finding:
    return dataclasses.replace(
        what,
        order=order,
        tried=True,
        decided=before.decided,
        error_before=float(before),
        error_after=float(after),
        non_finite_before=before.non_finite,
        non_finite_after=after.non_finite,
    )
