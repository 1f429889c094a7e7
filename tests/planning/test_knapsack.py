"""The knapsack against all choices, one by one."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise.planning._predict import front

OPTION = st.tuples(st.floats(0, 10), st.integers(0, 8))
ITEMS = st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=5)


def separate(items):
    errors = [np.array([e for e, _ in options]) for options in items]
    return errors, [np.array([float(c) for _, c in options]) for options in items]


def every_choice(items):
    for choice in itertools.product(*(range(len(options)) for options in items)):
        chosen = [options[i] for options, i in zip(items, choice, strict=True)]
        yield sum(c for _, c in chosen), sum(e for e, _ in chosen)


@settings(deadline=None)
@given(ITEMS)
def test_the_front_has_the_least_error_for_each_budget(items):
    found = front(*separate(items))
    assert found.exact
    everything = list(every_choice(items))
    for limit in {cost for cost, _ in everything}:
        best = min(error for cost, error in everything if cost <= limit)
        np.testing.assert_allclose(found.errors[found.within(limit)], best, rtol=1e-12, atol=1e-12)
    assert found.within(min(cost for cost, _ in everything) - 1) == -1


@settings(deadline=None)
@given(ITEMS, st.floats(0, 30))
def test_it_has_the_least_cost_for_each_error(items, limit):
    found = front(*separate(items))
    costs = [cost for cost, error in every_choice(items) if error <= limit]
    at = found.cheapest(limit)
    sums = np.array([error for _, error in every_choice(items)])
    if np.min(np.abs(sums - limit)) > 1e-9:  # the order of a sum decides nothing
        assert (at == -1) == (not costs)
        assert at == -1 or found.costs[at] == min(costs)


@settings(deadline=None)
@given(ITEMS)
def test_a_choice_has_the_cost_and_the_error_that_are_given(items):
    errors, costs = separate(items)
    found = front(errors, costs)
    for cost, error, choice in zip(found.costs, found.errors, found.choices, strict=True):
        assert cost == sum(c[i] for c, i in zip(costs, choice, strict=True))
        np.testing.assert_allclose(error, sum(e[i] for e, i in zip(errors, choice, strict=True)))


def test_a_thinned_front_says_so_and_is_nearly_as_good():
    random = np.random.default_rng(0)
    errors = [np.sort(random.random(4))[::-1] for _ in range(12)]
    costs = [np.sort(random.random(4)) for _ in range(12)]
    whole, thin = front(errors, costs, 1 << 20), front(errors, costs, 60)
    assert whole.exact
    assert not thin.exact
    assert len(thin.costs) <= 61 < len(whole.costs)
    for limit in np.linspace(whole.costs[0], whole.costs[-1], 9):
        best, found = whole.errors[whole.within(limit)], thin.errors[thin.within(limit)]
        assert best <= found <= 1.1 * best + 1e-3
        assert thin.costs[thin.within(limit)] <= limit + 1e-9
