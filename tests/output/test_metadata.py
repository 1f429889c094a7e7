"""The description of a checkpoint: every kind of damage is reported as damage."""

import json

import pytest

from scalewise.training._train._meta import KIND, DamagedError, ForeignError, Meta, read_meta

META = Meta(KIND, "run", 20, {"model": "m"}, [[".w", "float32", [2]]], ["d"]).sealed()


def checkpoint(folder, content, name="20"):
    file = folder / name / "meta" / "metadata"
    file.parent.mkdir(parents=True)
    (folder / name / "state").mkdir()
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder / name


def test_a_written_description_is_read(tmp_path):
    assert read_meta(checkpoint(tmp_path, META.as_dict())) == META


@pytest.mark.parametrize("key", META.as_dict())
def test_a_missing_or_changed_entry(tmp_path, key):
    whole = META.as_dict()
    less = {k: v for k, v in whole.items() if k != key}
    for number, content in enumerate((less, less | {key: None}, less | {key: {}})):
        with pytest.raises(DamagedError, match="its description "):
            read_meta(checkpoint(tmp_path / str(number), content))
    other = {"step": 21, "about": {"model": "n"}, "arrays": [], "digests": ["e"]}.get(key, "x")
    with pytest.raises(DamagedError, match="its description "):
        read_meta(checkpoint(tmp_path / "other", less | {key: other}))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"\xff", "can't be read"),
        (b"null", "no JSON object"), (b"[1]", "no JSON object"), (b"[" * 100_000, "no JSON"),
        (META.as_dict() | {"extra": 1}, "entries that were not written"),
        (META.as_dict() | {"about": json.loads("[" * 900 + "]" * 900)}, "has no about"),
        (META.as_dict() | {"about": {"a": json.loads("[" * 900 + "]" * 900)}}, "not the one"),
    ],
    ids=range(9),
)  # fmt: skip
def test_files_that_are_no_description(tmp_path, content, why):
    with pytest.raises(DamagedError, match=why):
        read_meta(checkpoint(tmp_path, content))


def test_a_folder_of_another_step_and_entries_that_are_no_folders(tmp_path):
    whole = checkpoint(tmp_path, META.as_dict())
    with pytest.raises(DamagedError, match="it is the checkpoint of step 20 under another name"):
        read_meta(checkpoint(tmp_path, META.as_dict(), "30"))
    (tmp_path / "40").symlink_to(whole)
    with pytest.raises(DamagedError, match="it is a symbolic link"):
        read_meta(tmp_path / "40")
    (tmp_path / "50").write_text("a file")
    with pytest.raises(DamagedError, match="it is not a folder"):
        read_meta(tmp_path / "50")
    (whole / "meta" / "metadata").unlink()
    with pytest.raises(DamagedError, match="its description is missing"):
        read_meta(whole)
    (whole / "meta" / "metadata").mkdir()
    with pytest.raises(DamagedError, match=r"can't be read .*it is a folder"):
        read_meta(whole)


def test_foreign_checkpoints_are_distinguished_from_damaged_ones(tmp_path):
    (tmp_path / "20" / "default").mkdir(parents=True)
    with pytest.raises(ForeignError, match="neither scalewise's description nor its state"):
        read_meta(tmp_path / "20")
    older = META.as_dict() | {"kind": "scalewise train, 1"}
    with pytest.raises(ForeignError, match="of the kind 'scalewise train, 1'"):
        read_meta(checkpoint(tmp_path / "older", older))
