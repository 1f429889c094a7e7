"""Failures of PyTorch programs in 16 bits from bug reports that nobody looked into after scoring.

As :mod:`.more_reports`, written before any of them was audited. They are scored, and no
threshold or rule was changed for one of them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from . import LOST, OVER, UNDER, normal, uniform
from . import reported as also_seen

reported = partial(also_seen, part="scored", prefix="scored.")

EMPTY = normal(6, 16, seed=7)
EMPTY[4] = 0


@reported(
    "idiap/fast-transformers#32",
    "fp16",
    OVER,
    normal(1, 64, 16, scale=8.0),
    normal(1, 64, 16, seed=1, scale=8.0),
    normal(1, 64, 16, seed=2, scale=300.0),
)
def linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = k.mT @ v.abs()  # <- here
    norm = q @ k.sum(1)[..., None]
    return (q @ (state / 64)) / (norm / 64)


def linear_attention_fixed(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = (k / 64).mT @ v.abs()
    norm = q @ (k / 64).sum(1)[..., None]
    return (q.float() @ state.float() / norm).to(v.dtype)


@reported(
    "plemeri/InSPyReNet#36",
    "fp16",
    OVER,
    normal(2, 8, 64, scale=60.0),
    normal(2, 8, 64, seed=1, scale=60.0),
    normal(2, 8, 16, seed=2),
)
def unscaled_attention(query, key, value):
    similarity = torch.bmm(query, key.mT) * query.shape[-1] ** 0.5  # <- here
    return torch.bmm(torch.softmax(similarity / 1e4, -1), value)


def unscaled_attention_fixed(query, key, value):
    similarity = torch.bmm(query.float(), key.float().mT) * query.shape[-1] ** 0.5
    return torch.bmm(torch.softmax(similarity / 1e4, -1).to(value.dtype), value)


@reported(
    "qubvel-org/segmentation_models.pytorch#463",
    "fp16",
    OVER,
    uniform(2, 300, 300) * 0.2 + 0.8,
    (uniform(2, 300, 300, seed=1) > 0.05).float(),
)
def soft_dice(output, target):
    intersection = torch.sum(output * target, dim=(1, 2))  # <- here
    cardinality = torch.sum(output + target, dim=(1, 2))  # <- here
    return 2.0 * intersection / cardinality.clamp_min(1e-4)


def soft_dice_fixed(output, target):
    intersection = torch.mean(output * target, dim=(1, 2))
    cardinality = torch.mean(output + target, dim=(1, 2))
    return 2.0 * intersection / cardinality


@reported(
    "huggingface/transformers#25938",
    "fp16",
    OVER,
    normal(4, 30000, scale=2.0) - 4,
    (uniform(3, 30000, seed=1) > 0.4).float(),
)
def pairwise_sigmoid_loss(inputs, labels):
    positive = F.softplus(-inputs)
    negative = F.softplus(inputs)
    together = positive @ labels.mT + negative @ (1 - labels).mT  # <- here
    return together / inputs.shape[1]


def pairwise_sigmoid_loss_fixed(inputs, labels):
    positive = F.softplus(-inputs) / inputs.shape[1] * 1024
    negative = F.softplus(inputs) / inputs.shape[1] * 1024
    return (positive @ labels.mT + negative @ (1 - labels).mT) / 1024


@reported("kornia/kornia#4224", "fp16", (*UNDER, *OVER), EMPTY)
def described(x):
    descriptor = x + 1e-10  # <- here
    size = descriptor.square().sum(-1, keepdim=True).sqrt()
    return descriptor / size  # <- here


def described_fixed(x):
    wide = x.float() + 1e-10
    return (wide / wide.square().sum(-1, keepdim=True).sqrt()).to(x.dtype)


@reported("kornia/kornia#4021", "fp16", (*UNDER, *OVER), EMPTY)
def quaternions(q):
    return F.normalize(q.reshape(-1, 4), dim=-1, eps=1e-12)  # <- here


def quaternions_fixed(q):
    return F.normalize(q.reshape(-1, 4).float(), dim=-1, eps=1e-12).to(q.dtype)


@reported("EleutherAI/gpt-neox#1003", "fp16", LOST, normal(1, 64, 16))
class CachedRotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10 ** (torch.arange(8) / 8))

    def forward(self, x):
        t = torch.arange(1800, 1864).type_as(self.inv_freq)
        angle = torch.einsum("i,j->ij", t, self.inv_freq)  # <- here
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class CachedRotaryFixed(nn.Module):
    def __init__(self):
        super().__init__()
        frequency = 1 / 10 ** (torch.arange(8) / 8)
        angle = torch.outer(torch.arange(1800, 1864).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)


@reported(
    "datamol-io/graphium#406",
    "fp16",
    OVER,
    normal(4000, 2, scale=40.0),
    normal(4000, 2, seed=1, scale=40.0),
)
def total_error(predictions, targets):
    total = (predictions - targets).abs().sum(0)  # <- here
    return total / predictions.shape[0]


def total_error_fixed(predictions, targets):
    return (predictions - targets).abs().mean(0)


@reported("pytorch/pytorch#69512", "fp16", OVER, normal(4, 512), normal(4, 512, seed=1) * 0.5 + 0.3)
def cosine(a, b):
    squares = a.square().sum(-1) * b.square().sum(-1)  # <- here
    return (a * b).sum(-1) * torch.rsqrt(squares.clamp_min(1e-16))


def cosine_fixed(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


@reported("huggingface/transformers#12225", "fp16", OVER, normal(4, 32, scale=12000.0))
class ResidualBranch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        h = self.fc2(torch.relu(self.fc1(self.norm(x))))
        x = x + x.sign() * (h.abs() + 1) * 3e4  # <- here
        return self.norm(x / 8)


class ResidualBranchFixed(ResidualBranch):
    def forward(self, x):
        h = self.fc2(torch.relu(self.fc1(self.norm(x))))
        wide = x.float() + (x.sign() * (h.abs() + 1)).float() * 3e4
        return self.norm((wide / 8).to(x.dtype))


@reported(
    "JunnYu/GAU-alpha-pytorch#1",
    "fp16",
    OVER,
    normal(2, 6, 16),
    torch.tensor([[1.0] * 6, [0.0] * 6]),
)
def gated_attention(x, attended):
    scores = x @ x.mT / 4
    scores = scores * attended[:, None] + (1 - attended[:, None]) * -1e12  # <- here
    return torch.softmax(scores, -1) @ x


def gated_attention_fixed(x, attended):
    scores = (x @ x.mT / 4).masked_fill(attended[:, None] == 0, -1e4)
    return torch.softmax(scores, -1) @ x


@reported("common", "bf16", LOST, uniform(24, 64, seed=3) * 0.02)
def moving_variance(batches):
    mean = torch.zeros(64, dtype=batches.dtype)
    square = torch.ones(64, dtype=batches.dtype)
    for x in batches:
        mean = mean + 0.1 * (x - mean)
        square = 0.999 * square + 0.001 * x.square()  # <- here
    return (1 - square) * 50 + mean


def moving_variance_fixed(batches):
    mean, square = torch.zeros(64), torch.ones(64)
    for x in batches.float():
        mean = mean + 0.1 * (x - mean)
        square = 0.999 * square + 0.001 * x.square()
    return ((1 - square) * 50 + mean).to(batches.dtype)
