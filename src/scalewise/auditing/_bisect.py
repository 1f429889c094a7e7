"""Bisection: the fewest of several things with which something still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def fewest(items: Sequence[Item], holds: Callable[[list[Item]], bool]) -> list[Item]:
    """Returns a part of ``items`` for which ``holds`` is true, and of which none can be left out.

    Parts of halving size are left out where that is possible, as by delta debugging (Zeller and
    Hildebrandt, 2002): of k items b are found in about ``2 b log2(k)`` calls, if each of the b is
    needed by itself. ``holds`` is true for all of them, and may be False once no more calls are
    affordable.
    """
    kept, size = list(items), len(items)
    while size:
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if holds(rest):
                kept = rest
            else:
                start += size
        size = size // 2
    return kept
