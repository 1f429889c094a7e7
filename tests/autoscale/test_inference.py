"""Caches of keys and values stay quantized, and programs are exported for other processes."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import scalewise as sw
from arrays import normal
from cases import nightly

CACHE = normal(0, (2, 16, 4, 8)) * jnp.array([1.0, 4.0, 0.5, 30.0])[:, None]
NEW = normal(1, (2, 1, 4, 8))
PLATFORMS = ("cpu", "cuda", "tpu")


def assign_slice(cache, new):
    return lax.dynamic_update_slice_in_dim(cache, new, 5, 1)


def assign_index(cache, new):
    return cache.at[:, 5].set(new[:, 0])


@pytest.mark.parametrize("assign", [assign_slice, assign_index])
@pytest.mark.parametrize("axis", [None, 2])
def test_what_is_assigned_is_rounded_with_the_scales_that_are_there(assign, axis):
    stored = sw.quantize(CACHE, "e4m3fn", axis=axis)
    got = jax.jit(sw.autoscale(assign, "fp8"))(stored, NEW)
    assert jax.tree.structure(got) == jax.tree.structure(stored)
    assert [x.shape for x in jax.tree.leaves(got)] == [x.shape for x in jax.tree.leaves(stored)]
    np.testing.assert_array_equal(got.scale, stored.scale)
    scale = stored.scale if axis is None else stored.scale[:, 0]
    rounded = sw.round_to(NEW[:, 0] / scale, "e4m3fn", saturate=True)
    want = stored.data.astype(jnp.float32).at[:, 5].set(rounded)
    np.testing.assert_array_equal(got.data.astype(jnp.float32), want)


def test_numbers_beyond_the_scales_saturate():
    stored = sw.quantize(jnp.ones((4, 8)), "e4m3fn")
    got = sw.autoscale(lambda c: c.at[0].set(1e6), "fp8")(stored)
    np.testing.assert_array_equal(got.value()[0], 448 * stored.scale * jnp.ones(8))


@pytest.mark.parametrize("axis", [1, 3])
def test_an_assignment_to_some_of_the_scales_gives_a_plain_array(axis):
    stored = sw.quantize(CACHE, "e4m3fn", axis=axis)
    got = sw.autoscale(lambda c, x: c.at[:, 5, :, 2].set(x[:, 0, :, 2]), "fp8")(stored, NEW)
    want = stored.value().at[:, 5, :, 2].set(NEW[:, 0, :, 2])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_transformed_step_carries_its_cache_through_a_loop():
    step = sw.autoscale(lambda c, x: (assign_slice(c, x), jnp.sum(c * 1.0)), "fp8")
    stored = sw.quantize(CACHE, "e4m3fn", axis=2)
    kept, _ = jax.jit(lambda c: lax.scan(step, c, jnp.stack([NEW, -NEW])))(stored)
    assert kept.data.dtype == jnp.float8_e4m3fn


def test_attention_reads_a_cache_as_it_is_stored():
    def attention(q, keys, values):
        scores = jnp.einsum("bthd,bshd->bhts", q, keys.astype(q.dtype))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), values.astype(q.dtype))

    recipe = dataclasses.replace(sw.recipes.fp8, device="h100", narrow="always")
    stored = sw.quantize(CACHE, "e4m3fn", axis=2)
    traced = jax.jit(sw.autoscale(attention, recipe)).trace(NEW, stored, stored)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 2
    assert all(line.count("xf8E4M3FN>") == 2 for line in products)


def loss(w, x):
    return jnp.mean(jnp.square(jax.nn.gelu(x @ w["up"]) @ w["down"]))


def step(w, x):
    value, gradients = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients), value


@pytest.mark.parametrize("recipe", ["fp8_delayed", *nightly(["fp8", "mxfp8"])])
def test_an_exported_step_runs_in_another_process(recipe, tmp_path):
    w = {"up": normal(0, (16, 32)) / 4, "down": normal(1, (32, 16)) / 6}
    arguments = w, normal(2, (8, 16))
    f = sw.autoscale(step, recipe)
    if hasattr(f, "init"):
        f, arguments = f.step, (f.init(*arguments), *arguments)
    check_elsewhere(jax.jit(f), arguments, tmp_path)


@pytest.mark.slow
def test_exported_inference_takes_stored_weights_in_another_process(tmp_path):
    w = {"up": normal(0, (64, 32)) / 4, "down": normal(1, (32, 64)) / 6}
    f = jax.jit(sw.autoscale(lambda w, x: jax.nn.gelu(x @ w["up"]) @ w["down"], "fp8"))
    check_elsewhere(f, (sw.quantize_params(w, "fp8"), normal(2, (8, 64))), tmp_path)


def check_elsewhere(f, arguments, folder):
    """Runs a serialized function in a process that gets its code and arguments as files."""
    exported = export.export(f, platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    (folder / "program").write_bytes(exported.serialize())
    leaves = jax.tree.leaves(arguments)
    dtypes = [x.dtype.name for x in leaves]
    np.savez(folder / "in.npz", *[np.atleast_1d(x).view(np.uint8) for x in leaves])
    code = f"""
import jax, ml_dtypes, numpy as np, scalewise.autoscaling
exported = jax.export.deserialize(open("program", "rb").read())
arrays = [a.view(d) for a, d in zip(np.load("in.npz").values(), {dtypes!r})]
tree = jax.tree.unflatten(exported.in_tree, [a.reshape(t.shape) for a, t in
                                             zip(arrays, exported.in_avals)])
leaves = jax.tree.leaves(exported.call(*tree[0], **tree[1]))
np.savez("out.npz", *[np.asarray(x).view(np.uint8) for x in map(np.atleast_1d, leaves)])
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    with np.load(folder / "out.npz") as found:
        for x, y in zip(found.values(), jax.tree.leaves(f(*arguments)), strict=True):
            np.testing.assert_array_equal(x.view(y.dtype.name).reshape(y.shape), y)
