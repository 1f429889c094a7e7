"""Functions compiled without optimizations where all arrays are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise._jax import quick_compilation
from scalewise.auditing._run._compiled import SMALL, Compiled


def f(x, y):
    return jnp.sum(jnp.sin(x) * y)


@pytest.mark.parametrize("n", [8, SMALL, SMALL + 1])
def test_results_are_those_of_jit(n):
    x = jax.random.normal(jax.random.key(n), (n,))
    np.testing.assert_allclose(Compiled(f)(x, x), jax.jit(f)(x, x), rtol=1e-5)


def test_large_arrays_are_compiled_with_optimizations():
    own = Compiled(f)
    few, many = (own.chosen([np.zeros(n)]) for n in (SMALL, SMALL + 1))
    assert few is not many
    assert many is own.chosen([jax.ShapeDtypeStruct((2, SMALL), np.float32)])
    assert Compiled(f, largest=SMALL + 1).chosen([np.zeros(1)]) is not few


def test_what_becomes_a_part_of_another_program_has_no_options():
    own, x = Compiled(f, static_argnums=()), jnp.ones(4)
    np.testing.assert_allclose(jax.jit(lambda x: own(x, jnp.ones(4)))(x), own(x, x))
    np.testing.assert_allclose(jax.jit(lambda: own(x, x))(), own(x, x))  # without a tracer
    assert jax.vmap(own)(jnp.ones((2, 4)), jnp.ones((2, 4))).shape == (2,)


def test_static_arguments():
    own = Compiled(lambda n, x: x * n, static_argnums=(0,))
    assert own(3, jnp.ones(())) == 3
    own.clear_cache()
    assert own(4, jnp.ones(())) == 4


def test_the_options_are_known_to_this_release():
    options = quick_compilation()
    assert options
    assert options["xla_backend_optimization_level"] == 0
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
