"""A loss scale that the audit tries has the bits of one written by hand."""

import html
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failures.gallery.short import normalised_step
from failures.programs import load
from rich.console import Console

import scalewise as sw
from arrays import normal
from scalewise.auditing._tape._loss_scale import LossScaled
from scalewise.autocasting import Autocast
from scalewise.interpret import transform

POLICY = sw.Policy(compute="f16")
WEIGHTS = normal(0, (8, 8)) / 3
X = normal(1, (16, 8))


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (cube(x), x), lambda x, g: (g * (1.0 + 2.0) * x**2,))


def layers(w, x):
    def layer(x, _):
        return jnp.tanh(x @ w), jnp.sum(x * x)

    x, sums = jax.lax.scan(jax.checkpoint(layer), x, None, length=3)
    return jnp.mean(jnp.square(x @ w)) + 1e-3 * jnp.mean(sums)


def branches(w, x):
    h = jax.lax.cond(x[0, 0] > 0, lambda h: jnp.maximum(h, 0.0), cube, x @ w)
    one = jnp.take(jax.vmap(lambda row: row @ w)(h), jnp.arange(4), axis=0)
    return jnp.sum(jax.nn.logsumexp(one, axis=-1)) / jnp.sqrt(jnp.sum(w * w))


def pooled(w, x):
    h = jax.lax.conv(x.reshape(1, 1, 16, 8), w.reshape(4, 1, 4, 4), (1, 1), "SAME")
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jnp.mean(jnp.pad(h, ((0, 0), (0, 0), (1, 1), (1, 1))) ** 2)


@pytest.mark.parametrize("loss", [layers, branches, pooled])
@pytest.mark.slow
def test_equals_a_loss_scale_by_hand_to_the_bit(loss):
    """Under 2^-24 half of a gradient is lost in FP16; through loops, branches and custom rules."""
    factor, power = jnp.float32(1e-7), 20

    def tiny(w, x):
        return loss(w, x) * factor

    def by_hand(w, x):
        loss, gradient = jax.value_and_grad(lambda w: tiny(w, x) * 2.0**power)(w)
        return loss, gradient * 2.0**-power

    plain = jax.value_and_grad(tiny)
    want = jax.jit(sw.autocast(by_hand, POLICY))(WEIGHTS, X)[1]
    low = LossScaled(Autocast(POLICY), power)
    got = jax.jit(transform(plain, low, name="audit"))(WEIGHTS, X)[1]
    np.testing.assert_array_equal(got, want)
    right = plain(WEIGHTS, X)[1]
    assert jnp.linalg.norm(got - right) < 0.02 * jnp.linalg.norm(right)


def test_rematerialised_values_are_not_scaled():
    """The backward pass has recomputed values of 2^15 and gradients of 2^-30."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.square(x * w) / 2.0**15

    def loss(w, x):
        return jnp.sum(layer(x, w)) * 2.0**-24

    report = sw.audit(jax.grad(loss), "fp16", trials=2)(jnp.full(64, 200.0), jnp.ones(64))
    worst = report.findings[0]
    assert str(worst.fix).startswith("loss scale 2^")
    assert worst.error_after == 0.0 < 0.5 < worst.error_before


def test_a_pair_of_fixes_that_help_only_together():
    report = sw.audit(normalised_step, "fp16", trials=10)(
        *load("gallery")["A loss scale isn't enough"].args()
    )
    assert any(str(x.fix).startswith("loss scale 2^") for x in report.findings)
    assert report.error.non_finite == 16
    assert report.error_fixed.relative < 1e-3
    assert len({x.order for x in report.findings}) > 1


def test_lines_that_only_help_together_have_one_change():
    def f(x):
        square = x * x
        larger = square * 4
        return jnp.sqrt(larger) * 1e-2

    report = sw.audit(f, "fp16")(jnp.full(4, 300.0))
    assert [x.line - f.__code__.co_firstlineno for x in report.findings] == [1, 2]
    assert [x.order for x in report.findings] == [1, 1]
    page, console = html.unescape(report._repr_html_()), Console(file=io.StringIO(), width=1000)
    report.show(console=console)
    for text, link in (
        (console.file.getvalue(), "     the change for 1: error"),
        (page, 'The <a href="#finding-1">change for finding 1</a>: error'),
    ):
        assert text.count(link) == 1
        assert str(report.findings[1].fix) not in text
