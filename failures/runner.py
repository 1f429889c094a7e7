"""Asks tools about programs, one process for a few programs, and compares with what is true.

Results are kept in ``.prove/failures``, so that a stopped run goes on.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .programs import PARTS, SCORED, Answer, Finding, Program, load, module_of
from .tools import TOOLS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "scoreboard.jsonl"  # one line for a program and a tool
TOTALS = ROOT / "docs" / "corpus.json"  # of the corpus, by tool; of other such sets beside it
LIMIT = 120  # processor seconds that a tool may take for a program
TOLERANCE = {"torch": 1.5}  # the error that fixes leave, as a multiple of what an expert's leave
OTHERS = 3.0  # for other sets
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7, "float32": 1e-6}  # an error that is always enough
BATCH = 24  # programs that a process runs
ASPECTS = ("line", "kind", "fix")
LIBRARIES = ("jax", "torch", "transformers", "paddlepaddle")

Row = dict[str, Any]
Tool = Callable[[Program, Any], Answer]


def tool_for(tool: str, set: str) -> Tool | None:
    """Returns the adapter of a tool for a set of programs; None without one.

    Args:
        tool: a name of ``TOOLS``, or ``module:function`` or ``file.py:function`` of a user.
        set: the name of a set.
    """
    if tool in TOOLS:
        found = TOOLS[tool].get(set)
        if found is None:
            return None
        return getattr(importlib.import_module(f"failures.tools.{found[0]}"), found[1])
    where, _, name = tool.rpartition(":")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        where = Path(where).stem
    return getattr(importlib.import_module(where), name)


def row(program: Program, tool: str) -> Row:
    """Asks a tool about a program, and returns what is recorded of it.

    ``seconds`` are the processor's, without those for the arguments (a model's first parameters).
    """
    ask, truth = tool_for(tool, program.set), truth_of(program.set)
    assert ask is not None
    args = truth.arguments(program)
    start = time.process_time()
    try:
        answer = ask(program, args)
    except Exception as problem:
        answer = Answer(failed=f"{type(problem).__name__}: {str(problem)[:300]}")
    return judged(program, answer) | {"seconds": round(time.process_time() - start, 2)}


def truth_of(set: str) -> Any:
    """Returns the module that measures the programs of a set."""
    return importlib.import_module(
        {"torch": "failures.torch.truth", "steps": "failures.torch.truth"}.get(
            set, "failures.paddle" if set == "paddle" else "failures.truth"
        )
    )


def judged(program: Program, answer: Answer) -> Row:
    """Returns whether line, kind and fix of an answer are right."""
    first = answer.findings[: program.faults]
    where = [f"{Path(file).name}:{n}" for x in first[:1] for file, n in x.places]
    found: Row = {
        "findings": len(answer.findings),
        "verdict": verdict(program, answer),
        "where": where or [x.module or "the model" for x in first[:1] if x.module is not None],
        "said": answer.failed or " | ".join(map(said, answer.findings[:4])),
    } | dict(answer.details)
    if not program.kinds:
        return found
    found["line"] = found["verdict"] in ("line", "module")
    found["kind"] = bool(first) and all(x.kind in program.accepted for x in first)
    try:
        wrong, errors = fix_problem(program, answer)
    except Exception as problem:
        wrong = f"the fixed program raised {type(problem).__name__}: {str(problem)[:200]}"
        errors = ()
    return found | {"fix": not wrong, "fix_said": wrong, "errors": errors}


def said(finding: Finding) -> str:
    where = ", ".join(f"{Path(file).name}:{line}" for file, line in finding.places[:1])
    at = f" at {where or finding.module}" if where or finding.module else ""
    text = f"{finding.kind}{at}: {finding.message}".strip(": ")
    return f"{text}; {finding.fix}" if finding.fix else text


def verdict(program: Program, answer: Answer) -> str:
    """Returns what the first findings name: "nothing", "line", "another line", "module", "another
    module", "operation" (no place), or "failed"."""
    if answer.failed:
        return "failed"
    if not answer.findings:
        return "nothing"
    first = answer.findings[: program.faults]
    if first[0].module is not None:
        right = bool(program.kinds) and first[0].module in program.modules
        return "module" if right else "another module"
    if not first[0].places:
        return "operation"
    lines = program.lines()
    named = [lines & {(str(Path(f).resolve()), line) for f, line in x.places} for x in first]
    right = all(named) and len(frozenset().union(*named)) >= program.faults
    return "line" if right else "another line"


def fix_problem(program: Program, answer: Answer) -> tuple[str, Sequence[str]]:
    """Returns why a tool's fixes aren't as good as an expert's ("" if they are), and the errors of
    the program, with the tool's fixes, and with the expert's."""
    if answer.fixed is None:
        return "no fix", ()
    truth = truth_of(program.set)
    before, expert, after = truth.errors(program, answer.fixed)
    errors = tuple("" if x is None else error_text(*x) for x in (before, after, expert))
    for finding in answer.findings[: program.faults]:
        if program.fixes and not any(re.search(x, finding.fix, re.I) for x in program.fixes):
            return f"another fix: {finding.fix}", errors
    if expert is None:
        good = truth.repaired(after, before, truth.limit_of(program))
    else:
        rounding = truth.limits(program.low, ROUNDING, 0.01, 0.05)
        enough = max(TOLERANCE.get(program.set, OTHERS) * expert[1], rounding)
        good = after[0] <= expert[0] and after[1] <= enough
    if not good:
        what = ("the error is", "with the fixes", "with an expert's")
        return ", ".join(" ".join(x) for x in zip(what, errors, strict=True) if x[1]), errors
    if answer.widened is not None:
        moved, operations, at_fault = answer.widened
        if moved > max(program.share * operations, 2 * at_fault, 4):
            return f"{moved} of {operations} operations are widened", errors
    return "", errors


def error_text(non_finite: int, relative: float) -> str:
    return f"{non_finite} not finite" if non_finite else f"{relative:.2g}"


def fingerprint(program: Program, tool: str) -> str:
    """Returns a hash of the code of the package, of the runner and of the program's module."""
    here = Path(__file__).parent
    files = [*sorted((ROOT / "src" / "scalewise").rglob("*.py")), *sorted(here.glob("*.py"))]
    files += sorted((here / "tools").glob("*.py"))
    files.append(Path(sys.modules[f"failures.{module_of(program)}"].__file__ or ""))
    if tool not in TOOLS and (where := Path(tool.rpartition(":")[0])).exists():
        files.append(where)
    whole = hashlib.sha256(f"{program.set} {program.name} {tool}".encode())
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()[:24]


def kept(program: Program, tool: str) -> Path:
    """Returns the file of a result; its name doesn't tell the program's."""
    return ROOT / ".prove" / "failures" / f"{fingerprint(program, tool)}.json"


def keep(program: Program, tool: str, found: Row) -> None:
    file = kept(program, tool)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found), "utf-8")


def work(todo: Sequence[str]) -> None:
    """Runs programs, each given as a line of JSON ``[set, module, name, tool]``.

    A tool beyond the limit ends the process.
    """
    for set, module, name, tool in map(json.loads, todo):
        program = load(set, (module,))[name]
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        found = row(program, tool)
        signal.setitimer(signal.ITIMER_PROF, 0)
        keep(program, tool, found)


def run(
    programs: Iterable[Program], tool: str, seconds: float = 3600, again: bool = False
) -> Iterator[tuple[str, Row]]:
    """Yields names and results of programs, of those that are run within a number of seconds."""
    programs, end = list(programs), time.monotonic() + seconds
    files = {program.name: kept(program, tool) for program in programs}
    if again:
        for file in files.values():
            file.unlink(missing_ok=True)
    while programs:
        done, todo = programs[:BATCH], [x for x in programs[:BATCH] if not files[x.name].exists()]
        if todo and time.monotonic() > end:
            return
        if todo:
            _work_elsewhere(todo, tool)
        done = [x for x in done if files[x.name].exists()]
        yield from ((x.name, json.loads(files[x.name].read_text())) for x in done)
        programs = [x for x in programs if x not in done]


def _work_elsewhere(todo: Sequence[Program], tool: str) -> None:
    """Runs programs in a process of their own, up to one that ends it."""
    lines = [json.dumps([x.set, module_of(x), x.name, tool]) for x in todo]
    done = subprocess.run(
        [sys.executable, "-m", "failures", "work"],
        input="\n".join(lines),
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    ended = next((x for x in todo if not kept(x, tool).exists()), None)
    if done.returncode and ended is not None:
        why = "beyond the limit" if done.returncode == -signal.SIGPROF else done.stderr[-500:]
        keep(ended, tool, judged(ended, Answer(failed=why)) | {"seconds": LIMIT})


def of_part(set: str, part: str, names: Sequence[str] = ()) -> list[Program]:
    """Returns the programs of a part of a set, those of the blind ones shuffled by a hash."""
    found = [x for x in load(set).values() if x.part == part and (not names or x.name in names)]
    if any(x.blind for x in found):
        found.sort(key=lambda x: hashlib.sha256(x.name.encode()).digest())
    return found


def totals(part: str, found: Mapping[str, Row]) -> Row:
    """Returns the totals of some programs' results; of healthy ones how many have a finding."""
    seconds = [x["seconds"] for x in found.values()] or [0.0]
    if part == "clean":
        counts = {"false": sum(x["verdict"] != "nothing" for x in found.values())}
    else:
        counts = {aspect: sum(bool(x.get(aspect)) for x in found.values()) for aspect in ASPECTS}
    return {
        "programs": len(found),
        **counts,
        "median_seconds": round(statistics.median(seconds), 1),
        "max_seconds": round(max(seconds), 1),
    }


def versions() -> dict[str, str]:
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    for name in LIBRARIES:
        if name == "jax" or name.removesuffix("paddle") in sys.modules:
            found[name] = importlib.metadata.version(name)
    return found


def rows() -> dict[tuple[str, str, str], Row]:
    """Returns the recorded results by set, program and tool."""
    lines = map(json.loads, ROWS.read_text("utf-8").splitlines()) if ROWS.exists() else []
    return {(x["set"], x["program"], x["tool"]): x for x in lines}


def record(set: str, part: str, tool: str, found: Mapping[str, Row]) -> None:
    """Writes results, in place of earlier ones; totals, with date and commit, of sets in
    ``SCORED``, whose names aren't printed."""
    if set in SCORED:
        file = TOTALS.with_stem(set)
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        old = json.loads(file.read_text("utf-8")) if file.exists() else {}
        stamp = {"date": datetime.date.today().isoformat(), "commit": commit}
        whole = totals(part, found) | stamp | {"of": len(of_part(set, part))}
        old.setdefault(tool, {})[part] = whole
        file.write_text(json.dumps(old, indent=1) + "\n", "utf-8")
        return
    if part == "scored":
        return
    new = rows()
    for name, one in found.items():
        key = {"set": set, "program": name, "tool": tool}
        new[set, name, tool] = key | {k: v for k, v in one.items() if k != "findings"} | versions()
    order = {name: n for n, name in enumerate(name for x in PARTS for name in load(set))}
    whole = sorted(new.values(), key=lambda x: (x["set"], x["tool"], order.get(x["program"], -1)))
    ROWS.write_text("".join(json.dumps(x) + "\n" for x in whole), "utf-8")
