"""Writes ``docs/parity.md`` from ``docs/parity.jsonl`` and ``docs/torture.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import parity, torture
from experiments.cases import cases
from experiments.models import MODELS
from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("parity")
RECIPES = ("fp16_every_op", "scalify", "fp16", "fp8")
WHAT = {
    "mlp": "a rectifier net, Adam; digits",
    "cnn": "convolutions, layer norm, momentum; digits",
    "resnet": "convolutions, batch norm with running statistics, AdamW; digits",
    "lstm": "recurrence by `scan`, clipped Adam; text",
    "gpt": "attention, layer norm, GELU, AdamW; text",
    "moe": "attention, the best two of eight experts by `top_k`, AdamW; text",
    "unet": "diffusion U-Net, Adam; digits and noise",
    "graph": "messages by `segment_sum`, AdamW; nearest neighbours among digits",
    "logistic": "logistic regression, L-BFGS with its line search; breast cancer",
    "wave": "initial state of a wave equation from its records, Adam; a digit",
}
TITLES = {
    "float32": "float32", "fp16-plain": "FP16", "loss-scaled": "FP16, loss scaled",
    "autocast": "autocast, loss scaled", "fp16": "`fp16`", "fp16_every_op": "`fp16_every_op`",
    "fp8": "`fp8`", torture.KEPT: "`fp16_every_op`, optimizer in FP32",
}  # fmt: skip


def percent(x: float) -> str:
    return f"{x:+.2%}".replace("%", " %")


def difference(row: dict[str, Any] | None, base: dict[str, Any]) -> str:
    if row is None:
        return "not run"
    if row["non_finite"]:
        return f"{row['non_finite']} steps not finite"
    shown = [percent(row["loss"] / base["loss"] - 1)]
    if row["held_out"] is not None:
        shown.append(percent(row["held_out"] / base["held_out"] - 1))
    return ", ".join(shown)


def seeds_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns rows for other seeds, each compared with float32 of the same seed."""
    found = {(r["model"], r["recipe"], r["seed"]): r for r in rows}
    seeds = sorted({r["seed"] for r in rows})
    lines = []
    for name, recipe in dict.fromkeys((r["model"], r["recipe"]) for r in rows if r["seed"]):
        runs = [(found.get((name, recipe, s)), found.get((name, "float32", s))) for s in seeds]
        if recipe != "float32" and all(base for _, base in runs):
            cells = [difference(row, base) for row, base in runs if base]
            lines.append(
                f"| {name}, {'chance' if 'moved' in recipe else recipe} | {' | '.join(cells)} |"
            )
    return lines


def parity_table(rows: list[dict[str, Any]]) -> list[str]:
    found = {(r["model"], r["recipe"]): r for r in rows}
    lines = []
    for name in MODELS:
        base = found.get((name, "float32"))
        if base is None:
            continue
        losses = f"{base['loss']:.4f}"
        if base["held_out"] is not None:
            losses += f", {base['held_out']:.4f}"
        cells = [difference(found.get((name, r)), base) for r in ("float32, moved", *RECIPES)]
        lines.append(f"| {name}: {WHAT[name]} | {losses} | {' | '.join(cells)} |")
    return lines


def cast_table(rows: list[dict[str, Any]]) -> list[str]:
    found = {(r["model"], r["recipe"]): r for r in rows}
    lines = []
    for name in parity.CAST_MODELS:
        base = found.get((name, "float32"))
        if base is not None:
            cells = [difference(found.get((name, r)), base) for r in parity.CAST_RECIPES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def passes(row: dict[str, Any]) -> bool:
    return row["error"] is not None and row["error"] <= torture.TOLERANCE


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["error"] is None:
        return f"**fails**, step {row['stopped']}"
    shown = f"{row['error']:.2%}".replace("%", " %")
    return shown if passes(row) else f"**fails**, {shown}"


def torture_table(rows: dict[tuple, dict[str, Any]]) -> list[str]:
    order = [*MODELS, *(program.name for program in cases())]
    variants = [title for title, *_ in torture.VARIANTS]
    lines = []
    for case in order:
        for variant in variants:
            cells = [rows.get((case, variant, m)) for m in torture.METHODS_HERE]
            if any(cells):
                title = case if variant == "as it is" else f"{case}, {variant}"
                lines.append(f"| {title} | {' | '.join(map(cell, cells))} |")
    return lines


def summary(rows: dict[tuple, dict[str, Any]]) -> str:
    parts = []
    for method in torture.METHODS_HERE:
        own = [r for r in rows.values() if r["method"] == method]
        parts.append(f"{sum(map(passes, own))} of {len(own)}")
    return f"| **passed** | {' | '.join(parts)} |"


def versions(rows: list[dict[str, Any]]) -> str:
    made = sorted({(r["date"], r["jax"], r["python"]) for r in rows})
    return "; ".join(f"{date}, JAX {jax}, Python {python}" for date, jax, python in made)


def page() -> str:
    every = [r for r in parity.rows(parity.FILE) if r["steps"] == parity.STEPS]
    runs = [r for r in every if not r["seed"]]
    numbers = sorted({r["seed"] for r in every})
    tortured = torture.rows(torture.FILE)
    head = PARTS.PARITY.format(
        versions=versions([*runs, *tortured.values()]), last=parity.LAST, steps=parity.STEPS,
        recipes=" | ".join(f"`{r}`" for r in RECIPES), columns="|".join("---" for _ in RECIPES),
    )  # fmt: skip
    middle = PARTS.TORTURE.format(
        steps=torture.STEPS, last=torture.LAST,
        tolerance=torture.TOLERANCE,
        patience=torture.PATIENCE,
        methods=" | ".join(TITLES[m] for m in torture.METHODS_HERE),
        columns="|".join("---" for _ in torture.METHODS_HERE),
    )  # fmt: skip
    lines = [*torture_table(tortured), summary(tortured)]
    seeds = PARTS.SEEDS.format(
        titles=" | ".join(f"seed {n}" for n in numbers), columns="|".join("---" for _ in numbers)
    )
    cast = PARTS.CAST.format(
        recipes=" | ".join(parity.CAST_RECIPES),
        columns="|".join("---" for _ in parity.CAST_RECIPES),
    )
    tables = [
        *parity_table(runs), PARTS.TOOK, seeds.strip(), *seeds_table(every), PARTS.SPREAD.strip(),
        cast.rstrip(), *cast_table(runs),
    ]  # fmt: skip
    return head + "\n".join(tables) + "\n" + middle + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "parity.md").write_text(page())
