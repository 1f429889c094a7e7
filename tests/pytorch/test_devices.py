"""torch models whose products a device's matrix units add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import scalewise as sw
import scalewise.torch as st
from scalewise.devices import MatrixUnits, matrix_unit


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2048, 4, bias=False)
        with torch.no_grad():
            self.layer.weight.abs_()

    def forward(self, x):
        return torch.tanh(self.layer(x) / 64)


@pytest.fixture
def inputs():
    return torch.rand(8, 2048, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("device", "dtype"), [
    ("volta", torch.float16), ("h100", torch.float16), ("h100", torch.bfloat16),
])  # fmt: skip
def test_operands_of_16_bits_have_their_own_units(device, dtype, inputs):
    """An operation of ATen computes in float32, which the device would multiply as TF32."""
    x, layer = inputs.to(dtype), torch.nn.Linear(2048, 4).to(dtype)
    units = MatrixUnits(device, result="fp16")
    found = st.to_jax(st.emulate(layer, device=units)(x))
    a, w, bias = (st.to_jax(t.detach()) for t in (x, layer.weight, layer.bias))
    unit = units.unit(a.dtype, w.dtype)
    product = sw.ops.matmul(a, w.T, accumulator=unit, out=jnp.float32)
    np.testing.assert_array_equal(found, (product + bias.astype(jnp.float32)[None]).astype(a.dtype))
    if dtype == torch.float16:  # BF16 has no accumulator in FP16
        plain = matrix_unit(device, "fp16")
        wide = sw.ops.matmul(a, w.T, accumulator=plain, out=jnp.float32)
        assert not np.array_equal(product, wide)


def test_gradients_and_other_products_are_emulated(inputs):
    class Several(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
            self.convolution = torch.nn.Conv1d(16, 4, 3)

        def forward(self, x):
            y = self.attention(x, x, x)[0]
            return self.convolution(y.transpose(1, 2)).float().sum()

    torch.manual_seed(0)
    model = Several().half()
    x = inputs.reshape(8, 128, 16)[:2].half()
    f, params = st.function(model, (x,))
    plain, found = (
        jax.grad(lambda p, g=g: g(p, st.to_jax(x)))(params)
        for g in (f, sw.emulate(f, device=MatrixUnits("h100", result="fp16")))
    )
    far = [
        float(np.linalg.norm(np.float32(a) - np.float32(b)) / np.linalg.norm(np.float32(b)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True)
        if np.any(np.float32(b))
    ]
    assert 0 < max(far) < 0.05


def test_an_audit_names_the_models_line(inputs):
    line = Pooled.forward.__code__.co_firstlineno + 1
    for low, device in (("fp8", "h100"), ("fp16", MatrixUnits("h100", result="fp16"))):
        report = st.audit(Pooled(), (inputs,), low=low, device=device)
        assert [(x.kind, x.line) for x in report.findings] == [("accumulation", line)]
        assert float(report.error_fixed) < 0.3 * float(report.error)


def test_a_device_that_is_not_known_is_refused(inputs):
    with pytest.raises(ValueError, match="nobody has published"):
        st.emulate(Pooled(), device="v5e")
    with pytest.raises(ValueError, match="a format or a device"):
        st.emulate(Pooled())
    with pytest.raises(ValueError, match="needs a recipe as low"):
        st.audit(Pooled(), (inputs,), low="e4m3fn", device="h100")
