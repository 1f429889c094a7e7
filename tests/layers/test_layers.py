"""Layer norm and RMS norm as layers: those of each library, in one format's arithmetic."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from arrays import normal
from cases import nightly
from scalewise.layers import equinox, linen
from scalewise.layers import nnx as ours_nnx

N = 8


def of_nnx(kind, ours, **options):
    layer = getattr(ours_nnx if ours else nnx, kind)(N, rngs=nnx.Rngs(0), **options)
    layer.scale[...] = normal(1, (N,))
    if kind == "LayerNorm":
        layer.bias[...] = normal(2, (N,))
    return layer


def of_linen(kind, ours, **options):
    layer = getattr(linen if ours else nn, kind)(**options)
    params = layer.init(jax.random.key(0), jnp.ones((1, N)))
    params = {"params": {k: normal(len(k), (N,)) for k in params["params"]}}
    return lambda x: layer.apply(params, x)


def of_equinox(kind, ours, **options):
    layer = getattr(equinox if ours else eqx.nn, kind)(N, **options)
    new = normal(1, (N,)), normal(2, (N,))
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, new)
    return jax.vmap(layer)


LIBRARIES = {"nnx": of_nnx, "linen": of_linen, "equinox": of_equinox}


@pytest.mark.parametrize("kind", ["LayerNorm", *nightly(["RMSNorm"])])
@pytest.mark.parametrize("library", LIBRARIES)
def test_in_float32_a_layer_is_the_librarys(library, kind):
    x = 3 * normal(0, (4, N)) + 1
    theirs, ours = (LIBRARIES[library](kind, own) for own in (False, True))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(ours(x), theirs(x), rtol=2e-5, atol=2e-5)
        got, want = (
            jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(x) for f in (ours, theirs)
        )
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["RMSNorm", *nightly(["LayerNorm"])])
@pytest.mark.parametrize("library", nightly(LIBRARIES, but=["equinox"]))
def test_in_fp16_squares_may_overflow(library, kind):
    theirs, ours = (
        LIBRARIES[library](kind, False),
        LIBRARIES[library](kind, True, arithmetic="fp16"),
    )
    x = ((3 * normal(0, (4, N)) + 1) * 4e3).astype(jnp.float16).astype(jnp.float32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        y, pull = jax.vjp(jax.jit(ours), x)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, y.astype(jnp.float16))
        np.testing.assert_allclose(y, theirs(x), rtol=4e-3, atol=8e-3)
        assert jnp.isfinite(pull(y)[0]).all()


def test_parameters_are_those_of_the_library():
    for kind in ("LayerNorm", "RMSNorm"):
        a, b = (nnx.state(of_nnx(kind, ours), nnx.Param) for ours in (True, False))
        assert jax.tree.structure(a) == jax.tree.structure(b)
        x = jnp.ones((1, N))
        a, b = (getattr(m, kind)().init(jax.random.key(0), x)["params"].keys() for m in (linen, nn))
        assert a == b
        a, b = ([x.shape for x in jax.tree.leaves(getattr(m, kind)(N))] for m in (equinox, eqx.nn))
        assert a == b


def test_dtypes_are_those_of_the_library():
    x = normal(0, (2, N)).astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        for options in ({}, {"dtype": jnp.bfloat16}):
            a, b = (m.LayerNorm(N, rngs=nnx.Rngs(0), **options)(x) for m in (ours_nnx, nnx))
            assert a.dtype == b.dtype


def test_what_a_layer_cannot_do_is_refused():
    x = jnp.ones((2, N))
    with pytest.raises(ValueError, match="LayerNorm: mask is set; expected None"):
        of_nnx("LayerNorm", True)(x, mask=jnp.ones((2, N), bool))
    with pytest.raises(ValueError, match=r"RMSNorm: reduction_axes=\(0, 1\) and feature_axes=-1"):
        of_linen("RMSNorm", True, reduction_axes=(0, 1))(x)
    with pytest.raises(ValueError, match=r"LayerNorm: x has shape \(2, 8\); expected \(8,\)"):
        equinox.LayerNorm(N)(x)
