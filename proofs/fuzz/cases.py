"""One case of a fuzz target: a kind of damage, in a folder of its own."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Kind = Callable[[random.Random, Path], list[str]]


def run_case(target: str, kinds: Sequence[Kind], seed: int, index: int) -> list[str]:
    """Runs case number ``index`` of a seed in a temporary folder.

    Args:
        target: the fuzz target's name, which with seed and index decides the random numbers.
        kinds: functions of a random generator and a folder; cases take them in order.
        seed, index: of the case.

    Returns:
        The failures, a sentence each; an exception is one.
    """
    rng = random.Random(f"{target} {seed} {index}")
    kind = kinds[index % len(kinds)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            failures = kind(rng, Path(folder))
        except Exception as error:
            failures = [f"{type(error).__name__}: {error}"]
    return [f"{kind.__name__}: {failure[:1000]}" for failure in failures]
