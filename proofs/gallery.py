"""Scores the audit on 64 failures and 20 clean programs of examples/.

`python -m proofs.gallery` takes many minutes; names on the command line choose some. It prints for
each failure whether the first finding has the marked line and an accepted kind, and whether its fix
is one that an expert would choose. With ``--record`` it also writes them to docs/gallery.jsonl, of
which docs/gallery_page.py makes a page. The exit status is 1 if one of the 26 failures of
examples/gallery.py and accumulators.py, which are checked more strictly, isn't found and fixed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.failures import FAILURES, Failure
from examples.failures.clean import CLEAN, Clean

import scalewise as sw
from examples import accumulators, gallery
from proofs.experts import error, expert_error, marked
from scalewise.auditing._report._terminal import alone
from scalewise.auditing._run._outcome import OutputError
from scalewise.formats import format

FILE = Path(__file__).parents[1] / "docs" / "gallery.jsonl"
ASPECTS = ("line", "kind", "fix")


@dataclasses.dataclass(frozen=True)
class Short(Failure):
    """A failure of a few lines.

    Attributes:
        device: whose matrix units add the products of a recipe.
    """

    device: Any = None


def _short(case: gallery.Case | accumulators.Case) -> Short:
    at = gallery.apply_update if case.call.__name__ == "<lambda>" else case.call
    return Short(
        case.call, case.arguments, case.low, case.kinds, fixes=(), at=(at,),
        source=case.reference, device=getattr(case, "device", None),
    )  # fmt: skip


# The last ones are told from others only by a model of a device, which other tools don't have.
ACCUMULATORS = {name: _short(case) for name, case in accumulators.ACCUMULATORS.items()}
SHORT = {name: _short(case) for name, case in gallery.GALLERY.items()}
ALL: dict[str, Failure] = SHORT | FAILURES
EVERY: dict[str, Failure] = ALL | ACCUMULATORS
STRICT = SHORT | ACCUMULATORS
TOLERANCE = 3.0  # the error that a fix leaves, as a multiple of the one that the expert's leaves


@dataclasses.dataclass(frozen=True)
class Score:
    """The audit's verdict on one program.

    Attributes:
        problems: by aspect, what is wrong with the first finding.
        report: the audit's; None if it raised an exception.
        expert: the error that the expert's fix leaves; None for the 26 short programs.
        seconds: that the audit took.
    """

    problems: dict[str, str]
    report: sw.Report | None
    expert: tuple[int, float] | None
    seconds: float

    def __str__(self) -> str:
        marks = ", ".join(f"{x} {'wrong' if x in self.problems else 'right'}" for x in ASPECTS)
        said = "; ".join([*dict.fromkeys(self.problems.values()), *map(_said, self.findings[:1])])
        return f"{marks}, {self.seconds:.0f} s: {said}"

    @property
    def findings(self) -> Sequence[sw.Finding]:
        return self.report.findings if self.report else ()


def _said(finding: sw.Finding) -> str:
    return f"{finding.kind} at {finding.where}: {finding.fix or 'no fix'}"


def audited(case: Failure | Clean, **options: Any) -> sw.Report:
    if isinstance(case, Short) and case.device is not None:
        options["device"] = case.device
    return sw.audit(case.call, case.low, reference=case.reference, **options)(*case.arguments())


def score(name: str) -> Score:
    """Audits a failure and judges its first finding."""
    case, start = EVERY[name], time.perf_counter()
    try:
        report = audited(case, **({"trials": 10} if name in STRICT else {}))
    except Exception as problem:  # counted as a failure, so that the others are audited too
        said = f"the audit raised {type(problem).__name__}: {str(problem)[:200]}"
        return Score(dict.fromkeys(ASPECTS, said), None, None, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    expert = None if name in STRICT else expert_error(case)
    if not report.findings:
        said = f"nothing was found; error {report.error}"
        return Score(dict.fromkeys(ASPECTS, said), report, expert, seconds)
    fix = _strict(case, report) if expert is None else _expert(case, report, expert)
    problems = {"line": _line(case, report), "kind": _kind(case, report), "fix": fix}
    return Score({k: v for k, v in problems.items() if v}, report, expert, seconds)


def _line(case: Failure, report: sw.Report) -> str:
    """Returns what is wrong with the lines of the first findings."""
    lines = {(Path(file).resolve(), line) for file, line in marked(case.at)}
    assert lines, "no line is marked"
    named = [
        lines & {(Path(file).resolve(), int(line)) for file, line in _places(x)}
        for x in report.findings[: case.faults]
    ]
    if all(named) and len(set().union(*named)) >= case.faults:
        return ""
    where = ", ".join(x.where for x in report.findings[: case.faults])
    return f"{where}, not {sorted(line for _, line in lines)}"


def _places(finding: sw.Finding) -> list[tuple[str, str]]:
    """Returns file and line of a finding, and of the lines that call it in a library."""
    called = [caller.rpartition(":") for caller in finding.callers]
    return [(finding.file or "", str(finding.line)), *((file, line) for file, _, line in called)]


def _kind(case: Failure, report: sw.Report) -> str:
    kinds = [x.kind for x in report.findings[: case.faults]]
    wrong = [kind for kind in kinds if kind not in case.kinds]
    return f"{', '.join(wrong)}, not {' or '.join(case.kinds)}" if wrong else ""


def _expert(case: Failure, report: sw.Report, expert: tuple[int, float]) -> str:
    """Returns why the fixes aren't those of an expert, or leave a larger error."""
    first = report.findings[: case.faults]
    for worst in first:
        if worst.fix is None:
            return "no fix"
        if not any(re.search(fix, str(worst.fix), re.IGNORECASE) for fix in case.fixes):
            return f"another fix: {worst.fix}"
    last = max(first, key=lambda x: x.order)
    after = {x.order: (x.non_finite_after, x.error_after) for x in report.findings if x.fix}
    orders = sorted(order for order in after if order >= last.order)
    enough = next((order for order in orders if _near(case, after[order], expert)), None)
    if enough is None:
        return f"the fixes leave {report.error_fixed}, an expert's {expert[0] or expert[1]:.2g}"
    needed = [x.fix for x in report.findings if x.fix and x.order <= enough]
    wide = sum(fix.size for fix in needed)
    if wide > _affordable(case, report):
        return f"{wide} of {len(report.equations)} operations in {case.reference}"
    return ""


def _near(case: Failure, error: tuple[int, float], expert: tuple[int, float]) -> bool:
    """Returns True if an error is near the expert's, or no larger than the format's epsilon."""
    rounding = float(format(case.low).eps) if _is_format(case.low) else 0.0
    left = error[1] if math.isfinite(error[1]) else 0.0
    return error[0] <= expert[0] and left <= max(TOLERANCE * expert[1], rounding)


def _affordable(case: Failure, report: sw.Report) -> float:
    """Returns how many operations a good fix may move to a wider format."""
    lines = {(file, line) for file, line in marked(case.at)}
    there = sum((e.file, e.line) in lines for e in report.equations)
    return max(case.share * len(report.equations), 2 * there)


def _is_format(low: Any) -> bool:
    try:
        return bool(format(low))
    except (TypeError, ValueError):
        return False


def _strict(case: Failure, report: sw.Report) -> str:
    """Returns why the first fix doesn't halve the error, or isn't what the audit measured."""
    worst = report.findings[0]
    if not worst.fix:
        return "no fix helps"
    halved = worst.error_after <= 0.5 * worst.error_before
    if not halved and worst.non_finite_after >= worst.non_finite_before:
        return "the fix doesn't halve the error"
    if report.error_fixed > report.error:
        return "all fixes together increase the error"
    first = min((x for x in report.findings if x.fix), key=lambda x: x.order)
    assert first.fix is not None
    arguments = case.arguments()
    want = case.call(*arguments)
    for fixed, measured in (
        (_fixed(case, first.fix.apply), (first.non_finite_after, first.error_after)),
        (_fixed(case, report.apply_fixes), dataclasses.astuple(report.error_fixed)),
    ):
        applied = error(fixed(*arguments), want)
        close = abs(applied[1] - measured[1]) <= 1e-2 * measured[1] + 1e-6
        close |= measured[1] == math.inf and applied[0] > 0
        if applied[0] != measured[0] or not close:
            return f"fix.apply has the error {applied}, the audit measured {measured}"
    return ""


def _fixed(case: Failure, apply: Callable[[Any], Any]) -> Callable:
    """Returns the program with fixes, which change it or the recipe for a device."""
    if not isinstance(case, Short) or case.device is None:
        return apply(case.call)
    recipe = sw.recipes.CATALOGUE[case.low] if isinstance(case.low, str) else case.low
    return sw.autoscale(case.call, apply(dataclasses.replace(recipe, emulate=case.device)))


def check(name: str) -> str:
    """Audits one failure and returns its first finding in a line.

    Raises:
        AssertionError: the first finding has another line or kind, or another fix.
    """
    scored = score(name)
    assert not scored.problems, "; ".join(scored.problems.values())
    return _said(scored.findings[0])


def false_findings(name: str) -> Sequence[sw.Finding]:
    """Returns the findings on a clean program."""
    return audited(CLEAN[name]).findings


def scored_row(name: str) -> tuple[Score, dict[str, Any]]:
    """Returns the score of a failure, and what is recorded of it."""
    found = score(name)
    report = found.report
    return found, {
        "program": name,
        "low": str(report.low if report else EVERY[name].low),
        "problems": found.problems,
        "finding": _recorded(found.findings[0]) if found.findings else None,
        "error": str(report.error) if report else "audit failed",
        "error_fixed": str(report.error_fixed) if report else "",
        "expert": str(OutputError(*found.expert)) if found.expert else "",
        "seconds": round(found.seconds, 1),
    }


def _recorded(finding: sw.Finding) -> dict[str, Any]:
    fields = ("kind", "line", "primitive", "direction", "evidence")
    return {k: getattr(finding, k) for k in fields} | {
        "fix": str(finding.fix) if finding.fix else None,
        "before": str(finding.outputs_error("before")),
        "after": f"{finding.outputs_error('after')}{alone(finding)}",
    }


def clean_row(name: str) -> dict[str, Any]:
    """Returns what is recorded of a clean program: the findings on it."""
    start = time.perf_counter()
    found = [_said(x) for x in false_findings(name)]
    return {"program": name, "found": found, "seconds": round(time.perf_counter() - start, 1)}


def rows(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Returns the recorded results by program; of two of one program, the later."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {row["program"]: row for row in map(json.loads, lines)}


def record(row: dict[str, Any], file: Path = FILE) -> None:
    """Writes a program's result, in place of an earlier one, in the order of the programs."""
    kept = rows(file) | {row["program"]: row | {"date": datetime.date.today().isoformat()}}
    text = [json.dumps(kept[name]) + "\n" for name in (*EVERY, *CLEAN) if name in kept]
    file.write_text("".join(text), "utf-8")


def totals(kept: Sequence[dict[str, Any]]) -> str:
    """``line 47/64, kind 45/64, expert fix 41/64, false findings on 20 clean programs: 0``."""
    scores = [row["problems"] for row in kept if "problems" in row]
    clean = {row["program"]: row["found"] for row in kept if "found" in row}
    right = {x: sum(x not in problems for problems in scores) for x in ASPECTS}
    wrong = [name for name, found in clean.items() if found]
    counts = [f"{n.replace('fix', 'expert fix')} {k}/{len(scores)}" for n, k in right.items()]
    counts.append(f"false findings on {len(clean)} clean programs: {len(wrong)}")
    return ", ".join(counts) + (f" ({', '.join(wrong)})" if wrong else "")


def main() -> int:
    names = [*EVERY, *CLEAN]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="program", help="by name; all by default")
    parser.add_argument("--record", action="store_true", help="write docs/gallery.jsonl")
    given = parser.parse_args()
    unknown = set(given.programs) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(names)}")
    made = []
    for name in [x for x in names if x in given.programs or not given.programs]:
        said, row = scored_row(name) if name in EVERY else (None, clean_row(name))
        print(f"{name}: {said or '; '.join(row['found']) or 'no finding'}", flush=True)
        made.append(row)
        if given.record:
            record(row)
    print(totals(made))
    return int(any(row.get("problems") for row in made if row["program"] in STRICT))


if __name__ == "__main__":
    sys.exit(main())
