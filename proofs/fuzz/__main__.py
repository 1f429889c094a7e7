"""Runs the fuzz targets, one or all: ``python -m proofs.fuzz [TARGET]``.

A target is a module of this package. One with ``check(seed, index)`` has numbered cases, each of
which is repeated by ``--first INDEX --count 1``; the others have ``PROPERTIES``: tests of
hypothesis, each of which is called with ``count`` random cases and reduced to a small one if it
fails. The same seed makes the same cases.
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
    "audits": 300,
    "files": 2000,
    "folders": 461,
    "arguments": 500,
}  # cases of a property in a full run


def run_numbered(
    target: str, check: Callable[[int, int], list[str]], count: int, seed: int, first: int
) -> bool:
    """Checks a number of cases, prints each failure, and returns whether there was none."""
    began, failed = time.perf_counter(), 0
    for done, index in enumerate(range(first, first + count), 1):
        failures = check(seed, index)
        failed += bool(failures)
        for failure in failures:
            print(f"{target} --seed {seed} --first {index} --count 1: {failure}", flush=True)
        if done % 50 == 0 or done == count:
            seconds = time.perf_counter() - began
            print(f"{target}: {failed} failed of {done} cases, {seconds:.0f} s", flush=True)
    return not failed


def run_property(name: str, test: Callable[[], Any], count: int, seed: int) -> bool:
    """Runs a property on a number of cases, and returns whether it holds."""
    checks = list(hypothesis.HealthCheck)
    options = {"database": None, "deadline": None, "suppress_health_check": checks}
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
    parser.add_argument(
        "--first", type=int, default=0, help="the first case of programs, chains or audits"
    )
    given = parser.parse_args()
    held = True
    for target in [given.target] if given.target else TARGETS:
        module = importlib.import_module(f"proofs.fuzz.{target}")
        getattr(module, "prepare", lambda: None)()
        count = given.count or TARGETS[target]
        if check := getattr(module, "check", None):
            held &= run_numbered(target, check, count, given.seed, given.first)
        for name, test in getattr(module, "PROPERTIES", {}).items():
            held &= run_property(f"{target}, {name}", test, count, given.seed)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
