"""The comparison of recipes: its models and variants, and its page."""

import jax
import numpy as np
import pytest
from experiments import parity, recipe_training
from experiments.recipe_variants import ABLATIONS, RECIPES

import scalewise as sw

ROWS = parity.rows(recipe_training.FILE)


def test_every_recipe_is_compared_but_aliases_and_mu_s():
    assert set(sw.recipes.CATALOGUE) - set(RECIPES) == {"fp8_current", "mu_s"}


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_variant_differs_from_its_recipe(name):
    assert ABLATIONS[name] != sw.recipes.CATALOGUE[name.partition(",")[0]]


def test_each_run_belongs_to_a_set():
    known = {
        (runs.model, recipe, runs.steps, seed)
        for runs in recipe_training.SETS.values()
        for recipe in runs.recipes
        for seed in runs.seeds
    }
    assert {parity.key(row) for row in ROWS} <= known


@pytest.mark.slow
def test_outlier_channels_leave_the_function_as_it_is():
    gpt = recipe_training.program("gpt")
    params, outliers = gpt.init(0)["params"], recipe_training.program("gpt, outliers").init(0)
    batch = next(iter(gpt.batches(bytes(range(256)) * 8, 0)))
    loss = jax.jit(gpt.loss_of)
    with jax.numpy_rank_promotion("allow"):
        losses = [float(loss(p, batch)) for p in (params, outliers["params"])]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    gains = outliers["params"]["blocks"][0]["norm_1"]["gain"]
    assert float(gains.max()) == recipe_training.OUTLIER
