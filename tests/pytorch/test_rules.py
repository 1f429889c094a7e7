"""Each rule beside torch's own kernel, in float32 and in 16 bits."""

import jax
import numpy as np
import pytest
import torch

import scalewise.torch as st
from cases import nightly
from pytorch.more_samples import MORE
from pytorch.samples import OTHER, SAMPLES
from scalewise.torch._convert import jax_dtype
from scalewise.torch._graph import apply
from scalewise.torch._registry import IN_STEPS
from scalewise.torch._torch import aten

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::UserWarning:torch")
# One unit in the last place, and float32's own error, relative to the result (or a twentieth of the
# largest one, of sums that cancel).
ALL = SAMPLES | MORE
NO_KERNEL = (
    "not implemented for", "doesn't support tensors of type", "only supported for half",
    "Expected both inputs to be Half", "Low precision dtypes not supported",
)  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def cast(tree, dtype):
    def leaf(x):
        floats = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
        return x.to(dtype) if floats else x

    return jax.tree.map(leaf, tree)


def split(sample):
    kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
    return sample[: len(sample) - bool(kwargs)], kwargs


def test_every_rule_has_samples():
    assert set(st.RULES) == set(ALL) | OTHER


@pytest.mark.parametrize("dtype", nightly(TOLERANCE, but=[*TOLERANCE][:1]), ids=str)
@pytest.mark.parametrize(
    "overload", nightly(ALL, but=[*ALL][:120]), ids=lambda o: str(o).removeprefix("aten.")
)
def test_a_rule_gives_what_torch_gives(overload, dtype):
    for sample in ALL[overload]:
        args, kwargs = cast(split(sample), dtype)
        try:
            want = overload(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if dtype == torch.float32 or not any(x in str(error) for x in NO_KERNEL):
                raise
            continue  # torch has no kernel in 16 bits on a CPU
        wants = [x for x in jax.tree.leaves(want) if isinstance(x, torch.Tensor)]
        dtypes = [jax_dtype(x.dtype) for x in wants]
        got = jax.tree.leaves(apply(overload, *st.to_jax((args, kwargs)), dtypes, "operation"))
        exact = jax.tree.leaves(overload(*cast(args, torch.float64), **cast(kwargs, torch.float64)))
        exact = [x for x in exact if isinstance(x, torch.Tensor)]
        for y, x, z in zip(got, wants, exact, strict=True):
            assert y.shape == tuple(x.shape)
            compare(np.asarray(y), x, z, TOLERANCE[dtype])


STEPS = {  # reductions come after the steps, so that they show in every number
    "mse_loss": lambda a, b: (a, b, 0),
    "l1_loss": lambda a, b: (a, b, 0),
    "smooth_l1_loss": lambda a, b: (a, b, 1, 0.5),
    "huber_loss": lambda a, b: (a, b, 0, 0.7),
    "kl_div": lambda a, b: (a, b.softmax(-1), 0),
    "binary_cross_entropy": lambda a, b: (a.sigmoid(), b.sigmoid(), None, 0),
    "binary_cross_entropy_with_logits": lambda a, b: (a, b.sigmoid(), b[0], b[1].exp(), 0),
    "xlogy": lambda a, b: (a, b.exp()),
    "logsumexp": lambda a, b: (a, [-1]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_step_rounds_where_torch_rounds_in_steps(dtype):
    random = torch.Generator().manual_seed(0)
    operands = [2 * torch.randn(64, 8, generator=random).to(dtype) for _ in range(2)]
    assert {x.__name__.partition(".")[0] for x in IN_STEPS} == {*STEPS}
    for overload in IN_STEPS:
        if dtype == torch.float16 and overload is torch.ops.aten.huber_loss.default:
            continue  # torch's kernel for FP16 on a CPU computes in float32; that for CUDA doesn't
        args = STEPS[overload.__name__.partition(".")[0]](*operands)
        want = overload(*args)
        got = apply(overload, *st.to_jax((args, {})), [jax_dtype(dtype)], "operation")
        assert (st.to_torch(got) == want).double().mean() > 0.995, overload


def compare(got, want, exact, tolerance):
    """Checks that a result is torch's, or the exact one: some kernels of torch round more often."""
    if want.dtype.is_complex:
        want, exact = (torch.view_as_real(z.resolve_conj()) for z in (want, exact))
        got = np.stack([got.real, got.imag], -1)
    if not want.dtype.is_floating_point:
        np.testing.assert_array_equal(got, want.numpy())
        return
    got, want, exact = np.float64(got), want.double().numpy(), exact.double().numpy()
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    got, want, exact = got[finite], want[finite], exact[finite]
    scale = np.maximum(np.abs(want), 0.05 * np.abs(want).max(initial=0.0))
    error = np.minimum(np.abs(got - want), np.abs(got - exact))
    np.testing.assert_array_less(error, tolerance * scale + 1e-30)


def test_rules_may_name_operators_that_this_torch_lacks():
    gone = aten.no_such_operator.default
    assert {gone: 1}[aten.no_such_operator.default] == 1
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    with pytest.raises(AttributeError, match=r"has no aten\.no_such_operator\.default"):
        gone()
