"""Measures the corpus' truths, and scores the audit on it.

``truth`` measures every entry without the audit; ``score`` audits and prints totals of the scored
half and of the clean programs; ``seen [NAME ...]`` prints details of the seen half. Results are
kept in ``.prove/corpus``, so that a stopped run goes on; ``--again`` starts anew.
"""

from __future__ import annotations

import argparse
import sys
import time

from .entries import CLEAN, ENTRIES, half, load
from .truth import clean_problems, measure


def truth(names: list[str]) -> int:
    """Measures entries and clean programs; returns how many contradict what is said of them."""
    wrong = 0
    for name, entry in ENTRIES.items():
        if names and name not in names and entry.call.__module__.split(".")[-1] not in names:
            continue
        start = time.perf_counter()
        try:
            found = measure(entry)
            problems = found.problems(entry)
            said = f"{found.failed} wide {found.wide} expert {found.expert}"
        except Exception as problem:
            problems, said = [f"{type(problem).__name__}: {str(problem)[:300]}"], ""
        wrong += bool(problems)
        mark = "WRONG" if problems else "ok"
        seconds = time.perf_counter() - start
        print(f"{mark} {name}: {'; '.join(problems) or said} ({seconds:.1f} s)", flush=True)
    for name, program in CLEAN.items():
        if names and name not in names and program.call.__module__.split(".")[-1] not in names:
            continue
        try:
            problems = clean_problems(program)
        except Exception as problem:
            problems = [f"{type(problem).__name__}: {str(problem)[:300]}"]
        wrong += bool(problems)
        print(f"{'WRONG' if problems else 'ok'} clean {name}: {'; '.join(problems)}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("truth", "count"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    load()
    if given.command == "count":
        halves = [half(name) for name in ENTRIES]
        print(len(ENTRIES), {x: halves.count(x) for x in set(halves)}, len(CLEAN), "clean")
        return 0
    return int(truth(given.names) > 0)


if __name__ == "__main__":
    sys.exit(main())
