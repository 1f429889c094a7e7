"""A rule for a primitive of one's own: scaled, differentiated, audited; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import scalewise as sw
from scalewise.autoscaling import RULES, Family, register


@pytest.fixture
def leaky():
    def f(x):
        return jnp.where(x > 0, x, x / 8)

    primitive = Primitive("test_leaky")
    primitive.def_impl(jax.jit(f))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(f, False))
    ad.defjvp(primitive, lambda t, x: t * jnp.where(x > 0, 1.0, 0.125).astype(x.dtype))
    yield primitive
    RULES.pop("test_leaky", None)


def test_it_is_computed_on_the_data_and_keeps_the_scale(leaky):
    x = jnp.float32([1.0, -2.0, 3.0])
    moved = lambda x: leaky.bind(x * 2.0**70 * 2.0**60) * 2.0**-120  # noqa: E731  (beyond float32)
    assert not np.isfinite(sw.autoscale(moved, "scalify")(x)).all()  # on plain numbers
    register(leaky, Family.HOMOGENEOUS)
    np.testing.assert_array_equal(sw.autoscale(moved, "scalify")(x), [1024.0, -256.0, 3072.0])


def test_it_has_derivatives_and_is_audited(leaky):
    register(leaky, Family.HOMOGENEOUS)

    def f(w, x):
        return jnp.sum(leaky.bind(x @ w) ** 2)

    w, x = jnp.ones((8, 4)), jnp.linspace(-400.0, 400.0, 64).reshape(8, 8)
    got = jax.jit(sw.autoscale(jax.grad(f), "fp16"))(w, x)
    np.testing.assert_allclose(got, jax.grad(f)(w, x), rtol=1e-2)
    assert sw.audit(f, "fp16", trials=0)(w, x).error.non_finite == 1


def test_a_primitive_of_jax_and_a_family_without_a_rule_are_refused(leaky):
    with pytest.raises(ValueError, match="'add' is a primitive of JAX"):
        register(jax.lax.add_p, Family.ALIGNED)
    with pytest.raises(ValueError, match=r"all of Family.PRODUCT; expected Family.STRUCTURAL"):
        register(leaky, Family.PRODUCT)
    assert "test_leaky" not in RULES
