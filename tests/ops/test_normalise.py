"""``rms_norm`` and ``layer_norm``, against float64, at the extremes, and their gradients."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs.normalise import BOUND, torture

from cases import nightly
from pages import DOCS
from scalewise.formats import format as format_
from scalewise.ops import layer_norm, rms_norm

RNG = np.random.default_rng(0)


def oracle(x, eps, centred):
    if centred:
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize(("name", "n"), [("fp16", 100), *nightly([("e4m3", 20)])])
@pytest.mark.parametrize("f", [layer_norm, *nightly([rms_norm])])
def test_within_ulps_of_the_exact_quotient(name, n, f):
    fmt = format_(name)
    x = fmt.decode(fmt.encode(RNG.standard_normal((20, n)) * 3))
    got = np.asarray(f(jnp.asarray(x, jnp.float32), eps=1e-3, arithmetic=fmt), np.float64)
    want = oracle(x, 1e-3, f is layer_norm)
    ulp = np.exp2(np.maximum(np.floor(np.log2(np.abs(want) + 1e-99)), fmt.min_exponent)) * float(
        fmt.eps
    )
    # a difference from the mean errs by an ulp of the largest: absolute, not relative
    slack = 2 * float(fmt.eps) if f is layer_norm else 0
    assert (np.abs(got - want) <= 4 * ulp + slack).all()


def test_where_the_square_is_beyond_the_format():
    x = jnp.asarray([[60000.0, -60000.0, 30000.0, 100.0], [2.0**-24, 2.0**-23, 0, 0]], jnp.float16)
    for f in (rms_norm, layer_norm):
        want = oracle(np.asarray(x, np.float64), 0.0, f is layer_norm)
        got = np.asarray(f(x, eps=0.0), np.float64)
        np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=2.0**-10)


@pytest.mark.slow
def test_a_mean_far_beyond_the_deviation():
    """One pass has a variance of 0 here."""
    x = (RNG.standard_normal((4, 256)) + 100).astype(np.float16)
    got = np.asarray(layer_norm(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, oracle(x.astype(np.float64), 1e-5, True), rtol=0.01, atol=0.002)


@pytest.mark.slow
def test_zeros_nans_and_nothing():
    zeros = jnp.zeros((2, 4), jnp.float16)
    for f in (rms_norm, layer_norm):
        assert f(zeros, eps=0.0).tolist() == [[0] * 4] * 2
        assert (
            jax.grad(lambda v, f=f: f(v, eps=0.0).astype(jnp.float32).sum())(zeros).tolist()
            == [[0] * 4] * 2
        )
        broken = f(zeros.at[0, 1].set(jnp.nan))
        assert jnp.isnan(broken[0]).all()
        assert broken[1].tolist() == [0] * 4
        assert jnp.isnan(f(zeros.at[0, 1].set(jnp.inf))[0]).all()
        assert f(jnp.zeros((2, 0), jnp.float16)).shape == (2, 0)
    got = layer_norm(jnp.full((2, 4), 7.0, jnp.float16), jnp.ones(4), jnp.arange(4.0))
    assert got.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("f", [layer_norm, *nightly([rms_norm])])
def test_gradients_are_the_plain_ones(f):
    x = jnp.asarray(RNG.standard_normal((3, 8)), jnp.float32)
    w, t = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in (8, (3, 8)))

    def plain(x, w):
        d = x - jnp.mean(x, axis=-1, keepdims=True) if f is layer_norm else x
        y = d / jnp.sqrt(jnp.mean(d * d, axis=-1, keepdims=True) + 0.1)
        return jnp.sum(t * (y * w[None]))

    def ours(x, w):
        return jnp.sum(t * f(x, w, eps=0.1, arithmetic="fp32"))

    for got, want in zip(
        jax.jit(jax.grad(ours, (0, 1)))(x, w), jax.grad(plain, (0, 1))(x, w), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_axis_and_vmap():
    x = jnp.asarray(RNG.standard_normal((6, 4)), jnp.float16)
    along = rms_norm(x, axis=0)
    np.testing.assert_array_equal(along, rms_norm(x.T).T)
    np.testing.assert_array_equal(jax.vmap(rms_norm)(x), rms_norm(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 1}, "axis is 1; expected different axes of 1 dimensions"),
        ({"weight": jnp.ones(2)}, r"shape \(2,\); expected \(3,\)"),
        ({"arithmetic": "e8m0"}, "e8m0 has no sign"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(jnp.ones(3), **arguments)
    with pytest.raises(TypeError, match="layer_norm takes real"):
        layer_norm(jnp.arange(3))


@pytest.mark.parametrize(("name", "n"), nightly([("fp16", 3), ("e4m3", 256), ("bf16", 16)]))
def test_values_and_gradients_are_within_the_bound_on_the_torture_set(name, n):
    with (DOCS / "normalise.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    for record in torture(format_(name), n):
        assert max(float(record["value"]), float(record["gradient"])) <= BOUND, record
        assert record in written
