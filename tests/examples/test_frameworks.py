"""Each framework's script trains under FP8 as in float32, with one line changed."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from experiments import frameworks, optimizers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "frameworks.md").read_text()
DIFFS = {
    re.search(r"from (\w+) import", diff)[1]: diff
    for diff in re.findall(r"^```diff\n(.*?)^```", TEXT, re.M | re.S)
}


def side(diff: str, sign: str) -> str:
    """Returns the program before (``-``) or after (``+``) a diff."""
    lines = diff.splitlines()
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", sign))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:haiku")
@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFS)
def test_both_sides_of_the_diff_train_alike(name, monkeypatch):
    framework = name.rpartition("_")[2]
    pytest.importorskip(framework if framework in ("keras", "numpyro") else "jax")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    losses = []
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for sign in "-+":
            monkeypatch.delitem(sys.modules, name, raising=False)
            variables = {"steps": 4, "text": bytes(range(32, 127)) * 40}
            exec(compile(side(DIFFS[name], sign), name, "exec"), variables)
            losses.append(variables["losses"])
    reference, narrow = np.array(losses)
    assert len(reference) == 4
    assert np.abs(narrow / reference - 1).max() < 0.03
    assert (narrow != reference).any() or name == "pole"  # whose loss counts moves


def test_each_diff_changes_one_line_of_the_program():
    for name, diff in DIFFS.items():
        changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:1]]
        assert [line[0] for line in changed] == ["+", "-", "+"], name
        assert changed[0] == "+import scalewise as sw"


def test_every_framework_and_kind_of_program_has_a_diff():
    kinds = {"gpt", "moe", "unet", "pole"}
    assert set(DIFFS) == set(frameworks.FRAMEWORKS.values()) - {"mlp"} | kinds
    assert all(f"(../examples/{name}.py)" in TEXT for name in DIFFS)


def test_the_table_is_that_of_the_runs():
    assert frameworks.table() in TEXT
    found = [json.loads(line) for line in frameworks.FILE.read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) for row in found)


def test_the_tables_of_optimizers_are_those_of_the_runs():
    page = (ROOT / "docs" / "guides" / "optimizers.md").read_text()
    assert all(table in page for table in optimizers.tables())
