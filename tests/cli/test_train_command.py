"""`scalewise train` as a user types it."""

import json

import jax
import pytest
from typer.testing import CliRunner

from scalewise.cli import app


@pytest.fixture(autouse=True)
def users_promotion():
    """The examples promote as users do."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def call(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize("model", ["cnn", "lstm", "mlp", "moe"])  # gpt: tests/examples
@pytest.mark.slow
def test_an_example_trains_in_mixed_precision(tmp_path, model):
    out = tmp_path / "run"
    method = "p=f32,c=bf16,o=f32"
    result = call(model, "--method", method, "--steps", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"{model}, p=f32,c=bf16,o=f32: 2 steps, loss " in result.output
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.thorough
def test_a_monitored_run(tmp_path):
    out = tmp_path / "run"
    result = call("mlp", "--steps", 10, "--out", out, "--monitor", "fp16")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [n for n, line in enumerate(lines, 1) if "weights/amax" in line] == [10]
    assert 0 < lines[-1]["optimizer/flushed"] < 1  # second moments span twice the gradients' range
    assert lines[-1]["weights/nonfinite"] == 0
    assert call("mlp", "--out", tmp_path / "b", "--monitor", "fp17").exit_code == 2


def test_an_unknown_program_is_an_error_of_one_sentence(tmp_path):
    result = call("gtp", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert result.output.startswith("scalewise: no program 'gtp'; did you mean 'gpt'? expected ")
    assert len(result.output.splitlines()) == 1
