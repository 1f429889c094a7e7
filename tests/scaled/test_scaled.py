"""ScaledArray and quantize: exact values, ranges far beyond float32's, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from scalewise.scaled import ldexp, power_of_two
from scalewise.training import ExpandedStorage, TableStorage

NARROW = ["fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4"]


@given(
    x=st.floats(2.0**-60, 2.0**60, width=32),
    exponent=st.integers(-400, 400),
)
@settings(max_examples=200, deadline=None)
def test_ldexp_is_exact_where_the_result_is_normal(x, exponent):
    want = np.ldexp(np.float64(x), exponent)
    got = float(ldexp(jnp.float32(x), jnp.int32(exponent)))
    if want > float(jnp.finfo(jnp.float32).max):
        assert got == np.inf
    elif want >= 2.0**-126:
        assert got == want
    else:
        assert got <= 2.0**-126


def test_power_of_two():
    e = jnp.arange(-126, 128)
    np.testing.assert_array_equal(power_of_two(e), np.ldexp(np.float32(1), np.asarray(e)))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"scale": None}, [1, -1.5]),
        ({"scale": 3}, [3, -4.5]),  # numbers multiply, whichever their type
        ({"scale": jnp.float32(0.5)}, [0.5, -0.75]),
        ({"scale": 0}, [0, -0.0]),
        ({"scale": jnp.asarray(4.0, jnp.float8_e8m0fnu)}, [4, -6]),
        ({"scale": jnp.asarray([2, 4], jnp.int32)}, [2, -6]),
    ],
)
def test_value(given, want):
    a = sw.ScaledArray(jnp.array([1, -1.5], jnp.float16), **given)
    np.testing.assert_array_equal(a.value(), np.float32(want))
    np.testing.assert_array_equal(np.asarray(a), np.float32(want))
    np.testing.assert_array_equal(jnp.asarray(a), np.float32(want))
    assert (a.shape, a.ndim, a.dtype) == ((2,), 1, np.float32)


def test_value_of_blocks_the_last_not_full():
    data = jnp.ones((2, 5), jnp.float8_e4m3fn)
    got = sw.ScaledArray(data, jnp.array([[1, 2, 4], [8, 16, 32]]), block=(1, 2)).value()
    np.testing.assert_array_equal(got, [[1, 1, 2, 2, 4], [8, 8, 16, 16, 32]])


@pytest.mark.parametrize("make", [int, float, np.int32, np.float32, np.int8, np.array, jnp.int32])
def test_a_scale_is_a_number_of_any_type(make):
    def value(scale):
        return sw.ScaledArray(jnp.array([1.0, 8.0]), scale).value()

    assert value(make(3)).tolist() == [3, 24]
    assert jax.jit(value)(make(3)).tolist() == [3, 24]
    assert jax.jit(lambda: value(make(-3)))().tolist() == [-3, -24]


@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (1e300, ValueError, r"scale is 1e.300, beyond the largest float32"),
        (True, TypeError, "scale is True; expected a real number"),
        (1j, TypeError, "scale is 1j; expected a real number"),
        ("max", TypeError, "scale is 'max'; expected a real number"),
        (jnp.array([True]), TypeError, "expected a real number"),
    ],
)
def test_what_is_no_scale_is_refused(scale, error, match):
    with pytest.raises(error, match=match):
        sw.ScaledArray(jnp.ones(1), scale)


@pytest.mark.parametrize("fmt", nightly(NARROW, but=["fp16", "e4m3fn", "e5m2fnuz"]))
@pytest.mark.parametrize("k", [-100, *nightly([-20, 0, 20, 100])])
def test_quantize_rounds_once_and_never_saturates(fmt, k):
    fmt = sw.format(fmt)
    x = normal(0, (1000,)) * 2.0**k
    a = jax.jit(lambda x: sw.quantize(x, fmt))(x)
    assert a.data.dtype == fmt.dtype
    mantissa, _ = np.frexp(np.asarray(a.scale))
    assert mantissa == 0.5  # a power of two
    scaled = np.asarray(x, np.float64) / np.asarray(a.scale, np.float64)
    np.testing.assert_array_equal(
        np.asarray(a.data.astype(jnp.float32)), fmt.decode(fmt.encode(scaled))
    )
    assert np.abs(scaled).max() <= float(fmt.max)
    # the same bits whatever power of two the input carries
    b = sw.quantize(x * 2.0**-k, fmt)
    np.testing.assert_array_equal(np.asarray(a.data.astype(jnp.float32)), b.data.astype("float32"))


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1)])
def test_a_scale_for_each_channel(axis):
    x = normal(0, (3, 4)) * jnp.array([[1e-9], [1.0], [1e9]])
    a = sw.quantize(x, "e4m3fn", axis=axis)
    kept = {ax % 2 for ax in np.atleast_1d(axis)}
    assert a.scale.shape == tuple(n if i in kept else 1 for i, n in enumerate(x.shape))
    if 0 in kept:
        np.testing.assert_allclose(a.value(), x, rtol=0.07)


def test_zeros_empties_and_what_isnt_finite():
    assert sw.quantize(jnp.zeros(3), "fp16").value().tolist() == [0, 0, 0]
    assert sw.quantize(jnp.zeros((0, 3)), "e4m3fn").value().shape == (0, 3)
    a = sw.quantize(jnp.array([1.0, jnp.inf, jnp.nan]), "fp16").value()
    assert np.isinf(a[1])
    assert np.isnan(a[2])


def test_rebalance_moves_a_factor():
    a = sw.quantize(jnp.array([3.0, 5.0]), "fp16")
    b = sw.rebalance(a, 4.0)
    np.testing.assert_array_equal(b.value(), a.value())
    assert float(b.scale) == 4 * float(a.scale)


REBALANCED = [
    sw.ScaledArray(jnp.float16([3, 5]), 2.0),
    sw.ScaledArray(jnp.float16([3, 5]), -3),
    sw.ScaledArray(jnp.float16([3, 5])),
    sw.ScaledArray(jnp.float16([3, 5]), 0),
    sw.ScaledArray(jnp.ones(2), jnp.array([2, 4], jnp.float8_e8m0fnu)),
    sw.ScaledArray(jnp.ones(64, jnp.float8_e5m2), jnp.array([1, 8], jnp.float8_e8m0fnu), (0, 32)),
]


@pytest.mark.parametrize("a", REBALANCED)
@pytest.mark.parametrize("factor", [2.0**-7, *nightly([2, 0.5, np.int32(8)])])
def test_a_factor_means_the_same_for_all_kinds_of_scales(a, factor):
    for b in (sw.rebalance(a, factor), jax.jit(sw.rebalance)(a, factor)):
        np.testing.assert_array_equal(
            np.asarray(b.data, np.float64), np.asarray(a.data, np.float64) / factor
        )
        np.testing.assert_array_equal(b.value(), a.value())


@pytest.mark.parametrize("factor", [0, np.nan, np.inf, [1.0, 2.0, 3.0], "2"])
def test_factors_that_cannot_be_moved(factor):
    a = sw.ScaledArray(jnp.float16([3, 5]), 7)
    with pytest.raises((TypeError, ValueError), match="rebalance: factor"):
        sw.rebalance(a, np.asarray(factor) if isinstance(factor, list) else factor)


def test_a_traced_factor_that_cannot_be_moved_changes_no_value():
    rebalance = jax.jit(sw.rebalance)
    a = sw.ScaledArray(jnp.float32([3, 5]), 2.0)
    for factor in (0.0, np.nan, np.inf):
        np.testing.assert_array_equal(rebalance(a, factor).value(), a.value())
    np.testing.assert_allclose(rebalance(a, -3.0).data, [-1, -5 / 3])


@pytest.mark.parametrize("name", ["e2m1fn", "dlfloat16", *nightly(["e3m2fn", "ue5m3"])])
def test_formats_without_a_dtype_of_whole_bytes(name):
    x = jnp.abs(normal(0, (4, 9))) * 1e-9
    a = sw.quantize(x, name)
    fmt = sw.format(name)
    want = fmt.decode(fmt.encode(np.asarray(x, np.float64) / float(a.scale))) * float(a.scale)
    np.testing.assert_array_equal(a.value(), want.astype(np.float32))
    again = jax.jit(lambda a: a.value())(a)
    np.testing.assert_array_equal(again, a.value())


def test_operators():
    a = sw.quantize(jnp.array([[1.0, -2.0], [3.0, 4.0]]), "e4m3fn")
    plain = a.value()
    for got, want in [
        (-a, -plain), (a[0], plain[0]), (a[:, 1], plain[:, 1]), (3 * a, 3 * plain),
        (a * plain, plain * plain), (a + 1, plain + 1), (1 - a, 1 - plain), (a / 2, plain / 2),
        (a @ plain, plain @ plain), (plain @ a, plain @ plain), (a + a, plain + plain),
        (a // 2, plain // 2), (7 // a, 7 // plain), (a % 3, plain % 3), (7 % a, 7 % plain),
    ]:  # fmt: skip
        np.testing.assert_array_equal(got, want)
    assert isinstance(a[0], sw.ScaledArray)
    assert isinstance(3 * a, sw.ScaledArray)
    blocks = sw.quantize(plain, "mxfp4")
    np.testing.assert_array_equal(blocks[1], blocks.value()[1])
    np.testing.assert_array_equal(2 * blocks, 2 * blocks.value())


def test_a_scale_of_two_levels():
    inner = sw.ScaledArray(jnp.array([[1.0], [2.0]], jnp.float8_e4m3fn), jnp.float32(0.25))
    a = sw.ScaledArray(jnp.ones((2, 3)), inner, block=(1, 3))
    np.testing.assert_array_equal(a.value(), [[0.25] * 3, [0.5] * 3])
    assert len(jax.tree.leaves(a)) == 3


def test_quantizing_again_absorbs_the_scale():
    a = sw.ScaledArray(jnp.array([1.0, 300.0, 500.0]), 2.0**100)
    new = sw.quantize(a, "e4m3fn")
    assert float(new.scale) == 2.0**101  # the largest goes below 2^8, the format's last full binade
    np.testing.assert_array_equal(new.data.astype(jnp.float32), [0.5, 144, 256])
    floats = sw.ScaledArray(jnp.array([1.0, 300.0]), jnp.float32(3))
    np.testing.assert_array_equal(sw.quantize(floats, "fp16").value(), [3, 900])
    np.testing.assert_array_equal(sw.quantize(floats, "mxfp8_e5m2").value(), [3, 896])


test_invalid_arguments_are_rejected = refused(
    (lambda: sw.ScaledArray(jnp.ones((2, 3)), jnp.ones(2)),
     r"scale of shape \(2,\) doesn't broadcast over \(2, 3\)"),
    (lambda: sw.ScaledArray(jnp.ones((2, 5)), jnp.ones((2, 2)), block=(1, 2)),
     r"doesn't broadcast over \(2, 3\), the blocks of data of shape \(2, 5\)"),
    (lambda: sw.ScaledArray(jnp.ones(4), jnp.ones(2), block=(1, 2)),
     r"block is \(1, 2\); expected \(axis, size\)"),
    *(
        (lambda data=data: sw.ScaledArray(data, 2.0), TypeError, "ScaledArray: data is ")
        for data in ("a", None, 1.5, [1.0], np.array(["a"]), np.array([1j]))
    ),
    (lambda: sw.quantize(jnp.arange(3), "fp16"), TypeError, "quantize takes real .* not int32"),
    (lambda: sw.quantize(jnp.ones(3), "fp61"), "no format is called 'fp61'"),
    (lambda: sw.quantize(jnp.ones(3), "e8m0"), "e8m0 has no zero: it is for scal"),
    (lambda: sw.quantize(jnp.ones(3), "fp16", axis=1), "axis is 1, but x has"),
    (lambda: sw.Recipe(residuals="tf32"), "tf32 has no storage dtype of whole bytes"),
)  # fmt: skip


def test_a_choice_of_scale_that_is_none():
    with pytest.raises(TypeError, match="scaling is 'amax'; expected a Scaling"):
        sw.quantize(jnp.ones(3), "e4m3fn", scaling="amax")


def test_a_gradient_goes_straight_through_a_quantised_array():
    gradient = jax.grad(lambda x: jnp.sum(sw.quantize(x, "e4m3fn").value() * 2))(jnp.ones(3))
    np.testing.assert_allclose(gradient, 2, rtol=0.1)


@pytest.mark.parametrize("fmt", ["e4m3fn", "mxfp8_e4m3"])
def test_numpys_float64_is_rounded_once(fmt):
    x = np.array([1.0625 + 2.0**-40, 1.0625 - 2.0**-40, 256.0])
    assert sw.quantize(x, fmt).value().tolist() == [1.125, 1.0, 256.0]


BY_HAND = {
    "len": len,
    "iter": lambda a: jnp.stack([jnp.asarray(row) for row in a]),
    "negative": lambda a: -a,
    "abs": abs,
    "power": lambda a: a**2 + 2.0**a,
    "over": lambda a: a / 3 + 3 / (a + 9),
    "compared": lambda a: (a > 0) & (a >= 1) | (a < -1) & (a <= -2) | (a == 0.5) | (a != a),
    "reshaped": lambda a: a.reshape(8, -1),
    "transposed": lambda a: a.T,
    "widened": lambda a: a.astype(jnp.bfloat16),
    "number": lambda a: float(a[1, 1]) if a[1, 1] else 0.0,
}


@pytest.mark.parametrize(
    ("fmt", "axis"),
    nightly(
        [("e4m3fn", None), ("e4m3fn", 0), ("mxfp8_e4m3", None), ("nvfp4", None)], [("nvfp4", None)]
    ),
)
def test_used_like_an_array(fmt, axis):
    a = sw.quantize(normal(0, (4, 32)), fmt, axis=axis)
    for use, f in BY_HAND.items():
        np.testing.assert_array_equal(np.asarray(f(a)), np.asarray(f(a.value())), use)
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)


@pytest.mark.parametrize("storage", [TableStorage(), *nightly([ExpandedStorage()])])
def test_numpy_and_jax_take_every_stored_array(storage):
    x = normal(0, (5000,))
    for stored in (storage.store(x), sw.SqrtStored(sw.quantize(jnp.abs(x), "fp16"))):
        np.testing.assert_array_equal(np.asarray(stored), stored.value())
        np.testing.assert_array_equal(jnp.asarray(stored), stored.value())
        again = jax.tree.unflatten(jax.tree.structure(stored), jax.tree.leaves(stored))
        np.testing.assert_array_equal(again.value(), stored.value())
