"""Writes ``docs/side_by_side.md`` from ``docs/side_by_side.jsonl`` and ``docs/torture.jsonl``."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from experiments import side_by_side, torture
from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("side_by_side")

COLUMNS = (
    "final loss", "to float32", "at once", "not finite", "left out", "last scale", "bytes",
    "temporaries, MB", "time", "build, s",
)  # fmt: skip

TITLES = {
    "all methods on mlp": "All methods, on a small network",
    "parity on cnn": "Automatic mixed precision on convolutions",
    "parity on gpt": "Automatic mixed precision and five bytes a parameter on a GPT",
}

NOTES = {
    "all methods on mlp": """
`fp8` is automatic bias selection: a power-of-two scale from a tensor's largest magnitude is
equivalent to another exponent bias (FP8-AMAX, [arXiv
2309.17224](https://arxiv.org/abs/2309.17224)). `fp8_delayed` uses the largest magnitudes of earlier
steps and reaches the same loss: another power of two as the scale changes no bit of numbers that
are neither flushed nor saturated.

`fp16_every_op` is `scalify` with each scale recomputed from the
data by the maximum, `scalify-l2` by the mean of squares, which leaves
less headroom for a tensor's large numbers. In `scalify-loss`, which is
`training.step(loss, optimizer, "scalify")`, scales are propagated only through loss and
gradients, and the optimizer is in float32.
""",
    "parity on gpt": """
Other recipes of autoscale on the GPT, seed 0 only, also 150 steps (`scalewise compare` on the same
day, not in the table; final loss to float32's, and *at once*): `bf16` 1.0000, 0.01 %;
`fp16_every_op` 1.0004, 0.13 %; `fp8` 1.0008, 0.10 %; `fp8_delayed` 1.0010, 0.11 %; `unit_scaling`
1.0044, 0.10 %; `mxfp8_floor` 1.0091, 0.36 %.

The figures for `scalify` here and in the tables were measured when its scales were only propagated.
In 60 steps of the GPT (seed 0, mean of the last 20) it then ended at 3.598, float32 and
`fp16_every_op` at 3.018: gradients shrank to a thousandth of unit size after a few operations of
the backward pass, and their squares underflowed in the optimizer.

The recipe now recomputes scales
after contractions, sums, powers and quotients, and in the optimizer; the same 60 steps end at 3.018
(`python -m experiments.parity --models gpt --recipes float32 scalify --steps 60`). On a pre-norm
transformer of 2 layers and width 16 the gradient of each parameter array is within 0.4 % of
float32's, and the loss after one step of AdamW is 3.7469 (float32: 3.7472; with propagated scales
only: 94).
""",
}

FIVE = {  # the method; kind, format, scales, and which method of the torture stands for it
    "static-scale": ("static loss scaling", "FP16", "1, given", None),
    "dynamic-scale": ("automatic loss scaling", "FP16", "1, from overflows", "loss-scaled"),
    "fp8": ("automatic bias selection", "E4M3, E5M2", "1 an operand, its own data", "fp8"),
    "unit_scaling": ("unit scaling", "E4M3, E5M2", "1 an operand, its shape", None),
    "scalify": ("scale propagation", "FP16, every operation", "1 a result, its operands'", None),
    "fp16_every_op": (
        "the same, scales found anew",
        "FP16, every operation",
        "1 a result, its own data",
        "fp16_every_op",
    ),
}


def percent(x: float | None) -> str:
    return "–" if x is None else f"{x:.2%}".replace("%", " %")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def quoted(text: str) -> str:
    """Returns the text with qualified names and paths of leaves as code."""
    return re.sub(r"(?:\[[^\]\s]+\])+|[\w.]*<\w+>[\w.<>]*", r"`\g<0>`", text)


def cells(summary: dict[str, Any], method: dict[str, Any]) -> list[str]:
    by_seed = side_by_side.ratios(summary, method["name"])
    finals, scale = method["final_loss_by_seed"], method["loss_scale_at_end"]
    return [
        f"`{method['name']}`",
        "–" if by_seed is None else spread(finals, 4),
        "–" if by_seed is None else spread(by_seed, 4),
        percent(method["early_difference"]),
        f"{method['non_finite_steps']}",
        f"{method['skipped_steps']}",
        "–" if scale in (None, 1.0) else f"{scale:g}",
        f"{method['bytes_per_parameter']:.2f}",
        f"{method['temporary_bytes'] / 1e6:.1f}",
        f"{method['median_seconds_ratio']:.2f}",
        f"{method['build_seconds']:.0f}",
    ]


def table(part: str, summary: dict[str, Any]) -> str:
    model, methods, steps = side_by_side.PARTS[part]
    command = f"`scalewise compare examples/{model}.py --steps {steps} --seeds {summary['seeds']}"
    command += f" --method ...` ({len(methods)} of them; float32: "
    command += f"{summary['methods'][0]['median_seconds'] * 1e3:.1f} ms a step)"
    head = PARTS.TABLE.format(
        title=TITLES[part],
        command=command,
        columns=" | ".join(COLUMNS),
        rule="|".join("---:" for _ in COLUMNS),
    )
    rows = ["| " + " | ".join(cells(summary, m)) + " |" for m in summary["methods"]]
    firsts = [
        f"`{m['name']}` diverges in step {first['step']}: {quoted(first['why'])}."
        for m in summary["methods"]
        if (first := m["first_non_finite"])
    ]
    return head + "\n".join([*rows, "", *firsts]).rstrip() + "\n" + NOTES.get(part, "")


def kinds(summary: dict[str, Any]) -> str:
    methods = {m["name"]: m for m in summary["methods"]}
    tortured = torture.rows(torture.FILE)

    def cell(method: str | None) -> str:
        if method is None:
            return "not run"
        row = tortured["mlp", "loss times 2^-40", method]
        if row["error"] is None:
            return f"fails, step {row['stopped']}"
        off = percent(row["error"])
        return off if row["error"] <= torture.TOLERANCE else f"fails ({off} off)"

    lines = []
    for name, (kind, fmt, scales, torment) in FIVE.items():
        by_seed = side_by_side.ratios(summary, name)
        final = "–" if by_seed is None else spread(by_seed, 4)
        early = percent(methods[name]["early_difference"])
        row = (kind, f"`{name}`", fmt, final, early, scales, cell(torment))
        lines.append(f"| {' | '.join(row)} |")
    return PARTS.KINDS.format(rows="\n".join(lines))


def environment(kept: dict[str, Any]) -> str:
    made = sorted(
        {
            f"{e['date'].split()[0]}, JAX {e['JAX']}, Python {e['Python']}"
            for e in (summary["environment"] for summary in kept.values())
        }
    )
    return "; ".join(made)


def page() -> str:
    kept = side_by_side.rows()
    parts = [part for part in side_by_side.PARTS if part in kept]
    head = PARTS.HEAD.format(last=side_by_side.SEEDS - 1, environment=environment(kept))
    tables = "".join(table(part, kept[part]) for part in parts)
    return head + tables + kinds(kept["all methods on mlp"])


if __name__ == "__main__":
    (HERE / "side_by_side.md").write_text(page())
