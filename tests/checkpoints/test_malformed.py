"""Malformed files are refused in one sentence, with memory bounded by their size."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from proofs.fuzz import folders
from typer.testing import CliRunner

from cases import nightly
from scalewise import checkpoints
from scalewise.cli import app
from scalewise.scaled import save_safetensors


def entry(start, stop, dtype="U8", shape=None):
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HUGE = 1 << 60
MALFORMED = {  # safetensors checks headers: some of each kind, and what it leaves to us
    "empty": b"",
    "a header longer than the file": file_of({}, length=1000),
    "a header of 2^60 bytes": file_of({}, length=HUGE),
    "no JSON": file_of(b"{nonsense"),
    "deep JSON": file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "a key twice": file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                           b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "no offsets": file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
    "a foreign dtype": file_of({"a": entry(0, 1, "Q9")}, b"1"),
    "sizes whose product overflows": file_of({"a": entry(0, 1, shape=[HUGE, HUGE])}, b"1"),
    "a gap": file_of({"a": entry(0, 1), "b": entry(2, 3)}, b"123"),
    "metadata that are numbers": file_of({"__metadata__": {"a": 1}}),
    "torchao's names without records": file_of({"__metadata__": {"tensor_names": '["a"]'}}),
    "torchao's names that are no JSON": file_of({"__metadata__": {"tensor_names": "{"}}),
    "scales that aren't there": file_of({"__metadata__": {"scalewise": '{"a": {"block": null}}'}}),
    "10,000 tensors that overlap": file_of({f"t{i}": entry(0, 1) for i in range(10_000)}, b"1"),
    "100,000 tensors that overlap": file_of({f"t{i}": entry(0, 1) for i in range(100_000)}, b"1"),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly(MALFORMED, but=[*MALFORMED][:-1]))
def test_a_malformed_file_is_refused_in_one_sentence(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(MALFORMED[name])
    tracemalloc.start()
    with pytest.raises(checkpoints.UnreadableError) as caught:
        checkpoints.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * path.stat().st_size + 1_000_000
    message = str(caught.value)
    assert str(path) in message or "'" in message
    assert len(message) < 400
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", ""])
def test_an_index_that_leaves_its_folder_is_refused(shard, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors(tmp_path / "x.safetensors", {"a": np.ones(3)})
    index = {"weight_map": {"a": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoints.UnreadableError, match="isn't a file of the folder"):
        checkpoints.load(folder)


@pytest.mark.parametrize("count", nightly([10_000, 100_000], but=[10_000]))
def test_many_tensors_are_read(count, tmp_path):
    header = {f"t{i}": entry(i, i + 1) for i in range(count)}
    (tmp_path / "x.safetensors").write_bytes(file_of(header, b"1" * count))
    tree = checkpoints.load(tmp_path / "x.safetensors")
    assert len(tree) == count
    assert tree.value(f"t{count - 1}").tolist() == [49]


def test_scales_that_do_not_fit_are_refused_when_the_tensor_is_used(tmp_path):
    tensors = {"a.weight_packed": np.zeros((8, 16), np.uint8),
               "a.weight_scale": np.zeros((8, 3), np.uint8)}  # fmt: skip
    save_safetensors(tmp_path / "x.safetensors", tensors)
    tree = checkpoints.load(tmp_path / "x.safetensors")
    with pytest.raises(checkpoints.UnreadableError, match=r"a scale of shape \(8, 3\)"):
        tree.value("a.weight")


def test_missing_shards_are_named(tmp_path):
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_safetensors(tmp_path / "a.safetensors", {"a": np.ones(3)})
    with pytest.raises(checkpoints.UnreadableError, match=r"the shard b\.safetensors isn't there"):
        checkpoints.load(tmp_path)
    found = checkpoints.check(tmp_path).findings
    assert [(f.fault, f.tensors) for f in found] == [("shard missing", ("b",))]


def test_a_damaged_folder_is_read_or_refused_in_one_sentence():
    folders.prepare()
    settings(max_examples=12, deadline=None)(folders.reads_damaged_folders)()
