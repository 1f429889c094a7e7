"""A ScaledArray means the same under vmap, lax.map, scan, stack, in a tree, and indexed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.rounding import EncodedArray, encode

# as many arrays as rows: a scale that is aligned with the wrong axis broadcasts
X = normal(0, (4, 4, 40)) * jnp.exp2(jnp.arange(16.0)).reshape(4, 4, 1)


def by_hand(x, scale, block=None, **given):
    return sw.ScaledArray((x / jnp.max(jnp.abs(x))).astype(jnp.float16), scale, block, **given)


def every_kind(x):
    """Returns ScaledArrays of each kind of scale and of storage, made by each constructor."""
    per_row = jnp.max(jnp.abs(x), axis=1)
    rows = jnp.exp2(jnp.arange(4.0))[:, None] * per_row.max()
    return {
        "tensor": sw.quantize(x, "e4m3fn"),
        "rows": sw.quantize(x, "e5m2", axis=0),
        "columns": sw.quantize(x, "e4m3fn", axis=1),
        "elements": sw.quantize(x, "e4m3fn", axis=(0, 1)),
        "codes": sw.quantize(x, "e2m3fn", axis=0),
        "tf32": sw.quantize(x, "tf32"),
        "mxfp8": sw.quantize(x, "mxfp8_e4m3"),
        "mxfp4 by columns": sw.quantize(x, "mxfp4", axis=0),
        "nvfp4": sw.quantize(x, "nvfp4"),
        "again": sw.quantize(by_hand(x, per_row.sum()), "e4m3fn"),
        "bfloat16": sw.quantize(x.astype(jnp.bfloat16), "e4m3fn", axis=0),
        "none": sw.ScaledArray(x),
        "from the right": by_hand(x, jnp.arange(1.0, 41) * per_row[0]),
        "rows by hand": by_hand(x, rows),
        "stored scale": by_hand(x, encode(jnp.exp2(jnp.arange(4.0))[:, None], "ue5m3")),
        "vector": sw.quantize(x[0], "mxfp8_e4m3"),
        "number": sw.scaled.as_scaled(x[0, 0]),
        "rescaled": sw.scaled.dynamic_rescale(by_hand(x, per_row[1])),
        "made inside": jax.vmap(lambda r: sw.quantize(r, "e4m3fn"))(x),
    }


@pytest.fixture(scope="module")
def batches():
    """Returns each kind for each of the four arrays, by a loop, and together in three ways."""
    one = jax.jit(every_kind)
    loop = [one(x) for x in X]
    return loop, {
        "vmap": jax.jit(jax.vmap(every_kind))(X),
        "scan": jax.jit(lambda x: lax.scan(lambda c, r: (c, every_kind(r)), 0, x)[1])(X),
        "stack": jax.tree.map(lambda *xs: jnp.stack(xs), *loop),
    }


def check(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got.value(), want, rtol=2e-6)


@jax.jit
def values(tree):
    return {kind: a.value() for kind, a in tree.items()}


@pytest.mark.parametrize("way", ["vmap", "scan", "stack"])
def test_arrays_made_together_are_those_that_a_loop_makes(batches, way):
    loop, together = batches[0], batches[1][way]
    rows = list(map(values, loop))
    for kind, got in values(together).items():
        a, want = together[kind], np.stack([row[kind] for row in rows])
        assert (a.shape, a.dtype) == (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=2e-6, err_msg=kind)
        assert a.scale is None or a.scale.ndim in (0, a.ndim), kind
        again = jax.tree.map(lambda x: x, a)
        assert jax.tree.structure(again) == jax.tree.structure(loop[0][kind]) or kind == "none"
    same = {kind: dataclasses.replace(a, data=a.data) for kind, a in together.items()}
    jax.tree.map(np.testing.assert_array_equal, values(same), values(together))
    for i, row in enumerate(rows):  # and taken apart again
        part = jax.tree.map(lambda x, i=i: np.asarray(x)[i], together)
        for kind, got in values(part).items():
            np.testing.assert_allclose(got, row[kind], rtol=2e-6, err_msg=kind)


def test_a_loop_over_arrays_made_together_gets_each_of_them(batches):
    loop, together = batches[0], batches[1]["vmap"]
    want = {k: jnp.stack([one[k].value() for one in loop]) for k in together}
    for run in (jax.vmap(values), lambda t: lax.map(values, t)):
        for kind, got in jax.jit(run)(together).items():
            np.testing.assert_allclose(got, want[kind], rtol=2e-6)


def every_result(a):
    """Returns each operation on a ScaledArray of two axes: those of its own class and of scaled."""
    small = sw.scaled.mul(a, 2.0**-20)
    unary = {
        name: getattr(sw.scaled, name)(small)
        for name in ("abs", "cos", "erf", "exp", "gelu", "log_softmax", "neg", "relu", "sigmoid",
                     "sin", "softmax", "square", "tanh")
    }  # fmt: skip
    binary = {
        name: getattr(sw.scaled, name)(small, sw.scaled.add(sw.scaled.abs(small), 1.0))
        for name in ("add", "sub", "mul", "div", "maximum", "minimum")
    }
    along = {
        f"{name} {axis}": getattr(sw.scaled, name)(small, axis=axis)
        for name in ("sum", "mean", "max", "min") for axis in (None, 0, -1)
    }  # fmt: skip
    others = {
        "cumsum": sw.scaled.cumsum(small, -1), "clip": sw.scaled.clip(small, -0.5, 0.5),
        "sqrt": sw.scaled.sqrt(sw.scaled.abs(small)), "power": sw.scaled.integer_pow(small, 3),
        "matmul": sw.scaled.matmul(small, jnp.ones((small.shape[-1], 2))),
        "where": sw.scaled.where(small.value() > 0, small, sw.scaled.neg(small)),
        "concatenated": sw.scaled.concatenate([small, a]),
        "beside": sw.scaled.concatenate([a, small], -1), "rebalanced": sw.rebalance(small, 4.0),
        "cast": sw.scaled.cast_data(small, jnp.float32), "transposed": a.T, "operator": a * 3.0 - a,
        "row": a[1], "rows": a[1:3], "columns": a[:, ::2], "reversed": a[::-1],
    }  # fmt: skip
    found = unary | binary | along | others
    return {k: y.value() if isinstance(y, sw.ScaledArray) else y for k, y in found.items()}


KINDS = [
    "tensor", "rows", "columns", "elements", "codes", "mxfp8", "mxfp4 by columns", "nvfp4", "none",
    "bfloat16", "from the right", "rows by hand", "stored scale",
]  # fmt: skip
LOOPS = [("map", kind) for kind in ("columns", "mxfp8")]


@pytest.mark.parametrize(
    ("way", "kind"), nightly([*(("vmap", k) for k in KINDS), *LOOPS], but=[("vmap", "mxfp8")])
)
def test_operations_on_arrays_together_are_those_on_each(batches, way, kind):
    together, one = batches[1]["vmap"][kind], jax.jit(every_result)
    run = jax.vmap(one) if way == "vmap" else lambda t: lax.map(one, t)
    want = [one(row[kind]) for row in batches[0]]
    for name, got in jax.jit(run)(together).items():
        each = np.stack([w[name] for w in want])
        np.testing.assert_allclose(got, each, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("axis", [1, *nightly([-1])])
def test_arrays_are_made_together_and_taken_apart_along_any_axis(batches, axis):
    with_axes = lambda x: {k: a for k, a in every_kind(x).items() if a.ndim}  # noqa: E731
    made = jax.jit(jax.vmap(with_axes, out_axes=axis))(X)
    packed = lambda a: isinstance(a.data, EncodedArray) and a.data.format.bits < 8  # noqa: E731
    fits = {k: a for k, a in made.items() if not (axis == -1 and packed(a))}
    want = {k: np.stack([one[k].value() for one in batches[0]], axis) for k in fits}
    for kind, a in fits.items():
        np.testing.assert_allclose(a.value(), want[kind], rtol=2e-6, err_msg=kind)
    apart = jax.jit(jax.vmap(lambda t: {k: a.value() for k, a in t.items()}, in_axes=axis))(fits)
    for kind, got in apart.items():
        np.testing.assert_allclose(got, np.moveaxis(want[kind], axis, 0), rtol=2e-6, err_msg=kind)


@pytest.mark.parametrize("fmt", ["nvfp4", *nightly(["e2m1fn", "mxfp6_e2m3"])])
def test_packed_codes_get_axes_in_front_of_them_or_refuse_to_be_read(fmt):
    rng = np.random.default_rng(len(fmt))
    quantize = jax.jit(lambda x: sw.quantize(x, fmt))
    for shape in ((4,), (2, 8)):
        # as many arrays as an axis or the bytes are long: an axis behind looks like one in front
        count = max(2, int(rng.choice([*shape, shape[-1] * 3 // 4, shape[-1] // 2])))
        x = rng.normal(size=(count, *shape)).astype(np.float32)
        rows = [quantize(r).value() for r in x]
        for axis in range(-len(shape) - 1, 0):
            a = jax.jit(jax.vmap(quantize, out_axes=axis))(x)
            if axis == -1:
                with pytest.raises(ValueError, match="out_axes have to be in front"):
                    a.value()
            else:
                np.testing.assert_array_equal(a.value(), np.stack(rows, axis))


@pytest.mark.parametrize("axis", [0, *nightly([-1])])
def test_shared_scales_are_given_to_each_index_of_an_axis(batches, axis):
    @jax.jit
    def taken_apart(kinds):
        spread = {kind: a.with_scales_along(axis) for kind, a in kinds.items()}
        rows = {k: jax.vmap(lambda r: r.value(), axis, axis)(a) for k, a in spread.items()}
        turns = range(4) if axis == 0 else ()
        by_index = {k: [jnp.asarray(a[i]) for i in turns] for k, a in kinds.items()}
        return spread, rows, by_index

    def packed(a):
        return isinstance(a.data, EncodedArray) and a.data.format.bits < 8

    kinds = {k: a for k, a in batches[0][0].items() if a.ndim and not (axis and packed(a))}
    wanted = values(kinds)
    spread, rows, by_index = taken_apart(kinds)
    for kind, want in wanted.items():
        check(spread[kind], want)
        np.testing.assert_array_equal(rows[kind], want, err_msg=kind)
        for i, row in enumerate(by_index[kind]):
            np.testing.assert_array_equal(row, want[i], err_msg=kind)
    tensor = batches[0][0]["tensor"]
    by_turn = lax.map(lambda i: tensor[i].value(), jnp.arange(4))
    np.testing.assert_array_equal(by_turn, tensor.value())
    for kind in ("tensor", "columns", "nvfp4"):
        with pytest.raises(ValueError, match="vmap got inconsistent sizes for array axes"):
            jax.vmap(lambda r: r.value())(batches[0][0][kind])
        with pytest.raises(ValueError, match="scan got values with different leading axis sizes"):
            jax.lax.map(lambda r: r.value(), batches[0][0][kind])


def test_leaves_that_dont_fit_are_refused_when_they_are_read():
    a = sw.quantize(X[0], "mxfp8_e4m3")
    cut = jax.tree.map(lambda x: x[:, :1], a)  # of 40 numbers and 2 scales
    bad = jax.tree.map(lambda x: x[:, 8:], a)  # of 32 numbers and no scale
    assert cut.value().shape == (4, 1)
    with pytest.raises(ValueError, match=r"block is \(-2, 2\), but data have the shape \(4,\)"):
        jax.tree.map(
            lambda x: x[0], sw.ScaledArray(jnp.ones((4, 4)), jnp.ones((2, 4)), (0, 2))
        ).value()
    with pytest.raises(ValueError, match=r"scale of shape \(4, 0\) .* over \(4, 1\), the blocks"):
        bad.value()


def test_one_scale_has_no_axes_in_a_tree_and_out_of_it():
    a = sw.quantize(X[0], "e4m3fn")
    assert jax.tree.leaves(a)[1].shape == (1, 1)
    assert jax.tree.map(lambda x: x, a).scale.shape == a.scale.shape == ()


def test_other_leaves_are_passed_through(batches):
    for a in batches[0][0].values():
        leaves, tree = jax.tree.flatten(a)
        for leaf in (None, object(), PartitionSpec("x"), 0, "text"):
            other = tree.unflatten([leaf] * len(leaves))
            assert jax.tree.leaves(other) == [leaf] * len(leaves) * (leaf is not None)
        shapes = jax.eval_shape(lambda a: a, a)
        assert jax.tree.structure(shapes) == tree
        assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in leaves]
        assert (shapes.shape, shapes.dtype) == (a.shape, a.dtype)


def random_index(random, shape):
    """Returns an index of integers, slices, new axes, an ellipsis and arrays."""
    entries = []
    for n in shape[: random.integers(1, len(shape) + 1)]:
        start, stop = sorted(random.integers(-n, n + 1, 2))
        entries.append([
            int(random.integers(-n, n)), slice(int(start), int(stop)), slice(None),
            slice(None, None, int(random.choice([-1, 2]))), random.integers(-n, n, 3),
            slice(0, 32), jnp.int32(random.integers(-n, n)),
        ][random.integers(7)])  # fmt: skip
    if random.integers(3) == 0:
        entries.insert(random.integers(len(entries) + 1), None)
    if random.integers(3) == 0:
        entries.append(Ellipsis)
    return tuple(entries)


@pytest.mark.parametrize("seed", nightly(range(4), but=[1]))
def test_an_indexed_array_has_the_indexed_value(batches, seed):
    random = np.random.default_rng(seed)
    kinds = batches[1]["stack"] if seed % 2 else batches[0][0]
    for kind, a in kinds.items():
        if not a.ndim:
            continue
        index = random_index(random, a.shape)
        plain = [np.asarray(e) if isinstance(e, jax.Array) else e for e in index]
        got, want = a[index], np.asarray(a.value())[tuple(plain)]
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=f"{kind}: {index}")
        assert got.shape == want.shape


def test_indexed_arrays_stay_as_they_are_stored(batches):
    i = jnp.array([3, 0])
    for kind, a in batches[0][0].items():
        if a.ndim < 2:
            continue
        blocked = a.block is not None and a.block[0] == -2  # along the indexed axis
        for index in (i, slice(1, 3), 0, None, (slice(None), slice(None))):
            kept = isinstance(a[index], sw.ScaledArray)
            assert kept or (blocked and index is i) or (blocked and index == slice(1, 3)), (
                kind,
                index,
            )
    a = batches[0][0]["mxfp8"]
    assert isinstance(a[:, 32:], sw.ScaledArray)
    assert isinstance(a[:, 8:], jax.Array)  # cuts a block
    assert a[:, 35].block is None
    assert isinstance(a[:, 35], sw.ScaledArray)


def test_an_exported_function_takes_an_array_that_stands_for_another_dtype():
    a = sw.quantize(X[0].astype(jnp.bfloat16), "e4m3fn", axis=0)
    f = jax.jit(lambda a: (a, a.value()))
    again = export.deserialize(export.export(f)(a).serialize())
    same, value = again.call(a)
    assert same.dtype == value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value, a.value())


# -- the dtype that it stands for ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("fmt", ["e4m3fn", "nvfp4", "mxfp8_e5m2"])
def test_a_quantized_array_stands_for_one_of_its_own_dtype(dtype, fmt):
    x = X[0].astype(dtype)
    a = sw.quantize(x, fmt)
    assert a.dtype == a.value().dtype == np.asarray(a).dtype == dtype
    wide = sw.quantize(x.astype(jnp.float32), fmt)
    np.testing.assert_array_equal(a.astype(jnp.float32), wide.value())
    np.testing.assert_array_equal(a.value(), wide.value().astype(dtype))
    assert sw.quantize(a, "e5m2").dtype == dtype
    assert a[1].dtype == a.T.dtype == sw.dequantize(a).dtype == dtype


def test_what_is_rounded_up_beyond_float16_stays_finite():
    a = sw.quantize(jnp.full(3, 65504, jnp.float16), "e4m3fn")
    assert a.astype(jnp.float32).tolist() == [65536.0] * 3
    assert a.value().tolist() == [65504.0] * 3


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(TypeError, match=r"value_dtype is .*int32.*; expected a float dtype"):
        sw.ScaledArray(jnp.ones(3), 2.0, value_dtype=jnp.int32)


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("part", [slice(0), slice(64, None), slice(8, 8)])
def test_an_empty_slice_of_blocks_is_empty(columns, part):
    x = sw.quantize(jnp.ones((2, columns)), "mxfp8_e4m3")
    assert x[:, part].shape == (2, 0)
