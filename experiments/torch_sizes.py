"""Measures audits of a PyTorch model of realistic size: time and memory, by its depth.

    python -m experiments.torch_sizes                     # with the Python of `make test-torch`
    python -m experiments.torch_sizes --layers 12
    python -m experiments.torch_sizes --write             # and writes the page of results

The model is GPT-2 small from transformers, with random weights: width 768, 12 heads, 50,257 tokens;
12 layers of it, and fewer. It is audited in FP16 on a sequence of 64 tokens. An outlier of the
middle layer overflows, which the audit has to find. Each audit runs in a process of its own; the
peak of its memory is that of the whole process, torch's weights included. Twelve layers
may take ten minutes of CPU time, of all threads, and 8 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "results" / "torch.md"
BEGIN, END = "<!-- made by experiments/torch_sizes.py -->\n", "<!-- end of the sizes -->\n"
LAYERS = (2, 4, 8, 12)
TRIALS = 40  # the default of st.audit
SOURCE = "x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)"  # transformers' Conv1D
MINUTES, GIGABYTES = 10, 8  # what 12 layers may take


def audited(layers: int, trials: int, tokens: int) -> dict[str, Any]:
    """Audits one model; returns the figures of the audit and of this process."""
    import torch
    import transformers

    import scalewise.torch as st

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    layer = model.transformer.h[layers // 2].mlp
    with torch.no_grad():
        layer.c_fc.weight[:, 0] *= 1e3
        layer.c_proj.weight[0, 0] = 2e3
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    begin, before = time.perf_counter(), time.process_time()
    report = st.audit(model, (ids,), low="fp16", trials=trials)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - before
    worst = (*report.findings, *report.unfixed)[:1]
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "equations": len(report.equations),
        "trials": report.trials,
        "seconds": seconds,
        "cpu": cpu,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "before": str(report.error),
        "after": str(report.error_fixed),
        "finding": [
            {"kind": x.kind, "source": x.source, "scope": x.scope, "fix": x.fix and str(x.fix)}
            for x in worst
        ],
    }


def in_process(layers: int, trials: int, tokens: int) -> dict[str, Any]:
    """Audits one model in a process of its own."""
    command = [sys.executable, "-m", "experiments.torch_sizes", "--one", str(layers)]
    command += ["--trials", str(trials), "--tokens", str(tokens)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{layers} layers failed:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def problems(row: dict[str, Any]) -> list[str]:
    """Returns what isn't as the table has to show it."""
    found = []
    if row["cpu"] > 60 * MINUTES or row["gigabytes"] > GIGABYTES:
        found.append(f"more than {MINUTES} minutes or {GIGABYTES} GB")
    worst = row["finding"][0] if row["finding"] else {}
    scope = f"h.{row['layers'] // 2}/mlp/c_proj"
    if worst.get("source") != SOURCE or scope not in worst.get("scope", ""):
        found.append(f"the overflow of {scope} isn't the first finding: {worst}")
    return found


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    worst = row["finding"][0] if row["finding"] else None
    said = f"{worst['kind']}, `{worst['scope']}`; {worst['fix'] or 'no fix'}" if worst else "none"
    cells = (
        row["layers"], f"{row['parameters'] / 1e6:.0f} M", f"{row['equations']:,}", row["trials"],
        f"{row['seconds']:.0f}", f"{row['cpu']:.0f}", f"{row['gigabytes']:.1f}",
        said, f"{row['before']} to {row['after']}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def table(layers: Sequence[int], trials: int, tokens: int) -> str:
    """Returns the table; prints each row when it is there."""
    import torch
    import transformers

    lines = [
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, "
        f"{tokens} tokens, up to {trials} trials.",
        "",
        "| layers | parameters | operations | trials | s | CPU s | GB | first finding | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    wrong = []
    for count in layers:
        row = in_process(count, trials, tokens)
        lines.append(line(row))
        print(lines[-1], flush=True)
        wrong += [f"{count} layers: {text}" for text in problems(row)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write to docs/results/torch.md")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(audited(given.one, given.trials, given.tokens)))
        return
    made = table(given.layers, given.trials, given.tokens)
    if given.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(before + BEGIN + made + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
