"""Audits the corpus, one process for a few programs, and compares with the truth."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import scalewise as sw

from .entries import CLEAN, ENTRIES, Clean, Entry, half, load
from .truth import change, error, limits, measure, reference, representable

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "corpus.json"
LIMIT = 120  # processor seconds that an audit may take
TOLERANCE = 3.0  # the error that the audit's fixes leave, as a multiple of what the expert's leave
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7, "float32": 1e-6}  # an error that is always enough
BATCH = 24  # programs that a process audits
ASPECTS = ("line", "kind", "fix")


def arguments(program: Entry | Clean) -> tuple[Any, ...]:
    return representable(program) if isinstance(program, Entry) else program.args()


def audited(program: Entry | Clean, args: tuple[Any, ...]) -> sw.Report:
    return sw.audit(program.call, program.low, **program.options)(*args)


def places(finding: Any) -> list[tuple[str, int]]:
    """Returns file and line of a finding, and of the lines that call it in a library."""
    called = [caller.rpartition(":") for caller in finding.callers]
    return [(finding.file or "", finding.line), *((file, int(n)) for file, _, n in called)]


def operation_places(equation: Any) -> list[tuple[Path, int]]:
    """Returns file and line of an operation, and of the user's line that calls it in a library."""
    file, _, line = equation.caller.rpartition(":")
    called = [(Path(file).resolve(), int(line))] if equation.caller else []
    return [(Path(equation.file or "").resolve(), equation.line), *called]


def row(name: str) -> dict[str, Any]:
    """Audits a program and returns what is recorded of it.

    ``seconds`` are the processor's for the audit, without those for its arguments (a model's first
    parameters).
    """
    program = ENTRIES.get(name) or CLEAN[name]
    args = arguments(program)
    start = time.process_time()
    try:
        report = audited(program, args)
    except Exception as problem:
        said = f"the audit raised {type(problem).__name__}: {str(problem)[:300]}"
        return {"seconds": time.process_time() - start, "said": said}
    seconds = round(time.process_time() - start, 2)
    said = [
        f"{x.kind} at {x.where} ({x.primitive}): {x.evidence}; {x.fix or 'no fix'}"
        for x in report.findings[:4]
    ]
    found = {"seconds": seconds, "findings": len(report.findings), "said": " | ".join(said)}
    if isinstance(program, Clean):
        return found
    if not report.findings:
        return found | {"said": f"nothing was found; error {report.error}"}
    first = report.findings[0]
    lines = {(Path(file).resolve(), n) for file, n in program.lines()}
    found["line"] = any((Path(file).resolve(), n) in lines for file, n in places(first))
    found["kind"] = first.kind in program.accepted
    try:
        wrong = fix_problem(program, report)
    except Exception as problem:
        wrong = f"applying the fixes raised {type(problem).__name__}: {str(problem)[:200]}"
    return found | {"fix": not wrong, "fix_said": wrong}


def fix_problem(entry: Entry, report: sw.Report) -> str:
    """Returns why the audit's fixes aren't as good as the expert's; "" if they are."""
    fixes = [x.fix for x in report.findings if x.fix]
    if not fixes:
        return "no fix"
    expert = measure(dataclasses.replace(entry, steps=1)).expert
    args = representable(entry)
    want = change(entry, reference(entry.call, args), args)
    after = error(change(entry, report.apply_fixes(entry.call)(*args), args), want)
    enough = max(TOLERANCE * expert[1], limits(entry.low, ROUNDING, 0.01, 0.05))
    if after[0] > expert[0] or not after[1] <= enough:
        return f"the fixes leave {after}, an expert's {expert}"
    lines = {(Path(file).resolve(), n) for file, n in entry.lines()}
    there = sum(any(at in lines for at in operation_places(e)) for e in report.equations)
    wide, affordable = sum(fix.size for fix in fixes), max(0.25 * len(report.equations), 2 * there)
    if wide > max(affordable, 4):
        return f"{wide} of {len(report.equations)} operations are widened"
    return ""


def area_of(name: str) -> str:
    """Returns the name of the module with a program."""
    return (ENTRIES.get(name) or CLEAN[name]).call.__module__.split(".")[-1]


def fingerprint(name: str) -> str:
    """Returns a hash of the package's code and of the program's module."""
    files = [*sorted((ROOT / "src" / "scalewise").rglob("*.py")), Path(__file__)]
    files.append(Path(__file__).with_name(f"{area_of(name)}.py"))
    whole = hashlib.sha256(name.encode())
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()[:24]


def kept(name: str) -> Path:
    """Returns the file of a program's result; its name doesn't tell the program's."""
    return ROOT / ".prove" / "corpus" / f"{fingerprint(name)}.json"


def work(todo: Sequence[str]) -> None:
    """Audits programs, each given as ``area name``, and keeps their results.

    An audit beyond the limit ends the process.
    """
    programs = [line.split() for line in todo]
    load(tuple(dict.fromkeys(area for area, _ in programs)))
    for _, name in programs:
        file = kept(name)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        found = row(name)
        signal.setitimer(signal.ITIMER_PROF, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), "utf-8")


def run(names: Iterable[str], seconds: float, again: bool = False) -> dict[str, dict[str, Any]]:
    """Returns the results of some programs, of those audited within a number of seconds."""
    names, end = list(names), time.monotonic() + seconds
    if again:
        for name in names:
            kept(name).unlink(missing_ok=True)
    while time.monotonic() < end:
        todo = [name for name in names if not kept(name).exists()][:BATCH]
        if not todo:
            break
        done = subprocess.run(
            [sys.executable, "-m", "proofs.corpus", "work"],
            input="\n".join(f"{area_of(name)} {name}" for name in todo),
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            ended = next((name for name in todo if not kept(name).exists()), None)
            if ended is None:
                continue
            said = "beyond the limit" if done.returncode == -signal.SIGPROF else done.stderr[-500:]
            kept(ended).parent.mkdir(parents=True, exist_ok=True)
            kept(ended).write_text(json.dumps({"seconds": LIMIT, "said": said}), "utf-8")
    return {name: json.loads(kept(name).read_text()) for name in names if kept(name).exists()}


def totals(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the totals of some failing programs' results."""
    seconds = [x["seconds"] for x in found.values()] or [0.0]
    right = {aspect: sum(bool(x.get(aspect)) for x in found.values()) for aspect in ASPECTS}
    return {
        "programs": len(found),
        **right,
        "median_seconds": round(statistics.median(seconds), 1),
        "max_seconds": round(max(seconds), 1),
    }


def clean_totals(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the totals of the clean programs' results; an audit that fails counts as wrong."""
    seconds = [x["seconds"] for x in found.values()] or [0.0]
    return {
        "programs": len(found),
        "false": sum(x.get("findings", 1) > 0 for x in found.values()),
        "median_seconds": round(statistics.median(seconds), 1),
        "max_seconds": round(max(seconds), 1),
    }


def names_of(part: str) -> list[str]:
    """Returns the names of a half, or of the clean programs, shuffled by a hash."""
    names = CLEAN if part == "clean" else [name for name in ENTRIES if half(name) == part]
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def record(parts: dict[str, dict[str, Any]]) -> None:
    """Writes totals to docs/corpus.json, with the date and the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    old = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    stamp = {"date": datetime.date.today().isoformat(), "commit": commit}
    new = old | {x: found | stamp | {"of": len(names_of(x))} for x, found in parts.items()}
    RESULTS.write_text(json.dumps(new, indent=1) + "\n", "utf-8")
