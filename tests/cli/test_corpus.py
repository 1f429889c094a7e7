"""Text from a file, a folder, or the standard library."""

import pytest

from scalewise._user_file import InputError
from scalewise.cli._program import corpus


def test_the_standard_library_is_the_same_text_each_time():
    assert len(corpus()) == 2_000_000
    assert corpus() == corpus()


def test_a_file_is_cut_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    assert corpus(tmp_path / "a.txt", limit=4) == b"abcd"


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in [("b", b"2"), ("a", b"1"), ("deep/c", b"3"), (".git/d", b"4"), (".e", b"5")]:
        (tmp_path / name).write_bytes(text)
    assert corpus(tmp_path) == b"123"


@pytest.mark.parametrize("folder", [True, False])
def test_missing_and_empty_data_is_an_error(tmp_path, folder):
    path = tmp_path / "empty"
    path.mkdir() if folder else path.touch()
    with pytest.raises(InputError, match=r"no data in '.*empty': it is empty"):
        corpus(path)
