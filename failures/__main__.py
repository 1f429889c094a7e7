"""Scores tools on programs that fail in low precision: `python -m failures score --tool NAME`.

``list`` names the programs, ``truth`` measures that they fail as they say, without a tool, and
``score`` asks a tool about them. Of programs that are only scored totals are printed, no names.
``pairs`` compares the pairs of programs of pairs.py. A
tool is one of those that ``list --tools`` names, or ``module:function`` or ``file.py:function`` of
your own (README.md). Results are kept in ``.prove/failures``, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from . import pairs
from .programs import PARTS, SCORED, SETS, load
from .runner import ASPECTS, TOOLS, of_part, record, run, tool_for, totals, truth_of, work


def listed(sets: Sequence[str]) -> int:
    for name in sets:
        programs = load(name)
        counts = ", ".join(
            f"{n} {part}" for part in PARTS if (n := sum(x.part == part for x in programs.values()))
        )
        print(f"# {name}: {counts}")
        for x in programs.values():
            if not x.blind:
                print(f"{x.name}: {x.low}; {' or '.join(x.kinds) or 'healthy'}; {x.source}")
    return 0


def truths(sets: Sequence[str], names: Sequence[str]) -> int:
    """Measures programs; returns 1 if one contradicts what is said of it."""
    wrong = 0
    for set in sets:
        for program in load(set).values():
            area = program.call.__module__.rpartition(".")[2]
            if names and program.name not in names and area not in names:
                continue
            start = time.perf_counter()
            try:
                problems = truth_of(set).problems(program)
            except Exception as problem:
                problems = [f"{type(problem).__name__}: {str(problem)[:300]}"]
            wrong += bool(problems)
            mark, seconds = "WRONG" if problems else "ok", time.perf_counter() - start
            print(f"{mark} {program.name}: {'; '.join(problems)} ({seconds:.1f} s)", flush=True)
    return int(wrong > 0)


def score(given: argparse.Namespace) -> int:
    seconds = given.seconds
    for set in given.set:
        if tool_for(given.tool, set) is None:
            print(f"{set}: {given.tool} doesn't run these programs")
            continue
        for part in given.part:
            programs = of_part(set, part, given.names)
            if given.names and any(x.blind for x in programs):
                print("some of these programs are only scored")
                return 1
            start, found = time.monotonic(), {}
            for name, row in run(programs, given.tool, seconds, given.again):
                found[name] = row
                if not load(set)[name].blind:
                    show(name, row, given.wrong)
            seconds -= time.monotonic() - start
            if programs:
                print(f"{set}, {part}: {totals(part, found)} of {len(programs)}", flush=True)
            if found and given.record and not (given.names and set in SCORED):
                record(set, part, given.tool, found)
    return 0


def show(name: str, row: dict, only_wrong: bool) -> None:
    """Prints a program's result."""
    right = all(row[x] for x in ASPECTS) if "line" in row else row["verdict"] == "nothing"
    if only_wrong and right:
        return
    marks = " ".join(f"{x}:{'yes' if row[x] else 'NO'}" for x in ASPECTS if x in row)
    print(f"{name}: {marks or row['verdict']} ({row['seconds']:.1f} s)\n   {row['said']}")
    if row.get("fix_said"):
        print(f"   fix: {row['fix_said']}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m failures", description=__doc__)
    parser.add_argument("command", choices=("list", "truth", "score", "work", "pairs"))
    parser.add_argument("names", nargs="*", help="of programs; for truth, of modules too")
    parser.add_argument("--tool", help="a name, or module:function, or file.py:function")
    parser.add_argument("--tools", action="store_true", help="list the tools")
    parser.add_argument("--set", action="append", choices=SETS, help="of programs: corpus")
    parser.add_argument("--part", action="append", choices=PARTS, help="of a set; all by default")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which to stop")
    parser.add_argument("--wrong", action="store_true", help="print only where the tool is wrong")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--record", action="store_true", help="write the results into docs/")
    given = parser.parse_intermixed_args()
    given.set, given.part = given.set or ["corpus"], given.part or PARTS
    if given.command == "work":
        work(sys.stdin.read().splitlines())
        return 0
    if given.command == "pairs":
        return pairs.score(given.names)
    if given.tools:
        print(*(f"{name}: {', '.join(sets)}" for name, sets in TOOLS.items()), sep="\n")
        return 0
    try:
        unknown = set(given.names).difference(*map(load, given.set))
    except ModuleNotFoundError as missing:
        parser.error(f"--set {' '.join(given.set)} needs the package {missing.name}")
    if given.command == "list":
        return listed(given.set)
    if given.command == "truth":
        return truths(given.set, given.names)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if given.tool is None or (given.tool not in TOOLS and ":" not in given.tool):
        parser.error(f"--tool is {given.tool}; expected file.py:function, or {', '.join(TOOLS)}")
    return score(given)


if __name__ == "__main__":
    sys.exit(main())
