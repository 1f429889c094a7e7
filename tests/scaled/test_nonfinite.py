"""NaN and infinities: they stay what they are, and the finite elements beside them keep theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.scaled import amax
from scalewise.scaled._amax import LARGE, SMALL

SPECIAL = np.float32([np.inf, -np.inf, np.nan])
# elements of several magnitudes, the special ones among them at every third place
FINITE = np.float32(np.outer([1.5, 0.25, -3e-3, 40.0], np.linspace(0.5, 1, 9)))
PLACES = np.arange(FINITE.size).reshape(FINITE.shape) % 3 == 1
MIXED = np.where(PLACES, np.resize(SPECIAL, FINITE.shape), FINITE)
SCALINGS = [
    sw.Amax(), sw.Amax(power_of_two=False), sw.LeastSquares(), sw.scaled.Mx(),
    sw.LeastSquares(16, power_of_two=False), sw.Delayed(),
]  # fmt: skip


def expected(x, fmt):
    """Which non-finite elements a format keeps as what."""
    fmt = sw.format(fmt)
    return np.where(np.isnan(x) | (fmt.infinity_code is None), np.nan, x)


@pytest.mark.parametrize(
    ("scaling", "fmt", "axis"),
    [
        (sw.Amax(), "e4m3fn", None), (sw.Amax(), "fp16", 0), (sw.LeastSquares(), "fp16", 0),
        *nightly((s, "fp16", None) for s in SCALINGS),
    ],
)  # fmt: skip
def test_scales_come_from_the_finite_elements(scaling, fmt, axis):
    x = MIXED.copy()
    x[-1] = np.nan  # a channel without a finite element
    finite = np.isfinite(x)
    got = sw.quantize(x, fmt, scaling=scaling, axis=axis)
    want = sw.quantize(np.where(finite, x, 0), fmt, scaling=scaling, axis=axis)
    np.testing.assert_array_equal(got.scale, want.scale)
    value = np.asarray(got.value())
    np.testing.assert_array_equal(value[finite], np.asarray(want.value())[finite])
    np.testing.assert_array_equal(value[~finite], expected(x[~finite], fmt))


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "nvfp4", *nightly(["mxfp8_e4m3", "mxfp4"])])
def test_blocks(name):
    fmt = sw.formats.block_format(name)
    clean = np.array(normal(0, (3, 64))) * np.float32(1e-3)
    clean[1, 5] = 0
    quantized = jax.jit(lambda x: sw.quantize(x, name).value())
    want = np.asarray(quantized(clean * np.float32([[1], [1], [0]])))
    for special in SPECIAL:
        x = clean.copy()
        x[1, 5] = special
        x[2] = special  # blocks without a finite element
        got = np.asarray(quantized(x))
        broken = np.zeros(x.shape, bool)
        broken[2] = broken[1, 5] = True
        if fmt.element.nan_code is None:
            broken[1, : fmt.size] = True
            assert np.isnan(got[broken]).all()
        else:
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


def test_directed_roundings():
    got = sw.quantize(MIXED, "fp16", rounding="away_from_zero").value()
    np.testing.assert_array_equal(got[PLACES], MIXED[PLACES])
    assert np.isfinite(got[~PLACES]).all()


@pytest.mark.parametrize(
    ("rows", "axes"),
    [(2, (1,)), (SMALL // 64, (0, 1)), *((LARGE // 64 + 5, a) for a in ((0, 1), (1,), (0,)))],
)
def test_the_largest_finite_magnitude(rows, axes):
    x = np.asarray(normal(0, (rows, 64)))
    largest = jax.jit(lambda x: amax(x, axes, True))
    np.testing.assert_array_equal(largest(x), np.abs(x).max(axes, keepdims=True))
    for special in SPECIAL:
        y = x.copy()
        y[0] = y[:, 3] = y[rows // 2, 7] = y[-1, -1] = special
        want = np.where(np.isfinite(y), np.abs(y), 0).max(axes, keepdims=True)
        np.testing.assert_array_equal(largest(y), want)
    assert np.asarray(amax(jnp.zeros((0, 3)), (0,), True)).tolist() == [[0, 0, 0]]
