"""A short run of `make fuzz` on files; the long one has 2,000 cases of each kind."""

import pytest
from hypothesis import settings
from proofs.fuzz import files

from cases import nightly


@pytest.mark.parametrize("name", nightly(files.PROPERTIES, but=[next(iter(files.PROPERTIES))]))
def test_malformed_files(name):
    settings(max_examples=30, deadline=None)(files.PROPERTIES[name])()
