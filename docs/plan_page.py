"""Writes ``docs/plan_results.md`` from ``docs/plan.jsonl``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("plan")
OWN = ("plan", "seen", "budget", "part", "model", "trained", "seed")


def page() -> str:
    rows = [json.loads(line) for line in (HERE / "plan.jsonl").read_text().splitlines()]
    parts = {part: [r for r in rows if r["part"] == part] for part in ("choose", "cost")}
    predicted = [r for r in rows if "rank" in r]
    chosen = [_against(row) for row in parts["choose"]]
    wins = [sum(row[i] >= 1 for row in chosen) for i in range(2)]
    seen = sum(r["seen"]["plan"] <= min(r["seen"].values()) for r in parts["choose"])
    seeds = len({r["seed"] for r in parts["choose"]})
    return "".join([
        PARTS.HEAD, *map(_prediction, predicted), _signed(predicted),
        PARTS.CHOICE.format(seeds=seeds), *_choices(parts["choose"]),
        PARTS.COST.format(uniform=wins[0], heuristic=wins[1], seen=seen, rows=len(chosen)),
        *_costs(parts["cost"]),
    ])  # fmt: skip


def _weights(row: dict[str, Any]) -> str:
    return "trained" if row["trained"] else "random"


def _prediction(row: dict[str, Any]) -> str:
    low, high = row["ratio_10_90"]
    return (
        f"| {row['model']} | {_weights(row)} | {row['objective']} | {row['rank']:.3f} | "
        f"{row['ratio']:.2f} | {low:.2f} to {high:.2f} | {row['additive_rank']:.3f} |\n"
    )


def _signed(rows: list[dict[str, Any]]) -> str:
    reached = {}
    for objective in ("kl", "loss"):
        own = [r for r in rows if r["objective"] == objective]
        met = sum(r["rank"] >= 0.95 and 0.8 <= r["ratio"] <= 1.2 for r in own)
        reached[objective] = f"{met} of {len(own)}"
    worst = min((r for r in rows if r["objective"] == "loss"), key=lambda r: r["rank"])
    pairs = worst["roundings"] * (worst["roundings"] - 1) / 2
    walk = worst["together"] * pairs**0.5
    name = f"{_weights(worst)} {worst['model']}"
    return PARTS.SIGNED.format(**(worst | reached), name=name, pairs=pairs, walk=walk)


def _against(row: dict[str, Any]) -> tuple[float, float]:
    """Returns the best uniform format's and the best heuristic's divergence, over the plan's."""
    uniform = [v for k, v in row.items() if k.startswith("uniform")]
    rules = [v for k, v in row.items() if k not in OWN and not k.startswith("uniform")]
    return min(uniform) / row["plan"], min(rules) / row["plan"]


def _choices(rows: list[dict[str, Any]]) -> Iterator[str]:
    for key in dict.fromkeys((r["model"], _weights(r), r["budget"]) for r in rows):
        same = [_against(r) for r in rows if (r["model"], _weights(r), r["budget"]) == key]
        cells = [f"{f(x):.2f}" for x in zip(*same, strict=True) for f in (statistics.median, min)]
        yield f"| {' | '.join([key[0], key[1], str(key[2]), *cells])} |\n"


def _costs(rows: list[dict[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(r["model"] for r in rows):
        plan, audit = (next(r for r in rows if (r["model"], r["what"]) == (name, what))
                       for what in ("plan", "audit"))  # fmt: skip
        times, sizes = ([f"{r[key]:.0f}" for r in (plan, audit)] for key in ("seconds", "mib"))
        yield f"| {' | '.join([name, *times, *sizes])} |\n"


if __name__ == "__main__":
    (HERE / "plan_results.md").write_text(page())
