"""Real failures: the audit finds the marked line, and its fix reduces the error.

One failure of each kind, and models; `make prove` scores all of them.
"""

import jax
import pytest
from examples.failures import FAILURES
from examples.failures.clean import CLEAN
from proofs.experts import expert_error, harm, marked
from proofs.gallery import ALL, check, false_findings

FEW = (
    "Sum of squares in a norm",
    "Adam's epsilon",
    "Updates vanish",
    "One-pass variance",
    "A loss scale isn't enough",
)
MODELS = ("Softplus by hand", "Edges of a 10-bit image")
HEALTHY = ("Softmax", "Two-pass variance")


def test_each_failure_has_a_marked_line():
    assert len(ALL) == 60
    assert len(CLEAN) == 20
    assert [name for name, case in ALL.items() if not marked(case.at)] == []


@pytest.mark.parametrize("name", [*FEW, *MODELS])
@pytest.mark.thorough(gate=2)
def test_line_kind_and_fix(name):
    assert check(name)


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.slow
def test_an_expert_reduces_a_real_error(name):
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam raises a float to an integer
        before, after = harm(FAILURES[name]), expert_error(FAILURES[name])
    assert after[0] == 0
    assert before[0] > 0 or after[1] < 0.5 * before[1]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.thorough(keep=1, gate=3)
def test_nothing_is_found_in_clean_programs(name):
    assert not false_findings(name)
