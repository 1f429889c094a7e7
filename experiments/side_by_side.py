"""Trains a model with every method, and compares the losses with float32's, seed by seed.

    python -m experiments.side_by_side               # continues where it stopped
    python -m experiments.side_by_side --parts cnn --again

Each part is one `scalewise compare` of a model under several methods, from three seeds; its summary
is a line of ``docs/side_by_side.jsonl``, and ``docs/side_by_side_page.py`` makes a page of them.
What the page claims is checked here: automatic mixed precision within half a percent of float32 and
five bytes a parameter within one, where the same optimizer in plain FP16 fails.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalewise import training
from scalewise.cli._compare import compare
from scalewise.cli._methods import METHODS
from scalewise.cli._program import corpus, load_program

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "side_by_side.jsonl"
SEEDS = 3
AMP = ("dynamic-scale", "autocast-bf16")
PARITY = ("float32", "fp16-plain", *AMP)
# recipes that were added, or changed, after the recorded run: docs/recipe_results.md has them
UNMEASURED = {
    "fp8_current", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8", "mxfp8_hybrid",
    "mxfp4", "nvfp4", "fp4_all_the_way", "quartet", "quartet2", "tetrajet2", "mu_s",
    *(f"state-{name}" for name in training.STATES),
}  # fmt: skip
# the runs, in this order: model, methods, steps
PARTS: Mapping[str, tuple[str, Sequence[str], int]] = {
    "all methods on mlp": ("mlp", tuple(m for m in METHODS if m not in UNMEASURED), 150),
    "parity on cnn": ("cnn", PARITY, 500),
    "parity on gpt": ("gpt", (*PARITY, "five-bytes"), 150),
}
CLAIMS = {  # method and part to the largest allowed difference of its mean loss from float32's
    **{(method, f"parity on {model}"): 0.005 for method in AMP for model in ("gpt", "cnn")},
    ("five-bytes", "parity on gpt"): 0.01,
}


def run(part: str) -> dict[str, Any]:
    """Runs one comparison and returns its summary."""
    model, methods, steps = PARTS[part]
    program = load_program(ROOT / "examples" / f"{model}.py")
    chosen = [METHODS[name] for name in methods]
    summary = compare(program, chosen, corpus(), steps, seeds=SEEDS).summary
    if summary["interrupted"]:
        raise SystemExit(f"{part}: interrupted, nothing kept")
    return {"part": part, "seeds": SEEDS, **summary}


def rows(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Returns the recorded summaries by part; of two of one part, the later."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {row["part"]: row for row in map(json.loads, lines)}


def ratios(summary: Mapping[str, Any], method: str) -> list[float] | None:
    """Returns a method's final losses over float32's of the same seed; None if non-finite."""
    finals = {m["name"]: m["final_loss_by_seed"] for m in summary["methods"]}
    if method not in finals or None in finals[method]:
        return None
    return [a / b for a, b in zip(finals[method], finals["float32"], strict=True)]


def failures(kept: Mapping[str, dict[str, Any]]) -> list[str]:
    """Returns a sentence for each claim that the recorded results don't support."""
    found = []
    for (method, part), limit in CLAIMS.items():
        by_seed = ratios(kept[part], method)
        if by_seed is None:
            found.append(f"{part}: {method} isn't finite")
        elif abs(statistics.fmean(by_seed) - 1) > limit:
            found.append(f"{part}: {method} is {statistics.fmean(by_seed):.4f} of float32")
    if ratios(kept["parity on gpt"], "fp16-plain") is not None:
        found.append("parity on gpt: fp16-plain trains")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--again", action="store_true", help="also what is there already")
    given = parser.parse_args()
    for part in given.parts:
        if given.again or part not in rows():
            line = json.dumps(run(part)) + "\n"
            with FILE.open("a", encoding="utf-8") as file:
                file.write(line)
    kept = rows()
    if set(PARTS) <= set(kept):
        wrong = failures(kept)
        print("\n".join(wrong) or "every claim holds")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
