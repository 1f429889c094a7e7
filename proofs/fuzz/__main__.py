"""Runs the fuzz targets: ``python -m proofs.fuzz [programs|chains|files|folders|arguments]``.

A target is a module of this package with ``PROPERTIES``: tests of hypothesis, each of which is
called with ``count`` random cases. The same seed makes the same cases; a failure is printed,
reduced to a small one unless a case is a seed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis

TARGETS = {
    "programs": 1000,
    "chains": 500,
    "files": 2000,
    "folders": 461,
    "arguments": 500,
}  # cases of a property in a full run


def run(name: str, test: Callable[[], Any], count: int, seed: int, seeded: bool) -> bool:
    """Runs a property on a number of cases, and returns whether it holds."""
    checks = list(hypothesis.HealthCheck)
    options = {"database": None, "deadline": None, "suppress_health_check": checks}
    if seeded:
        options["phases"] = [hypothesis.Phase.generate]
    began, held = time.perf_counter(), True
    try:
        hypothesis.seed(seed)(hypothesis.settings(max_examples=count, **options)(test))()
    except Exception:
        traceback.print_exc()
        held = False
    seconds = time.perf_counter() - began
    print(f"{name}: {'held' if held else 'FAILED'} in {count} cases, {seconds:.0f} s", flush=True)
    return held


def main() -> int:
    """Runs the target named on the command line, all of them by default; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m proofs.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="default: all of them")
    parser.add_argument("--count", type=int, help="cases of each property; default: a full run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    held = True
    for target in [given.target] if given.target else TARGETS:
        module = importlib.import_module(f"proofs.fuzz.{target}")
        getattr(module, "prepare", lambda: None)()
        seeded = getattr(module, "SEEDED", False)
        for name, test in module.PROPERTIES.items():
            held &= run(
                f"{target}, {name}", test, given.count or TARGETS[target], given.seed, seeded
            )
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
