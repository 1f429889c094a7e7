"""`checkpoints.load`: lazy trees of arrays that compute as they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise import checkpoints
from scalewise.scaled import save_safetensors


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.weight": (rng.standard_normal((64, 128)) * 0.1).astype(np.float32)
               for i in range(2)}  # fmt: skip
    save_safetensors(tmp_path / "wide.safetensors", tensors | {"bias": np.ones(64, np.float32)})
    out = tmp_path / "narrow.safetensors"
    checkpoints.cast(tmp_path / "wide.safetensors", "nvfp4", out=out, layout="modelopt")
    return out


def test_names_and_a_selection_of_them(path):
    tree = checkpoints.load(path)
    assert list(tree) == ["bias", "layers.0.weight", "layers.1.weight"] or len(tree) == 3
    assert list(checkpoints.load(path, r"\.1\.")) == ["layers.1.weight"]
    assert tree["layers.0.weight"].shape == (64, 128)
    bias = tree["bias"]
    assert isinstance(bias, np.ndarray)
    assert not bias.flags.writeable  # it maps the file


def test_a_scaled_array_keeps_the_stored_bytes_and_multiplies(path):
    tree = checkpoints.load(path)
    w = tree["layers.0.weight"]
    assert isinstance(w, sw.ScaledArray)
    stored = sum(t.nbytes for t in tree.weights["layers.0.weight"].parts.values())
    assert w.nbytes == stored
    x = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)
    want = x @ tree.value("layers.0.weight").T
    got = sw.scaled.matmul(sw.ScaledArray(jnp.asarray(x), 1.0), w.T)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)


def test_a_tree_is_saved_and_read_again_to_the_bit(path, tmp_path):
    tree = checkpoints.load(path)
    out = tmp_path / "again.safetensors"
    save_safetensors(out, tree)
    again = checkpoints.load(out)
    assert set(again) == set(tree)
    for name in tree:
        a, b = (jax.tree.leaves(t[name]) for t in (tree, again))
        for left, right in zip(a, b, strict=True):
            assert left.dtype == right.dtype
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
