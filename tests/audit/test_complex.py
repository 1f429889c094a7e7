"""Outputs of complex numbers: compared by their parts; they stay in the program's own dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

x = normal(0, (64,))
ONES = jnp.ones(64, jnp.complex64)


def spectrum(x):
    return jnp.fft.fft(x * x * 300.0)


def spectrum_and_mean(x):
    return {"z": jnp.fft.rfft(x * x), "mean": jnp.mean(x)}


def step(params, x):
    def loss(params):
        y = jnp.fft.ifft(jnp.fft.fft(x) * params["w"])
        return jnp.sum(jnp.abs(y) ** 2) * params["gain"]

    loss, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * jnp.conj(g), params, gradients), loss


@pytest.mark.parametrize("low", ["fp16", "bf16", *nightly(["e5m2"])])
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (spectrum, (x,)),
        *nightly([(spectrum_and_mean, (x,)), (step, ({"w": ONES, "gain": jnp.float32(1)}, x))]),
    ],
)
@pytest.mark.filterwarnings("ignore:emulate")
def test_the_error_is_that_of_emulate(f, args, low):
    report = sw.audit(f, low, trials=0, dtypes="all")(*args)
    assert "complex numbers stay" in report.semantics
    lows, own = (jax.tree.leaves(g(*args)) for g in (sw.emulate(f, low), f))
    for (path, error), y, s in zip(report.outputs, lows, own, strict=True):
        size = np.linalg.norm(np.asarray(s, complex))
        apart = np.linalg.norm(np.asarray(y, complex) - np.asarray(s)) / size
        assert error.relative == pytest.approx(apart, rel=1e-3, abs=1e-6), path


def test_a_fault_before_the_complex_numbers_is_found():
    def f(x):
        energy = jnp.sum(x * x * 3e4)  # beyond 65504
        return jnp.fft.fft(x * energy)

    report = sw.audit(f, "fp16")(x)
    assert report.fails
    assert {finding.kind for finding in report.findings} == {"overflow"}
    assert report.error_fixed.relative < 1e-3


def test_a_lost_change_of_a_complex_state():
    def f(z, x):
        return z + (1e-9 * x).astype(jnp.complex64)

    report = sw.audit(f, "fp16")(ONES * 0, x)
    assert report.error.relative == pytest.approx(1, rel=0.1)
    assert report.findings[0].kind == "underflow"


def test_complex_numbers_alone_are_nothing_to_compare():
    with pytest.raises(ValueError, match="Complex numbers stay in their own dtype"):
        sw.audit(lambda z: z * 2, "fp16")(ONES)
