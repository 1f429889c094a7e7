"""Checkpoints: there and back exactly, the official reader's view, and files that are none."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.rounding import encode
from scalewise.scaled import load_safetensors, save_safetensors


def same(a, b):
    """Bit for bit."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def tensors():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32))
    return {
        "plain": np.arange(6).reshape(2, 3),
        "half": x.astype(jnp.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2.5),
        "w8": sw.quantize(x, "e4m3fn"),
        "mx8": sw.quantize(x, "mxfp8_e5m2"),
        "mx4": sw.quantize(x[:, :33], "mxfp4"),
        "mx6": sw.quantize(x, "mxfp6_e2m3"),
        "nv4": sw.quantize(x, "nvfp4", axis=0),
        "mine": sw.quantize(x, sw.Format("e6m9", 6, 9)),
        "codes": encode(x, "dlfloat16"),
    }


def test_there_and_back_exactly(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", tensors())
    got = load_safetensors(tmp_path / "a.safetensors")
    assert set(got) == set(tensors())
    for name, want in tensors().items():
        assert jax.tree.structure(got[name]) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want), strict=True):
            same(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_official_reader_reads_it(tmp_path):
    reader = pytest.importorskip("safetensors")
    save_safetensors(tmp_path / "a.safetensors", tensors())
    parsed = dict(reader.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert parsed["w8"]["dtype"] == "F8_E4M3"
    assert bytes(parsed["w8"]["data"]) == np.asarray(tensors()["w8"].data).tobytes()
    assert bytes(parsed["half"]["data"]) == np.asarray(tensors()["half"]).tobytes()


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(tmp_path, cut):
    path = tmp_path / "a.safetensors"
    save_safetensors(path, tensors())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"a\.safetensors is no complete safetensors file"):
        load_safetensors(path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "can't be read"),
        ({"a": 3}, "can't be read"),
        ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}, "'a' is F3; known: F64"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"shape \(2,\) lies at"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, "2 bytes belong to no"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, why):
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(ValueError, match=why):
        load_safetensors(path)


def test_scales_that_lie_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_safetensors(path, {"x": sw.quantize(jnp.ones((2, 40)), "mxfp4")})
    for old, new in ((b'length\\": 40', b'length\\": []'), (b"block", b"bluck")):
        raw = path.read_bytes()
        assert old in raw
        (tmp_path / "b.safetensors").write_bytes(raw.replace(old, new))
        with pytest.raises(ValueError, match="its scales can't be read"):
            load_safetensors(tmp_path / "b.safetensors")


def test_nothing_is_written_where_something_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="'x' is complex128; safetensors has float64"):
        save_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(2, complex)})
    x = sw.quantize(jnp.ones(3), "e5m2")
    with pytest.raises(ValueError, match=r"two tensors are called 'x.scale'"):
        save_safetensors(tmp_path / "a.safetensors", {"x": x, "x.scale": np.zeros(2)})
    assert not list(tmp_path.iterdir())
