"""Writes ``docs/recipe_results.md`` from ``experiments.recipe_training`` and others."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments import operand_bias, parity, recipe_numbers, recipe_training
from experiments.recipe_variants import ABLATIONS, CHANCE, LONG, RECIPES, STATE_ABLATIONS, STATES
from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("recipe_results")

COLUMNS = (
    "recipe", "GPT, loss", "MoE, loss", "ResNet, loss", "worst cosine", "SQNR, dB", "saturated",
    "flushed", "bits",
)  # fmt: skip

ORDERINGS = (  # better, worse, model
    ("nvfp4", "nvfp4, nearest gradients", "gpt"),
    ("nvfp4", "nvfp4, no Hadamard", "gpt"),
    ("nvfp4, 4/6", "nvfp4", "gpt"),
    ("nvfp4, last block and head in BF16", "nvfp4", "gpt"),
    ("quartet2", "quartet2, stochastic rounding", "gpt"),
    ("quartet2", "nvfp4", "gpt"),
    ("quartet2", "nvfp4", "resnet"),
    ("quartet2", "nvfp4", "mlp"),
    ("quartet", "mxfp4_forward", "gpt"),
    ("mxfp8", "mxfp8_floor", "gpt"),
    ("fp8_blockwise", "fp8", "gpt, outliers"),
)


class Losses:
    """The recorded final losses."""

    def __init__(self):
        self.rows = rows = parity.rows(recipe_training.FILE)
        self.by_run = {
            (r["model"], r["recipe"], r["seed"]): math.nan if r["loss"] is None else r["loss"]
            for r in rows
        }

    def ratios(self, model: str, recipe: str, to: str = "float32") -> list[float]:
        """Returns a recipe's losses over another's of the same seed."""
        return [
            loss / self.by_run[model, to, seed]
            for (m, r, seed), loss in sorted(self.by_run.items(), key=lambda x: x[0][2])
            if (m, r) == (model, recipe) and (model, to, seed) in self.by_run
        ]

    def common(self, model: str, first: str, second: str) -> tuple[list[float], list[float]]:
        """Returns the ratios to float32 of two recipes, of the seeds that both have."""
        seeds = [s for (m, r, s) in self.by_run if (m, r) == (model, first)]
        seeds = sorted(s for s in seeds if (model, second, s) in self.by_run)
        own = [
            [self.by_run[model, r, s] / self.by_run[model, "float32", s] for s in seeds]
            for r in (first, second)
        ]
        return own[0], own[1]


def ratio(values: list[float]) -> str:
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "not finite"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def gap(values: list[float]) -> str:
    return f"{statistics.fmean(values) - 1:+.2%}".replace("%", " %") if values else "–"


def numbers() -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["model"], r["recipe"]): r for r in parity.rows(recipe_numbers.FILE)}


def gradient(row: dict[str, Any] | None) -> list[str]:
    """Returns the cells of the worst cosine and the median signal-to-noise ratio."""
    if row is None:
        return ["–", "–"]
    arrays = row["gradient"].values()
    ratios = [x["sqnr"] for x in arrays if x["sqnr"] is not None]
    return [f"{min(x['cosine'] for x in arrays):.4f}", f"{statistics.median(ratios):.1f}"]


def shares(row: dict[str, Any] | None) -> list[str]:
    found = (row or {}).get("operands", {}).get("all")
    if not found:
        return ["–", "–", "–"]
    percent = [f"{found[k]:.3%}".replace("%", " %") for k in ("saturated", "flushed")]
    return [*percent, f"{found['bits']:.1f}"]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def all_recipes(losses: Losses, measured: dict) -> str:
    def place(recipe: str) -> float:
        values = losses.ratios("gpt", recipe)
        mean = statistics.fmean(values) if values else math.inf
        return mean if math.isfinite(mean) else math.inf

    made = [r for r in (*RECIPES, *STATES) if losses.ratios("gpt", r)]
    text = line(*COLUMNS) + f"|---{'|---:' * (len(COLUMNS) - 1)}|\n"
    for recipe in sorted(made, key=place):
        row = measured.get(("gpt", recipe))
        by_model = [ratio(losses.ratios(m, recipe)) for m in ("gpt", "moe", "resnet")]
        text += line(f"`{recipe}`", *by_model, *gradient(row), *shares(row))
    return text


def long_runs(losses: Losses) -> str:
    runs = recipe_training.SETS["long"]
    made = [r for r in LONG if (runs.model, r, 0) in losses.by_run]
    missing = [r for r in LONG if r not in made]
    text = f"\nNot finished: {', '.join(missing)}.\n" if missing else ""
    curves = {r["recipe"]: r["curve"] for r in losses.rows if r["model"] == runs.model}
    pairs = zip(curves.get(CHANCE, ()), curves.get("float32", ()), strict=False)
    chance = f"{max((abs(a / b - 1) for a, b in pairs), default=0):.2%}".replace("%", " %")
    text = PARTS.LONG_HEAD.format(steps=runs.steps, missing=text, chance=chance)
    for recipe in made:
        loss = losses.by_run[runs.model, recipe, 0]
        text += line(f"`{recipe}`", f"{loss:.4f}", ratio(losses.ratios(runs.model, recipe)))
    return text if made else ""


def devices(losses: Losses, measured: dict) -> str:
    runs = recipe_training.SETS["devices"]
    text = PARTS.DEVICES_HEAD.format(steps=runs.steps)
    for recipe in runs.recipes:
        loss = losses.by_run[runs.model, recipe, 0]
        of_gradient = gradient(measured.get((runs.model, recipe)))
        compared = ratio(losses.ratios(runs.model, recipe))
        text += line(f"`{recipe}`", f"{loss:.4f}", compared, *of_gradient)
    return text


def ablations(losses: Losses, measured: dict) -> str:
    text = PARTS.ABLATION_HEAD
    for name in (*ABLATIONS, *STATE_ABLATIONS):
        own, whole = losses.common("gpt", name, name.partition(",")[0])
        if own:
            text += line(f"`{name}`", gap(own), gap(whole), *gradient(measured.get(("gpt", name))))
    return text + PARTS.ABLATION_NOTES


def outliers(losses: Losses, measured: dict) -> str:
    runs = recipe_training.SETS["outliers"]
    text = PARTS.OUTLIERS_HEAD.format(
        planted=recipe_training.PLANTED, outlier=recipe_training.OUTLIER
    )
    for recipe in runs.recipes:
        row = measured.get((runs.model, recipe))
        values = losses.ratios(runs.model, recipe)
        text += line(f"`{recipe}`", ratio(values), *gradient(row), shares(row)[1])
    return text


def orderings(losses: Losses) -> str:
    text = PARTS.ORDER_HEAD
    for better, worse, model in ORDERINGS:
        good, bad = losses.common(model, better, worse)
        if len(good) > 1:
            found = [b - a for a, b in zip(good, bad, strict=True)]
            mean, deviation = statistics.fmean(found), statistics.stdev(found)
            error = deviation / math.sqrt(len(found))
            what = "comes out" if mean > 2 * error else "reversed" if mean < -2 * error else "open"
            shown = f"{mean:+.2%} ± {deviation:.2%}".replace("%", " %")
            text += line(f"`{better}`", f"`{worse}`", model, f"{shown} ({len(found)})", what)
    steps = recipe_training.SETS["gpt"].steps
    return text + PARTS.ORDER_NOTES.format(steps=steps, outlier=recipe_training.OUTLIER)


def bias(losses: Losses) -> str:
    found = json.loads(operand_bias.FILE.read_text("utf-8"))
    text = PARTS.BIAS_HEAD.format(draws=found["draws"], date=found["date"])
    for row in found["rows"]:
        cells = [
            f"{b:.2f} ± {e:.2f}"
            for kind in ("normal", "outliers")
            for b, e in zip(row[kind]["bias"], row[kind]["error"], strict=True)
        ]
        suffix = " with headroom" if row["headroom"] else ""
        text += line(f"`{row['recipe']}`{suffix}", *cells)
    text += PARTS.BIAS_NOTES
    for name in ("nvfp4, headroom", "fp4_all_the_way, headroom", "quartet2, stochastic rounding"):
        own, whole = losses.common("gpt", name, name.partition(",")[0])
        differences = [a - b for a, b in zip(own, whole, strict=True)]
        if len(differences) > 1:
            mean, spread = statistics.fmean(differences), statistics.stdev(differences)
            shown = f"{mean:+.2%} ± {spread:.2%}".replace("%", " %")
            text += f"\n- `{name}`: {shown} of float32's loss ({len(differences)} seeds)"
    return text + "\n"


def goals(losses: Losses) -> Iterable[tuple[str, str, bool]]:
    """Yields each goal, what was measured, and whether it's met."""
    model = recipe_training.SETS["outliers"].model
    quartet, nvfp4 = (losses.ratios("gpt", r) for r in ("quartet2", "nvfp4"))
    if quartet and nvfp4:
        share = (statistics.fmean(quartet) - 1) / (statistics.fmean(nvfp4) - 1)
        what = f"`quartet2`'s gap at most 0.8 of `nvfp4`'s ({len(quartet)} seeds)"
        yield what, f"{share:.2f}", share <= 0.8
    blocks = losses.ratios(model, "fp8_blockwise")
    if blocks:
        off = statistics.fmean(blocks) - 1
        yield (
            "`fp8_blockwise` within 0.25 % with outlier channels",
            f"{off:+.2%}",
            abs(off) <= 25e-4,
        )
    mx = losses.ratios("gpt", "mxfp8", "bf16")
    if mx:
        off = statistics.fmean(mx) - 1
        yield "`mxfp8` within 0.056 % of `bf16`", f"{off:+.3%}", abs(off) <= 56e-5
    small = losses.ratios("mlp", "mxfp4")
    if small:
        off = statistics.fmean(small) - 1
        yield "`mxfp4` on the small network less than 19 % off", f"{off:+.1%}", abs(off) < 0.19


def page() -> str:
    losses, measured = Losses(), numbers()
    rows = parity.rows(recipe_training.FILE)
    dates = sorted({(r["date"], r["jax"], r["python"]) for r in rows})
    environment = "; ".join(f"{date}, JAX {jax}, Python {python}" for date, jax, python in dates)
    runs = recipe_training.SETS["gpt"]
    models = f"The examples `gpt`, `moe` and `resnet`, {runs.steps} steps, 3 seeds (5 for some)"
    text = PARTS.HEAD.format(environment=environment, last=recipe_training.LAST)
    text += PARTS.TABLE.format(models=models, steps=recipe_numbers.STEPS)
    text += all_recipes(losses, measured) + long_runs(losses) + devices(losses, measured)
    text += ablations(losses, measured) + outliers(losses, measured)
    text += bias(losses) + orderings(losses) + PARTS.TARGET_HEAD
    for goal, found, met in goals(losses):
        text += line(goal, found.replace("%", " %"), "met" if met else "not met")
    return text


if __name__ == "__main__":
    (HERE / "recipe_results.md").write_text(page(), encoding="utf-8")
