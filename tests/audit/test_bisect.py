"""Bisection finds exactly the items that are needed."""

import itertools
import math

import pytest

from scalewise.auditing._bisect import fewest


@pytest.mark.parametrize("needed", [(), (0,), (5,), (2, 9), (0, 1, 2), (3, 8, 12)])
def test_the_needed_items_are_left_after_few_calls(needed):
    calls = itertools.count(1)
    count = 0

    def holds(items):
        nonlocal count
        count = next(calls)
        return set(needed) <= set(items)

    assert fewest(range(13), holds) == list(needed)
    assert count <= 2 * max(len(needed), 1) * math.ceil(math.log2(13)) + 2


def test_a_call_that_is_no_longer_affordable_keeps_what_is_left():
    assert fewest("abcd", lambda items: False) == list("abcd")
