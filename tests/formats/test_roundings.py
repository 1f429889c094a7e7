"""The table of rounding modes: its fields agree with each other, and lookups read it."""

import dataclasses
import itertools

import numpy as np
import pytest
from proofs import oracle

from scalewise.formats import FP16, ROUNDINGS, Rest, Rounding, rounding_mode


@pytest.mark.parametrize("mode", ROUNDINGS.values(), ids=lambda mode: mode.name)
def test_addend_rounds_up_where_goes_up_is_true(mode):
    for d, negative, lower in itertools.product(range(5), (False, True), (6, 7)):
        rest, noise = (a.ravel().astype(np.uint32) for a in np.indices((1 << d, 1 << d)))
        dropped, size = np.uint32((1 << d) - 1), np.full(rest.shape, 1 << d)
        odd, mask = np.uint32(lower % 2), np.uint32(0xFFFFFFFF if negative else 0)
        at = Rest(rest > 0, 2 * rest == size, 2 * rest > size, rest + noise >= size)
        up = mode.goes_up(at, np.full(rest.shape, lower % 2 == 1), np.full(rest.shape, negative))
        with np.errstate(over="ignore"):
            addend = mode.addend(dropped, odd, mask, noise)
        rounded = ((np.uint32(lower << d) | rest) + addend) >> np.uint32(d)
        np.testing.assert_array_equal(rounded, lower + up)
        same_for_all_noise = len(set(zip(rest.tolist(), up.tolist(), strict=True))) == 1 << d
        assert same_for_all_noise or mode.random


@pytest.mark.parametrize("mode", ROUNDINGS.values(), ids=lambda mode: mode.name)
def test_other_fields_agree_with_the_predicate(mode):
    tiny = Rest(*(np.array([v]) for v in (True, False, False, True)))
    even, signs = np.array([False]), (np.array([False]), np.array([True]))
    assert mode.underflows_to_zero == (not any(mode.goes_up(tiny, even, s) for s in signs))
    below_half = mode.goes_up(tiny, ~even, ~even) | mode.goes_up(tiny, even, even)
    assert mode.max_error == (0.5 if mode.name.startswith("nearest") else 1.0)
    assert mode.max_error == 1.0 or not below_half
    big = np.array([1e300, -1e300])
    bits = np.zeros(2, np.uint32) if mode.random else None
    infinite = np.isinf(FP16.decode(FP16.encode(big, rounding=mode.name, bits=bits)))
    assert tuple(infinite) == mode.overflows


def test_every_field_of_a_mode_is_required():
    fields = {f.name: getattr(ROUNDINGS["to_odd"], f.name) for f in dataclasses.fields(Rounding)}
    for left_out in fields:
        with pytest.raises(TypeError, match=left_out):
            Rounding(**{k: v for k, v in fields.items() if k != left_out})


def test_the_oracle_knows_every_mode_that_draws_nothing():
    assert set(oracle.DETERMINISTIC) == {n for n, mode in ROUNDINGS.items() if not mode.random}
    for name, negative in itertools.product(oracle.DETERMINISTIC, (False, True)):
        assert len(oracle.Case(FP16, name).expected(negative << 31, 4)) == 4


def test_rounding_mode_returns_the_mode_of_a_name():
    for name, mode in ROUNDINGS.items():
        assert rounding_mode(name) is mode is rounding_mode(mode) is rounding_mode(name, FP16)
    with pytest.raises(ValueError, match="rounding is 'nearest'; expected one of 'nearest_even', "):
        rounding_mode("nearest", FP16)
