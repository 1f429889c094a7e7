"""The GPT example learns, and doesn't import scalewise."""

import ast
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from scalewise._user_file import InputError
from scalewise.cli._compare import compare
from scalewise.cli._methods import METHODS
from scalewise.cli._program import load_program

FILE = Path(__file__).parents[2] / "examples" / "gpt.py"
TEXT = FILE.read_bytes()


@pytest.fixture
def gpt():
    """The example at a size that trains in no time; it promotes as users do."""
    program = load_program(FILE)
    module = program.init.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    module["CONFIG"] = dataclasses.replace(
        module["CONFIG"], context=16, width=16, heads=2, layers=1, batch=4
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield program


def test_it_imports_nothing_of_scalewise():
    imports = [n for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports]
    assert not [n for n in names if n and n.startswith("scalewise")]


@pytest.mark.slow
def test_it_learns(gpt):
    state, step = gpt.init(0), jax.jit(gpt.train_step)
    losses = []
    for _, batch in zip(range(100), gpt.batches(TEXT, 0), strict=False):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert np.mean(losses[-5:]) < 4.5


@pytest.mark.slow
def test_attention_is_causal(gpt):
    logits = gpt.init.__globals__["logits"]
    params = gpt.init(0)["params"]
    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5:] = 200
    before, after = logits(params, tokens), logits(params, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


@pytest.mark.slow
def test_scaled_recipes_follow_float32_and_plain_fp16_diverges(gpt):
    methods = [METHODS[x] for x in ("float32", "fp16-plain", "fp16", "fp8-narrow-state")]
    result = compare(gpt, methods, TEXT, 20)
    float32, plain, *scaled = result.summary["methods"]
    assert plain["first_non_finite"]["step"] == 1
    for row in scaled:
        assert row["non_finite_steps"] == 0
        assert row["final_loss"] == pytest.approx(float32["final_loss"], rel=0.01)


def test_too_little_text_is_an_error(gpt):
    with pytest.raises(InputError, match="at least 17 bytes of text are needed, not 3"):
        compare(gpt, [METHODS["float32"]], b"abc", 3)
