"""Scores audits of ``proofs.torch_reports``, beside torch's own checks on the same programs.

    python -m proofs.torch_score truth     # with the Python of `make test-torch`; audits nothing
    python -m proofs.torch_score           # line, kind and fix of each
    python -m proofs.torch_score --write   # and writes the table of docs/torch.md

A fix is right if torch computes the fixed program with at most 1.5 times the error of the expert's
(or half a unit in the last place), both in the narrow dtype, beside the program in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.debug_utils import DebugUnderflowOverflow

import proofs.torch_scored_once
import proofs.torch_unseen  # noqa: F401 -- registers its programs
import scalewise.torch as st
from proofs.torch_reports import CLEAN, FIXED, REPORTS, Failure
from scalewise.auditing._thresholds import unusable
from scalewise.formats import format as format_

DOCS = Path(__file__).parents[1] / "docs" / "torch.md"
BEGIN, END = "<!-- made by proofs/torch_score.py -->\n", "<!-- end of the reports -->\n"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TRIALS = 20
AS_GOOD = 1.5  # of the expert's error


class Program(nn.Module):
    """A function as a module, as torch's checks want it."""

    def __init__(self, f: Callable[..., Tensor]):
        super().__init__()
        self.f = f

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(*args)


def model_of(f: Callable[..., Any]) -> nn.Module:
    return f() if isinstance(f, type) else Program(f)


def _run(failure: Failure, model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns a model's result, or its gradients, from arguments in a dtype."""
    args = [x.to(dtype) for x in failure.args]
    if not failure.grad:
        with torch.no_grad():
            return model(*args).double()
    own = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(*args), own)
    return torch.cat([g.double().flatten() for g in found])


def error(failure: Failure, model: nn.Module, dtype: torch.dtype | None = None) -> float:
    """Returns the relative error of a model in a dtype, infinite if a number isn't finite.

    The model and its arguments are converted to the dtype; one without a dtype does that itself.
    """
    want = _run(failure, model_of(failure.f), torch.float32)
    if failure.autocast:
        with torch.autocast("cpu", DTYPES[failure.low], enabled=dtype is not None):
            got = _run(failure, model, torch.float32)
    else:
        got = _run(failure, model if dtype is None else model.to(dtype), dtype or torch.float32)
    assert want.isfinite().all()
    return float((got - want).norm() / want.norm()) if got.isfinite().all() else math.inf


def truths(name: str) -> list[int]:
    """Returns the lines at fault."""
    lines, first = inspect.getsourcelines(REPORTS[name].f)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]


def check_truth(name: str) -> None:
    """Raises unless the program fails in torch, and the expert's version doesn't."""
    failure = REPORTS.get(name) or CLEAN[name]
    dtype, limit = DTYPES[failure.low], unusable(format_(failure.low).precision)
    before = error(failure, model_of(failure.f), dtype)
    if name in CLEAN:
        print(f"{name}: {before:.2g}")
        assert before < limit, name
        return
    if name not in FIXED:  # by a loss scale, or by one operation in float32
        assert failure.grad
        print(f"{name}: {before:.2g} ({failure.source})")
        assert before > limit, name
        return
    after = error(failure, model_of(FIXED[name]), dtype)
    wide = _run(failure, model_of(failure.f).double(), torch.float64)
    chance = float((_run(failure, model_of(failure.f), torch.float32) - wide).norm() / wide.norm())
    print(f"{name}: {before:.2g}, expert {after:.2g}, float32 {chance:.1g} ({failure.source})")
    assert before > limit > after, name
    assert truths(name), name


class Score(NamedTuple):
    """An audit's first finding of a program: whether its line, kind and fix are right."""

    line: bool
    kind: bool
    fix: bool
    text: str
    seconds: float


def judged(name: str) -> Score:
    """Audits a program."""
    failure, begin = REPORTS[name], time.process_time()
    program = model_of(failure.f)
    options = {"low": failure.low, "autocast": failure.autocast, "grad": failure.grad}
    report = st.audit(program, failure.args, trials=TRIALS, **options)
    seconds = time.process_time() - begin
    found = (*report.findings, *report.unfixed)
    if not found:
        return Score(False, False, False, "no finding", seconds)
    worst, dtype = found[0], DTYPES[failure.low]
    edited = [number for _, number, _ in getattr(worst.fix, "lines", [])]
    line = bool({worst.line, *edited} & {*truths(name)})
    text = f"{worst.kind} at line {worst.line} for {truths(name)}"
    right = False
    if worst.fix is not None:
        fixes = [f.fix for f in report.findings] or [worst.fix]
        after, expert = _fixed_error(failure, fixes, program), 0.0
        if name in FIXED:
            expert = error(failure, model_of(FIXED[name]), dtype)
        right = after <= AS_GOOD * max(expert, 2.0 ** -format_(failure.low).precision)
        text += f"; {', '.join(map(str, fixes))}: error {after:.2g}, the expert's {expert:.2g}"
    return Score(line, worst.kind in failure.kinds, right, text, seconds)


def _fixed_error(failure: Failure, fixes: Sequence[Any], model: nn.Module) -> float:
    """Returns the error of a program in torch with the fixes of a report; for a loss scale that of
    the gradients of the scaled loss, divided by it."""
    if fixes[0].text.startswith("loss scale"):
        scale = 2.0 ** float(fixes[0].text.removeprefix("loss scale 2^"))
        scaled = failure._replace(f=_scaled(failure.f, scale))
        return error(scaled, scaled.f(), DTYPES[failure.low])
    for fix in fixes:
        model = fix.apply(model)
    return error(failure, model)


def _scaled(kind: type[nn.Module], factor: float) -> type[nn.Module]:
    class Scaled(kind):
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(*args) * factor

    return Scaled


def false_finding(name: str) -> str:
    """Returns what an audit finds in a program that doesn't fail, or ""."""
    program = CLEAN[name]
    report = st.audit(model_of(program.f), program.args, low=program.low, trials=TRIALS)
    found = [f for f in (*report.findings, *report.unfixed) if f.fix is not None]
    return ", ".join(str(f) for f in found) or (
        "not usable" if report.verdict.startswith("No") else ""
    )


def _step(model: nn.Module, args: Sequence[Tensor]) -> None:
    outs = model(*args)
    ((outs * outs).mean() if outs.ndim else outs).backward()


def debug_underflow_overflow(model: nn.Module, args: Sequence[Tensor]) -> str:
    """Returns what transformers' check says of a step of a model in 16 bits."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            DebugUnderflowOverflow(model)
            _step(model, args)
    except ValueError as error:
        if "DebugUnderflowOverflow" not in str(error):
            raise
        module, kind = re.findall(r"^ {18}(\S*) (\w+)$", printed.getvalue(), re.MULTILINE)[-1]
        seen = ", ".join(dict.fromkeys(re.findall(r"^\S+ has \w+$", printed.getvalue(), re.M)))
        return f"module `{module or 'the model'}` ({kind}): {seen}"
    return "nothing"


def detect_anomaly(model: nn.Module, args: Sequence[Tensor]) -> str:
    """Returns what torch's check says of a step of a model in 16 bits."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                _step(model, args)
        except RuntimeError as error:
            text = "".join(str(w.message) for w in told if "Traceback of forward" in str(w.message))
            lines = re.findall(r'File "(.+?)", line (\d+)', text)
            own = [x for x in lines if not x[0].startswith(str(Path(torch.__file__).parent))]
            at = f" at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
            return f"{str(error).splitlines()[0]}{at}"
    return "nothing"


def row(name: str, score: Score) -> str:
    """Returns a line of the table: the audit, and torch's checks."""
    failure = REPORTS[name]
    cells = [name, failure.low, *("yes" if x else "no" for x in score[:3])]
    for check in (debug_underflow_overflow, detect_anomaly):
        model, dtype = model_of(failure.f), DTYPES[failure.low]
        model = model if failure.autocast else model.to(dtype)
        args = tuple(x if failure.autocast else x.to(dtype) for x in failure.args)
        with torch.autocast("cpu", dtype, enabled=failure.autocast):
            text = check(model, [x.requires_grad_() for x in args])
        names_line = any(text.endswith(f".py:{n}") for n in truths(name))
        cells.append("the line" if names_line else "nothing" if text == "nothing" else "a failure")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="?", choices=("truth", "score"), default="score")
    parser.add_argument("--only", nargs="+", default=[*REPORTS, *CLEAN], help="programs")
    parser.add_argument("--write", action="store_true", help="write the table to docs/torch.md")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.part == "truth":
        for name in given.only:
            check_truth(name)
        return
    lines = [
        "| program | format | line | kind | fix | `DebugUnderflowOverflow` | `detect_anomaly` |",
        "|---|---|---|---|---|---|---|",
    ]
    scores, clean = [], [name for name in given.only if name in CLEAN]
    for name in given.only:
        if name in CLEAN:
            continue
        scores.append(judged(name))
        lines.append(row(name, scores[-1]))
        print(f"{lines[-1]} {scores[-1].text} ({scores[-1].seconds:.0f} s)", flush=True)
    totals = [sum(getattr(s, what) for s in scores) for what in ("line", "kind", "fix")]
    lines += ["", f"Of {len(scores)}: line {totals[0]}, kind {totals[1]}, fix {totals[2]}."]
    false = {name: found for name in clean if (found := false_finding(name))}
    lines.append(f"Of {len(clean)} programs that torch computes well: {len(false)} with a finding.")
    print(*lines[-2:], *(f"{name}: {found}" for name, found in false.items()), sep="\n")
    if given.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
