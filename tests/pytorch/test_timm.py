"""Models of timm, which imports torchvision for parts that its models don't use.

torchvision's release has to match torch's, and its wheels need CUDA's build of it. So timm is
installed without its dependencies, and imported with stand-ins for what it takes from torchvision.
"""

import importlib.util
import sys
import types
from unittest import mock

import jax
import numpy as np
import pytest
import torch

import scalewise.torch as st

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm isn't installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")

IMAGE = {"in_chans": 3, "num_classes": 10}
# Of timm's registry: the arguments that make the model small.
MODELS = {
    "vit_tiny_patch16_224": {
        "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
    },
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
}  # fmt: skip


class FrozenBatchNorm2d(torch.nn.Module):
    """A class that no layer of the models is an instance of."""


@pytest.fixture(scope="module")
def timm():
    """timm, imported while stand-ins for torchvision's modules are there, and only then."""
    if importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    names = ("ops", "datasets", "transforms", "transforms.functional")
    modules = {f"torchvision.{name}": mock.MagicMock() for name in names}
    misc = types.ModuleType("torchvision.ops.misc")
    misc.FrozenBatchNorm2d = FrozenBatchNorm2d
    modules |= {"torchvision": mock.MagicMock(), "torchvision.ops.misc": misc}
    sys.modules.update(modules)
    try:
        return importlib.import_module("timm")
    finally:
        for name in modules:
            del sys.modules[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_an_audit(timm, name):
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **IMAGE, **MODELS[name]).eval()
    random = torch.Generator().manual_seed(0)
    size = 16 if name.startswith("vit") else 32
    x = torch.randn(2, 3, size, size, generator=random)
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
