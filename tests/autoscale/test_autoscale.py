"""autoscale on whole programs: close to float32, finite where FP16 isn't, narrow in memory."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from programs import DIFFERENTIABLE, PROGRAMS, scalar, together
from scalewise.formats import E4M3FN, FP16

NOTHING = sw.Recipe(sw.Products.short(None, None), residuals=None)
EAGER = dataclasses.replace(sw.recipes.fp16, min_size=1)
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp8": 0.2}


def example(seed=0, shape=(4, 4)):
    return normal(seed, shape)


def floats(tree):
    return [np.asarray(y) for y in jax.tree.leaves(tree) if jnp.issubdtype(y.dtype, jnp.floating)]


def assert_close(got, want, tolerance):
    for a, b in zip(floats(got), floats(want), strict=True):
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-6


ALL = together(PROGRAMS)


def gradients(t=lambda f: f):
    return together(DIFFERENTIABLE, lambda f: jax.grad(t(scalar(f))))


def test_a_recipe_that_rounds_nothing_changes_nothing():
    got, want = jax.jit(sw.autoscale(ALL, NOTHING))(example()), jax.jit(ALL)(example())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", nightly(["fp16", "bf16", "fp8"], but=["fp16", "fp8"]))
def test_close_to_float32(recipe):
    got = jax.jit(sw.autoscale(ALL, recipe))(example())
    assert_close(got, jax.jit(ALL)(example()), TOLERANCE[recipe])


def test_vmap_outside_and_inside():
    xs = jnp.stack([example(1), example(2)])
    want = jax.jit(jax.vmap(ALL))(xs)
    assert_close(jax.jit(jax.vmap(sw.autoscale(ALL)))(xs), want, 4e-3)
    assert_close(jax.jit(sw.autoscale(jax.vmap(ALL)))(xs), want, 4e-3)


@pytest.mark.parametrize("recipe", [EAGER, *nightly([sw.recipes.fp16])])
def test_gradients_inside_and_outside(recipe):
    want = jax.jit(gradients())(example())
    inside = jax.jit(sw.autoscale(gradients(), recipe))(example())
    outside = jax.jit(gradients(lambda f: sw.autoscale(f, recipe)))(example())
    assert_close(inside, want, 1e-2)
    assert_close(outside, want, 1e-2)


def test_a_recipe_that_rounds_nothing_changes_no_gradient():
    want = jax.jit(gradients())(example())
    got = jax.jit(gradients(lambda f: sw.autoscale(f, NOTHING)))(example())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def wide():
    return [example(i, (64, 64)) / 8 for i in range(2)], example(9, (256, 64))


def test_operands_have_the_formats_of_their_direction():
    params, x = wide()
    program = str(jax.make_jaxpr(sw.autoscale(jax.grad(mlp), sw.recipes.fp8))(params, x))
    assert program.count("f8_e4m3fn[64,64]") >= 2  # the weights
    assert "f8_e5m2[256,64]" in program  # gradients of activations
    assert "f8_e5m2[64,64]" not in program  # no weight was taken for a gradient
    forward = str(jax.make_jaxpr(sw.autoscale(mlp, sw.recipes.fp8))(params, x))
    assert "f8_e5m2" not in forward


def test_residuals_are_stored_narrow():
    params, x = wide()
    step = jax.jit(sw.autoscale(jax.grad(mlp), sw.recipes.fp8))
    hlo = step.lower(params, x).compile().as_text()
    assert "f8e4m3fn[16384]" in hlo  # flat on a CPU
    _, pull = jax.vjp(sw.autoscale(lambda p: mlp(p, x), sw.recipes.fp16), params)
    stored = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.shape == (256, 64)]
    assert jnp.float16 in stored


def test_a_scans_residuals_are_stacked_narrow():
    w, x = example(1, (64, 64)) / 8, example(2, (256, 64))

    def loss(w):
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0])

    program = str(jax.make_jaxpr(sw.autoscale(jax.grad(loss), sw.recipes.fp16))(w))
    assert "f16[3,256,64]" in program
    assert_close(jax.jit(sw.autoscale(jax.grad(loss), sw.recipes.fp16))(w), jax.grad(loss)(w), 1e-2)


def largest(jaxpr, within=False):
    """Shapes of which a largest element is sought, and whether in a loop's body."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_max":
            yield eqn.invars[0].aval.shape, within
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from largest(inner, within or eqn.primitive.name in ("scan", "while"))


def batched(x, w):
    return jnp.matmul(x, w).transpose(0, 2, 1)


def both(x, w):
    y = jnp.matmul(x, w)
    return y.transpose(0, 2, 1), jnp.sin(y)


def gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.square(x[0] @ w)))(w[0])


@pytest.mark.parametrize(
    ("f", "products", "transpositions"),
    [(batched, 1, 0), (both, 1, 1), (gradient, 2, 0)],
)
def test_the_operands_of_a_transposed_product_change_places(f, products, transpositions):
    x, w = example(0, (2, 3, 5)), example(1, (2, 5, 4))
    program = jax.jit(sw.autoscale(f, "fp16")).lower(x, w).as_text()
    assert program.count("stablehlo.dot_general") == products
    assert program.count("stablehlo.transpose") == transpositions
    for got, want in zip(
        jax.tree.leaves(jax.jit(sw.autoscale(f, "fp16"))(x, w)),
        jax.tree.leaves(f(x, w)),
        strict=True,
    ):
        assert_close(got, want, 4e-3)


def test_a_deferred_product_may_pass_through_any_structure():
    def loss(x):
        y = (x @ x).T
        mapped = lax.map(lambda row: row @ y, y)  # walked along, and read in each turn
        stacked = lax.scan(lambda c, row: (c, row @ y), x, y)[1]
        chosen = lax.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y - 1, y)
        carried = lax.fori_loop(0, 3, lambda _, z: jnp.sin(z + y), y)
        return jnp.sum(jnp.square(mapped + stacked + chosen + carried) * y)

    x = example() / 4
    got, want = jax.jit(jax.grad(sw.autoscale(loss, EAGER)))(x), jax.jit(jax.grad(loss))(x)
    assert_close(got, want, 4e-3)


def norm(x, gain):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain[None]


def residual_stream(params, x):
    for w, gain in params:
        x = x + jnp.tanh(norm(x, gain) @ w)
    return jnp.mean(jnp.square(x))


def largest_kernel(layers):
    """Lines of the largest kernel that XLA makes of a gradient."""
    params, x = [(example(1, (32, 32)), jnp.ones(32))] * layers, example(2, (128, 32))
    hlo = jax.jit(sw.autoscale(jax.grad(residual_stream), "fp16")).lower(params, x).compile()
    parts = re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", hlo.as_text())
    return max(part.count("\n") for part in parts[1:] if not part.startswith("ENTRY"))


def test_compiled_kernels_do_not_grow_with_the_layers():
    assert largest_kernel(4) <= largest_kernel(3)  # float32's own do: 82 and 113


def test_weights_in_a_loop_are_rounded_once_before_it():
    def f(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x).sum()

    traced = jax.make_jaxpr(sw.autoscale(jax.grad(f)))(example(0, (5, 5)), example(1, (3, 5)))
    found = list(largest(traced.jaxpr))
    assert found.count(((5, 5), False)) == 1
    assert ((5, 5), True) not in found
    assert ((3, 5), True) in found


@pytest.mark.parametrize("power", [-40, -20, 20, 40])
def test_inputs_weights_and_loss_far_from_one(power):
    params, x = wide()
    factor = 2.0**power

    def loss(p, x, c):
        h = x @ p[0]
        h = h / jnp.sqrt(jnp.mean(h * h, axis=1, keepdims=True))
        return c * jnp.mean((h @ p[1]) ** 2)

    grad = jax.grad(loss)
    step = jax.jit(sw.autoscale(grad, sw.recipes.fp16))
    plain = jax.jit(grad)
    for p, y, c in ((params, x * factor, 1.0), (params, x, factor)):
        assert_close(step(p, y, c), plain(p, y, c), 1e-2)
    scaled = [params[0] * factor, params[1]]
    assert_close(step(scaled, x, 1.0), plain(scaled, x, 1.0), 1e-2)


@pytest.mark.parametrize("mask", [-jnp.inf, float(jnp.finfo(jnp.float32).min), -1e9])
@pytest.mark.parametrize("recipe", ["fp16", *nightly(["fp8"])])
def test_masks_in_attention(mask, recipe):
    q, k, v = (example(i, (8, 16)) for i in range(3))
    keep = jnp.tril(jnp.ones((8, 8), bool))

    def attention(q, k, v):
        return jax.nn.softmax(jnp.where(keep, q @ k.T / 4, mask)) @ v

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v) ** 2)

    for f in (attention, jax.grad(loss, (0, 1, 2))):
        got, want = (jax.jit(g)(q, k, v) for g in (sw.autoscale(f, recipe), f))
        assert_close(got, want, TOLERANCE[recipe] * 2)


def test_adam_with_its_epsilon_and_squares():
    def update(g, m, v):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        return m / (jnp.sqrt(v) + 1e-8)

    g = example() * 1e-12
    got = jax.jit(sw.autoscale(update))(g, jnp.zeros_like(g), jnp.zeros_like(g))
    np.testing.assert_allclose(got, update(g, 0 * g, 0 * g), rtol=1e-5)


def test_a_program_written_in_half_precision_survives():
    def normalised(x, w):
        h = x @ w
        return h / jnp.sqrt(jnp.sum(h * h))

    (w, _), x = wide()
    half = (x * 100).astype(jnp.float16), (w * 100).astype(jnp.float16)
    assert not np.any(normalised(*half))  # its sum of squares is infinite
    got = sw.autoscale(normalised)(*half)
    assert got.dtype == jnp.float16
    assert_close(got.astype(jnp.float32), normalised(*[a.astype(jnp.float32) for a in half]), 4e-3)


def test_a_float64_program_stays_one():
    with jax.enable_x64(True):
        x = jnp.linspace(1, 2, 16).reshape(4, 4)
        got = sw.autoscale(lambda x: jnp.sum(jnp.sin(x) * 1e-200), NOTHING)(x)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, np.sum(np.sin(np.asarray(x))) * 1e-200, rtol=1e-14)


@pytest.mark.filterwarnings("ignore:.*a result of autoscale already")
def test_interpretations_compose():
    x = example(0, (8, 8))
    inside = sw.autoscale(sw.emulate(lambda x: x @ x, "bf16"))
    outside = sw.emulate(sw.autoscale(lambda x: x @ x), "bf16")
    for f in (inside, outside, sw.autoscale(sw.autoscale(lambda x: x @ x), "fp8")):
        assert_close(jax.jit(f)(x), x @ x, 0.1)


def test_effects_callbacks_keys_and_objects_go_through():
    def f(model, key, x, *, mode):
        assert mode == "train"
        jax.debug.print("{}", x[0, 0], ordered=False)
        noise = jax.random.normal(key, x.shape)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return {"y": jax.vmap(model)(y + noise), "n": None}

    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    x = example(0, (8, 8))
    args = (model, jax.random.key(1), x)
    recipe = dataclasses.replace(sw.recipes.fp16, keep={"pure_callback": "fp32"})
    got = jax.jit(lambda k, x: sw.autoscale(f, recipe)(model, k, x, mode="train"))(*args[1:])
    assert_close(got, f(*args, mode="train"), 4e-3)
    assert got["n"] is None


@pytest.mark.parametrize("recipe", ["fp16", "fp8_delayed", "fp16_every_op"])
def test_callbacks_get_plain_numbers_and_a_warning_unless_keep_names_them(recipe):
    def seen(x):
        jax.debug.print("{}", x)
        return jnp.sin(x)

    def hidden(row):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(row.shape, row.dtype), row)

    recipe, x = sw.recipes.CATALOGUE[recipe], example()
    where = r"test_autoscale.py:\d+ \(.*hidden\): pure_callback .* keep={'pure_callback': 'fp32'}"
    with pytest.warns(UserWarning, match=where):
        warned = sw.autoscale(lambda x: lax.map(hidden, x * 3), recipe)(x)
    named = dataclasses.replace(recipe, keep={"pure_callback": "fp32"})
    got = sw.autoscale(lambda x: lax.map(hidden, x * 3), named)(x)
    assert_close(got, sw.autoscale(seen, recipe)(x * 3), 4e-3)
    assert_close(warned, got, 4e-3)


class TestState:
    recipe = sw.Recipe(
        state=(
            (r"\['w'\]", sw.Storage(FP16)),
            (r"\['m'\]", sw.Storage("e4m3fn", axis=0)),
            (r"\['v'\]", sw.Storage(FP16, root=2)),
        ),
    )

    def state(self):
        w = example(0, (16, 8)) * 1e-9
        return {"w": w, "m": w * 3e-6, "v": w**2, "step": jnp.int32(3)}

    def test_stored_and_read_again(self):
        stored = sw.store(self.state(), self.recipe)
        assert stored["w"].data.dtype == jnp.float16
        assert stored["m"].data.dtype == E4M3FN.dtype
        assert stored["m"].scale.shape == (16, 1)
        assert isinstance(stored["v"], sw.SqrtStored)
        assert stored["step"] == 3
        assert_close(stored["w"].value(), self.state()["w"], 4e-4)
        assert_close(np.asarray(stored["v"]) * 1e18, self.state()["v"] * 1e18, 1e-3)
        assert_close(jnp.asarray(stored["m"]) * 1e15, self.state()["m"] * 1e15, 0.05)

    def test_a_step_returns_the_types_it_was_given(self):
        step = sw.autoscale(lambda s: {**s, "w": s["w"] * 2, "v": s["v"] * 4}, self.recipe)
        stored = sw.store(self.state(), self.recipe)
        after = jax.jit(step)(stored)
        assert jax.tree.structure(after) == jax.tree.structure(stored)
        assert_close(after["w"].value() * 1e9, stored["w"].value() * 2e9, 1e-6)
        np.testing.assert_array_equal(after["v"].root.data, stored["v"].root.data)
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape, after, stored)
        )

    def test_small_arrays_stay_unstored(self):
        recipe = sw.Recipe(state=((".", sw.Storage(FP16, min_size=4)),))
        state = {"bias": jnp.ones(3), "w": jnp.ones(4)}
        for tree in (sw.store(state, recipe), sw.autoscale(lambda s: s, recipe)(state)):
            assert isinstance(tree["w"], sw.ScaledArray)
            assert tree["bias"].dtype == jnp.float32

    def test_plain_arrays_are_accepted(self):
        step = sw.autoscale(lambda s: s, self.recipe)
        assert isinstance(step(self.state())["w"], sw.ScaledArray)

    def test_storing_twice_is_storing_once(self):
        once = sw.store(self.state(), self.recipe)
        twice = sw.store(once, self.recipe)
        assert all(
            a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True)
        )


test_invalid_arguments_are_refused = refused(
    (lambda: sw.autoscale(mlp, "fp61"), "no recipe is called 'fp61'.*fp16, bf16"),
    (lambda: sw.autoscale(mlp, 16), TypeError,
     "recipe is 16; expected a Recipe or a Scalify or a string"),
    (lambda: sw.Products.short("e4m3fm"), "no format is called 'e4m3fm'; did you"),
    (lambda: sw.Storage("half!"), "no format is called 'half!'; did you mean"),
)  # fmt: skip


def test_a_scaled_argument_is_differentiated_by_the_chain_rule():
    a, w = sw.ScaledArray(example(0), jnp.float32(4.0)), example(1)

    def loss(a, w):
        x = a.value() if isinstance(a, sw.ScaledArray) else a
        return jnp.sum((x @ w) ** 2)

    plain = jax.grad(loss, (0, 1))(a, w)
    scaled = jax.grad(sw.autoscale(loss, NOTHING), (0, 1))(a, w)
    for got, want in zip(jax.tree.leaves(scaled), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_narrow_output_cannot_be_differentiated_from_outside():
    recipe = sw.Recipe(state=((r".*", sw.Storage(FP16)),))
    with pytest.raises(TypeError, match=r"stored narrow and can't be differentiated"):
        jax.vjp(sw.autoscale(jnp.sin, recipe), example())[1](sw.quantize(example(), FP16))
