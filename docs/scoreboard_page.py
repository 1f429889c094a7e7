"""Writes ``docs/scoreboard.md`` from ``docs/scoreboard.jsonl``.

Run as `PYTHONPATH=. python docs/scoreboard_page.py` from the root of the repository.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from failures.gallery import accumulators
from failures.programs import Program, load
from failures.runner import rows
from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("scoreboard")
Row = Mapping[str, Any]

AUDIT = "scalewise"
TOOLS = {
    "debug_nans": "`jax_debug_nans`",
    "debug_infs": "`jax_debug_infs`",
    "checkify": "`checkify`",
    "debug_nans_op_by_op": "`jax_debug_nans`, op by op",
    "debug_infs_op_by_op": "`jax_debug_infs`, op by op",
}
ELSEWHERE = {  # tools that run in an environment of their own
    "detect_anomaly": "`torch.autograd.detect_anomaly`",
    "debug_underflow_overflow": "Hugging Face `DebugUnderflowOverflow`",
    "tensor_checker": "Paddle `enable_tensor_checker`",
}
# The sums of a device's matrix units are known by a model of it, which other tools don't have.
GALLERY: dict[str, Program] = {
    name: x for name, x in load("gallery").items() if name not in accumulators.ACCUMULATORS
}
ALL = [name for name, x in GALLERY.items() if x.kinds]
CLEAN = [name for name, x in GALLERY.items() if not x.kinds]


def by_program(kept: Iterable[Row], tool: str) -> dict[str, Row]:
    return {row["program"]: row for row in kept if row["tool"] == tool}


def count(found: Iterable[Row], *verdicts: str) -> int:
    return sum(row["verdict"] in verdicts for row in found)


def times(pairs: Iterable[Sequence[float]]) -> str:
    """``1.2 x``: the median ratio of the first to the second number of each pair."""
    ratios = [a / b for a, b in pairs if a and b]
    if not ratios:
        return "-"
    median = statistics.median(ratios)
    return f"{median:.0f} x" if median >= 10 else f"{median:.1f} x"


def jax_rows(kept: Sequence[Row], audits: Mapping[str, Row]) -> list[str]:
    lines = [audit_row(kept, audits)]
    for tool, title in TOOLS.items():
        rows = by_program(kept, tool)
        bad = [rows[name] for name in ALL]
        infinite = [row for row in bad if not row["finite"]]
        silent = [row for row in rows.values() if row["verdict"] == "nothing"]
        cells = [
            title,
            count(bad, "line"), count(infinite, "line"), count(bad, "another line"),
            count(bad, "operation", "failed"), count(bad, "nothing"),
            sum(rows[name]["verdict"] != "nothing" for name in CLEAN),
            times(row["first"] for row in bad), times(row["steady"] for row in silent),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def audit_row(kept: Sequence[Row], audits: Mapping[str, Row]) -> str:
    plain = by_program(kept, "debug_nans")
    bad = [audits[name] for name in ALL]
    silent = [row for row in bad if row["verdict"] == "nothing"]
    right = [row for row in bad if row["line"]]
    infinite = [row for row in right if not plain[row["program"]]["finite"]]
    cells = [
        "`scalewise.audit`", len(right), len(infinite), len(bad) - len(right) - len(silent), 0,
        len(silent),
        count((audits[name] for name in CLEAN), "line", "another line", "failed"),
        times((row["seconds"], plain[row["program"]]["first"][1]) for row in bad), "-",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def elsewhere_rows(kept: Sequence[Row]) -> list[str]:
    lines = []
    for tool, title in ELSEWHERE.items():
        rows = by_program(kept, tool)
        bad = [row for name, row in rows.items() if name in ALL]
        clean = [row for name, row in rows.items() if name in CLEAN]
        silent = [row["steady"] for row in rows.values() if row["verdict"] == "nothing"]
        cells = [
            title, count(bad, "line", "module"),
            count(bad, "another line", "another module", "failed"), count(bad, "nothing"),
            sum(row["verdict"] != "nothing" for row in clean), times(silent),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def cell(row: Row) -> str:
    """Returns what a tool names, in a few words."""
    verdict, where = row["verdict"], ", ".join(row["where"])
    operation = row["said"].rpartition(" ")[2].strip(".")
    return {
        "nothing": "-",
        "line": "**line**",
        "module": f"**{where}**",
        "operation": f"`{operation}`" if operation.isidentifier() else "an output",
        "failed": "the tool fails",
    }.get(verdict, where or operation)


def finding_cell(row: Row) -> str:
    return "-" if row["verdict"] == "nothing" else cell(row)


def each(kept: Sequence[Row], audits: Mapping[str, Row]) -> list[str]:
    tools = {tool: by_program(kept, tool) for tool in TOOLS}
    lines = []
    for name, case in ((name, GALLERY[name]) for name in ALL):
        finite = "yes" if tools["debug_nans"][name]["finite"] else "no"
        said = [cell(found[name]) for found in tools.values()]
        cells = [name, str(case.low), finite, finding_cell(audits[name]), *said]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def each_elsewhere(kept: Sequence[Row]) -> list[str]:
    tools = {tool: by_program(kept, tool) for tool in ELSEWHERE}
    lines = []
    for name in [x for x in (*ALL, *CLEAN) if x in tools["debug_underflow_overflow"]]:
        finite = "yes" if tools["debug_underflow_overflow"][name]["finite"] else "no"
        said = [cell(found[name]) for found in tools.values()]
        clean = " (healthy)" if name in CLEAN else ""
        lines.append(f"| {' | '.join([name + clean, finite, *said])} |")
    return lines


def versions(kept: Sequence[Row]) -> str:
    titles = {"jax": "JAX", "torch": "PyTorch", "transformers": "transformers"}
    titles |= {"paddlepaddle": "Paddle", "python": "Python"}
    made = [f"{title} {max(row.get(k, '') for row in kept)}" for k, title in titles.items()]
    return f"{max(row['date'] for row in kept)}: {', '.join(made)}"


def page() -> str:
    kept = [row for (set, _, _), row in rows().items() if set != "torch"]
    audits = by_program(kept, AUDIT)
    failures = by_program(kept, "debug_nans")
    finite = sum(failures[name]["finite"] for name in ALL)
    head = PARTS.HEAD.format(
        versions=versions([x for x in kept if x["tool"] != AUDIT]),
        finite=finite,
        infinite=len(ALL) - finite,
    )
    scores = [audits[name] for name in ALL]
    others = by_program(kept, "debug_underflow_overflow")
    notes = PARTS.NOTES.format(
        seconds=statistics.median(row["seconds"] for row in scores),
        kind=sum(row["kind"] for row in scores),
        fix=sum(row["fix"] for row in scores),
        programs=sum(name in ALL for name in others),
        clean=sum(name in CLEAN for name in others),
    )
    table = PARTS.EACH.format(
        tools=" | ".join(TOOLS.values()),
        rule="|".join("---" for _ in TOOLS),
    )
    last = PARTS.EACH_ELSEWHERE.format(
        tools=" | ".join(ELSEWHERE.values()), rule="|".join("---" for _ in ELSEWHERE)
    )
    parts = [
        head + "\n".join(jax_rows(kept, audits)), notes + "\n".join(elsewhere_rows(kept)),
        PARTS.TIME.rstrip(), table + "\n".join(each(kept, audits)),
        last + "\n".join(each_elsewhere(kept)),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "scoreboard.md").write_text(page())
