"""Trains two recurrent models in several precisions, and draws their losses.

``python docs/curves_page.py train`` (three minutes) writes ``docs/mixed_precision/curves.json``;
``python docs/curves_page.py`` draws the figures of ``docs/mixed_precision.md`` from it, and
the audit's report in the README.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import scalewise as sw
from examples import lstm
from scalewise import training
from scalewise.cli._curves import curves_svg

HERE = Path(__file__).parent
RECORD = HERE / "mixed_precision" / "curves.json"
README = HERE / "readme"
STEPS, WIDTH = 200, 64
SCALE = 2.0**13  # the largest power of two with which no gradient of the first 10 steps overflows
Losses = list[float | None]


def rnn_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the loss of a network that begins with an identity (arXiv 1504.00941)."""
    x = params["tokens"][tokens[:, :-1]].swapaxes(0, 1)

    def cell(hidden: jax.Array, x: jax.Array):
        hidden = jax.nn.relu(x @ params["input"] + hidden @ params["recurrent"])
        return hidden, hidden

    start = jnp.zeros((tokens.shape[0], WIDTH), x.dtype)
    _, hidden = jax.lax.scan(cell, start, x)
    scores = jax.nn.log_softmax(hidden.swapaxes(0, 1) @ params["head"])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


def rnn_init() -> Any:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    return {
        "tokens": 0.1 * jax.random.normal(a, (256, WIDTH)),
        "input": jax.random.normal(b, (WIDTH, WIDTH)) * WIDTH**-0.5,
        "recurrent": jnp.eye(WIDTH),
        "head": jax.random.normal(c, (WIDTH, 256)) * WIDTH**-0.5,
    }


def batches() -> Iterator[Any]:
    library = Path(sysconfig.get_path("stdlib"))
    data = b"".join(p.read_bytes() for p in sorted(library.glob("[a-d]*.py")))
    return lstm.batches(data, 0)


def losses(step: Callable, state: Any) -> Losses:
    """Returns the loss of each step; None for one that isn't finite."""
    step, found = jax.jit(step), []
    for _, batch in zip(range(STEPS), batches(), strict=False):
        state, loss = step(state, batch)
        found.append(float(loss))
    return [x if math.isfinite(x) else None for x in found]


def stepped(loss: Callable, params: Any, optimizer: Any, policy: Any, **options: Any) -> Losses:
    """Returns the losses of ``training.step`` with these arguments."""
    train = training.step(loss, optimizer, policy, **options)

    def step(state: Any, batch: jax.Array):
        state, metrics = train(state, batch)
        return state, metrics.loss

    return losses(step, train.init(params))


def autoscaled(loss: Callable, params: Any, optimizer: Any) -> Losses:
    """Returns the losses of the whole step under the recipe ``fp8``."""

    def step(state: Any, batch: jax.Array):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return losses(sw.autoscale(step, "fp8"), (params, optimizer.init(params)))


def train_scales() -> dict[str, Losses]:
    """Returns the losses of FP16 with loss scales, and of FP8 with a scale for each tensor."""
    warm = optax.linear_schedule(0.0, 1e-2, 100)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(warm))
    rnn = (rnn_loss, rnn_init(), adam)
    constant = training.StaticLossScale(SCALE)
    half = "p=f16,c=f16,o=f32"
    return {
        "float32": stepped(*rnn, None),
        "FP16, constant scale": stepped(*rnn, half, scaling=constant, check_finite=False),
        "FP16, dynamic scale": stepped(*rnn, half),
        "FP8, autoscale": autoscaled(*rnn),
    }


def train_masters() -> dict[str, Losses]:
    """Returns the losses of updates that are smaller than BF16's spacing."""
    slow = (lstm.loss_of, lstm.init(0)["params"], optax.adam(1e-4))
    narrow = "p=bf16,c=bf16,o=f32"
    return {
        "float32": stepped(*slow, None),
        "BF16 weights": stepped(*slow, narrow, weights="plain", check_finite=False),
        "with master weights": stepped(*slow, narrow, weights="master", check_finite=False),
        "rounded stochastically": stepped(*slow, narrow, weights="stochastic", check_finite=False),
    }


def figure(title: str, curves: dict[str, Losses]) -> str:
    """Returns one panel of curves as SVG; a curve ends at its first number that isn't finite."""
    shown, names = [], []
    for name, ys in curves.items():
        end = next((i for i, y in enumerate(ys) if y is None), None)
        shown.append([math.nan if y is None or (end or STEPS) < i else y for i, y in enumerate(ys)])
        names.append(name if end is None else f"{name}: NaN in step {end + 1}")
    return curves_svg(title, {f"{title}, mean of 5 steps": [*map(_mean, shown)]}, names) + "\n"


def _mean(ys: list[float]) -> list[float]:
    return [sum(ys[max(0, i - 4) : i + 1]) / len(ys[max(0, i - 4) : i + 1]) for i in range(len(ys))]


def report() -> str:
    """Returns the audit's report of the README's program, as a terminal shows it, as SVG."""
    text = (HERE.parent / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    file = README / "model.py"
    file.write_text(blocks[0])
    try:
        variables: dict[str, Any] = {}
        exec(compile(blocks[0], str(file), "exec"), variables)
        v = variables
        found = sw.audit(v["train_step"], "fp16")(v["params"], v["x"], v["y"])
        console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
        found.show(console)
    finally:
        file.unlink()
    return console.export_svg(title='sw.audit(train_step, "fp16")', unique_id="audit")


def figures(curves: dict[str, dict[str, Losses]]) -> dict[Path, str]:
    """Returns the figures that need no training, by file."""
    pages = HERE / "mixed_precision"
    return {
        pages / "scales.svg": figure("training loss", curves["scales"]),
        pages / "masters.svg": figure("training loss", curves["masters"]),
    }


if __name__ == "__main__":
    README.mkdir(exist_ok=True)
    if sys.argv[1:] == ["train"]:
        record = {"scales": train_scales(), "masters": train_masters()}
        RECORD.write_text(json.dumps(record, indent=0).replace(",\n", ",") + "\n")
    for path, content in figures(json.loads(RECORD.read_text())).items():
        path.write_text(content)
    (README / "audit.svg").write_text(report())
