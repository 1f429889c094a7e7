"""Failures of PyTorch programs in 16 bits that other people's bug reports describe.

The programs, lines, kinds and fixes were written down, and measured in torch, before any of them
was audited (``python -m failures truth --set torch``). ``more_reports`` has more.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from . import LOST, OVER, UNDER, normal, reported, uniform

ATTENDED = torch.ones(3, 8)
ATTENDED[1, 5:], ATTENDED[2] = 0, 0  # a shorter sequence and an empty one


@reported("NVIDIA/apex#93", "fp16", OVER, normal(3, 8, 16), ATTENDED)
def padded_attention(x, attended):
    scores = x @ x.mT / x.shape[-1] ** 0.5
    penalty = (1 - attended) * -1e9  # <- here
    return torch.softmax(scores + penalty[:, None, :], -1) @ x


def padded_attention_fixed(x, attended):
    scores = x @ x.mT / x.shape[-1] ** 0.5
    penalty = (1 - attended) * -6e4
    return torch.softmax(scores + penalty[:, None, :], -1) @ x


@reported("pytorch/pytorch#69512", "fp16", OVER, normal(6, 512), normal(6, 512, seed=1) + 0.5)
def cosine(a, b):
    dot = (a * b).sum(-1)
    squares = a.square().sum(-1) * b.square().sum(-1)  # <- here
    return dot / squares.sqrt()


def cosine_fixed(a, b):
    return (a * b).sum(-1) / (a.square().sum(-1).sqrt() * b.square().sum(-1).sqrt())


ROWS = normal(6, 32)
ROWS[2] = 0


@reported("pytorch/pytorch#41527", "fp16", UNDER, ROWS)
def layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-12)  # <- here


def layer_norm_fixed(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


@reported("huggingface/diffusers#13316", "fp16", UNDER, ROWS * 3)
def normalized(x):
    length = x.square().sum(-1, keepdim=True).sqrt()
    length = length.clamp_min(1e-12)  # <- here
    return x / length


def normalized_fixed(x):
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-6)


@reported("EleutherAI/gpt-neox#1003", "fp16", LOST, normal(1, 2048, 32))
def rotated(x):
    exponent = torch.arange(0, 32, 2, dtype=x.dtype) / 32
    frequency = 1.0 / 10000.0**exponent  # <- here
    angle = torch.outer(torch.arange(2048, dtype=x.dtype), frequency)  # <- here
    a, b = x[..., :16], x[..., 16:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def rotated_fixed(x):
    frequency = 1.0 / 10000.0 ** (torch.arange(0, 32, 2).float() / 32)
    angle = torch.outer(torch.arange(2048).float(), frequency)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :16], x[..., 16:]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


@reported(
    "Lightning-AI/torchmetrics#1380", "fp16", OVER, normal(2, 60000), normal(2, 60000, seed=1)
)
def manhattan(a, b):
    distance = (a - b).abs().sum(-1)  # <- here
    return distance / a.shape[-1]


def manhattan_fixed(a, b):
    return (a - b).abs().mean(-1)


GRADIENT = normal(64, scale=0.5)
GRADIENT[::4] = 0


@reported("chainer/chainer#6299", "fp16", UNDER, normal(64), GRADIENT)
def adam(weight, gradient):
    first, second = 0.1 * gradient, 0.1 * gradient.square()
    denominator = (second / 0.1).sqrt() + 1e-8  # <- here
    return weight - 0.1 * (first / 0.1) / denominator


def adam_fixed(weight, gradient):
    second = 0.1 * gradient.square()
    return weight - 0.1 * gradient / ((second / 0.1).sqrt() + 1e-5)


@reported("afiaka87/glide-finetune#5", "fp16", UNDER, normal(64, scale=1e-3))
def second_moment(gradient):
    second = 0.001 * gradient.square()  # <- here
    corrected = second / 0.001
    return gradient / (corrected.sqrt() + 1e-6)


def second_moment_fixed(gradient):
    wide = gradient.float()
    return (wide / (wide.square().sqrt() + 1e-6)).to(gradient.dtype)


@reported("d8ahazard/sd_dreambooth_extension#1415", "bf16", LOST, normal(64), normal(64, seed=1))
def averaged_weights(average, weight):
    start = average
    for _ in range(16):
        average = average * 0.999 + weight * 0.001  # <- here
    return average - start


def averaged_weights_fixed(average, weight):
    start = average = average.float()
    for _ in range(16):
        average = average * 0.999 + weight.float() * 0.001
    return (average - start).to(weight.dtype)


@reported("common", "fp16", UNDER, normal(8, 20, scale=5.0))
def entropy(x):
    p = torch.softmax(x, -1)
    logs = torch.log(p + 1e-10)  # <- here
    return -logs.mean(-1)


def entropy_fixed(x):
    return -torch.log_softmax(x, -1).mean(-1)


@reported("common", "fp16", (*LOST, "overflow", "nan"),
          normal(64, scale=2.0) + 9, (normal(64, seed=1) > 0).float())  # fmt: skip
def cross_entropy(x, y):
    p = torch.sigmoid(x)  # <- here
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p))  # <- here


def cross_entropy_fixed(x, y):
    return F.binary_cross_entropy_with_logits(x, y, reduction="none")


@reported("common", "fp16", OVER, normal(8, 50, scale=5.0))
def log_sum_exp(x):
    total = torch.exp(x).sum(-1)  # <- here
    return torch.log(total)


def log_sum_exp_fixed(x):
    return torch.logsumexp(x, -1)


@reported("pytorch/pytorch#66707", "fp16", LOST, normal(8, 64) * 0.5 + 60)
def instance_norm(x):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean  # <- here
    return (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-3)


def instance_norm_fixed(x):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).square().mean(-1, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + 1e-3)).to(x.dtype)


CORNERS = torch.cat((uniform(12, 2) * 100, 400 + uniform(12, 2, seed=1) * 600), -1)


@reported("pytorch/vision#3371", "fp16", OVER, CORNERS)
def overlap(boxes):
    sizes = boxes[:, 2:] - boxes[:, :2]
    areas = sizes[:, 0] * sizes[:, 1]  # <- here
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (high - low).clamp_min(0).prod(-1)  # <- here
    return common / (areas[:, None] + areas[None] - common)


def overlap_fixed(boxes):
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    areas = (boxes[:, 2:].float() - boxes[:, :2].float()).prod(-1)
    common = (high.float() - low.float()).clamp_min(0).prod(-1)
    return (common / (areas[:, None] + areas[None] - common)).to(boxes.dtype)


@reported("huggingface/transformers#19229", "fp16", OVER,
          normal(4, 32, scale=30.0), normal(64, 32, seed=1),
          normal(32, 64, seed=2, scale=80.0))  # fmt: skip
def feed_forward(x, first, second):
    hidden = F.relu(F.linear(x, first))
    y = x + F.linear(hidden, second)  # <- here
    return F.layer_norm(y, (32,))


def feed_forward_fixed(x, first, second):
    hidden = F.relu(F.linear(x, first))
    y = x.float() + F.linear(hidden.float(), second.float())
    return F.layer_norm(y, (32,)).to(x.dtype)


@reported(
    "pytorch/pytorch#60940", "fp16", OVER, normal(2, 6, 128, scale=60.0), normal(2, 6, 128, seed=1)
)
def scored(query, key):
    key = key + query
    scores = query @ key.mT  # <- here
    return torch.softmax(scores / 128**0.5 / 100, -1)


def scored_fixed(query, key):
    key = key + query
    return torch.softmax((query / 128**0.5 / 100) @ key.mT, -1)


@reported(
    "idiap/fast-transformers#32", "fp16", OVER, normal(1, 512, 32), normal(1, 512, 32, seed=1)
)
def linear_attention(query, key):
    q, k = F.elu(query * 4) + 1, F.elu(key * 4) + 1
    total = k.sum(1)
    weight = torch.einsum("bld,bd->bl", q, total)  # <- here
    return torch.einsum("bld,bmd->blm", q, k)[:, :, :8] / weight[..., None]


def linear_attention_fixed(query, key):
    q, k = F.elu(query * 4) + 1, F.elu(key * 4) + 1
    weight = torch.einsum("bld,bd->bl", q / 512, k.sum(1))
    return torch.einsum("bld,bmd->blm", q / 512, k)[:, :, :8] / weight[..., None]


@reported("common", "fp16", LOST, torch.ones(1, 3000))
def positions(mask):
    place = torch.cumsum(mask, 1)  # <- here
    return torch.sin(place * 0.5)


def positions_fixed(mask):
    return torch.sin(torch.cumsum(mask.float(), 1) * 0.5).to(mask.dtype)


@reported("common", "fp16", UNDER, normal(32, 16), normal(32, seed=1))
def mean_gradient(x, error):
    each = error / 1e7  # <- here
    gradient = each @ x
    return gradient * 1e7


def mean_gradient_fixed(x, error):
    return ((error * 1024 / 1e7) @ x) * (1e7 / 1024)


@reported(
    "qubvel-org/segmentation_models.pytorch#463",
    "fp16",
    OVER,
    uniform(2, 90000),
    (uniform(2, 90000, seed=1) > 0.3).float(),
)
def dice(p, target):
    common = (p * target).sum(-1)
    both = p.sum(-1) + target.sum(-1)  # <- here
    return 1 - 2 * common / (both + 1e-5)


def dice_fixed(p, target):
    both = p.mean(-1) + target.mean(-1)
    return 1 - 2 * (p * target).mean(-1) / (both + 1e-5)
