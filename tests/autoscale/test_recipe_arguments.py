"""Recipes refuse invalid arguments, and their repr evaluates to them."""

import dataclasses
import json
import pathlib
import re

import jax.numpy as jnp
import pytest
import yaml

import scalewise as sw


@pytest.mark.parametrize("scaling", ["amax", sw.Amax, sw.Delayed, 3])
def test_a_scaling_that_is_no_instance_of_a_strategy_is_refused(scaling):
    with pytest.raises(TypeError, match=r"Operand: scaling is .*a Scaling"):
        sw.Products.short(scaling=scaling)
    with pytest.raises(TypeError, match=r"quantize: scaling is .*a Scaling"):
        sw.quantize(jnp.ones(3), "e4m3fn", scaling=scaling)


def test_a_name_stands_for_its_recipe():
    tree = {"w": jnp.ones(3)}
    assert sw.store(tree, sw.recipes.fp8)["w"] is tree["w"]
    with pytest.raises(ValueError, match="'fp8' has no state patterns, so nothing would be stored"):
        sw.store(tree, "fp8")
    with pytest.raises(ValueError, match="did you mean 'fp8_delayed'"):
        sw.store(tree, "fp8_delaye")


@pytest.mark.parametrize("name", sw.recipes.CATALOGUE)
def test_a_recipes_repr_evaluates_to_the_recipe(name):
    recipe = sw.recipes.CATALOGUE[name]
    long = isinstance(recipe, sw.Recipe) and recipe.products.short_form is None
    assert len(repr(recipe)) < (480 if long else 120)
    if not recipe.is_delayed:  # its history is an array
        names = {x.__name__: x for x in sw.scaled.SCALINGS.values()} | vars(sw.formats)
        assert eval(repr(recipe), names | {x: getattr(sw, x) for x in dir(sw)}) == recipe
    storage = dataclasses.replace(recipe, state=((r"\.mu", sw.Storage("e4m3fn")),))
    assert repr(storage).count("Storage(") == 1


def test_a_short_form_makes_products_that_can_be_changed():
    fp8, nvfp4 = sw.recipes.fp8, sw.recipes.nvfp4
    assert fp8.with_operands(backward="fp16") == sw.Recipe(sw.Products.short("e4m3fn"))
    assert fp8.with_operands(scaling=sw.Unit()).products.forward[0].scaling == sw.Unit()
    assert fp8.with_operands(forward="fp32").products.forward == (None, None)
    assert dataclasses.replace(fp8, products=nvfp4.products) == nvfp4
    assert dataclasses.replace(nvfp4, products=fp8.products) == fp8
    e4m3fn, e5m2 = sw.Operand("e4m3fn"), sw.Operand("e5m2")
    written = sw.Products(*[(e4m3fn, e4m3fn), (e5m2, e4m3fn), (e4m3fn, e5m2)])
    assert written == fp8.products == sw.Products.short(**fp8.products.short_form)
    wide = fp8.with_products(weight_gradient=(None, None))
    assert (wide.products.short_form, wide.products.scaling) == (None, sw.Amax())
    with pytest.raises(ValueError, match="operands of more than two kinds"):
        wide.with_operands(forward="fp16")


@pytest.mark.parametrize("name", sw.recipes.CATALOGUE)
def test_replace_makes_an_equal_recipe(name):
    recipe = sw.recipes.CATALOGUE[name]
    assert dataclasses.replace(recipe) == recipe
    changed = dataclasses.replace(recipe, keep={"head": "fp32"})
    assert changed != recipe
    assert dataclasses.replace(changed, keep=()) == recipe


def test_the_page_of_recipes_has_a_row_for_each():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    names = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert set(sw.recipes.CATALOGUE) == {name for name in names if not {"/", " "} & set(name)}


KEPT = (
    (),
    {"head": "bf16", re.compile("^block_(0|11)/"): None},
    {"dot_general": sw.Format("e6m9", 6, 9), "head": sw.recipes.nvfp4.products},
)
CHANGES = (
    {},
    {"residuals": "e4m3fn", "emulate": sw.devices.MatrixUnits("h100", promote=128)},
    {"state": (("mu", sw.Storage("e4m3fn")), ("nu", sw.Storage("mxfp8_e4m3", root=2)))},
    {"products": sw.Products.short(sw.formats.BlockFormat("own", "e3m2fn", size=16), "e5m2")},
)


@pytest.mark.parametrize("name", sw.recipes.CATALOGUE)
def test_a_recipe_is_its_dict(name):
    base = sw.recipes.CATALOGUE[name]
    variants = [base]
    if isinstance(base, sw.Recipe):
        variants += [
            dataclasses.replace(base, keep=keep, **change) for keep in KEPT for change in CHANGES
        ]
    for recipe in variants:
        data = json.loads(json.dumps(sw.recipes.to_dict(recipe)))
        assert yaml.safe_load(yaml.safe_dump(data)) == data
        assert sw.recipes.from_dict(data) == recipe
    assert sw.recipes.to_dict(base).keys() == {"recipe"}


def test_a_config_that_is_no_recipe():
    for data in ({}, {"Format": {"name": "x"}}, {"head": "bf16"}, {"Pattern": "x"}, {"Amax": {}}):
        with pytest.raises((ValueError, TypeError), match=r"from_dict|Format"):
            sw.recipes.from_dict(data)
    with pytest.raises(ValueError, match="did you mean 'fp8'"):
        sw.recipes.from_dict({"recipe": "fp9"})
    with pytest.raises(TypeError, match="Recipe: unexpected keyword argument 'kep'; did you mean"):
        sw.recipes.from_dict({"recipe": "fp8", "kep": {"head": "bf16"}})
