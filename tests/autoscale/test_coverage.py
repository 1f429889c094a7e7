"""Every primitive of JAX is a row, and every row that a program can meet is run."""

import functools

import jax
import jax.extend.core.primitives as published
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from pages import page_script
from primitives import ELSEWHERE, FLOATS, OTHERS, arguments, together

ROWS = FLOATS | OTHERS
NAMES = sorted({getattr(published, n).name for n in dir(published) if n.endswith("_p")})
# as FP16 operands and residuals allow; what isn't named is computed in float32
LOOSE = {
    "composite": 5e-3,
    "conv_general_dilated": 5e-3,
    "dot_general": 5e-3,
    "custom_linear_solve": 5e-3,
}


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from primitives(getattr(inner, "jaxpr", inner))


def is_jaxpr(x):
    return hasattr(x, "eqns")


def test_no_primitive_is_missing():
    assert not set(NAMES) - set(ROWS) - set(ELSEWHERE)


@functools.cache
def expected():
    return jax.jit(together(ROWS))(arguments(ROWS))


def test_each_row_binds_its_primitive():
    for name, (f, given) in ROWS.items():
        if name != "scatter_apply":  # a scatter, as JAX calls it
            assert name in set(primitives(jax.make_jaxpr(f)(*map(jnp.asarray, given)).jaxpr)), name


@pytest.mark.filterwarnings("ignore:.*can.t be transformed")
def test_each_row_runs_as_it_does_without():
    got, want = jax.jit(together(ROWS, sw.autoscale))(arguments(ROWS)), expected()
    for name in ROWS:
        tolerance = LOOSE.get(name, 1e-5)
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            assert a.dtype == b.dtype, name
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|complex numbers)")
@pytest.mark.parametrize("recipe", [sw.recipes.fp16_every_op, sw.Scalify(rescale="never")])
@pytest.mark.slow
def test_each_row_runs_where_every_result_is_narrow(recipe):
    # bits, neighbours, and the order of pivots and roots depend on the last bit
    fragile = ("bitcast_convert_type", "nextafter", "eig", "lu")
    rows = {name: row for name, row in ROWS.items() if name not in fragile}
    got = jax.jit(together(rows, lambda f: sw.autoscale(f, recipe)))(arguments(rows))
    want = expected()
    for name in rows:
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), err_msg=name)
            if name not in ("ceil", "floor", "round", "argmax", "argmin"):
                assert np.abs(a - b).max() <= 0.02 * max(np.abs(b).max(), 0.1), name


def test_every_public_primitive_has_a_row():
    module = page_script("coverage_page")
    assert sorted(n for n in module.public_primitives() if module.row(n) is None) == []
