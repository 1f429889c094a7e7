"""The training loop of examples/train.py resumes to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from examples.train import train

from cases import nightly
from scalewise import training

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("users_promotion")


def init(seed):
    return {"params": {"w": 0.1 * jax.random.normal(jax.random.key(seed), (32, 32))}}


def batches(data, seed):
    random = np.random.default_rng(seed)
    while True:
        yield random.normal(size=(4, 32)).astype(np.float32)


def loss_of(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))


TINY = SimpleNamespace(init=init, batches=batches)


def run(step, out, steps):
    state = train(TINY, step, out, data=b"", steps=steps, every=4)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]
    return [np.asarray(x).tobytes() for x in leaves], lines


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("fp8_delayed", {"moments": "coat"}),
     *nightly([("p=f16,c=f16", {"weights": "stochastic"})])],
)  # fmt: skip
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path, policy, options):
    step = training.step(loss_of, optax.adamw(1e-2), policy, **options)
    whole = run(step, tmp_path / "whole", 10)
    run(step, tmp_path / "parts", 6)  # has a checkpoint of step 4, and of the last one
    metrics = tmp_path / "parts" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "lo')  # as a kill leaves it
    assert run(step, tmp_path / "parts", 10) == whole
    assert [row["step"] for row in whole[1]] == list(range(1, 11))
    assert run(step, tmp_path / "parts", 10) == whole  # a finished run has nothing to do


def test_it_makes_the_steps_of_a_plain_loop(tmp_path):
    step = training.step(loss_of, optax.adamw(1e-2), "c=f16")
    _, rows = run(step, tmp_path / "run", 5)
    state, losses = step.init(init(0)["params"]), []
    for _, batch in zip(range(5), batches(b"", 0), strict=False):
        state, metrics = jax.jit(step)(state, batch)
        losses.append(float(metrics.loss))
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_the_command_of_its_docstring(tmp_path):
    command = [sys.executable, "examples/train.py", "mlp", "--steps", "3", "--out", tmp_path]
    for _ in range(2):
        subprocess.run(
            command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
        )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
