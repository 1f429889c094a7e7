"""Which error is better, by how much, and which settings and findings are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from ...autoscale import Boundaries
from .._run._session import Error
from ._findings import Finding
from ._fixes import Setting

ENOUGH = 0.5  # a fix that halves the error is taken before wider ones are tried
GAIN = 0.95  # and one that leaves more than this of it is none


def same(a: Finding, b: Finding) -> bool:
    """Whether two findings are about the same thing: operations, or a constant in one."""
    if a.rows or b.rows:
        return a.rows == b.rows
    return (a.file, a.line, a.evidence) == (b.file, b.line, b.evidence)


def enough(after: Error, before: Error) -> bool:
    """Whether nothing else need be tried: an error halved, and more right than wrong."""
    return better(after, before, ENOUGH) and after.relative <= ENOUGH


def key_of(setting: Any) -> Hashable:
    """Equal for settings, or lanes, that are the same."""
    if isinstance(setting, Setting):
        return setting.formats.tobytes(), setting.constants
    return setting.recipe if isinstance(setting, Boundaries) else setting


def near(error: Error, floor: Error) -> bool:
    return error.broken <= floor.broken and error.relative <= 1.5 * floor.relative + 1e-7


def better(after: Error, before: Error, share: float) -> bool:
    """Whether an error is at most a share of another: first what isn't finite, then the rest.

    What is finite and off by more than its own size isn't better than what isn't finite.
    """
    if before.broken:
        return after.broken <= share * before.broken and bool(after.broken or after.relative <= 1)
    return after.broken == 0 and after.relative <= share * before.relative


def mended(what: Finding, order: int, before: Error, after: Error) -> Finding:
    return dataclasses.replace(
        what,
        order=order,
        tried=True,
        error_before=float(before),
        error_after=float(after),
        broken_before=before.broken,
        broken_after=after.broken,
    )


def gain(what: Finding) -> tuple[int, float]:
    """What a fix did to the outputs: numbers made finite, then the error taken off."""
    mended = what.broken_before - what.broken_after
    if what.broken_before or not what.error_before:
        return mended, 0.0
    return mended, what.error_before - what.error_after
