"""Formats whose numbers all lie far from 1, and such with hardly an exponent."""

import jax.numpy as jnp
import numpy as np
import pytest

from scalewise import quantize
from scalewise.formats import Format

FORMATS = [
    Format("tiny", 4, 8, bias=68),  # its largest number is 2^-53
    Format("huge", 4, 8, bias=-68),  # its smallest is 2^61
    Format("short", 2, 8, bias=3, infinities=False, nan="none"),  # up to 2
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_quantize_keeps_the_precision_of_the_format(fmt):
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    for factor in (1.0, 2.0**40, 2.0**-40):
        got = np.asarray(quantize(jnp.asarray(x * np.float32(factor)), fmt).value()) / factor
        assert np.abs(got - x).max() <= np.abs(x).max() * 2.0**-9
