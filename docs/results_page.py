"""Writes ``docs/results.md``: for each claim of the README and the docs its figure and command.

Figures come from the recorded data where a command records them. Run as
``PYTHONPATH=. python docs/results_page.py`` from the root of the repository.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import parity, recipe_training, side_by_side, torture
from failures.programs import load
from failures.runner import rows as scores
from failures.runner import totals
from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("results")


@dataclass(frozen=True)
class Claim:
    """A claim, and where it comes from.

    Attributes:
        text: returns the claim as a sentence, with its figures.
        command: shows it; a target of the Makefile, or ``python -m`` of a module.
        page: of the docs, which has the details.
        data: files in docs/ that the command records.
        measured: returns dates and versions.
    """

    text: Callable[[], str]
    command: str
    page: str
    data: Sequence[str]
    measured: Callable[[], str]


def said(text: str) -> Callable[[], str]:
    return lambda: text


def made(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the dates and versions of JAX that records name, the first and the last."""
    found = sorted({(str(r["date"])[:10], r.get("jax") or r.get("JAX") or "") for r in rows})
    days = [day for day, _ in found]
    versions = sorted({jax for _, jax in found if jax})
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return when + "".join(f", JAX {v}" for v in versions)


def summary() -> dict[str, Any]:
    return json.loads((HERE / "demo" / "summary.json").read_text())


def demo() -> str:
    methods = {m["name"]: m for m in summary()["methods"]}
    scaled = ("fp16", "fp8", "fp8-narrow-state")
    off = max(abs(methods[name]["final_loss_ratio"] - 1) for name in scaled)
    first = methods["fp16-plain"]["first_non_finite"]["step"]
    size = methods["fp8-narrow-state"]["bytes_per_parameter"]
    return (
        f"A small GPT ends within {off:.2%} of float32's loss in scaled FP16, in FP8, and in FP8 "
        f"with {size:.2f} bytes of state per parameter; plain FP16 diverges in step {first}"
    )


def parity_runs() -> list[dict[str, Any]]:
    rows = parity.rows(parity.FILE)
    return [r for r in rows if r["steps"] == parity.STEPS and not r["seed"]]


def largest_difference(recipes: Sequence[str]) -> float:
    """Returns the largest relative difference of a loss from float32's, rounded up to 0.1 %."""
    runs = {(r["model"], r["recipe"]): r for r in parity_runs()}
    largest = max(
        abs(row[loss] / runs[model, "float32"][loss] - 1)
        for (model, recipe), row in runs.items()
        if recipe in recipes
        for loss in ("loss", "held_out")
        if row[loss] is not None
    )
    return math.ceil(largest * 1000) / 1000


def ten_models() -> str:
    off = largest_difference(("fp16", "fp8", "fp16_every_op"))
    chance = largest_difference(("float32, moved",))
    count = len({r["model"] for r in parity_runs()})
    return (
        f"{count} models reach float32's loss within {off:.1%} under `fp16`, `fp8` and "
        f"`fp16_every_op`; rounding in another order alone changes it by up to {chance:.1%}"
    )


def tortured() -> str:
    counts = []
    rows = torture.rows(torture.FILE).values()
    for method in ("fp16", "fp8", "loss-scaled", "fp16-plain"):
        own = [r for r in rows if r["method"] == method]
        good = sum(r["error"] is not None and r["error"] <= torture.TOLERANCE for r in own)
        counts.append(f"`{method}` {good} of {len(own)}")
    return f"Runs in units changed by 2^40 or 2^-40 that still train: {', '.join(counts)}"


def methods_compared() -> str:
    kept = side_by_side.rows()
    count = len(kept["all methods on mlp"]["methods"])
    wrong = side_by_side.failures(kept)
    verdict = "; ".join(wrong) if wrong else "all promises of the page hold"
    return f"{count} methods of training from {side_by_side.SEEDS} seeds each: {verdict}"


def recipes_compared() -> str:
    rows = parity.rows(recipe_training.FILE)
    count = len({row["recipe"] for row in rows})
    return f"{count} recipes and variants of recipes on {len({r['model'] for r in rows})} models"


def audits() -> dict[str, Mapping[str, Any]]:
    """Returns the rows of the audit on the gallery."""
    return {key[1]: row for key, row in scores().items() if key[::2] == ("gallery", "scalewise")}


def audited() -> str:
    healthy = {name: row for name, row in audits().items() if not load("gallery")[name].kinds}
    failing = {name: row for name, row in audits().items() if name not in healthy}
    found, false = totals("seen", failing), totals("clean", healthy)["false"]
    right = ", ".join(f"{x} {found[x]}/{len(failing)}" for x in ("line", "kind", "fix"))
    return (
        f"The audit on {len(failing)} failing and {len(healthy)} clean programs: {right}, false "
        f"findings: {false}"
    )


def corpus() -> dict[str, dict[str, Any]]:
    return json.loads((HERE / "corpus.json").read_text())["scalewise"]


def unseen() -> str:
    found, clean = (corpus()[x] for x in ("scored", "clean"))
    right = ", ".join(f"{x} {found[x]}/{found['programs']}" for x in ("line", "kind", "fix"))
    return (
        f"The audit on programs of reports and papers, never tuned on: {right}; false findings on "
        f"{clean['programs']} clean programs: {clean['false']}"
    )


def jsonl(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def frameworks_compared() -> str:
    losses = {(r["framework"], r["recipe"]): r["loss"] for r in jsonl("frameworks.jsonl")}
    ratios = [x / losses[name, "float32"] for (name, r), x in losses.items() if r != "float32"]
    return (
        f"{len(ratios)} combinations of a framework and a recipe train with one changed line, to "
        f"{min(ratios):.2f} to {max(ratios):.2f} of float32's loss"
    )


def optimizers_compared() -> str:
    names = sorted({row["optimizer"] for row in jsonl("optimizers.jsonl")})
    return f"{', '.join(names)} under recipes, their own products rounded or left alone"


def attention_compared() -> str:
    losses = {(r["model"], r["recipe"], r["seed"]): r["loss"] for r in jsonl("attention.jsonl")}

    def ratio(model: str) -> float:
        own, plain = (
            sum(x for (m, r, _), x in losses.items() if (m, r) == (model, recipe))
            for recipe in ("fp8, attention", "float32")
        )
        return own / plain

    return (
        f"With attention in FP8, forward and backward, a GPT reaches {ratio('gpt'):.4f} and a ViT "
        f"{ratio('vit'):.4f} of float32's loss"
    )


def scored() -> str:
    tools = len({row["tool"] for row in jsonl("scoreboard.jsonl")} - {"scalewise"})
    return f"{tools} checks of JAX, PyTorch, Hugging Face and Paddle on the same programs"


def inputs() -> str:
    with (HERE / "functions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    functions, formats = ({r[key] for r in rows} for key in ("name", "format"))
    return (
        f"The error of {len(functions)} functions and casts on every finite input of "
        f"{len(formats)} formats"
    )


def normed() -> str:
    with (HERE / "norms.csv").open(newline="") as file:
        methods = {row["method"] for row in csv.DictReader(file)}
    return f"{len(methods)} ways to compute a norm within FP16, with their errors and failures"


def kinds() -> str:
    return f"JAX {json.loads((HERE / 'scaling_kinds.json').read_text())['JAX']}"


ON_21, ON_22, ON_23, ON_24, ON_28, ON_29, ON_30 = (
    said(f"2026-11-{day}, JAX 0.10.2") for day in (21, 22, 23, 24, 28, 29, 30)
)
CLAIMS = (
    Claim(demo, "make demo", "index.md", ("demo/summary.json",),
          lambda: made([summary()["environment"]])),
    Claim(ten_models, "python -m experiments.parity", "parity.md", ("parity.jsonl",),
          lambda: made(parity_runs())),
    Claim(tortured, "python -m experiments.torture", "parity.md#torture", ("torture.jsonl",),
          lambda: made(torture.rows(torture.FILE).values())),
    Claim(methods_compared, "python -m experiments.side_by_side", "side_by_side.md",
          ("side_by_side.jsonl",),
          lambda: made(row["environment"] for row in side_by_side.rows().values())),
    Claim(recipes_compared, "python -m experiments.recipe_training", "recipe_results.md",
          ("recipe_training.jsonl",), lambda: made(parity.rows(recipe_training.FILE))),
    Claim(frameworks_compared, "python -m experiments.frameworks", "frameworks.md",
          ("frameworks.jsonl",), ON_29),
    Claim(attention_compared, "python -m experiments.attention",
          "results/training.md#attention-in-fp8", ("attention.jsonl",), ON_29),
    Claim(said("The KL that a cache's format costs, predicted from one pass, is within 12 % of that"
               " of decoding: ten models, five formats"),
          "python -m experiments.cache_formats", "guides/kv-cache.md#what-a-format-costs", (),
          ON_29),
    Claim(optimizers_compared, "python -m experiments.optimizers", "guides/optimizers.md",
          ("optimizers.jsonl",), ON_28),
    Claim(audited, "python -m failures score --tool scalewise --set gallery --record",
          "gallery.md", ("scoreboard.jsonl",), lambda: made(audits().values())),
    Claim(unseen, "make corpus", "gallery.md", ("corpus.json",),
          lambda: f"{corpus()['scored']['date']}, JAX 0.10.2"),
    Claim(scored, "make scoreboard", "scoreboard.md", ("scoreboard.jsonl",),
          lambda: made(jsonl("scoreboard.jsonl"))),
    Claim(said("Every cast equals two independent implementations on all 2^32 float32 numbers"),
          "make prove", "references.md", (), said("by the command, which records in `.prove/`")),
    Claim(said("Our casts beside those of other libraries, bit by bit"), "make references",
          "references.md", (), ON_22),
    Claim(inputs, "python docs/functions_page.py measure", "functions.md", ("functions.csv",),
          ON_21),
    Claim(normed, "python -m proofs.norms", "norms.md", ("norms.csv", "norms_sweep.csv"), ON_21),
    Claim(said("Layer norm and RMS norm in FP16: 1.70 ulp for a value, 2.14 for a gradient"),
          "python -m proofs.normalise", "norms.md", ("normalise.csv",), ON_22),
    Claim(said("Five kinds of scaling, told apart by measurement"),
          "python -m proofs.scaling_kinds", "scalify.md#five-kinds-of-scaling",
          ("scaling_kinds.json",), kinds),
    Claim(said("Runs killed at random moments end with the bits of undisturbed ones, in one "
               "process and in four"),
          "python -m proofs.resume", "results/training.md#runs-that-are-killed", (),
          said("2026-11-27, JAX 0.10.2")),
    Claim(said("Two processes skip the same steps, and train as one process does"),
          "python -m proofs.two_processes", "results/training.md#two-processes", (), ON_21),
    Claim(said("Random programs under every recipe keep to the bounds of one scale"),
          "python -m proofs.fuzz programs", "concepts/scales.md#what-one-scale-cant-hold", (),
          ON_22),
    Claim(said("A training step in FP8 is bounded at 1.3 to 1.69 times bfloat16's speed on an "
               "H100 (compiled)"), "make gpu-hlo", "gpu.md", (), ON_22),
    Claim(said("A deep MLP's step in FP8 is 1.27 to 1.30 times as fast as bfloat16's on an H200"),
          "python -m benchmarks.gpu", "gpu.md#measured-on-an-h200", (),
          said("2026-11-27, JAX 0.11.2, one H200")),
    Claim(said("Figures of five papers, computed again: NVFP4's errors, averages, harmonic sums"),
          "python -m proofs.published", "recipes.md#how-they-are-tested", (), ON_23),
    Claim(said("Headroom removes the bias of operands drawn in NVFP4, up to 1.5 % of a gradient"),
          "python -m experiments.operand_bias", "recipe_results.md#bias-of-operands-that-are-drawn",
          ("operand_bias.json",), ON_23),
    Claim(said("Plans of formats, predicted and measured, beside uniform formats and heuristics"),
          "python -m experiments.plan --models gpt moe resnet --out docs/plan.jsonl",
          "plan_results.md", ("plan.jsonl",), ON_24),
    Claim(said("The wheel works on Python 3.11 to 3.13; a typed program passes pyright --strict"),
          "python -m proofs.wheels --torch", "index.md", (), ON_24),
    Claim(said("From a clone to one's own step in FP8, two lines changed: 214 s for the"
               " installation with all frameworks and torch, then 11 to 26 s each for plain JAX,"
               " NNX, Equinox, Keras, torch"),
          "python -m proofs.first_minutes", "get-started/install.md", (), ON_29),
    Claim(said("160 faults put into quantised checkpoints are named beside the original, 122 alone,"
               " with no false alarm in 36 clean files"), "python -m proofs.checkpoints.mutants",
          "guides/convert-a-checkpoint.md#check", (), ON_28),
    Claim(said("Speed of casts beside other libraries"), "make bench", "benchmarks.md#casts", (),
          ON_21),
    Claim(said("Loss scaling costs at most 1.1 times a training step"),
          "python -m benchmarks.training", "results/training.md#overhead", (), ON_21),
    Claim(said("Time and compilation of a step under each recipe on a CPU"),
          "python -m benchmarks.autoscale", "benchmarks.md#autoscale", (), ON_21),
    Claim(said("A run of an audit takes 20 times the processor time of the float32 step"),
          "python -m benchmarks.audit", "benchmarks.md#audit", (), ON_29),
    Claim(said("A reading of the monitor takes 0.09 % of ten steps"),
          "python -m benchmarks.monitor", "guides/monitor.md", (), ON_21),
    Claim(said("Weights and tokens are sent in half of bfloat16's bytes, and arrive bit for bit as "
               "one device rounds them"),
          "python -m benchmarks.messages", "guides/sharding.md#messages-in-eight-bits", (), ON_29),
    Claim(said("Bytes and operations of grouped products in FP8, compiled for an H100"),
          "python -m benchmarks.grouped", "gpu.md#a-kernel-for-grouped-products", (), ON_30),
)  # fmt: skip


def row(claim: Claim) -> str:
    text = claim.text().replace("%", " %").replace("  %", " %")
    where = claim.page.split("#")[0]
    cells = (
        text,
        f"`{claim.command}`",
        f"[{where}]({claim.page})",
        ", ".join(f"`docs/{name}`" for name in claim.data) or "–",
        claim.measured(),
    )
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Returns the page as Markdown."""
    return PARTS.HEAD + "".join(map(row, CLAIMS))


if __name__ == "__main__":
    (HERE / "results.md").write_text(page(), encoding="utf-8")
