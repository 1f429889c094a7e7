"""Weights that each iteration of a loop multiplies by are rounded once, before the loop."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise._jax import open_jaxpr
from scalewise.interpret._equation import nested_jaxprs

WEIGHTS = {"up": normal(0, (64, 128)) / 8, "down": normal(1, (128, 64)) / 8}
BATCHES = normal(2, (4, 32, 64))


def roundings(jaxpr, loops=0):
    """How often arrays of each shape are rounded, by the number of loops around."""
    found = Counter()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        name = eqn.primitive.name
        if name == "outlined" and eqn.params["call"].name in (
            "_narrow_copy", "_in_blocks",
        ):  # fmt: skip
            found[eqn.invars[0].aval.shape, loops] += 1
        for inner in nested_jaxprs(eqn):
            found += roundings(inner, loops + (name in ("scan", "while")))
    return found


def measured(jaxpr):
    """Of each array that is rounded with one scale: its shape, and of the one it is found from."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        call = eqn.params.get("call") if eqn.primitive.name == "outlined" else None
        if call is not None and call.name == "_narrow_copy":
            yield tuple(x.aval.shape for x in eqn.invars)
        for inner in nested_jaxprs(eqn):
            yield from measured(inner)


def loss(w, x):
    """In bfloat16: a cast stands between each weight and its product."""
    up, down = (w[n].astype(jnp.bfloat16) for n in ("up", "down"))
    y = jax.nn.relu(x.astype(jnp.bfloat16) @ up) @ down
    return jnp.mean(jnp.square(y).astype(jnp.float32))


def accumulated(loss):
    """Gradients of the mean over microbatches."""

    def gradients(w, batches):
        def part(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

        return lax.scan(part, jax.tree.map(jnp.zeros_like, w), batches)[0]

    return gradients


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"]
)
def test_weights_of_microbatches_are_rounded_once(recipe, wrap):
    step = accumulated(wrap(loss))
    counted = roundings(jax.make_jaxpr(sw.autoscale(step, recipe))(WEIGHTS, BATCHES))
    for shape in ((64, 128), (128, 64)):
        assert counted[shape, 0] >= 1
        assert counted[shape, 1] == 0
    assert any(loops == 1 for _, loops in counted)  # activations and gradients


def test_weights_of_inner_loops_are_rounded_before_the_outer_one():
    def powers(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w.T), None), x, length=3)[0])

    f = sw.autoscale(lambda w, xs: lax.map(lambda x: powers(w, x), xs), "fp8")
    counted = roundings(jax.make_jaxpr(f)(normal(0, (64, 64)), BATCHES))
    assert {loops for (shape, loops), n in counted.items() if shape == (64, 64)} == {0}


@pytest.mark.parametrize("recipe", ["fp8", *nightly(["fp8_rowwise", "nvfp4"])])
def test_rounding_before_the_loop_changes_no_number(recipe):
    recipe = sw.recipes.recipe(recipe)
    gradients = jax.jit(sw.autoscale(jax.grad(jax.checkpoint(loss)), recipe))
    got = jax.jit(sw.autoscale(accumulated(jax.checkpoint(loss)), recipe))(WEIGHTS, BATCHES)
    want = jax.tree.map(lambda *g: sum(g), *[gradients(WEIGHTS, x) for x in BATCHES])
    tolerance = 0.3 if recipe.products.is_random else 2e-2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(x - y) < tolerance * np.linalg.norm(y)


def test_a_recomputed_forward_pass_keeps_its_rounded_weights():
    step = sw.autoscale(jax.grad(jax.checkpoint(loss)), "fp8")
    counted = roundings(jax.make_jaxpr(step)(WEIGHTS, BATCHES[0]))
    assert counted[(64, 128), 0] == counted[(128, 64), 0] == 1
    barriers = str(jax.make_jaxpr(step)(WEIGHTS, BATCHES[0])).count("optimization_barrier")
    assert barriers >= 1  # the activations are computed again


def test_slices_of_stacked_weights_are_measured_before_the_loops():
    """A scan over layers, computed again in the backward pass: both loops round by one scale."""

    def stacked(w, x):
        @jax.checkpoint
        def layer(x, own):
            y = x.astype(jnp.bfloat16) @ own.astype(jnp.bfloat16)
            return x + jnp.tanh(y).astype(jnp.float32), None

        return jnp.sum(jnp.square(lax.scan(layer, x, w)[0]))

    def unrolled(w, x):
        for own in w:
            y = x.astype(jnp.bfloat16) @ own.astype(jnp.bfloat16)
            x = x + jnp.tanh(y).astype(jnp.float32)
        return jnp.sum(jnp.square(x))

    w = normal(0, (3, 64, 64)) * jnp.array([1.0, 1e-3, 1e3])[:, None, None]
    f = sw.autoscale(jax.grad(stacked), "fp8")
    weights = [by for x, by in measured(jax.make_jaxpr(f)(w, BATCHES[0])) if x == (64, 64)]
    assert weights == [(1, 1)] * 2  # forward and backward
    got = jax.jit(f)(w, BATCHES[0])
    want = jax.jit(sw.autoscale(jax.grad(unrolled), "fp8"))(w, BATCHES[0])
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2 * float(jnp.abs(want).max()))


def test_a_product_is_added_to_a_loops_float32_carry_unrounded():
    """A device adds it within the product's own kernel, which therefore returns float32."""
    f = jax.jit(sw.autoscale(accumulated(loss), "fp8"))
    text = f.trace(WEIGHTS, BATCHES).lower(lowering_platforms=("cuda",)).as_text()
    products = [s for s in text.splitlines() if "stablehlo.dot_general" in s]
    sums = [s for s in products if s.endswith(("tensor<64x128xf32>", "tensor<128x64xf32>"))]
    assert len(sums) == 2
    assert all("f8E4M3FN" in s and "f8E5M2" in s for s in sums)
