"""Functions compiled without optimizations where all arrays are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise._jax import quick_compilation
from scalewise.auditing._tape._compiled import MEDIUM, SMALL, compiled


def f(x, y):
    return jnp.sum(jnp.sin(x) * y)


@pytest.mark.parametrize("n", [8, SMALL + 1, MEDIUM + 1])
def test_results_are_those_of_jit(n):
    x = jax.random.normal(jax.random.key(n), (n,))
    np.testing.assert_allclose(compiled(f, n)(x, x), jax.jit(f)(x, x), rtol=1e-5)


@pytest.mark.parametrize("level", [0, 1])
def test_the_options_are_known_to_this_release(level):
    options = quick_compilation(level)
    assert options
    assert options["xla_backend_optimization_level"] == level
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
