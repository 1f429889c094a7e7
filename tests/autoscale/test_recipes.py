"""Every recipe on one network; exceptions, block formats, static scales, narrow collectives."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from devices import run_on_devices
from scalewise.formats import E4M3FN, FP16, FP32, MXFP8_E4M3

CATALOGUE = sw.recipes.CATALOGUE
W = normal(0, (64, 64)) / 8
X = normal(1, (32, 64))
# relative error of the gradient that each format's precision allows here
ERROR = {
    "fp16": 2e-3, "bf16": 1e-2, "fp8": 0.1, "fp8_delayed": 0.1, "mxfp8": 0.1, "mxfp4_forward": 0.4,
    "fp8_current": 0.1, "fp8_rowwise": 0.1, "fp8_rowwise_gw_hp": 0.1, "fp8_blockwise": 0.1,
    "mxfp8_floor": 0.1, "mxfp8_hybrid": 0.1, "nvfp4": 0.4, "fp4_all_the_way": 0.5,
    "mxfp4": 0.5, "quartet": 0.5, "quartet2": 0.4, "tetrajet2": 0.5,
    "mu_s": 0.1, "unit_scaling": 0.1, "fp16_every_op": 5e-3, "scalify": 5e-3,
}  # fmt: skip


def loss(w, x):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.mean(jnp.square(jax.nn.log_softmax(h @ w)))


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", nightly(CATALOGUE, but=["fp8_current"]))
def test_value_and_gradient_from_inside_and_outside(name):
    want, gradient = jax.value_and_grad(loss)(W, X)
    inside = jax.jit(sw.autoscale(jax.value_and_grad(loss), name))(W, X)
    outside = jax.jit(jax.value_and_grad(sw.autoscale(loss, name)))(W, X)
    for value, grad in (inside, outside):
        np.testing.assert_allclose(value, want, rtol=ERROR[name])
        assert error(grad, gradient) < ERROR[name]


def test_blocks_lie_along_the_contracted_axis():
    got = sw.autoscale(lambda w, x: x @ w, "mxfp8")(W, X)
    a, b = (sw.quantize(z, MXFP8_E4M3, axis=i, scaling=sw.Mx("rceil")) for z, i in ((X, 1), (W, 0)))
    np.testing.assert_array_equal(got, a.value() @ b.value())


def test_one_scale_a_channel():
    spread = W * jnp.logspace(-12, 0, 64)[None]
    recipe = sw.recipes.fp8.with_operands(per="channel")
    product = lambda w, x: x @ w  # noqa: E731
    want = X @ spread
    column = lambda y: error(y[:, 0], want[:, 0])  # noqa: E731
    assert column(sw.autoscale(product, recipe)(spread, X)) < 0.05
    assert column(sw.autoscale(product, sw.recipes.fp8)(spread, X)) > 0.5


def test_a_static_scale_does_not_read_the_data():
    traced = str(jax.make_jaxpr(sw.autoscale(lambda w, x: x @ w, "unit_scaling"))(W, X))
    assert "reduce_max" not in traced
    assert "f8_e4m3fn" in traced


@pytest.mark.parametrize(
    "scaling", [sw.Amax(power_of_two=False), *nightly([sw.LeastSquares(), sw.Mx("rceil")])]
)
def test_other_choices_of_scale(scaling):
    recipe = sw.recipes.fp8.with_operands(scaling=scaling)
    gradient = jax.grad(sw.autoscale(loss, recipe))(W, X)
    assert error(gradient, jax.grad(loss)(W, X)) < 0.1


@pytest.mark.parametrize("name", ["head", "dot_general", "hidden"])
def test_keep_by_scope_or_primitive(name):
    recipe = dataclasses.replace(sw.recipes.fp8, keep={name: FP32}, residuals=None)
    got = sw.autoscale(loss, recipe)(W, X)

    def narrow(x):
        return sw.quantize(x, E4M3FN).value()

    w, x = (W, X) if name in ("dot_general", "hidden") else (narrow(W), narrow(X))
    h = jnp.tanh(x @ w)
    w, h = (narrow(W), narrow(h)) if name == "hidden" else (W, h)
    want = jnp.mean(jnp.square(jax.nn.log_softmax(h @ w)))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_kept_scope_holds_in_the_backward_pass():
    recipe = dataclasses.replace(
        sw.recipes.fp8, keep={"head": FP32, "hidden": FP32}, residuals=None
    )
    got = sw.autoscale(jax.grad(loss), recipe)(W, X)
    np.testing.assert_allclose(got, jax.grad(loss)(W, X), rtol=1e-4, atol=1e-7)


def test_a_kept_name_that_matches_nothing_is_refused():
    recipe = dataclasses.replace(sw.recipes.fp8, keep={"lm_head": FP16})
    with pytest.raises(ValueError, match=r"keep names 'lm_head', which is neither .*head, hidden"):
        jax.jit(sw.autoscale(jax.grad(loss), recipe))(W, X)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": {"head": "mxfp8"}}, "'mxfp8' is a recipe, not a format; .*mxfp8_e4m3"),
        ({"residuals": "e2m1fn"}, "e2m1fn has no storage dtype of whole bytes"),
    ],
)  # fmt: skip
def test_contradictory_recipes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        sw.Recipe(**fields)


test_contradictory_parts_of_recipes_are_refused = refused(
    (lambda: sw.Products.short(scaling=sw.Delayed(), per="channel"), "one scale for an operand"),
    (lambda: sw.Products.short("mxfp8_e4m3", scaling=sw.Delayed()), "Delayed"),
    (lambda: sw.Products.short("e8m0"), "e8m0 has no zero"),
    (lambda: sw.Scalify("e4m3fn"), "Scalify.format is e4m3fn; expected 'fp16' or 'bf16'"),
    (lambda: sw.Scalify(keep={"head": E4M3FN}), "keep names e4m3fn"),
    (lambda: sw.quantize_params({"w": W}, "scalify"), "'scalify', which rounds every result"),
)  # fmt: skip


MESH = """
    import jax, jax.numpy as jnp, numpy as np, scalewise as sw
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (8, 16)) * 2.0 ** jnp.arange(8)[:, None]
    w = jax.random.normal(jax.random.key(1), (16, 16))
    placed = jax.device_put(x, NamedSharding(mesh, P("d")))

    def mapped(w, x):
        def body(w, x):
            y = x @ w
            rows = jax.lax.all_gather(y, "d", axis=0, tiled=True)
            return jax.lax.psum(jnp.sum(y**2), "d") + jnp.mean(rows)
        return jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False
        )(w, x)

    def tracked(w, x):
        def body(w, x):
            return jax.lax.psum(jnp.sum((x @ w) ** 2), "d")
        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)

    import dataclasses
    narrow = dataclasses.replace(sw.recipes.fp16, collective="e4m3fn", min_size=1)
    for f, tolerance in ((mapped, 0.05), (tracked, 0.05)):
        for recipe, t in ((sw.recipes.fp16, 2e-3), (narrow, tolerance), ("fp16_every_op", 5e-3)):
            run = jax.jit(sw.autoscale(f, recipe))
            np.testing.assert_allclose(run(w, placed), f(w, x), rtol=t)
    for recipe, t in ((sw.recipes.fp16, 5e-3), ("fp16_every_op", 1e-2)):
        for g in (jax.grad(sw.autoscale(tracked, recipe)), sw.autoscale(jax.grad(tracked), recipe)):
            got, want = jax.jit(g)(w, placed), jax.grad(tracked)(w, x)
            assert np.linalg.norm(got - want) < t * np.linalg.norm(want)
    delayed = sw.autoscale(tracked, "fp8_delayed")  # a history is that of all devices' parts
    history = delayed.init(w, placed)
    assert np.max(history.amaxes) == np.max(np.abs(x)) and len(history.operand_ids) == 2
    y, history = jax.jit(delayed.step)(history, w, placed)
    np.testing.assert_allclose(y, tracked(w, x), rtol=0.05)
    assert (np.sort(history.amaxes[:, 1]) == np.sort([np.abs(x).max(), np.abs(w).max()])).all()
    text = jax.jit(sw.autoscale(mapped, narrow)).lower(w, placed).as_text()
    assert any("all_gather" in line and "ui8" in line for line in text.splitlines())
"""


@pytest.mark.slow
def test_a_mesh_of_devices_with_narrow_collectives():
    run_on_devices(4, MESH)


def test_few_features_have_no_fp8():
    def f(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def formats(channels, recipe):
        x, k = jnp.ones((2, 4, 4, channels)), jnp.ones((3, 3, channels, 8))
        text = jax.jit(sw.autoscale(f, recipe)).lower(x, k).as_text()
        return {name for name in ("f8E4M3FN", "f16") if f"x{name}>" in text}

    assert formats(3, "fp8") == {"f16"}
    assert formats(4, "fp8") == {"f8E4M3FN"}
    assert formats(3, dataclasses.replace(sw.recipes.fp8, features=1)) == {"f8E4M3FN"}
    assert formats(
        3, dataclasses.replace(sw.recipes.fp8, keep={"conv_general_dilated": E4M3FN})
    ) == {"f8E4M3FN"}


def stacked(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"), jax.named_scope("dense"):
            x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def formats(recipe):
    rows = sw.explain(jax.grad(stacked), recipe)(
        [normal(0, (32, 32)) / 6] * 12, normal(1, (16, 32))
    ).rows
    return [(r.direction, r.format) for r in rows if r.kind == "contraction"]


def test_a_pattern_keeps_the_first_and_the_last_layer():
    keep = {re.compile(r"^layer_(0|11)/"): "bf16"}
    found = formats(dataclasses.replace(sw.recipes.nvfp4, keep=keep))
    forward = [fmt for direction, fmt in found if direction == "forward"]
    assert forward == ["bf16 x bf16", *["nvfp4 x nvfp4"] * 10, "bf16 x bf16"]
    assert [fmt for d, fmt in found if d == "backward"].count("bf16 x bf16") == 3


def test_a_recipe_with_a_pattern_evaluates_from_its_repr():
    recipe = dataclasses.replace(sw.recipes.fp8, keep={re.compile("^head"): "bf16"})
    assert eval(repr(recipe), {"re": re, **vars(sw.autoscaling)}) == recipe
    assert hash(recipe) == hash(dataclasses.replace(recipe))


def test_a_name_that_is_in_no_scope_is_refused():
    with pytest.raises(
        ValueError, match=r"'\^head', which is found in no scope where .*layer_0/dense"
    ):
        formats(sw.Recipe(keep={re.compile("^head"): "bf16"}))
    with pytest.raises(ValueError, match="'head', which is neither a primitive, nor a scope"):
        formats(sw.Recipe(keep={"head": "bf16"}))
