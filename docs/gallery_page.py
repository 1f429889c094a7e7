"""Writes docs/gallery.md from docs/scoreboard.jsonl and docs/corpus.json.

Run as `PYTHONPATH=. python docs/gallery_page.py` from the root of the repository.
"""

import inspect
import json
import statistics
from pathlib import Path
from typing import Any

from failures.gallery import accumulators, short
from failures.programs import Program, load
from failures.runner import ASPECTS, TOTALS, rows, totals
from parts import parts_of

ROOT = Path(__file__).parent.parent
PARTS = parts_of("gallery")
SHOWN: dict[str, Program] = short.SHORT | accumulators.ACCUMULATORS
NAMES = {"scored": "only scored", "seen": "looked at", "clean": "clean"}


def section(name: str, case: Program, row: dict[str, Any]) -> str:
    """Returns the section of one case: its source, the first finding, and its fix."""
    worst = row["finding"]
    source = inspect.getsource((case.inside or (case.call,))[0]).rstrip()
    return (
        f"\n## {name}\n\n{case.source}; in {row['low']}.\n\n```python\n{source}\n```\n\n"
        f"**{worst['kind']}** at line {worst['line']}, `{worst['primitive']}`, "
        f"{worst['direction']}: {worst['evidence']}.\n\n"
        f"Fix that was tried: {worst['fix']}; error {worst['before']} → {worst['after']}.\n"
    )


def line(row: dict[str, Any]) -> str:
    """Returns a program's line of the table of scores."""
    marks = ["yes" if row[aspect] else "no" for aspect in ASPECTS]
    errors = row["errors"] or ["", "", ""]
    cells = [row["program"], row["low"], *marks, *errors, f"{row['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |\n"


def scores(kept: dict[str, dict[str, Any]]) -> str:
    """``line 64/64, kind 63/64, fix 63/64, false findings on 20 clean programs: 0``."""
    bad, good = ({n: r for n, r in kept.items() if ("line" in r) == x} for x in (True, False))
    found = totals("seen", bad)
    counts = [f"{aspect} {found[aspect]}/{found['programs']}" for aspect in ASPECTS]
    false = totals("clean", good)["false"]
    return f"{', '.join(counts)}, false findings on {len(good)} clean programs: {false}"


def audits() -> dict[str, dict[str, Any]]:
    """Returns the rows of the audit on the gallery, in its order."""
    kept = {name: row for (set, name, tool), row in rows().items()
            if (set, tool) == ("gallery", "scalewise")}  # fmt: skip
    missing = [name for name in load("gallery") if name not in kept]
    if missing:
        raise SystemExit(f"docs/scoreboard.jsonl lacks {', '.join(missing)}")
    return {name: kept[name] for name in load("gallery")}


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
    """Returns the section on the corpus."""
    found = json.loads(TOTALS.read_text("utf-8"))["scalewise"]
    return PARTS.CORPUS + "".join(corpus_line(x, found[x]) for x in NAMES if x in found)


def page() -> str:
    kept = audits()
    failures = [row for row in kept.values() if "line" in row]
    text = PARTS.HEAD + "".join(section(n, case, kept[n]) for n, case in SHOWN.items())
    median = statistics.median(row["seconds"] for row in failures)
    text += PARTS.SCORES.format(totals=scores(kept), median=median)
    return text + "".join(map(line, failures)) + corpus()


if __name__ == "__main__":
    (ROOT / "docs" / "gallery.md").write_text(page())
