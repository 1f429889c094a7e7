"""Ragged, scaled and symmetric products; kernels and sparse products, which warn."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas, sparse

import scalewise as sw
from arrays import normal
from cases import nightly

A, B = (normal(k, (12, 12)) for k in jax.random.split(jax.random.key(0)))
ONE, THREE = jnp.array([12], jnp.int32), jnp.array([4, 3, 5], jnp.int32)


@pytest.mark.parametrize("recipe", ["fp8", *nightly(["mxfp4_forward", "fp16_every_op"])])
def test_a_ragged_product_of_one_group_is_the_product_bit_for_bit(recipe):
    """Forward and both gradients, whose ragged axes are rows, features and again rows."""

    def gradients(product):
        return jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(product(a, b)) ** 2), (0, 1))

    def outputs(product):
        return jax.jit(sw.autoscale(gradients(product), recipe))(A, B)

    ragged = outputs(lambda a, b: lax.ragged_dot(a, b[None], ONE))
    plain = outputs(lambda a, b: a @ b)
    for x, y in zip(jax.tree.leaves(ragged), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)


def test_each_group_of_a_ragged_product_has_its_matrix():
    def f(a, b):
        return lax.ragged_dot(a, jnp.stack([b, 2 * b, 3 * b]), THREE)

    got = jax.jit(sw.autoscale(f, "fp16"))(A, B)
    np.testing.assert_allclose(got, f(A, B), rtol=2e-3, atol=1e-2)
    assert not np.array_equal(got, f(A, B))


def test_a_scaled_product_keeps_the_programs_own_narrow_numbers():
    a, b = A.astype(jnp.float8_e4m3fn), B.astype(jnp.float8_e4m3fn)
    scales = jnp.full((12, 3), 2.0**8), jnp.full((3, 12), 2.0**-100)

    def f(a, b):
        left, right = (s.astype(jnp.float8_e8m0fnu) for s in scales)
        return lax.scaled_dot(
            a, b, lhs_scale=left, rhs_scale=right, preferred_element_type=jnp.float32
        )

    np.testing.assert_array_equal(jax.jit(sw.autoscale(f, "fp8"))(a, b), f(a, b))
    wide = jax.jit(sw.autoscale(f, "fp16"))(A, B)
    np.testing.assert_allclose(wide * 2.0**92, A @ B, rtol=2e-3, atol=1e-2)


def test_a_symmetric_product_is_a_product():
    def f(a, c):
        return lax.linalg.symmetric_product(a, c, alpha=2.0, beta=0.5)

    got = jax.jit(sw.autoscale(f, "fp8"))(A, B)
    narrow = jax.jit(sw.autoscale(lambda a: a @ a.T, "fp8"))(A)
    np.testing.assert_allclose(got, 2 * narrow + 0.5 * B, rtol=1e-6, atol=1e-5)


def kernel(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(body, out_shape=shape, interpret=True)(x)


def solver(x):
    return jax.scipy.sparse.linalg.cg(lambda y: x @ (x.T @ y) + y, x[0], maxiter=2)[0]


INDICES = jnp.stack(jnp.unravel_index(jnp.arange(A.size), A.shape), 1)


def sparse_product(x):
    return sparse.BCOO.fromdense(x, nse=144) @ x


@pytest.mark.parametrize("transform", [
    lambda f: sw.autoscale(f, "fp8"),
    lambda f: sw.autoscale(f, "fp16_every_op"),
    sw.autocast,
    lambda f: sw.emulate(f, "bf16"),
], ids=["fp8", "fp16_every_op", "autocast", "emulate"])  # fmt: skip
def test_a_kernel_warns_once_with_its_line(transform):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            jax.eval_shape(transform(kernel), A)
    (warning,) = caught
    assert "test_products_beside_dot_general.py" in str(warning.message)
    assert "(kernel): pallas_call can't be transformed" in str(warning.message)


def complex_product(x):
    z = lax.complex(x, x)
    return jnp.real(z @ jnp.moveaxis(z, 0, 1))


def complex_solve(x):
    return jnp.abs(jnp.linalg.solve(lax.complex(x, x), lax.complex(x[0], x[0])))


@pytest.mark.parametrize(("f", "name", "recipe"), [
    (kernel, "pallas_call", "fp8"), (solver, "custom_linear_solve", "fp8"),
    (sparse_product, "bcoo_dot_general", "fp8"), (complex_product, "dot_general", "fp8"),
    (complex_product, "dot_general", "scalify"),
])  # fmt: skip
def test_wide_operations_warn_unless_keep_names_them(f, name, recipe):
    with pytest.warns(UserWarning, match=rf"py:\d+ .*{name}"):
        jax.eval_shape(sw.autoscale(f, recipe), A)
    named = dataclasses.replace(getattr(sw.recipes, recipe), keep={name: "fp32"})
    jax.eval_shape(sw.autoscale(f, named), A)


@pytest.mark.parametrize(("transform", "f", "name"), [
    (sw.autocast, complex_product, "dot_general"),
    (lambda f: sw.emulate(f, "bf16"), complex_product, "dot_general"),
    (lambda f: sw.emulate(f, "bf16"), complex_solve, "lu"),
    (lambda f: sw.autoscale(f, "fp16_every_op"), complex_solve, "lu"),
])  # fmt: skip
def test_complex_numbers_stay_as_they_are_with_a_warning(transform, f, name):
    with pytest.warns(UserWarning, match="own dtype") as caught:
        jax.eval_shape(transform(f), A)
    assert f"({f.__name__}): {name} stays in the program's own dtype" in str(caught[0].message)


def test_autocast_adds_the_products_of_a_sparse_matrix_in_float32_with_a_warning():
    with pytest.warns(UserWarning, match=r"\(sparse_product\): bcoo_dot_general stays in float32"):
        jax.eval_shape(sw.autocast(sparse_product, "bf16"), A)
    rule = sw.autocasting.Rule("full", primitive="bcoo_dot_general")
    policy = sw.Policy("bf16", rules=[rule])
    f = lambda x: sparse.BCOO((x.reshape(-1), INDICES), shape=x.shape) @ (x @ x)  # noqa: E731
    dtypes = {p.primitive: p.dtype for p in sw.autocasting.placements(f, policy)(A)}
    assert (dtypes["dot_general"], dtypes["bcoo_dot_general"]) == ("bfloat16", "float32")


@pytest.mark.parametrize("transform", [
    lambda f: sw.autoscale(f, "fp8"), lambda f: sw.autocast(f, "float32"),
    lambda f: sw.emulate(f, "bf16"), lambda f: sw.autoscale(f, "scalify"),
])  # fmt: skip
def test_products_of_integers_are_exact_without_a_warning(transform):
    with jax.numpy_dtype_promotion("standard"):
        whole = jnp.round(A * 100).astype(jnp.int8)
        f = lambda n: (n @ n.T, lax.dot(n, n.T, preferred_element_type=jnp.int32), (n > 0) @ n.T)  # noqa: E731
        for got, want in zip(transform(f)(whole), f(whole), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_solver_without_products_does_not_warn():
    jax.eval_shape(sw.autoscale(jnp.linalg.solve, "fp8"), A, B)
