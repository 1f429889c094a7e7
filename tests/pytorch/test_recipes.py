"""Models of torch under recipes, policies, devices and plans: ATen operations are taken apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import scalewise as sw
import scalewise.torch as st

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).mean((2, 3))


@functools.cache
def made(kind, *shape):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    f, params = st.function(model, (x,))
    return f, params, st.to_jax(x)


MODELS = {"block": (Block, 2, 8, 32), "convolutions": (Convolutions, 2, 3, 8, 8)}


def loss_of(f):
    return lambda params, x: jnp.mean(f(params, x) ** 2)


def error(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    squares = [(np.sum((np.asarray(a) - b) ** 2), np.sum(np.asarray(b) ** 2)) for a, b in pairs]
    return np.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares))


@pytest.mark.parametrize(
    ("recipe", "allowed"),
    [("fp16", 2e-3), ("bf16", 2e-2), ("fp8", 0.15), ("mxfp8", 0.15), ("nvfp4", 0.5),
     ("fp16_every_op", 1e-2)],
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_rounds_what_the_products_of_operations_read(name, recipe, allowed):
    f, params, x = made(*MODELS[name])
    gradient = jax.grad(loss_of(f))
    want = jax.jit(gradient)(params, x)
    ways = [sw.autoscale(gradient, recipe)]
    if recipe == "fp8":  # the others share what differentiates
        ways.append(jax.grad(sw.autoscale(loss_of(f), recipe)))
    for way in ways:
        assert 1e-5 < error(jax.jit(way)(params, x), want) < allowed


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("block", 6, 13), ("convolutions", 2, 3)]
)
def test_each_product_is_listed_once(name, forward, backward):
    f, params, x = made(*MODELS[name])
    rows = sw.explain(jax.grad(loss_of(f)), "fp8")(params, x).rows
    found = [r.direction for r in rows if r.kind == "contraction"]
    assert (found.count("forward"), found.count("backward")) == (forward, backward)


def test_a_policy_and_a_device_reach_the_products():
    f, params, x = made(*MODELS["block"])

    def computed(f):
        return jax.jit(f)(params, x)

    assert 1e-4 < error(computed(sw.autocast(f, "p=f32,c=bf16,o=f32")), computed(f)) < 1e-2
    exact = computed(sw.autoscale(f, "fp8"))
    assert not np.array_equal(computed(sw.autoscale(f, "fp8", emulate="h100")), exact)
    exact = computed(sw.emulate(f, "fp16"))
    assert not np.array_equal(computed(sw.emulate(f, "fp16", device="volta")), exact)


def test_an_emulated_operation_still_rounds_once():
    layer = nn.Linear(32, 8)
    f, params, x = made(lambda: layer, 4, 32)
    low = sw.emulate(f, "bf16")(params, x)
    rounded = {k: sw.round_to(p, "bf16") for k, p in params.items()}
    product = np.float64(sw.round_to(x, "bf16")) @ np.float64(rounded["weight"]).T
    np.testing.assert_array_equal(low, sw.round_to(product + np.float64(rounded["bias"]), "bf16"))


def test_an_audit_under_a_recipe_has_its_error():
    f, params, x = made(*MODELS["block"])
    report = sw.audit(f, "nvfp4", trials=0)(params, x)
    own = error(sw.autoscale(f, "nvfp4")(params, x), f(params, x))
    assert report.error.relative == pytest.approx(own, rel=0.05)
    assert own > 0.01


def test_a_plan_chooses_formats_for_the_layers():
    f, params, x = made(*MODELS["block"])
    found = sw.plan(f, 6.5, objective="error")(params, x)
    chosen = " ".join(line.formats for line in found.lines)
    assert "nvfp4" in chosen
    assert "mxfp8_e4m3" in chosen
    assert found.measured > 0


def test_a_model_trains_under_a_recipe():
    f, params, x = made(*MODELS["block"])
    target, optimizer = jnp.roll(x, 1, axis=1), optax.sgd(0.3)

    def step(params, state):
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((f(p, x) - target) ** 2))(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    def train(step):
        given, state, losses = params, optimizer.init(params), []
        for _ in range(20):
            given, state, value = step(given, state)
            losses.append(float(value))
        return losses

    plain, low = train(jax.jit(step)), train(jax.jit(sw.autoscale(step, "fp8")))
    assert low != plain
    assert low[-1] < 0.9 * low[0]
    assert low[-1] == pytest.approx(plain[-1], rel=0.05)
