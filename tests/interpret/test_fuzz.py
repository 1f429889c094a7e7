"""A short run of `make fuzz` on programs, and of `make prove` on functions."""

import pytest
from proofs import functions
from proofs.function_calls import EXPLICIT, WITHOUT, call, names
from proofs.fuzz import programs


@pytest.mark.parametrize("index", [0, 2])
def test_random_programs(index):
    assert programs.check(0, index) == []


def test_one_function_of_each_kind():
    """A selection, a function of scalars, a traced first value, under all transformations."""
    chosen = ["jnp.nanargmax", "lax.scatter_apply", "nn.softmax", "lax.reduce_window"]
    calls = [c for c in map(call, chosen) if c is not None]
    assert functions.check(calls) == {name: [] for name in chosen}


def test_tables_name_functions_that_there_are():
    listed = {f"{module}.{name}" for module, text in WITHOUT.items() for name in text.split()}
    assert not listed & set(EXPLICIT)
    assert set(names()) >= {"jnp.sin", "lax.scan", "nn.relu", "special.gammainc", "random.normal"}
