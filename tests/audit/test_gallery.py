"""Real failures: the audit finds the marked line, and its fix reduces the error.

One failure of each kind; `make prove` runs all of them.
"""

import pytest
from proofs.gallery import check

FEW = (
    "Sum of squares in a norm",
    "Adam's epsilon",
    "Updates vanish",
    "One-pass variance",
    "A loss scale isn't enough",
)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.thorough(keep=2)
def test_line_kind_and_fix(name):
    assert check(name)
