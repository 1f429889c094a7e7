"""A short run of `make fuzz` on files and folders; the long one has 500 and 100 cases."""

import pytest
from proofs.fuzz import files, folders


@pytest.mark.thorough
def test_malformed_files():
    assert [failure for index in range(60) for failure in files.check(7, index)] == []


@pytest.mark.parametrize("index", [0, 1, 3])  # swapped, killed, full
@pytest.mark.thorough(keep=1)
def test_folders(index):
    assert folders.check(7, index) == []
