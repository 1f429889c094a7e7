"""Real failures, each found at the marked line and fixed by what the audit suggests.

A handful of them, one of each kind; `make prove` runs all of them.
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
def test_found_at_its_line_and_fixed(name):
    assert check(name)
