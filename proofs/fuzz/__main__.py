"""Runs the fuzz targets: ``python -m proofs.fuzz [TARGET] [--count N] [--seed S]``.

A target is a module of this package with ``check(seed, index)``, which makes case number ``index``
of a seed, runs it and returns a list of failures, one sentence each. The same ``--seed``
and index always make the same case: ``--first INDEX --count 1`` repeats one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

# How many cases a full run has.
TARGETS = {
    "programs": 1000,
    "chains": 500,
    "files": 10_000,
    "arguments": 1000,
}


def run(target: str, count: int, seed: int, first: int = 0) -> int:
    """Runs ``count`` cases of a target, prints the failures, and returns how many cases failed."""
    module = importlib.import_module(f"proofs.fuzz.{target}")
    getattr(module, "prepare", lambda: None)()
    check = module.check
    failed, began = 0, time.perf_counter()
    for index in range(first, first + count):
        failures = check(seed, index)
        failed += bool(failures)
        for failure in failures:
            print(f"{target} --seed {seed} --first {index} --count 1: {failure}", flush=True)
        done = index - first + 1
        if done % 50 == 0 or done == count:
            seconds = time.perf_counter() - began
            print(f"{target}: {done} of {count}, {failed} failed, {seconds:.0f} s", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs the targets named on the command line, all of them by default; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m proofs.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="default: all of them")
    parser.add_argument("--count", type=int, help="cases of each target; default: a full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args(arguments)
    failed = 0
    for target in [options.target] if options.target else TARGETS:
        count = TARGETS[target] if options.count is None else options.count
        failed += run(target, count, options.seed, options.first)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
