"""Models in 16 bits beside torch's own CPU kernels: operation by operation, and as a whole."""

import copy
import math

import jax
import numpy as np
import pytest
import torch

import scalewise.torch as st
from cases import nightly
from pytorch.test_models import CONFIGS, made
from scalewise.torch._export import export
from scalewise.torch._graph import _dtypes, apply, hashable
from scalewise.torch._place import line_of

pytestmark = pytest.mark.filterwarnings("ignore")

# torch's CPU kernels for these round between their steps; those for CUDA don't.
ROUND_WITHIN = {"aten.log_softmax.int", "aten.pow.Tensor_Scalar"}
SUMS = {"aten.linear.default", "aten.scaled_dot_product_attention.default", "aten.matmul.default"}


class Beside(torch.fx.Interpreter):
    """Runs a graph by torch's kernels, and each operation by its rule on the same operands.

    Attributes:
        errors: line, operation, share of numbers that differ, and largest error in units of the
            result's largest number times the dtype's eps.
    """

    def __init__(self, module, dtype):
        super().__init__(module)
        self.dtype, self.errors = dtype, []

    def run_node(self, n):
        out = super().run_node(n)
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.compare(n, hashable((tuple(args), dict(kwargs))), out)
        return out

    def compare(self, node, given, out):
        wants = [x for x in jax.tree.leaves(hashable(out)) if isinstance(x, torch.Tensor)]
        if not any(x.dtype == self.dtype for x in wants):
            return
        args, kwargs = st.to_jax(jax.tree.map(within_int32, given))
        got = jax.tree.leaves(
            apply(node.target, args, kwargs, _dtypes(node.meta["val"]), "operation")
        )
        for y, x in zip(got, wants, strict=True):
            if x.dtype == self.dtype:
                y, x = np.float64(np.asarray(y)), x.double().numpy()
                np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x))
                finite = np.isfinite(x)
                error = np.abs(y - x, where=finite, out=np.zeros(x.shape))
                unit = np.abs(x, where=finite, out=np.zeros(x.shape)).max(initial=0.0)
                unit = unit * torch.finfo(self.dtype).eps or math.inf
                self.errors.append(
                    (
                        line_of(node),
                        str(node.target),
                        np.mean(error > 0),
                        error.max(initial=0) / unit,
                    )
                )


def within_int32(x):
    """Infinities become the largest int64 in torch, the largest int32 in JAX."""
    wide = isinstance(x, torch.Tensor) and x.dtype == torch.int64
    return x.clamp(-(2**31), 2**31 - 1) if wide else x


def operands(exported, model, kwargs):
    """Returns the values of a graph's placeholders."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    inputs = dict(zip(exported.inputs, kwargs.values(), strict=True))
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.name in exported.weights:
                yield parameters[exported.weights[node.name]].detach()
            elif node.name in inputs:
                yield inputs[node.name]
            else:
                yield st.to_torch(exported.values[node.name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *nightly([torch.float16])], ids=str)
@pytest.mark.parametrize("name", nightly(CONFIGS, but=[*CONFIGS][:1]))
def test_each_operation_gives_torchs_bits(name, dtype):
    model, kwargs = made(name)
    low = copy.deepcopy(model).to(dtype)
    exported = export(low, (), kwargs, "forward", "operation")
    beside = Beside(exported.graph_module, dtype)
    with torch.no_grad():
        beside.run(*operands(exported, low, kwargs))
    assert len(beside.errors) > 50
    for line, name, share, largest in beside.errors:
        if name in ROUND_WITHIN:
            assert largest <= 1, (line, name)
        elif name in SUMS:  # ties, decided by the order of the sum
            assert share <= 0.01, (line, name, share)
            assert largest <= 1, (line, name)
        else:
            assert share == 0, (line, name, share)


@pytest.mark.parametrize(
    ("fmt", "dtype"), [("bf16", torch.bfloat16), *nightly([("fp16", torch.float16)])]
)
@pytest.mark.parametrize("name", nightly(CONFIGS, but=[*CONFIGS][:1]))
def test_emulate_agrees_with_torch_in_16_bits(name, fmt, dtype):
    model, kwargs = made(name)
    with torch.no_grad():
        want = copy.deepcopy(model).to(dtype)(**kwargs).logits.float()
        plain = model(**kwargs).logits
    got = st.emulate(model, fmt)(**kwargs)["logits"]
    assert (got != want).float().mean() < 0.01  # the order of a sum decides a tie
    assert (got - want).norm() < 0.05 * (plain - want).norm()
