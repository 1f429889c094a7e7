"""quantize to formats whose numbers all lie far from 1, and in every rounding mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise import quantize
from scalewise.formats import FP16, ROUNDINGS, Format

FORMATS = [
    Format("tiny", 4, 8, bias=68),  # its largest number is 2^-53
    Format("huge", 4, 8, bias=-68),  # its smallest is 2^61
    Format("short", 2, 8, bias=3, infinities=False, nan="none"),  # up to 2
]

NEIGHBOURS = ("toward_zero", "away_from_zero")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_quantize_keeps_the_precision_of_the_format(fmt):
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    for factor in (1.0, 2.0**40, 2.0**-40):
        got = np.asarray(quantize(jnp.asarray(x * np.float32(factor)), fmt).value()) / factor
        assert np.abs(got - x).max() <= np.abs(x).max() * 2.0**-9


@pytest.mark.parametrize("mode", ROUNDINGS.values(), ids=lambda mode: mode.name)
def test_every_rounding_mode_of_the_table(mode):
    """Numbers whose quotients by the scale are far below float32's normal range, too."""
    x = np.float32([3.3, -1.7, 0.01, 2.0**-125, -(2.0**-125), 0.0])
    key = jax.random.key(0) if mode.random else None
    a = quantize(jnp.asarray(x), FP16, rounding=mode.name, key=key)
    exact = x.astype(np.float64) / float(a.scale)
    got = np.asarray(a.data, np.float64)
    if mode.random:  # one of two neighbours; what is left of the smallest is never drawn
        down, up = (FP16.decode(FP16.encode(exact, rounding=r)) for r in NEIGHBOURS)
        assert ((got == down) | (got == up)).all()
        assert (got[3:] == 0).all()
    else:
        want = FP16.decode(FP16.encode(exact, rounding=mode.name))
        np.testing.assert_array_equal(got, want)
