"""Digits that agree between runs whose results are rounded at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.auditing import stability


def lines(found):
    return {x.primitive: x for x in found.lines}


@pytest.mark.thorough
def test_a_cancellation_leaves_no_digits():
    def lost(x):
        y = x * x + 100.0
        return y - 100.0

    found = stability(lost, "bf16")(jnp.linspace(0.3, 0.7, 64))
    by_primitive = lines(found)
    assert by_primitive["sub"].digits < 1
    assert by_primitive["add"].digits > 2
    assert found.outputs[0].digits == by_primitive["sub"].digits
    assert found.outputs[0].error > 0.3
    text = str(found)
    assert "lost in bf16, 5 runs" in text.replace("test_a_cancellation_leaves_no_digits.", "")
    assert text.count("test_stability.py:") == 2


@pytest.mark.thorough
def test_the_spread_is_that_of_the_format():
    x = jnp.linspace(1.1, 1.9, 200)
    found = [stability(lambda x: x * x, low)(x).outputs[0] for low in ("fp16", "bf16")]
    # errors of stochastic rounding have a standard deviation of up to half a unit in the last place
    for output, low in zip(found, ("fp16", "bf16"), strict=True):
        eps = float(sw.format(low).eps)
        assert eps / 20 < output.spread < eps
        assert output.digits == pytest.approx(-np.log10(max(output.spread, eps)))
    exact = stability(lambda x: x * 2.0, "bf16")(jnp.arange(1.0, 9.0))
    assert exact.outputs[0].spread == 0


@pytest.mark.slow
def test_loops_draws_and_gradients():
    def loss(w, x):
        def body(c, x):
            return jnp.tanh(c * w + x), c

        h, _ = jax.lax.scan(body, jnp.float32(0.1), x)
        noise = jax.random.normal(jax.random.key(0), (50,))
        return h + 0 * jnp.sum(noise * w)

    found = stability(jax.grad(loss), "e4m3fn", runs=3)(jnp.float32(0.5), jnp.linspace(0, 1, 20))
    assert all(np.isfinite(x.spread) for x in found.lines)  # a draw isn't rounded before it is used
    assert 0 < found.outputs[0].digits < 2


def test_bad_input():
    with pytest.raises(ValueError, match="runs is 1; expected an integer of at least 2"):
        stability(jnp.sin, "bf16", runs=1)
    with pytest.raises(TypeError, match="f is 3; expected a function"):
        stability(3)  # pyright: ignore
    with pytest.raises(TypeError, match=r"stability\(sin\) was called under jit"):
        jax.jit(lambda x: stability(jnp.sin, "bf16")(x).runs)(1.0)
