"""The page of methods side by side agrees with the results, and its claims hold."""

import copy
import re

import pytest
from experiments import side_by_side

from scalewise.cli._methods import METHODS

KEPT = side_by_side.rows()


def test_every_claim_holds_for_the_recorded_results():
    assert side_by_side.failures(KEPT) == []
    measured = {m["name"] for m in KEPT["all methods on mlp"]["methods"]}
    assert measured | side_by_side.UNMEASURED == set(METHODS)
    assert not measured & side_by_side.UNMEASURED
    for part, (model, methods, steps) in side_by_side.PARTS.items():
        row = KEPT[part]
        assert (row["program"], row["steps_made"], row["seeds"]) == (model, steps, 3)
        assert [m["name"] for m in row["methods"]] == list(methods)


@pytest.mark.parametrize(
    ("method", "part", "change", "message"),
    [
        ("autocast-bf16", "parity on cnn", lambda x: 1.01 * x, "1.00[89]. of float32"),
        ("five-bytes", "parity on gpt", lambda x: 0.98 * x, "0.97.. of float32"),
        ("dynamic-scale", "parity on gpt", lambda x: None, "dynamic-scale isn't finite"),
        ("fp16-plain", "parity on gpt", lambda x: 1.0, "fp16-plain trains"),
    ],
)
def test_a_failing_claim_is_reported(method, part, change, message):
    kept = copy.deepcopy(KEPT)
    row = next(m for m in kept[part]["methods"] if m["name"] == method)
    row["final_loss_by_seed"] = [change(x) for x in row["final_loss_by_seed"]]
    (found,) = side_by_side.failures(kept)
    assert found.startswith(part)
    assert re.search(message, found)
