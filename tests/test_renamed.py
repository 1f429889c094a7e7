"""Old public names warn, name the new ones, and do what those do."""

import dataclasses
import importlib
import inspect
import sys
from functools import partial
from types import ModuleType

import jax
import optax
import pytest

import scalewise as sw
from scalewise._deprecated import renamed_arguments, renamed_attribute, renamed_exports
from scalewise.formats import BlockFormat


@renamed_arguments(smallest="min_size")
@dataclasses.dataclass(frozen=True)
class Keep:
    min_size: int = 0
    size: int = 7
    extent = renamed_attribute("extent", "size")


@renamed_arguments(wire="comm_format")
def send(x, *, comm_format=None):
    return x, comm_format


def test_arguments_of_a_function():
    with pytest.warns(DeprecationWarning, match=r"send\(wire=...\) is deprecated.*comm_format="):
        assert send(1, wire="fp16") == send(1, comm_format="fp16") == (1, "fp16")
    with pytest.raises(TypeError, match="wire= is the old name of comm_format=, which is given"):
        send(1, wire="fp16", comm_format="fp16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'cable'"):
        send(1, cable="fp16")
    assert list(inspect.signature(send).parameters) == ["x", "comm_format"]


def test_arguments_and_attributes_of_a_dataclass():
    with pytest.warns(DeprecationWarning, match=r"Keep\(smallest=...\) is deprecated.*min_size="):
        keep = Keep(smallest=4)
    assert keep == Keep(4) == dataclasses.replace(Keep(), min_size=4)
    with pytest.warns(DeprecationWarning, match=r"Keep\(smallest=...\) is deprecated.*min_size="):
        assert dataclasses.replace(Keep(1), smallest=4) == keep
    with pytest.raises(TypeError, match="smallest= is the old name of min_size=, which is given"):
        Keep(smallest=4, min_size=4)
    for old, new in (("smallest", "min_size"), ("extent", "size")):
        with pytest.warns(DeprecationWarning, match=f"Keep.{old} is deprecated.*use {new}"):
            assert getattr(keep, old) == getattr(keep, new)
    assert [f.name for f in dataclasses.fields(keep)] == ["min_size", "size"]


def test_exports_of_a_module(monkeypatch):
    module = ModuleType("renaming")
    module.New = Keep  # pyright: ignore
    module.__getattr__ = renamed_exports("renaming", {"Old": "New"})  # pyright: ignore
    monkeypatch.setitem(sys.modules, "renaming", module)
    with pytest.warns(DeprecationWarning, match=r"renaming.Old is deprecated.*use New"):
        assert module.Old is Keep
    with pytest.raises(AttributeError, match="module 'renaming' has no attribute 'Other'"):
        module.Other  # noqa: B018


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("scalewise", "Rooted", "SqrtStored"),
        ("scalewise.autoscale", "Rooted", "SqrtStored"),
        ("scalewise.autoscale", "Exceptions", "FormatOverrides"),
        ("scalewise.training", "Death", "Divergence"),
        ("scalewise.training", "stored_in", "store_state"),
    ],
)
def test_renamed_exports(module, old, new):
    package = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is deprecated.*use .*{new}"):
        assert getattr(package, old) is getattr(package, new)


@pytest.mark.parametrize(
    ("make", "value", "old", "new"),
    [
        (lambda **size: sw.Storage("fp16", **size), 7, "smallest", "min_size"),
        (sw.Recipe, 7, "smallest", "min_size"),
        (sw.Recipe, sw.formats.BF16, "storage", "residuals"),
        (sw.Recipe, "every_op", "store", "rounds"),
        (partial(BlockFormat, "b", sw.formats.E2M1FN), sw.formats.FP32, "whole", "tensor_scale"),
        (sw.training.DynamicLossScale, 0.5, "smallest", "min_scale"),
        (sw.training.DynamicLossScale, 2.0**20, "largest", "max_scale"),
    ],
)
def test_renamed_fields(make, value, old, new):
    with pytest.warns(DeprecationWarning, match=rf"\({old}=...\) is deprecated.*use {new}="):
        made = make(**{old: value})
    assert made == make(**{new: value})
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated.*use {new}"):
        assert getattr(made, old) == getattr(made, new) == value


def test_renamed_choices_of_a_recipe():
    recipe = sw.recipes.scalify
    with pytest.warns(DeprecationWarning, match="Recipe.stored_as is deprecated.*state_storage"):
        assert recipe.stored_as("", 1) is None


def test_renamed_arguments_of_step():
    with pytest.warns(DeprecationWarning, match=r"step\(wire=...\) is deprecated.*comm_format="):
        step = sw.training.step(abs, optax.sgd(1.0), axis_name="devices", wire="fp16")
    with pytest.warns(DeprecationWarning, match="Step.wire is deprecated.*comm_format"):
        assert step.wire == step.comm_format == "fp16"


def test_renamed_shape_of_a_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = sw.training.Sharding(
        mesh, lambda path, shape: jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    )
    with pytest.warns(DeprecationWarning, match="Sharding.about is deprecated.*mesh_shape"):
        assert sharding.about == sharding.mesh_shape == {"data": 1}
