"""NaN and infinities: they stay what they are, and the finite elements beside them keep theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.scaled import amax
from scalewise.scaled._amax import LARGE, SMALL

SPECIAL = np.float32([np.inf, -np.inf, np.nan])
# elements of several magnitudes, the special ones among them at every third place
FINITE = np.float32(np.outer([1.5, 0.25, -3e-3, 40.0], np.linspace(0.5, 1, 9)))
PLACES = np.arange(FINITE.size).reshape(FINITE.shape) % 3 == 1
MIXED = np.where(PLACES, np.resize(SPECIAL, FINITE.shape), FINITE)
SCALINGS = [
    sw.Amax(), sw.Amax(power_of_two=False), sw.Rms(2.0), sw.Rms(2.0, power_of_two=False),
    sw.LeastSquares(), sw.LeastSquares(power_of_two=False), sw.Unit(), sw.Delayed(),
    sw.Delayed().update(MIXED), sw.scaled.Mx(), sw.Propagated(),
]  # fmt: skip


def expected(x, fmt):
    """Which non-finite elements a format keeps as what."""
    fmt = sw.format(fmt)
    return np.where(np.isnan(x) | (fmt.infinity_code is None), np.nan, x)


@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scales_come_from_the_finite_elements(scaling, fmt):
    got = sw.quantize(MIXED, fmt, scaling=scaling)
    want = sw.quantize(FINITE[~PLACES], fmt, scaling=scaling)
    np.testing.assert_allclose(got.scale, want.scale, rtol=3e-7)
    np.testing.assert_allclose(got.value()[~PLACES], want.value(), rtol=3e-7)
    np.testing.assert_array_equal(got.value()[PLACES], expected(MIXED[PLACES], fmt))


@pytest.mark.parametrize("scaling", [sw.Amax(), sw.Rms(2.0), sw.LeastSquares()], ids=repr)
def test_scales_of_channels_come_from_their_finite_elements(scaling):
    x = np.concatenate([MIXED, np.full_like(MIXED[:1], np.nan), FINITE[:1]])
    got = sw.quantize(x, "fp16", scaling=scaling, axis=0)
    for row, (value, scale) in enumerate(zip(got.value(), got.scale, strict=True)):
        kept = np.isfinite(x[row])
        want = sw.quantize(x[row, kept], "fp16", scaling=scaling)
        assert float(scale[0]) == float(want.scale)
        np.testing.assert_array_equal(np.asarray(value)[kept], want.value())
        np.testing.assert_array_equal(np.asarray(value)[~kept], x[row, ~kept])


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("special", SPECIAL)
def test_blocks(fmt, special):
    clean = np.asarray(jax.random.normal(jax.random.key(0), (3, 64))) * np.float32(1e-3)
    clean[1, 5] = 0
    x = clean.copy()
    x[1, 5] = special
    x[2] = special  # blocks without a finite element
    got, want = (np.asarray(sw.quantize(v, fmt).value()) for v in (x, clean * [[1], [1], [0]]))
    fmt = sw.formats.block_format(fmt)
    broken = np.zeros(x.shape, bool)
    broken[2] = True
    if fmt.element.nan_code is None:
        broken[1, : fmt.size] = True
        assert np.isnan(got[broken]).all()
    else:
        broken[1, 5] = True
        np.testing.assert_array_equal(got[broken], expected(x, fmt.element)[broken])
    np.testing.assert_array_equal(got[~broken], want[~broken])


@pytest.mark.parametrize("special", SPECIAL)
def test_the_scale_is_nan_where_the_format_has_none(special):
    x = np.array([[1.5, special], [1.5, 0.25]], np.float32)
    got = np.asarray(sw.quantize(x, "e2m1fn", axis=0).value())
    assert np.isnan(got[0]).all()
    assert got[1].tolist() == [1.5, 0.25]
    assert np.isnan(sw.quantize(x, "e2m1fn").value()).all()
    behind = sw.ScaledArray(jnp.asarray(x), jnp.float32(4))
    assert np.isnan(sw.quantize(behind, "e2m1fn", axis=0).value()[0]).all()
    exponent = sw.quantize(sw.ScaledArray(jnp.asarray(x), jnp.int32(300)), "e2m1fn", axis=0)
    assert np.asarray(exponent.scale).ravel().tolist() == [299, 299]


@pytest.mark.parametrize("rounding", ["toward_zero", "away_from_zero", "to_odd"])
def test_directed_roundings(rounding):
    got = sw.quantize(MIXED, "fp16", rounding=rounding).value()
    np.testing.assert_array_equal(got[PLACES], MIXED[PLACES])
    assert np.isfinite(got[~PLACES]).all()


@pytest.mark.parametrize("rows", [2, SMALL // 64, LARGE // 64 + 5])
@pytest.mark.parametrize("axes", [(0, 1), (1,), (0,)])
def test_the_largest_finite_magnitude(rows, axes):
    x = np.asarray(jax.random.normal(jax.random.key(0), (rows, 64)))
    largest = jax.jit(lambda x: amax(x, axes, True))
    np.testing.assert_array_equal(largest(x), np.abs(x).max(axes, keepdims=True))
    for special in SPECIAL:
        y = x.copy()
        y[0] = y[:, 3] = y[rows // 2, 7] = y[-1, -1] = special
        want = np.where(np.isfinite(y), np.abs(y), 0).max(axes, keepdims=True)
        np.testing.assert_array_equal(largest(y), want)
    assert np.asarray(amax(jnp.zeros((0, 3)), (0,), True)).tolist() == [[0, 0, 0]]
