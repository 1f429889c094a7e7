"""Functions compiled without optimizations where all arrays are small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise._jax import quick_compilation
from scalewise.auditing._run._compiled import MEDIUM, SMALL, Compiled


def f(x, y):
    return jnp.sum(jnp.sin(x) * y)


@pytest.mark.parametrize("n", [8, SMALL, SMALL + 1, MEDIUM + 1])
def test_results_are_those_of_jit(n):
    x = jax.random.normal(jax.random.key(n), (n,))
    np.testing.assert_allclose(Compiled(f, n)(x, x), jax.jit(f)(x, x), rtol=1e-5)


def test_larger_arrays_are_compiled_with_more_optimizations():
    own, often = (Compiled(f, lambda x, y: x.size, often=often) for often in (False, True))
    shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (SMALL, SMALL + 1, MEDIUM + 1)]
    chosen = [own.chosen(x, x) for x in shapes]
    assert len(set(map(id, chosen))) == 3
    assert own.chosen(*[jax.ShapeDtypeStruct((2, SMALL), np.float32)] * 2) is chosen[1]
    assert often.chosen(*shapes[:1] * 2) is often.chosen(*shapes[1:2] * 2)
    assert own.chosen(*shapes[:1] * 2) is not own.chosen(*shapes[1:2] * 2)


def test_what_becomes_a_part_of_another_program_has_no_options():
    own, x = Compiled(f, 4), jnp.ones(4)
    np.testing.assert_allclose(jax.jit(lambda x: own(x, jnp.ones(4)))(x), own(x, x))
    np.testing.assert_allclose(jax.jit(lambda: own(x, x))(), own(x, x))  # without a tracer
    assert jax.vmap(own)(jnp.ones((2, 4)), jnp.ones((2, 4))).shape == (2,)


def test_static_arguments():
    own = Compiled(lambda n, x: x * n, 1, static_argnums=(0,))
    assert own(3, jnp.ones(())) == 3
    own.clear_cache()
    assert own(4, jnp.ones(())) == 4


@pytest.mark.parametrize("level", [0, 1])
def test_the_options_are_known_to_this_release(level):
    options = quick_compilation(level)
    assert options
    assert options["xla_backend_optimization_level"] == level
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
