"""Control flow with graphs of its own, and ``flex_attention``, beside torch's own results."""

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import scalewise.torch as st
from pytorch.samples import normal

pytestmark = pytest.mark.filterwarnings("ignore")


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x.exp() * 2, lambda x: x - 1, (x,))


def loop(x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.1), (torch.tensor(0), x))[1]


def rows(x):
    return scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)


def causal(b, h, i, j):
    return i >= j


def biased(q, k, bias):
    def change(score, b, h, i, j):
        return score + bias[h, i] * (i - j)

    mask = create_block_mask(causal, None, None, 5, 5, device="cpu")
    return flex_attention(q, k, k, score_mod=change, block_mask=mask, enable_gqa=True)


def numbered(x, start):
    """``x[i]`` of a number in a tensor: its value isn't known when the graph is made."""
    return x[start] * x[:, start]


CALLS = [
    (branches, (normal(3),)), (branches, (-normal(3),)), (loop, (normal(3),)),
    (rows, (normal(3, 4),)), (biased, (normal(2, 4, 5, 8), normal(2, 2, 5, 8), normal(4, 5))),
    (numbered, (normal(4, 4), torch.tensor(1))), (numbered, (normal(4, 4), torch.tensor(-2))),
]  # fmt: skip


@pytest.mark.parametrize(("f", "args"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_results_are_torchs(f, args):
    function, params = st.function(f, args)
    wants = f(*args)
    gots = jax.jit(function)(params, *st.to_jax(args))
    for got, want in zip(
        *[x if isinstance(x, tuple) else (x,) for x in (gots, wants)], strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("f", "args"), [CALLS[0], CALLS[4]], ids=["cond", "flex_attention"])
def test_the_error_in_16_bits_is_torchs(f, args):
    want, got = f(*args).double(), f(*[x.bfloat16() for x in args]).double()
    error = st.audit(f, args, low="bf16", trials=0).error
    assert error.relative == pytest.approx(float((got - want).norm() / want.norm()), rel=0.3)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[1][0]


def above(x):
    return x[x > 0].sum()


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (Packed(), (normal(2, 5, 4), torch.tensor([5, 3])), "run the layer on the padded batch"),
        (above, (normal(4),), "test_control.py:.* keep all elements, and choose by torch.where"),
        (torch.unique, (normal(4),), "keep all elements"),
    ],
)
def test_shapes_that_depend_on_numbers_are_refused(model, args, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        st.function(model, args)


def test_a_float32_model_that_cannot_be_exported_is_told():
    class Narrow(nn.Module):
        def forward(self, x):
            if x.dtype == torch.float32:
                raise ValueError("this model runs in 16 bits")
            return x * 2

    with pytest.warns(UserWarning, match="compares with the 16-bit model computed in float32"):
        st.audit(Narrow(), (normal(3),), low="fp16", trials=0)


@pytest.mark.parametrize("f", [loop, lambda x: scan(add, torch.zeros(4, dtype=x.dtype), x)[1]])
def test_loops_are_audited(f):
    x = normal(3, 4)
    want, got = f(x).double(), f(x.bfloat16()).double()
    error = st.audit(f, (x,), low="bf16", trials=0).error
    assert error.relative == pytest.approx(float((got - want).norm() / want.norm()), rel=0.3)


def add(carried, row):
    return carried + row, carried * row
