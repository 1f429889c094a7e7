"""A short run of `make fuzz` on programs and chains, and of `make prove` on functions."""

import pytest
from proofs import functions
from proofs.function_calls import EXPLICIT, WITHOUT, call, names
from proofs.fuzz import chains, programs

from cases import nightly


@pytest.mark.slow
def test_a_random_program():
    assert programs.check(0, 2) == []


@pytest.mark.parametrize("index", [11, *nightly([22, 18, 20])])
def test_a_random_chain_or_loop_of_constants(index):
    assert chains.check(3, index) == []


@pytest.mark.slow
def test_a_losing_operand_of_a_maximum_doesnt_win():
    """It stood for an infinity of its own sign: a small positive number was larger than 0.69."""
    assert programs.check(909090, 56) == []


@pytest.mark.slow
def test_functions():
    """One whose lowering is other JAX functions, and its gradient, under all transformations."""
    chosen = ["special.i0e"]
    calls = [c for c in map(call, chosen) if c is not None]
    assert functions.check(calls) == {name: [] for name in chosen}


def test_tables_name_functions_that_there_are():
    listed = {f"{module}.{name}" for module, text in WITHOUT.items() for name in text.split()}
    assert not listed & set(EXPLICIT)
    assert set(names()) >= {"jnp.sin", "lax.scan", "nn.relu", "special.gammainc", "random.normal"}
