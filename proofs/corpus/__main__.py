"""Measures the corpus' truths, and scores the audit on it.

``truth`` measures every entry without the audit; ``score`` audits and prints totals of the scored
half and of the clean programs; ``seen [NAME ...]`` prints details of the seen half. Results are
kept in ``.prove/corpus``, so that a stopped run goes on; ``--again`` starts anew.
"""

from __future__ import annotations

import argparse
import sys
import time

from .entries import CLEAN, ENTRIES, HALVES, half, load
from .score import ASPECTS, clean_totals, names_of, record, run, totals, work
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


def score(seconds: float, again: bool) -> int:
    """Prints and records the totals of the scored half and of the clean programs, no names."""
    parts = {}
    for part in ("scored", "clean"):
        start = time.monotonic()
        found = run(names_of(part), seconds, again)
        seconds -= time.monotonic() - start
        parts[part] = clean_totals(found) if part == "clean" else totals(found)
        print(f"{part}: {parts[part]} of {len(names_of(part))}", flush=True)
    record(parts)
    return 0


def seen(names: list[str], seconds: float, again: bool, wrong: bool = False) -> int:
    """Prints details of the seen half, or of what is wrong there, and records its totals."""
    if any(half(name) == "scored" for name in names if name in ENTRIES):
        print("these programs are only scored")
        return 1
    found = run([x for x in names_of("seen") if not names or x in names], seconds, again)
    for name, one in found.items():
        if wrong and all(one.get(x) for x in ASPECTS):
            continue
        marks = " ".join(f"{x}:{'yes' if one.get(x) else 'NO'}" for x in ASPECTS)
        entry = ENTRIES[name]
        print(f"## {name} ({entry.low}) {marks} {one['seconds']:.1f} s")
        print(f"   truth: {' or '.join(entry.at)}; {' '.join(entry.kinds)}; {entry.source}")
        print(f"   said: {one['said']}")
        if one.get("fix_said"):
            print(f"   fix: {one['fix_said']}")
    print(totals(found))
    if found and not names:
        record({"seen": totals(found)})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("truth", "count", "score", "seen", "work"))
    parser.add_argument("names", nargs="*", help="of programs or areas")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which to stop")
    parser.add_argument("--wrong", action="store_true", help="only where the audit is wrong")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    given = parser.parse_args()
    if given.command == "work":
        work(sys.stdin.read().splitlines())
        return 0
    load()
    if given.command == "count":
        halves = [half(name) for name in ENTRIES]
        print({x: halves.count(x) for x in HALVES}, len(CLEAN), "clean")
    elif given.command == "truth":
        return int(truth(given.names) > 0)
    elif given.command == "score":
        return score(given.seconds, given.again)
    elif given.command == "seen":
        return seen(given.names, given.seconds, given.again, given.wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
