"""Gradients beside torch's, where ties, zeros, padding or repeated indices decide them."""

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise.torch as st
from pytorch.samples import normal

pytestmark = pytest.mark.filterwarnings("ignore")


def check(function, *operands):
    """Compares a function's result, and its gradient by each float operand, with torch's."""
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in operands]
    want = function(*given)
    f, params = st.function(function, operands)
    arrays = st.to_jax(operands)
    weights = torch.linspace(1, 2, want.numel()).reshape(want.shape)
    floats = [i for i, x in enumerate(operands) if x.is_floating_point()]
    wants = torch.autograd.grad((want * weights).sum(), [given[i] for i in floats])

    def loss(*some):
        own = list(arrays)
        for i, x in zip(floats, some, strict=True):
            own[i] = x
        out = f(params, *own)
        return (out * st.to_jax(weights)).sum(), out

    gradients = jax.jit(jax.value_and_grad(loss, tuple(range(len(floats))), has_aux=True))
    (_, out), gots = gradients(*(arrays[i] for i in floats))
    np.testing.assert_allclose(out, want.detach(), rtol=1e-5, atol=1e-6)
    for got, gradient in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-6)


IDS = torch.tensor([[1, 2, 0, 0, 0], [2, 2, 3, 3, 1]])
TABLE = (2 * normal(5, 3)).round() / 2
EMBEDDINGS = {
    "padding_idx": lambda w: F.embedding(IDS, w, padding_idx=0),
    "negative padding_idx": lambda w: F.embedding(IDS, w, padding_idx=-2),
    "scale_grad_by_freq": lambda w: F.embedding(IDS, w, padding_idx=2, scale_grad_by_freq=True),
    "max_norm": lambda w: F.embedding(IDS, w, max_norm=0.5),
    "bags with frequencies": lambda w: F.embedding_bag(
        IDS[:, [0, 1]].sort(1).values, w, mode="sum", scale_grad_by_freq=True
    ),
    "bags of equal numbers": lambda w: F.embedding_bag(IDS, w, mode="max"),
    "bags with padding": lambda w: F.embedding_bag(IDS, w, mode="max", padding_idx=0),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_gradient_of_an_embedding_is_torchs(name):
    check(EMBEDDINGS[name], TABLE)


def test_padding_does_not_swamp_the_gradient_of_an_embedding():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 1)
            for i, p in enumerate(self.parameters()):
                p.data.copy_(normal(*p.shape, seed=i))

        def forward(self, ids):
            return self.out(self.embedding(ids)).square().sum(1).mean()

    ids = torch.zeros(16, 600, dtype=torch.long)
    ids[:, :8] = torch.arange(1, 9)
    report = st.audit(Text(), (ids,), low="bf16", grad=True, trials=0)
    assert report.error.relative < 0.01


CHANCES = torch.tensor([1, 0, 0, 1, 1, 0, 0.25, 0.75, 1e-7])
LABELS = torch.tensor([1, 0, 1, 0, 0.5, 0.5, 0.25, 0.3, 1])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_of_a_certain_cross_entropy_is_torchs(reduction):
    check(
        lambda x, y: F.binary_cross_entropy(x, y, reduction=reduction).reshape(-1), CHANCES, LABELS
    )


STEPWISE = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, LABELS.to(x.dtype)),
    "clamp": lambda x: F.relu(x - x[-2]).clamp(0, 0.25),
}


@pytest.mark.parametrize(
    ("name", "granularity"), [("binary_cross_entropy", "operation"), ("clamp", "decomposed")]
)
def test_a_derivative_in_16_bits_is_torchs_where_each_step_rounds(name, granularity):
    function, x = STEPWISE[name], CHANCES.bfloat16()
    given = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(function(given).sum(), given)
    f, params = st.function(function, (x,), granularity=granularity)
    got = jax.grad(lambda x: f(params, x).sum())(st.to_jax(x))
    np.testing.assert_allclose(np.float32(got), want.float(), rtol=2**-6)


def test_an_audit_trains_a_discriminator_with_certain_answers():
    def loss(x, weight):
        return F.binary_cross_entropy(torch.sigmoid(x @ weight), (x @ weight > 0).to(x.dtype))

    report = st.audit(
        loss, (normal(32, 8), 20 * normal(8, seed=1)), low="bf16", grad=True, trials=0
    )
    assert not report.error.non_finite


EQUAL = torch.tensor([[1.0, 3, 3, 0], [2, 2, 2, 2], [float("nan"), 1, float("nan"), 3]])
BOUNDS = torch.tensor([0.0, 2, 3, 3]), torch.tensor([1.0, 3, 2, 3])
AT_TIES = {
    "max and min": lambda x: torch.cat([x.max(1).values, x.min(0).values, x.max(1, True)[0][0]]),
    "pooling": lambda x: torch.cat([
        F.adaptive_max_pool1d(x[None, :2], 2).flatten(),
        F.adaptive_max_pool2d(x[None, :2], 1).flatten(),
        F.max_pool2d(x[None, :2], 2, 1, 1, return_indices=True)[0].flatten(),
        F.max_pool1d(x[None, :2], 2, dilation=2).flatten(),
        F.max_pool2d(x[None, :2], 2, 1).flatten(),
    ]),
    "median": lambda x: torch.stack([
        x[:2].median(), x[1].median(), x.median(), x.nanmedian(), *x.median(1).values,
    ]),
    "fmax and fmin": lambda x: torch.cat([torch.fmax(x, x.flip(1)), torch.fmin(x, x * x / 2)]),
    "clamp": lambda x: torch.cat([x.clamp(1, 2), x.clamp(2, 1), x.clamp(min=3), x.clamp(max=2)]),
    "cummax": lambda x: torch.cat([x.cummax(1).values, x.cummin(1).values]),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_TIES)
def test_a_gradient_is_shared_by_equal_numbers_as_in_torch(name):
    check(AT_TIES[name], EQUAL)


def test_the_gradients_of_bounds_are_torchs():
    check(lambda x, low, high: torch.clamp(x, low, high), EQUAL[:2], *BOUNDS)
    check(lambda x, low: x.clamp(min=low) + x.clamp(max=low), EQUAL[:2], BOUNDS[0])


FACTORS = torch.tensor([[1.0, 0, 3, 0], [2, 0, 0.5, 2], [3, 1, 0, 2]])
PLACES = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [2, 1, 1, 1]])


@pytest.mark.parametrize("own", [True, False])
def test_the_gradient_of_a_product_at_repeated_places_is_torchs(own):
    def scattered(x, y):
        rows = x.index_reduce(
            0, torch.tensor([1, 1, 0]), y[[0, 0, 2]] + 1, "prod", include_self=own
        )
        return x.scatter_reduce(0, PLACES, y, "prod", include_self=own) + rows

    y = FACTORS.clone()
    y[1, 1] = 4  # torch refuses several zeros of a place
    check(scattered, normal(3, 4), y)


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
def test_integers_are_reduced_as_by_torch(reduce):
    def reduced(x, y):
        return x.scatter_reduce(0, PLACES, y, reduce, include_self=False)

    x, y = torch.arange(12).reshape(3, 4), torch.arange(-7, 5).reshape(3, 4)
    f, params = st.function(reduced, (x, y))
    np.testing.assert_array_equal(f(params, *st.to_jax((x, y))), reduced(x, y))


def test_the_gradient_of_a_multilabel_margin_is_torchs():
    x = torch.tensor([[0.1, 0.2, 0.4, 0.8], [1, 0.5, 0.2, -3]])
    targets = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2]])
    check(lambda x: F.multilabel_margin_loss(x, targets, reduction="none"), x)


def written(x, y):
    x = x @ x.mT
    x.diagonal().add_(y.diagonal())
    x[:2].diagonal(1).mul_(2)
    x[0, 1:3] = y[0, :2]
    return x


def test_a_model_may_write_into_a_diagonal():
    check(written, normal(4, 4), normal(4, 4, seed=1))


ZEROS = torch.tensor([0, -0.0, 0, 1, -1, 2, 0.5])
OTHERS = torch.tensor([0.0, 0, 2, 0, 0.0, 3, -1])
AT_ZERO = {
    "one": lambda x: torch.stack([
        x.angle(), torch.special.i0(x), torch.copysign(x, OTHERS), torch.copysign(x, -1.0),
        torch.where(x < 0, 0, torch.zeros_like(x) ** x.abs()), F.relu(x) ** OTHERS,
    ]),
    "two": lambda x: torch.stack([torch.atan2(x, OTHERS), torch.atan2(OTHERS, x)]),
    "norm": lambda x: torch.linalg.vector_norm(x, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ZERO)
def test_a_derivative_at_zero_is_torchs(name):
    check(AT_ZERO[name], ZEROS)


def test_results_of_nan_and_zero_are_torchs():
    def f(x):
        functions = torch.sign, torch.sgn, torch.digamma, torch.angle
        return torch.stack([*(f(x) for f in functions), x.cummax(0).values, x.cummin(0).values])

    x = torch.tensor([3.0, 0, -0.0, -2.5, float("nan"), 1])
    g, params = st.function(f, (x,))
    np.testing.assert_allclose(g(params, st.to_jax(x)), f(x), rtol=1e-5)


WIDE = 3 * normal(16, 32)
POSITIVE, SMALL = WIDE.abs() + 0.5, (WIDE / 12).clamp(-0.8, 0.8)
SAVED = {
    "sigmoid": (lambda x: torch.sigmoid(x + 4), WIDE),
    "tanh": (torch.tanh, WIDE), "rsqrt": (torch.rsqrt, POSITIVE), "sqrt": (torch.sqrt, POSITIVE),
    "exp2": (torch.exp2, WIDE), "log2": (torch.log2, POSITIVE), "log10": (torch.log10, POSITIVE),
    "reciprocal": (torch.reciprocal, POSITIVE), "atanh": (torch.atanh, SMALL),
    "erf": (torch.erf, SMALL), "erfc": (torch.erfc, SMALL), "erfinv": (torch.erfinv, SMALL),
    "pow": (lambda x: x**1.5, POSITIVE), "root": (lambda x: x**0.5, POSITIVE),
    "pow of a number": (lambda x: 2**x, WIDE), "softmax": (lambda x: x.softmax(-1), WIDE),
    "logsumexp": (lambda x: x.logsumexp(-1), WIDE), "var": (lambda x: x.var(-1), WIDE),
    "std": (lambda x: x.std(-1), WIDE), "norm": (lambda x: x.norm(dim=-1), WIDE),
    "norm of order 3": (lambda x: x.norm(p=3, dim=-1), WIDE),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(16)), WIDE),
}  # fmt: skip


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", SAVED)
def test_a_derivative_in_16_bits_is_of_what_torch_saves(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(SAVED[name][1].bfloat16().float())

        def forward(self, weights):
            return (SAVED[name][0](self.x) * weights).sum()

    shape = SAVED[name][0](SAVED[name][1]).shape
    model, weights = Model(), normal(*shape, seed=1).bfloat16().float()
    model(weights).backward()
    narrow = Model().bfloat16()
    narrow(weights.bfloat16()).backward()
    want = relative(narrow.x.grad, model.x.grad)
    report = st.audit(Model(), (weights,), low="bf16", grad=True, trials=0)
    got = dict(report.outputs)["[1]['x']"].relative
    assert got == pytest.approx(want, rel=0.25)


@pytest.mark.parametrize("inner", [True, False])
def test_a_derivative_of_examples_side_by_side_is_that_of_each(inner):
    """In 16 bits, where it is of the rounded result, and at the bounds of a clamp."""
    x = torch.cat([torch.zeros(1), torch.ones(1), normal(6)]).bfloat16()
    f, params = st.function(lambda x: torch.sigmoid(x + 4) + x.clamp(0, 1), (x[0],))

    def one(x):
        return f(params, x).astype(np.float32)

    side_by_side = jax.grad(lambda x: jax.vmap(one)(x).sum()) if inner else jax.vmap(jax.grad(one))
    want = [float(jax.grad(one)(y)) for y in st.to_jax(x)]
    np.testing.assert_array_equal(np.float32(side_by_side(st.to_jax(x))), want)
    assert min(want[:2]) > 1  # at both bounds
