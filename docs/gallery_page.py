"""Writes docs/gallery.md from docs/gallery.jsonl, which `python -m proofs.gallery --record` writes.

Run as `python docs/gallery_page.py` from the root of the repository.
"""

import inspect
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.failures.clean import CLEAN  # noqa: E402
from proofs.gallery import ALL, ASPECTS, EVERY, rows, totals  # noqa: E402

from examples import accumulators, gallery  # noqa: E402

HEAD = """# 64 failures, and what the audit says of each

Written by `python docs/gallery_page.py` from docs/gallery.jsonl, which
`python -m proofs.gallery --record` writes: it checks that the audit finds each marked line and a
fix that at least halves the error, the relative error of the outputs against float32, root mean
square.
[scoreboard.md](scoreboard.md) compares what other tools report for these programs, except for the
four that lose accuracy by the sums of a device's [matrix units](concepts/matrix-units.md).
"""
SCORES = """
## Scores

The failures above, and those of models in examples/failures/. *Line* and *kind* say whether the
first finding is right; *fix*, for a model, whether its fix is one that an expert would choose and
leaves at most three times the error that the expert's leaves. The last columns hold the errors of
the program, with the audit's fixes, and with the expert's, and the seconds that the audit and the
trial of its fixes took, compiling included (2 shared cores; median {median:.0f}).

{totals}.

| program | arithmetic | line | kind | fix | error | with fixes | expert's | s |
|---|---|---|---|---|---|---|---|---|
"""
CORPUS = """
## Programs that the audit was not tuned to

`proofs/corpus` holds programs of other people's bug reports and papers, each with a truth that was
measured in float64 before the audit saw the program, and clean programs of libraries' examples. A
hash of its name puts a program into the half that is looked at, on which thresholds are chosen, or
into the half that is only scored. *Line* and *kind* are of the first finding; *fix* says that the
fixes leave at most three times the error that an expert's leave and widen few operations. Seconds
are of processor time, compiling included. Written by `python -m proofs.corpus score` and `seen`.

| programs | line | kind | fix | false findings | median s | longest s | date | commit |
|---|---|---|---|---|---|---|---|---|
"""
SHOWN: dict[str, Any] = gallery.GALLERY | accumulators.ACCUMULATORS
NAMES = {"scored": "only scored", "seen": "looked at", "clean": "clean"}


def section(name: str, case: Any, row: dict[str, Any]) -> str:
    """Returns the section of one case: its source, the first finding, and its fix."""
    worst = row["finding"]
    call = case.call if case.call.__name__ != "<lambda>" else gallery.apply_update
    source = inspect.getsource(call).rstrip()
    return (
        f"\n## {name}\n\n{case.reference}; in {row['low']}.\n\n```python\n{source}\n```\n\n"
        f"**{worst['kind']}** at line {worst['line']}, `{worst['primitive']}`, "
        f"{worst['direction']}: {worst['evidence']}.\n\n"
        f"Fix that was tried: {worst['fix']}; error {worst['before']} → {worst['after']}.\n"
    )


def line(row: dict[str, Any]) -> str:
    """Returns a program's line of the table of scores."""
    marks = ["no" if aspect in row["problems"] else "yes" for aspect in ASPECTS]
    low = str(ALL[row["program"]].low) if row["program"] in ALL else row["low"]
    errors = (row["error"], row["error_fixed"], row["expert"])
    cells = [row["program"], low, *marks, *errors, f"{row['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |\n"


def corpus_line(part: str, found: dict[str, Any]) -> str:
    """Returns the line of one half of the corpus, or of the clean programs."""
    count = found["programs"]
    right = [f"{found[x]}/{count}" if x in found else "" for x in ASPECTS]
    false = f"{found['false']}/{count}" if "false" in found else ""
    seconds = [f"{found[x]:.1f}" for x in ("median_seconds", "max_seconds")]
    cells = [
        f"{NAMES[part]}: {count} of {found['of']}",
        *right,
        false,
        *seconds,
        found["date"],
        found["commit"],
    ]
    return f"| {' | '.join(cells)} |\n"


def corpus() -> str:
    """Returns the section on the corpus; "" if docs/corpus.json doesn't exist."""
    file = ROOT / "docs" / "corpus.json"
    if not file.exists():
        return ""
    found = json.loads(file.read_text("utf-8"))
    return CORPUS + "".join(corpus_line(x, found[x]) for x in NAMES if x in found)


def page() -> str:
    kept = rows()
    missing = [name for name in (*EVERY, *CLEAN) if name not in kept]
    if missing:
        raise SystemExit(f"docs/gallery.jsonl lacks {', '.join(missing)}")
    failures = [kept[name] for name in EVERY]
    text = HEAD + "".join(section(n, case, kept[n]) for n, case in SHOWN.items())
    median = statistics.median(row["seconds"] for row in failures)
    text += SCORES.format(totals=totals(list(kept.values())), median=median)
    return text + "".join(map(line, failures)) + corpus()


if __name__ == "__main__":
    (ROOT / "docs" / "gallery.md").write_text(page())
