"""`checkpoints.load`: lazy trees of arrays that compute as they are stored."""

import jax
import jax.numpy as jnp
import ml_dtypes
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


def test_arrays_are_placed_on_a_mesh(path):
    mesh = jax.make_mesh((1,), ("model",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    tree = checkpoints.load(path, sharding=spec)
    for leaf in jax.tree.leaves(tree["layers.0.weight"]):
        assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    np.testing.assert_array_equal(tree["layers.0.weight"].value(), tree.value("layers.0.weight"))


@pytest.mark.parametrize("layout", ["scalewise", "orbax"])
def test_a_tree_is_saved_and_read_again_to_the_bit(path, tmp_path, layout):
    tree = checkpoints.load(path)
    out = tmp_path / ("again" if layout == "orbax" else "again.safetensors")
    checkpoints.save(out, tree, layout=layout)
    again = checkpoints.load(out)
    assert set(again) == set(tree)
    for name in tree:
        a, b = (jax.tree.leaves(t[name]) for t in (tree, again))
        for left, right in zip(a, b, strict=True):
            assert left.dtype == right.dtype
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture
def orbax(path, tmp_path):
    checkpoints.save(tmp_path / "saved", checkpoints.load(path), layout="orbax")
    return tmp_path / "saved"


def test_a_part_of_an_array_that_orbax_saved_is_placed_where_it_can_be(orbax, tmp_path):
    mesh = jax.make_mesh((1,), ("model",))
    shapes = {}

    def place(name, shape):
        shapes[name] = shape
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))

    tree, plain = checkpoints.load(orbax, sharding=place), checkpoints.load(orbax)
    for name in tree:
        for leaf in jax.tree.leaves(tree[name]):
            assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
        np.testing.assert_array_equal(tree.value(name), plain.value(name))
    assert shapes["layers.0.weight"] == (64, 128)
    assert shapes["bias"] == (64,)


def test_the_commands_take_a_folder_of_orbax(orbax, path, tmp_path):
    wide = tmp_path / "wide.safetensors"
    assert checkpoints.inspect(orbax).layout == "orbax"
    assert checkpoints.diff(path, orbax)
    report = checkpoints.check(orbax, wide)
    assert report
    assert "in 2 quantised tensors" in str(report)
    checkpoints.cast(orbax, "fp32", out=tmp_path / "out")
    assert checkpoints.diff(path, tmp_path / "out")
    other = {n: np.roll(checkpoints.load(wide).value(n), 1) for n in checkpoints.load(wide)}
    save_safetensors(tmp_path / "other.safetensors", other)
    found = checkpoints.check(orbax, tmp_path / "other.safetensors").findings
    assert {n for f in found for n in f.tensors} == {"layers.0.weight", "layers.1.weight"}


def test_a_folder_that_orbax_did_not_finish_is_refused(orbax):
    (orbax / "scalewise.json").unlink()
    with pytest.raises(checkpoints.UnreadableError, match=r"holds no \.safetensors file"):
        checkpoints.load(orbax)
    (orbax / "scalewise.json").write_text('{"records": {}, "dtypes": {"a": "float32"}}')
    with pytest.raises(checkpoints.UnreadableError, match="is damaged"):
        checkpoints.load(orbax)


def test_what_cannot_be_saved_is_an_error(path, tmp_path):
    with pytest.raises(ValueError, match="expected scalewise or orbax"):
        checkpoints.save(tmp_path / "x", checkpoints.load(path), layout="gptq")
    with pytest.raises(ValueError, match="exists"):
        checkpoints.save(tmp_path, {"a": np.ones(3, ml_dtypes.bfloat16)}, layout="orbax")
