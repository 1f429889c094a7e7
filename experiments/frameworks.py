"""Trains a program of each framework under each recipe, with one changed line, beside float32.

    python -m experiments.frameworks    # half an hour; continues where it stopped

Each run is a line of ``docs/frameworks.jsonl``; the table of ``docs/frameworks.md`` is written from
it. A number is the mean loss of the last steps, relative to float32's.
"""

import importlib
import itertools
import json
import statistics
from pathlib import Path

import jax

import scalewise as sw

DOCS = Path(__file__).parents[1] / "docs"
FILE, PAGE = DOCS / "frameworks.jsonl", DOCS / "frameworks.md"
STEPS, LAST = 100, 20
FRAMEWORKS = {
    "plain JAX": "mlp",
    "Flax NNX": "digits_nnx",
    "Flax Linen": "digits_linen",
    "Equinox": "digits_equinox",
    "Haiku": "digits_haiku",
    "Keras": "digits_keras",
    "NumPyro": "digits_numpyro",
    "as MaxText": "gpt_linen",
}
RECIPES = (
    "fp8", "mxfp8", "fp16", "bf16", "fp8_rowwise", "fp8_blockwise", "nvfp4", "mxfp4",
    "fp16_every_op", "scalify", "quartet2", "quartet",
)  # fmt: skip


def loss(module: str, recipe: str | None) -> float:
    """Returns the mean of the last losses of a program's run."""
    program = importlib.import_module(f"examples.{module}")
    step = jax.jit(sw.autoscale(program.train_step, recipe) if recipe else program.train_step)
    state, losses = program.init(seed=0), []
    data = Path(str(program.__file__)).read_bytes()
    for batch in itertools.islice(program.batches(data=data, seed=0), STEPS):
        state, value = step(state, batch)
        losses.append(float(value))
    return statistics.fmean(losses[-LAST:])


def table() -> str:
    """Returns the table of ``docs/frameworks.md``: recipes by frameworks."""
    found = {
        (r["framework"], r["recipe"]): r["loss"]
        for r in map(json.loads, FILE.read_text().splitlines())
    }
    lines = [f"| recipe | {' | '.join(FRAMEWORKS)} |", "|---" + "|---:" * len(FRAMEWORKS) + "|"]
    for recipe in RECIPES:
        cells = [
            f"{found[name, recipe] / found[name, 'float32']:.3f}" if (name, recipe) in found else ""
            for name in FRAMEWORKS
        ]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    done = {(r["framework"], r["recipe"]) for r in map(json.loads, lines)}
    for recipe, name in itertools.product(("float32", *RECIPES), FRAMEWORKS):
        if (name, recipe) not in done:
            value = loss(FRAMEWORKS[name], None if recipe == "float32" else recipe)
            with FILE.open("a") as file:
                print(json.dumps({"framework": name, "recipe": recipe, "loss": value}), file=file)
    before, _, rest = PAGE.read_text().partition("| recipe |")
    if rest:
        PAGE.write_text(f"{before}{table()}\n\n{rest.partition(chr(10) * 2)[2]}")


if __name__ == "__main__":
    main()
