"""``scalewise.audit`` on programs of JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import scalewise as sw

from ..low_precision import is_emulated, recipe
from ..programs import Answer, Finding, Place, Program, Widened

FIELDS = ("kind", "line", "primitive", "direction", "evidence")


def scalewise(program: Program, args: Any) -> Answer:
    report = audited(program, args)
    fixes = [x.fix for x in report.findings if x.fix]
    lines = program.lines()
    at_fault = sum(any(x in lines for x in _operation(e)) for e in report.equations)
    return Answer(
        tuple(map(_finding, report.findings)),
        _fixed(program, report.apply_fixes) if fixes else None,
        Widened(sum(fix.size for fix in fixes), len(report.equations), at_fault),
        details={
            "low": str(report.low),
            "finding": _recorded(report.findings[0]) if report.findings else None,
        },
    )


def audited(program: Program, args: Any) -> sw.Report:
    options = dict(program.options)
    if is_emulated(program):  # so the truth was measured
        options.setdefault("dtypes", "all")
    if program.reference != "float64":
        options["reference"] = program.reference
    if program.device is not None:
        options["device"] = program.device
    return sw.audit(program.call, program.low, **options)(*args)


def _finding(x: sw.Finding) -> Finding:
    """Returns a finding with file and line, and the lines that call it in a library."""
    called = [caller.rpartition(":") for caller in x.callers]
    places = [(x.file or "", x.line), *((file, int(n)) for file, _, n in called)]
    return Finding(x.kind, places, f"{x.primitive}, {x.evidence}", str(x.fix or ""))


def _operation(equation: Any) -> list[Place]:
    """Returns file and line of an operation, and of the user's line that calls it in a library."""
    file, _, line = equation.caller.rpartition(":")
    called = [(str(Path(file).resolve()), int(line))] if equation.caller else []
    return [(str(Path(equation.file or "").resolve()), equation.line), *called]


def _fixed(program: Program, apply: Callable[[Any], Any]) -> Callable:
    """Returns the program with fixes, which change it, or the recipe for a device."""
    if program.device is None:
        return apply(program.call)
    return sw.autoscale(program.call, apply(recipe(program.low, program.device)))


def _recorded(finding: sw.Finding) -> dict[str, Any]:
    return {k: getattr(finding, k) for k in FIELDS} | {
        "fix": str(finding.fix) if finding.fix else None,
        "before": str(finding.outputs_error("before")),
        "after": str(finding.outputs_error("after")),
    }
