"""Backward passes that a model defines itself: traced, with their own lines, or refused."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import scalewise.torch as st
from pytorch.samples import normal

pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 + 0.1 * x, None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return x * weight, x + weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, first, second):
        x, weight = ctx.saved_tensors
        return first * weight * 2, (first * x).sum(0) * 5 + second.sum(0)


def helper(y):
    return y.exp() * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(normal(4))

    def forward(self, x):
        first, second = Pair.apply(Scaled.apply(self.layer(x), 0.3), self.weight)
        return (helper(first) * second.sin()).sum()


def test_custom_backward_passes_are_used():
    model, x = Custom(), normal(3, 4)
    model(x).backward()
    f, params = st.function(model, (x,))
    gradients = jax.grad(f)(params, st.to_jax(x))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        large = x.abs().exp()
        return gradient / (1 + large) * large / (1 + large)


def test_a_custom_backward_pass_has_its_own_lines():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return Exponential.apply(self.layer(x) * 15).mean()

    report = st.audit(Layer(), (normal(16, 8),), low="fp16", grad=True, trials=6)
    worst, first = report.findings[0], Exponential.backward.__code__.co_firstlineno
    assert (worst.kind, worst.line, worst.direction) == ("overflow", first + 3, "backward")


def test_a_backward_pass_that_cannot_be_traced_is_refused():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient if float(gradient.sum()) > 0 else -gradient

    f, params = st.function(lambda x: Odd.apply(x).sum(), (normal(3),))
    assert np.isfinite(f(params, st.to_jax(normal(3))))
    with pytest.raises(ValueError, match="the backward pass of Odd can't be traced"):
        jax.grad(f, argnums=1)(params, st.to_jax(normal(3)))


def test_findings_name_the_lines_of_helper_functions():
    report = st.audit(Custom(), (normal(3, 4),), low="fp16", trials=0)
    exp = next(e for e in report.equations if e.primitive == "exp")
    assert exp.function == "helper"
    assert exp.line == helper.__code__.co_firstlineno + 1
