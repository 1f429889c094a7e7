"""Each framework's script trains under FP8 as in float32, with one line changed."""

import importlib.util
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import scalewise as sw

ROOT = Path(__file__).parents[2]
SCRIPTS = ("digits_nnx", "digits_linen", "digits_equinox", "digits_haiku", "pole")


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning:haiku")
@pytest.mark.thorough(gate=2)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_steps_are_those_of_float32(name):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        script = loaded(name)
        losses = []
        for step in (script.train_step, sw.autoscale(script.train_step, "fp8")):
            step, state = jax.jit(step), script.init(0)
            losses.append([])
            for batch in itertools.islice(script.batches(b"", 0), 4):
                state, loss = step(state, batch)
                losses[-1].append(float(loss))
    reference, narrow = np.array(losses)
    assert np.abs(narrow / reference - 1).max() < 0.03
    assert (narrow != reference).any() or name == "pole"  # whose loss counts moves


def test_the_page_lists_the_scripts():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    linked = set(re.findall(r"\(\.\./examples/(\w+)\.py\)", text))
    assert set(SCRIPTS) <= linked
    assert all((ROOT / "examples" / f"{name}.py").exists() for name in linked)
