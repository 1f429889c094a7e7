"""Real failures: the audit finds the marked line, and its fix reduces the error.

One failure of each kind, and models; `make prove` scores all of them.
"""

import jax
import pytest
from failures.gallery import FAILURES
from failures.programs import load
from failures.runner import ASPECTS, judged
from failures.tools.audit import audited, scalewise
from failures.truth import error, measure, right

from cases import nightly

GALLERY = load("gallery")
FEW = (
    "Sum of squares in a norm",
    "Adam's epsilon",
    "One-pass variance",
    "A loss scale isn't enough",
)
MODELS = ("Softplus by hand", "Edges of a 10-bit image")
HEALTHY = ("Softmax", "Two-pass variance")


def test_each_failure_has_a_marked_line():
    assert sum(bool(x.kinds) for x in GALLERY.values()) == 64
    assert sum(not x.kinds for x in GALLERY.values()) == 20
    assert [name for name, x in GALLERY.items() if x.kinds and not x.lines()] == []


@pytest.mark.parametrize("name", [*FEW, *MODELS])
@pytest.mark.slow
def test_line_kind_and_fix(name):
    program = GALLERY[name]
    found = judged(program, scalewise(program, program.args()))
    assert all(found[x] for x in ASPECTS), found


@pytest.mark.parametrize("name", nightly(FEW, but=[*FEW][:1]))
def test_a_fix_has_the_error_that_the_audit_measured(name):
    program = GALLERY[name]
    args = program.args()
    report = audited(program, args)
    after = error(report.apply_fixes(program.call)(*args), right(program, args))
    assert after[0] == report.error_fixed.non_finite == 0
    assert after[1] <= 4 * float(report.error_fixed) + 1e-6  # of the worst output, not of all


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.slow
def test_an_expert_reduces_a_real_error(name):
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam raises a float to an integer
        found = measure(GALLERY[name])
    assert found.expert[0] == 0
    assert found.failed[0] > 0 or found.expert[1] < 0.5 * found.failed[1]


@pytest.mark.parametrize("name", nightly(HEALTHY, but=[*HEALTHY][:1]))
def test_nothing_is_found_in_clean_programs(name):
    assert not audited(GALLERY[name], GALLERY[name].args()).findings
