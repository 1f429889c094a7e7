"""A report in the terminal: about one screen, the worst finding first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from ..._output import Text, counted, print_rows
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import OutputError
from .._search._findings import Finding
from .._search._kinds import FINDING_KINDS
from .._search._literals import called_at
from ._edits import Edit, edits
from ._summary import Summary
from ._trace import before_first_event
from ._verdict import no_fix, tried

SHOWN = 12
LATENT_SHOWN = 3
NO_EDIT = "no edit of the source that was run has this error"
TRACE = ("module", "direction", "last operation", "smallest", "largest", "overflowed", "NaN")


def show(
    report: Summary, said: str, kept: Sequence[Edit], console: Console, *, everything: bool = False
) -> None:
    head = Text(f"audit  {report.function}  {report.low} beside a run in float64")
    count = counted(len(report.equations), "rounded operation")
    head.append(f"   {count}, {counted(report.trials, 'trial')}", style="dim")
    console.print(head)
    console.print(Text(said, style="bold"))
    decided = report.error.decided
    outputs = Text("outputs: " if decided else "outputs: error ")
    outputs.append(str(report.error), style=_style(report.error))
    unit = f" (one rounding: up to {2.0**-report.precision:.2g})"
    outputs.append(" of the elements compared differ" if decided else unit, style="dim")
    if any(x.fix for x in report.findings):
        outputs.append("; with the fixes below ")
        outputs.append(str(report.error_fixed), style=_style(report.error_fixed, "bold green"))
    if not report.error_float32 <= OutputError(0, max(report.error.relative / 10, 1e-6)):
        outputs.append(f"; with {report.wide} operations on arguments in {report.low} ")
        outputs.append(str(report.error_float32), style=_style(report.error_float32))
    console.print(outputs)
    if report.findings:
        _findings(report, kept, console)
    else:
        console.print(no_fix(report))
    if report.updates_lost > 0.01:
        lost = f"{report.updates_lost:.0%} of the optimizer's additions change nothing"
        console.print(Text(f"updates  {lost}"))
    gradients = scales(report)
    if gradients:
        console.print(Text(f"gradients  {gradients}"))
    for line in report.arguments:
        console.print(Text(f"argument  {line}", style="yellow"))
    for literal in [x for x in report.literals if not x.masks]:
        called = f", {literal.called}" if literal.called else ""
        console.print(Text(f"constant  {literal.where}  {literal}{called}", style="yellow"))
    for line in report.latent if everything else report.latent[:LATENT_SHOWN]:
        console.print(Text(f"latent  {line}"))
    if everything:
        _trace(report, console)
        for finding in report.unfixed[:SHOWN]:
            text = f"{finding.kind}  {finding.where}  {finding.primitive}: {finding.evidence}"
            console.print(Text(f"no fix  {text}; {tried(finding)}", style="dim"))
        for line in report.benign:
            console.print(Text(f"benign  {line}", style="dim"))
    else:
        hidden = len(report.benign) + len(report.unfixed) + len(report.latent[LATENT_SHOWN:])
        if hidden:
            text = f"{counted(hidden, 'more note')} and the trace: show(everything=True) or --all"
            console.print(Text(text, style="dim"))
    console.print(Text(f"Model: {report.semantics}.", style="dim"))


def _findings(report: Summary, kept: Sequence[Edit], console: Console) -> None:
    for number, finding in enumerate(report.findings[:SHOWN], 1):
        head = Text(f"{number:2} ")
        head.append(finding.kind, style=FINDING_KINDS[finding.kind].style)
        head.append(f"  {finding.where}", style="bold")
        head.append(function(report, finding))
        head.append(f"  {finding.primitive}, {finding.part}")
        if finding.iteration is not None:
            head.append(f", iteration {finding.iteration}")
        head.append(f": {finding.evidence}")
        console.print(head)
        if finding.source:
            console.print(Text(f"     {finding.source}", style="dim"))
        if finding.called:
            console.print(Text(f"     {finding.called}", style="dim"))
        before = finding.outputs_error("before")
        if finding.fix is None:
            console.print(Text(f"     {tried(finding)}: error {before}"))
            continue
        after = finding.outputs_error("after")
        first = fixed_with(report, finding)
        line = f"the change for {first}" if first else str(finding.fix)
        style = "yellow" if finding.non_finite_after else "green"
        line = f"     {line}: error {before} -> {after}"
        console.print(Text(line, style=style))
        if first:
            continue
        own = edits(report, finding)
        if own and not {*own} & {*kept}:
            console.print(Text(f"       {NO_EDIT}", style="dim"))
        for edit in (x for x in own if x in kept):
            for text in str(edit).splitlines():
                console.print(Text(f"       {text}", style="dim"))
    if len(report.findings) > SHOWN:
        console.print(Text(f"and {len(report.findings) - SHOWN} more", style="dim"))


def _trace(report: Summary, console: Console) -> None:
    rows = before_first_event(report.equations)
    if not rows:
        return
    title = "The last modules before the first number that overflows or is NaN"
    cells = [
        (
            row.scope, row.direction, f"{row.primitive}, {row.place}", f"{row.smallest:.2e}",
            f"{row.largest:.2e}", f"{row.overflowed:,}", f"{row.nan:,}",
        )
        for row in rows
    ]  # fmt: skip
    print_rows(console, TRACE, cells, title=title, right=TRACE[3:])


def function(report: Summary, finding: Finding) -> str:
    """`` in step``, or `` in Attention.__call__ called at model.py:40``; "" if it isn't known."""
    here = _equations(report, finding)
    names = dict.fromkeys(e.name for e in here if e.name)
    if not names:
        return ""
    called = called_at(list(dict.fromkeys(e.call_site for e in here if e.call_site)))
    return f" in {next(iter(names))}{f' {called}' if called and not finding.callers else ''}"


def _equations(report: Summary, finding: Finding) -> list[EquationStatistics]:
    indices = set(finding.equations)
    return [e for e in report.equations if e.index in indices]


def errors(report: Summary, finding: Finding) -> str:
    """``Error made here 0.001, with the error carried in 0.2.``"""
    here = _equations(report, finding)
    if here and all(e.sqnr == -math.inf for e in here):
        return "No number of it is finite in both runs."
    if FINDING_KINDS[finding.kind].out_of_range and not math.isnan(finding.error_before):
        cost = finding.outputs_error("before")
        return f"Outputs' error with it: {cost}; of its finite numbers: {finding.inherited:.2g}."
    made, total = f"{finding.introduced:.2g}", f"{finding.inherited:.2g}"
    return f"Error made here {made}, with the error carried in {total}."


def _style(error: OutputError, finite: str = "bold") -> str:
    return "bold red" if error.non_finite else finite


def scales(report: Summary) -> str:
    table = {} if report.scaled else report.loss_scales()
    lost, over = table.get(0, (0.0, 0.0))
    if max(lost, over) < 1e-3:
        return ""
    best = min((k for k in table if table[k][1] <= over), key=lambda k: (table[k][0], k))
    beyond = next((k for k in table if table[k][1] > over), None)
    text = f"{lost:.1%} flushed to zero" if lost else ""
    if over:
        text += f"{', ' if lost else ''}{over:.1%} overflow"
    text += " without a loss scale"
    if best:
        text += f"; under 2^{best} {table[best][0]:.1%} flushed"
    return text + (f"; from 2^{beyond} more overflow" if beyond is not None else "")


def fixed_with(report: Summary, finding: Finding) -> int | None:
    """Findings that only one change helps together have the same place in the order of fixes."""
    if finding.fix is None:
        return None
    first = next(i for i, x in enumerate(report.findings, 1) if x.order == finding.order)
    return None if report.findings[first - 1] is finding else first
