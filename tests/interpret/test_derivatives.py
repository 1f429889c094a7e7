"""Derivatives from outside, of every mode and order, under the identity interpretation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.interpret import Interpretation, transform

W, X = normal(0, (4, 4)), normal(1, (3, 4))


def identity(f):
    return transform(f, Interpretation(), name="identity")


def looped(w, x):
    def body(x, _):
        x = lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w), lambda x: x - x @ w, x)
        return x, jnp.sum(x * x)

    x, sums = lax.scan(jax.checkpoint(body), x, None, 3)
    return jnp.mean(jnp.sin(x)) + jnp.sum(sums)


MODES = {
    "jvp": lambda f: jax.jvp(f, (W, X), (2 * W, W[:3])),
    "jvp_of_one_argument": lambda f: jax.jvp(lambda w: f(w, X), (W,), (W,)),
    "linearize": lambda f: jax.linearize(f, W, X)[1](W, X),
    "jacfwd": lambda f: jax.jacfwd(f, 1)(W, X),
    "hessian": lambda f: jax.hessian(f, 1)(W, X),
    "reverse_over_reverse": lambda f: jax.jacrev(jax.grad(f, 1))(W, X),
    "reverse_over_forward": lambda f: jax.grad(lambda x: jax.jvp(f, (W, x), (W, X))[1])(X),
    "third": lambda f: jax.jvp(lambda x: jax.hessian(f, 1)(W, x), (X,), (X,))[1],
    "vmap_of_grad_of_vmap": lambda f: jax.vmap(
        jax.grad(lambda x: jnp.sum(jax.vmap(f, (None, 0))(W, x)))
    )(jnp.stack([X, 2 * X])[:, :, None]),
    "grad_of_scan": lambda f: jax.grad(
        lambda w: lax.scan(lambda c, x: (c + f(w, x[None]), None), jnp.float32(0), X)[0]
    )(W),
    "grad_of_remat": lambda f: jax.grad(lambda w: jax.checkpoint(f)(w, X) ** 2)(W),
}  # fmt: skip


@pytest.mark.parametrize("mode", nightly(MODES, but=["linearize", "reverse_over_forward"]))
def test_a_derivative_is_the_programs_own(mode):
    of = MODES[mode]
    got, want = (jax.jit(lambda f=f: of(f))() for f in (identity(looped), looped))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_a_named_axis_of_the_callers_vmap():
    def f(w, x):
        return jnp.sum((x @ w - lax.pmean(x @ w, "i")) ** 2)

    def gradient(f):
        return jax.jit(jax.vmap(jax.grad(f), (None, 0), axis_name="i"))(W, X)

    np.testing.assert_allclose(gradient(identity(f)), gradient(f), rtol=1e-5, atol=1e-6)


def test_forward_mode_of_a_custom_vjp_is_refused_with_a_reason():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    np.testing.assert_allclose(jax.grad(sw.autoscale(f))(1.0), np.cos(1.0), rtol=1e-6)
    with pytest.raises(TypeError, match=r"autoscale: the function has a custom_vjp, .* no forward"):
        jax.jvp(sw.autoscale(f), (1.0,), (1.0,))


def test_taylor_series_are_taken_inside():
    series = ((W, jnp.zeros_like(W)),)

    def f(w):
        return jnp.sum(jnp.sin(w @ w))

    with pytest.raises(TypeError, match=r"autoscale: jax.experimental.jet .* inside"):
        jet.jet(sw.autoscale(f), (W,), series)
    inside = identity(lambda w: jet.jet(f, (w,), series))(W)
    for got, want in zip(jax.tree.leaves(inside), jax.tree.leaves(jet.jet(f, (W,), series)),
                         strict=True):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-5)


OUTER = {
    "emulate": lambda f: sw.emulate(f, "bf16"),
    "autoscale": lambda f: sw.autoscale(f, "fp8"),
    "autocast": lambda f: sw.autocast(f, "bfloat16"),
}


@pytest.mark.parametrize("outer", OUTER)
def test_a_derivative_within_another_transformation_is_interpreted(outer):
    def f(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    gradients = [OUTER[outer](jax.grad(f))(W, X) for f in (f, identity(f))]
    np.testing.assert_array_equal(*gradients)
    assert np.any(gradients[0] != jax.grad(f)(W, X))


def test_a_transposed_map_and_the_refusals_of_a_jit_and_a_checkpoint():
    for name, t in OUTER.items():
        f = t(lambda x: x @ W)
        (got,) = jax.linear_transpose(jax.vmap(f), X)(X)
        np.testing.assert_allclose(got, X @ W.T, rtol=0.2, atol=0.2)
        for within in (jax.jit, jax.checkpoint):
            transpose = jax.linear_transpose(within(f), X)
            if name == "autocast":  # casts are linear
                np.testing.assert_allclose(transpose(X)[0], X @ W.T, rtol=0.02, atol=0.02)
                continue
            with pytest.raises(TypeError, match=f"{name}: .* can't be transposed within jit"):
                transpose(X)


def test_a_scaled_argument_has_a_tangent():
    stored = sw.quantize(W, "fp16")

    def f(w):
        return jnp.sum(jnp.tanh(jnp.asarray(w, jnp.float32)) ** 2)

    def value(data):
        return sw.autoscale(f)(sw.ScaledArray(data, stored.scale))

    wide = stored.data.astype(jnp.float32)
    got = jax.jvp(value, (wide,), (jnp.ones_like(wide),))[1]
    want = jax.jvp(lambda d: f(d * stored.scale), (wide,), (jnp.ones_like(wide),))[1]
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_gradients_of_complex_results():
    """They were zero."""

    def loss(f):
        return jax.grad(lambda w: jnp.sum(jnp.abs(f(w)) ** 2))(W)

    def f(w):
        return lax.complex(w, jnp.sin(w))

    np.testing.assert_allclose(loss(identity(f)), loss(f), rtol=1e-6)


def test_a_gradient_by_a_python_number():
    """A residual is then a number of JAX's program, which is no array."""
    assert float(jax.grad(sw.autocast(lambda x: x * x))(2.0)) == 4
    assert float(jax.hessian(sw.autocast(lambda x: x**3))(2.0)) == 12
