"""Models of timm: outputs, gradients and an audit."""

import importlib.util

import jax
import numpy as np
import pytest
from experiments.torch_architectures import TIMM, of_timm

import scalewise.torch as st

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm isn't installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_outputs_gradients_and_an_audit(name):
    model, (x,), _ = of_timm(name)
    f, params = st.function(model, (x,))
    want = model(x)
    got = jax.jit(f)(params, st.to_jax(x))
    largest = max(want.abs().max().item(), 1.0)
    np.testing.assert_allclose(got, want.detach(), atol=1e-5 * largest)
    want.square().mean().backward()
    gradients = jax.jit(jax.grad(lambda p: (f(p, st.to_jax(x)) ** 2).mean()))(params)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in wanted.values())
    for key, gradient in wanted.items():
        np.testing.assert_allclose(gradients[key], gradient, atol=1e-4 * largest)
    report = st.audit(model, (x,), low="bf16", trials=0)
    assert 2**-12 < report.error.relative < 0.1
    assert not report.error.non_finite
