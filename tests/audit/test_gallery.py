"""Real failures: the audit finds the marked line, and its fix reduces the error."""

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
QUICK = (
    "A mask of -1e10", "A sum stalls at 256", "An accumulator in FP16", "Small gradients",
    "Softmax", "T5 in fp16",
)  # fmt: skip
# what the audit doesn't find, of line, kind and fix
MISSED = {
    "Updates vanish": ["kind"],
    "A router's second best expert": ["fix"],
    "apply_if_finite skips every step": ["fix"],
    "A static loss scale of 65536": ["fix"],
    "Adam's epsilon behind clipping": ["fix"],
    "Adam's bias correction": ["fix"],
    "Stochastic rounding behind a rounded sum": ["kind"],
    "A focal loss with epsilons": ["fix"],
}


def test_each_failure_has_a_marked_line():
    assert sum(bool(x.kinds) for x in GALLERY.values()) == 64
    assert sum(not x.kinds for x in GALLERY.values()) == 20
    assert [name for name, x in GALLERY.items() if x.kinds and not x.lines()] == []


@pytest.mark.parametrize("name", nightly(GALLERY, but=QUICK))
def test_line_kind_and_fix_or_nothing(name):
    program = GALLERY[name]
    found = judged(program, scalewise(program, program.args()))
    if program.kinds:
        assert [x for x in ASPECTS if not found[x]] == MISSED.get(name, []), found
    else:
        assert not found["findings"], found


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
