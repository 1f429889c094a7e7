"""Checkpoints: there and back exactly, the official reader's view, and other files."""

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
        "bare": sw.ScaledArray(x),
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


ENTRY = '"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]%s}'


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("", "is no complete"), ("[]", "is no complete"), ('{"a": 3}', "is no complete"),
        ('{"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}', "'a' is F4; known: F64"),
        ("{" + ENTRY % ', "dtype": "U8"' + "}", "is no complete"),
        ("{" + ENTRY % f', "x": {"[" * 100_000}{"]" * 100_000}' + "}", "is no complete"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_header_that_the_official_reader_refuses_is_refused(tmp_path, header, why):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"ab")
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'length\": 40', r'length\": -1'), (r'length\": 40', r'length\": \"x\"'),
        (r'length\": 40', r'length\": 43'), (r'length\": 40', r'length\": true'),
        (r"[1, 32]", r"[0, 1]"), (r"[1, 32]", r"[1, 0]"), (r"[1, 32]", r"null"),
        (r"[1, 32]", r"[1.0, 32]"), (r"[1, 32]", r"[1, 16]"),
        (r'mantissa_bits\": 1', r'mantissa_bits\": \"1\"'),
        (r'bias\": 1', r'bias\": 1e400'), (r'bias\": 1', "bias" + r'\": ' + "9" * 99),
        (r'"U8","shape":[2,20]', r'"I8","shape":[2,20]'),
        (r'"U8","shape":[2,20]', r'"F32","shape":[2,5]'),
        (r'"F8_E8M0"', r'"BOOL"'),
        (r'"F8_E8M0","shape":[2,2]', r'"F16","shape":[2]'),
        (r'"F8_E8M0","shape":[2,2]', r'"F32","shape":[]'),
    ],
    ids=range(17),
)  # fmt: skip
def test_codes_and_scales_that_nothing_writes_are_refused(tmp_path, old, new):
    path = tmp_path / "a.safetensors"
    save_safetensors(path, {"x": sw.quantize(jnp.ones((2, 40)), "mxfp4")})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].decode()
    assert old in header
    header = header.replace(old, new).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    with pytest.raises(ValueError, match=r"its scales can't be read|is no complete safetensors"):
        load_safetensors(path)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a\udc00b", 3, None, b"w"])
def test_names_that_no_reader_takes_are_refused(tmp_path, name):
    for value in (np.ones(3), sw.quantize(np.ones(3, np.float32), "e4m3fn")):
        with pytest.raises((TypeError, ValueError), match="save_safetensors: arrays is"):
            save_safetensors(tmp_path / "a.safetensors", {"3": np.ones(2), name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", " ", "é", "\0", "a\nb", "\U0001f600", '"', "__metadata"])
def test_unusual_names_are_read_by_the_official_reader(tmp_path, name):
    reader = pytest.importorskip("safetensors.numpy")
    save_safetensors(tmp_path / "a.safetensors", {name: np.arange(3.0)})
    assert reader.load_file(tmp_path / "a.safetensors")[name].tolist() == [0, 1, 2]
