"""Failures of PyTorch programs in 16 bits, of a line each, from before they were audited.

No expert's version is given: a fix has to remove three quarters of the error.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from . import LOST, normal, reported

failure = partial(reported, "common", prefix="lines.")
OVER, UNDER = ("overflow",), ("underflow",)
X, W = normal(16, 64), normal(64, 64, seed=1)
BIG = normal(16, 64, scale=400.0)
TINY = normal(16, 64, scale=1e-4)


@failure("fp16", OVER, BIG)
def norm_by_squares(x):
    squares = x * x  # <- here
    return x / squares.mean(-1, keepdim=True).sqrt()


@failure("fp16", OVER, BIG)
def variance_by_power(x):
    spread = (x - x.mean()).pow(2)  # <- here
    return (spread.mean(-1)).sqrt()


@failure("fp16", OVER, X * 80, W * 80)
def unscaled_scores(x, w):
    scores = x @ w  # <- here
    return torch.softmax(scores / 1e4, -1)


@failure("fp16", OVER, X * 8)
def exponential(x):
    weights = torch.exp(x)  # <- here
    return weights / weights.sum(-1, keepdim=True)


@failure("fp16", OVER, X.abs() * 300 + 1)
def long_product(x):
    area = x[:, :32] * x[:, 32:]  # <- here
    return torch.log(area)


@failure("fp16", OVER, normal(8, 5000).abs() * 30)
def long_sum(x):
    total = x.sum(-1)  # <- here
    return x[:, :4] / total[:, None]


@failure("fp16", OVER, X)
def mask_of_a_billion(x):
    scores = x.masked_fill(x < 5, -1e9)  # <- here
    return torch.softmax(scores, -1)


@failure("fp16", UNDER, TINY)
def squares_of_small_numbers(x):
    squares = x * x  # <- here
    return (squares.mean(-1) * 1e8).sqrt()


@failure("fp16", UNDER, normal(16, 64) * (torch.arange(64) % 2))
def epsilon_beside_zero(x):
    size = x.abs() + 1e-8  # <- here
    return x / size


@failure("fp16", UNDER, -12 - X.abs() * 2)
def probability(x):
    chance = torch.sigmoid(x)  # <- here
    return torch.log(chance * 1e3)


@failure("fp16", UNDER, X * 1e-4, W * 1e-4)
def product_of_small_weights(x, w):
    y = x @ w  # <- here
    return y * 1e8


@failure("fp16", UNDER, X.abs() * 20 + 20)
def gaussian(x):
    density = torch.exp(-x)  # <- here
    return density * 1e12


@failure("fp16", UNDER, X * 1e-3)
def learning_rate(x):
    step = x * 1e-6  # <- here
    return step * 1e6


@failure("bf16", LOST, torch.arange(2000, 2600).float())
def positions(x):
    angle = x * 0.37  # <- here
    return torch.sin(angle)


@failure("bf16", LOST, X * 1e-3 + 30)
def cancelled_mean(x):
    centred = x - x.mean()  # <- here
    return centred / centred.std()


@failure("bf16", LOST, X + 50)
def difference_of_squares(x):
    variance = (x * x).mean(-1) - x.mean(-1) ** 2  # <- here
    return variance


@failure("bf16", LOST, normal(4, 4096).abs())
def running_sum(x):
    total = torch.cumsum(x, -1)  # <- here
    return total[:, 1:] - total[:, :-1]


@failure("bf16", LOST, X * 1e-3)
def one_plus(x):
    y = 1 + x  # <- here
    return torch.log(y)


@failure("bf16", LOST, X * 1e-3)
def one_minus_cosine(x):
    y = torch.cos(x)  # <- here
    return 1 - y


@failure("bf16", LOST, X * 1e-3)
def exponential_minus_one(x):
    y = torch.exp(x)  # <- here
    return y - 1


@failure("fp16", OVER, X * 100)
def cubes(x):
    y = x**3  # <- here
    return y / (1 + y.abs())


@failure("fp16", OVER, BIG)
def energy(x):
    total = (x / 16).square().sum()  # <- here
    return total.log()


@failure("fp16", OVER, X.abs() * 1e-3 + 1e-5)
def reciprocal(x):
    y = 1 / x.square()  # <- here
    return 1 / (1 + y)


@failure("fp16", OVER, X * 80, W * 80)
def bilinear(x, w):
    y = F.linear(x, w)  # <- here
    return F.layer_norm(y, (64,))


@failure("fp16", OVER, normal(2, 8, 16, 16) * 80, normal(4, 8, 3, 3, seed=1) * 80)
def convolved(x, w):
    y = F.conv2d(x, w)  # <- here
    return torch.tanh(y / 1e5)


@failure("fp16", OVER, X * 8, W * 8)
def cosines(x, w):
    lengths = (x @ w).pow(2)  # <- here
    return lengths / lengths.amax()


@failure("fp16", OVER, X * 9)
def hyperbolic(x):
    y = torch.cosh(x)  # <- here
    return torch.log(y)


@failure("fp16", OVER, X.abs() + 1)
def factorials(x):
    y = torch.cumprod(x + 1, -1)  # <- here
    return y.log()


@failure("fp16", UNDER, X.abs() * 0.1 + 0.05)
def likelihood(x):
    y = torch.cumprod(x, -1)  # <- here
    return y.log2()


@failure("fp16", UNDER, X * 5 - 20)
def focal(x):
    p = torch.softmax(torch.stack([x, -x], -1), -1)[..., 0]  # <- here
    return (p * 1e10).clamp(max=1e4)


@failure("fp16", UNDER, X * 1e-3, W * 1e-3)
def two_layers(x, w):
    y = (x @ w) * 1e-3  # <- here
    return (y @ w) * 1e6


@failure("bf16", LOST, torch.arange(1000, 1064).float() * torch.ones(16, 1))
def rotary(x):  # <- here
    angle = x * 10000.0 ** (-torch.arange(64) / 64)
    return torch.cos(angle)


@failure("bf16", LOST, torch.arange(300).float())
def indices(x):
    place = x * 3 + 1  # <- here
    return place - 3 * x


@failure("bf16", LOST, X * 1e-2 + 100)
def distances(x):  # <- here
    y = x[:, None] - x[None]
    return y.square().sum(-1).sqrt()


@failure("bf16", LOST, X * 0.02, X + 10)
def update(x, w):
    new = w + x * 0.01  # <- here
    return new - w


@failure("bf16", LOST, normal(2000).abs(), limit=0.02)
def moving_average(x):
    y = x.cumsum(0)  # <- here
    return (y[100:] - y[:-100]) / 100


@failure("bf16", LOST, X * 1e-3 + 3.14159)
def near_a_zero(x):  # <- here
    y = torch.sin(x)
    return y


@failure("bf16", LOST, torch.rand(16, 64, generator=torch.Generator().manual_seed(3)) * 1e-2)
def entropy(x):
    p = 1 - x  # <- here
    return -torch.log(p) * 100


@failure("fp16", OVER, X * 20, W * 20)
def squared_error(x, w):
    loss = (x @ w - 1).square()  # <- here
    return loss.mean().sqrt()
