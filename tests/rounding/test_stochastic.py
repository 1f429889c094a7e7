"""Stochastic rounding: the number of draws that round up, compared with exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs.probabilities import FORMATS, check, inputs, threshold

from arrays import normal
from cases import nightly
from scalewise import quantize, round_to
from scalewise.formats import DLFLOAT16, E4M3FN, FP16, Format

GAPPED = Format("gapped", 8, 2, subnormals=False)  # its smallest number is subnormal in float32


@pytest.mark.parametrize("fmt", [FP16, E4M3FN, DLFLOAT16, GAPPED], ids=lambda f: f.name)
def test_number_of_draws_that_round_up_is_exact_in_every_binade(fmt):
    """Checks a sample of the formats that `make prove` compares."""
    compared, wrong = check(fmt, np.float32, per_binade=2)
    assert not wrong
    assert compared > 300
    assert {"e4m3fn", "dlfloat16", "e8m0", "ue5m11"} <= set(FORMATS)


def test_float64_uses_64_random_bits():
    with jax.enable_x64(True):
        compared, wrong = check(E4M3FN, np.float64, per_binade=1)
    assert not wrong
    assert compared > 300


def test_number_of_draws_matches_a_loop_over_all_draws():
    """Tries all draws that differ in the 16 bits that rounding float32 to BF16 drops."""
    draws = jnp.arange(1 << 16, dtype=jnp.uint32)
    for x in np.float32([1.2345, -3e-39, 2.0**-130 * 1.7]):
        got = round_to(jnp.full(draws.shape, x), "bf16", rounding="stochastic", bits=draws)
        size = np.abs(np.asarray(got, np.float64))
        assert len(np.unique(size)) == 2
        rest = Fraction(abs(float(x))) - Fraction(size.min())
        gap = Fraction(size.max()) - Fraction(size.min())
        assert (size == size.max()).sum() == rest / gap * (1 << 16)


@pytest.mark.parametrize("name", ["nvfp4", *nightly(["mxfp4"])])
def test_block_formats_keep_the_mean(name):
    x = normal(1, (64, 64)) * 0.07
    got = quantize(x, name, rounding="stochastic", key=jax.random.key(2)).value()
    assert float(jnp.abs(got).mean()) == pytest.approx(float(jnp.abs(x).mean()), rel=0.05)
    assert float(got.mean()) == pytest.approx(float(x.mean()), abs=2e-3)


def test_key_rounds_like_its_random_bits():
    x, key = jnp.asarray(inputs(FP16, np.float32, 2)), jax.random.key(3)
    bits = jax.random.bits(key, x.shape, jnp.uint32)
    by_key = round_to(x, FP16, rounding="stochastic", key=key)
    np.testing.assert_array_equal(by_key, round_to(x, FP16, rounding="stochastic", bits=bits))


@pytest.mark.parametrize(("word", "width", "kept"), [(np.uint32, 32, 32), (np.uint64, 64, 53)])
def test_encode_rounds_up_for_the_highest_draws(word, width, kept):
    for x in [1.2345, 2.0**-20, 0.3 * 2.0**-9, 440.0]:
        _, _, count = threshold(E4M3FN, Fraction(x), kept)
        first = (1 << kept) - count
        draws = np.array([0, first - 1, first, (1 << kept) - 1], word) << word(width - kept)
        codes = E4M3FN.encode([x] * 4, rounding="stochastic", bits=draws).astype(int)
        assert (codes - codes[0]).tolist() == [0, 0, 1, 1]
