"""next_up and ulp compared with NumPy and with the sorted list of all numbers."""

import itertools
import math

import numpy as np
import pytest

from scalewise.formats import CATALOGUE, E2M1FN, FP16, next_up, ulp

SMALL = [f for f in CATALOGUE.values() if f.bits <= 8]


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_neighbours_match_the_sorted_list_of_numbers(fmt):
    values = fmt.values()
    numbers = np.unique(values[np.isfinite(values)])  # -0 equals 0
    for low, high in itertools.pairwise(numbers):
        for x in (low, (low + high) / 2):
            assert next_up(fmt, x) == high


def test_fp16_matches_numpys_nextafter_and_spacing():
    with np.errstate(over="ignore"):
        for x in np.random.default_rng(0).integers(0, 2**16, 500, np.uint16).view(np.float16):
            if np.isfinite(x):
                assert next_up(FP16, float(x)) == float(np.nextafter(x, np.float16(np.inf)))
                assert ulp(FP16, float(x)) == abs(float(np.spacing(x))) or abs(x) == 65504


def test_neighbours_of_extreme_values():
    assert next_up(FP16, 65504) == math.inf
    assert next_up(FP16, -math.inf) == -65504
    assert math.isnan(next_up(E2M1FN, 6))
    assert math.isnan(ulp(FP16, math.inf))
    assert ulp(FP16, 65504) == 32
    assert math.isnan(next_up(FP16, math.nan))
