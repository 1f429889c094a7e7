"""More failures of PyTorch programs in 16 bits from bug reports, and programs that don't fail.

Written down, with lines, kinds and an expert's version, before any of them was audited, and
measured in torch against float64 (``python -m failures truth --set torch``). A line at fault ends
with ``# <- here``.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from . import LOST, OVER, UNDER, clean, normal, reported, uniform

SILENT = normal(6, 64, seed=3)
SILENT[2] = 0


@reported("facebookresearch/ConvNeXt#80", "fp16", OVER, normal(2, 8, 6, 6, scale=400.0))
def channels_first(x):
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)  # <- here
    return (x - u) / torch.sqrt(s + 1e-6)


def channels_first_fixed(x):
    wide = x.float()
    u = wide.mean(1, keepdim=True)
    s = (wide - u).pow(2).mean(1, keepdim=True)
    return ((wide - u) / torch.sqrt(s + 1e-6)).to(x.dtype)


PADDED = torch.ones(2, 6)
PADDED[1] = 0


@reported(
    "huggingface/transformers#17306",
    "fp16",
    OVER,
    normal(2, 6, 16, scale=4.0),
    normal(2, 6, 16, seed=1, scale=4.0),
    PADDED,
)
def lowest_mask(q, k, attended):
    mask = (1 - attended) * torch.finfo(q.dtype).min
    scores = q @ k.mT - 20
    weights = scores + mask[:, None, :]  # <- here
    return torch.softmax(weights, -1) @ k


def lowest_mask_fixed(q, k, attended):
    scores = (q @ k.mT - 20).masked_fill(attended[:, None, :] == 0, torch.finfo(q.dtype).min)
    return torch.softmax(scores.float(), -1).to(k.dtype) @ k


@reported("NVIDIA-NeMo/Automodel#2658", "fp16", OVER, normal(2, 6, 16), PADDED)
def two_masks(x, attended):
    causal = torch.triu(torch.full((6, 6), -6e4, dtype=x.dtype), 1)
    padding = ((1 - attended) * -6e4)[:, None, :]
    mask = causal + padding  # <- here
    return torch.softmax(x @ x.mT / 4 + mask, -1) @ x + mask.amin() / 6e4


def two_masks_fixed(x, attended):
    causal = torch.triu(torch.full((6, 6), -6e4), 1)
    mask = causal + ((1 - attended.float()) * -6e4)[:, None, :]
    weights = torch.softmax((x @ x.mT / 4).float() + mask, -1)
    return (weights @ x.float() + mask.amin() / 6e4).to(x.dtype)


@reported(
    "NVIDIA-NeMo/RL#876", "fp16", OVER, normal(4, 32, scale=6.0), normal(4, 32, seed=1, scale=6.0)
)
def kl_penalty(logprobs, reference):
    r = (reference - logprobs).clamp(-20, 20)
    penalty = torch.exp(r) - r - 1  # <- here
    return torch.log1p(penalty)


def kl_penalty_fixed(logprobs, reference):
    r = (reference - logprobs).clamp(-20, 20).float()
    return torch.log1p(torch.exp(r) - r - 1).to(logprobs.dtype)


@reported("common", "bf16", LOST, normal(4, 64, scale=0.05))
def small_divergence(r):
    k3 = torch.exp(r) - 1 - r  # <- here
    return k3.mean(-1)


def small_divergence_fixed(r):
    wide = r.float()
    return (torch.expm1(wide) - wide).mean(-1).to(r.dtype)


DRAWN = uniform(4, 32)
DRAWN[:, 3] = 0


@reported("pytorch/pytorch#41663", "fp16", (*UNDER, *OVER), normal(4, 32), DRAWN)
def gumbel(logits, u):
    noise = -torch.log(u + 1e-10)  # <- here
    return (logits - torch.log(noise + 1e-10)) / 0.5


def gumbel_fixed(logits, u):
    noise = -torch.log(u.float() + 1e-10)
    return ((logits.float() - torch.log(noise + 1e-10)) / 0.5).to(logits.dtype)


SAME = torch.tensor([[1.5, 0.25, 3.75, 7.5], [2.0, 2.0, 4.0, 6.0], [1.0, 1.0, 3.0, 2.0]])
OTHER = torch.tensor([[1.5, 0.25, 3.75, 7.5], [2.5, 2.0, 4.0, 5.0], [1.0, 1.5, 2.0, 2.0]])


@reported("ultralytics/yolov5#2376", "fp16", (*UNDER, *OVER), SAME, OTHER)
def complete_overlap(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    common = (high - low).clamp_min(0).prod(-1)
    size, other = a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]
    iou = common / (size.prod(-1) + other.prod(-1) - common)
    turned = torch.atan(size[:, 0] / size[:, 1]) - torch.atan(other[:, 0] / other[:, 1])
    v = 4 / math.pi**2 * turned.square()
    alpha = v / (1 - iou + v + 1e-9)  # <- here
    return 1 - iou + alpha * v


def complete_overlap_fixed(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    common = (high - low).clamp_min(0).prod(-1)
    size, other = a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]
    iou = common / (size.prod(-1) + other.prod(-1) - common)
    turned = torch.atan(size[:, 0] / size[:, 1]) - torch.atan(other[:, 0] / other[:, 1])
    v = 4 / math.pi**2 * turned.square()
    return 1 - iou + v / (1 - iou + v + 1e-6) * v


LEFT = torch.cat((uniform(10, 2) * 200, 500 + uniform(10, 2, seed=1) * 300), -1)
RIGHT = torch.cat((uniform(10, 2, seed=2) * 200, 450 + uniform(10, 2, seed=3) * 300), -1)


@reported("facebookresearch/fvcore#114", "fp16", OVER, LEFT, RIGHT)
def hull(a, b):
    low, high = torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:])
    w, h = (high - low).unbind(-1)
    area = w * h  # <- here
    own = (a[:, 2] - a[:, 0]) / 1000 * (a[:, 3] - a[:, 1])
    return own / (area / 1000)


def hull_fixed(a, b):
    low, high = torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:])
    w, h = (high - low).unbind(-1)
    own = (a[:, 2] - a[:, 0]) / 1000 * (a[:, 3] - a[:, 1])
    return own / (w / 1000 * h)


BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2


@reported("AUTOMATIC1111/stable-diffusion-webui#14071", "fp16", LOST, normal(8, 4))
class Sigmas(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("alphas", torch.cumprod(1 - BETAS, 0))

    def forward(self, x):
        kept = self.alphas[:8]  # <- here
        noise = 1 - kept  # <- here
        return x / (noise / kept).sqrt()[:, None]


class SigmasFixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", 1 - torch.cumprod(1 - BETAS, 0))

    def forward(self, x):
        noise = self.noise[:8]
        return x / (noise / (1 - noise)).sqrt()[:, None]


@reported("huggingface/diffusers#9405", "bf16", LOST, normal(30, 32))
def timesteps(x):
    t = torch.linspace(999, 1, 30, dtype=x.dtype)  # <- here
    frequency = torch.exp(torch.arange(16) * (-math.log(100.0) / 16))
    angle = t[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1).to(x.dtype) + 0.1 * x


def timesteps_fixed(x):
    t = torch.linspace(999, 1, 30)
    angle = t[:, None] * torch.exp(torch.arange(16) * (-math.log(100.0) / 16))
    return torch.cat((angle.sin(), angle.cos()), -1).to(x.dtype) + 0.1 * x


@reported("huggingface/diffusers#13920", "bf16", LOST, normal(1, 40, 16), autocast=True)
class RotatedImage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16)
        self.register_buffer("inverse", 1 / 10 ** (torch.arange(8) / 8))
        self.register_buffer("position", torch.arange(2048, 2088).float())

    def forward(self, x):
        q = self.project(x)
        angle = self.position[:, None] @ self.inverse[None]  # <- here
        a, b = q.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class RotatedImageFixed(RotatedImage):
    def forward(self, x):
        q = self.project(x)
        angle = self.position[:, None] * self.inverse[None]
        a, b = q.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


WINDOWS = torch.outer(torch.arange(64.0), torch.arange(33.0)) * (2 * math.pi / 64)
COSINE, SINE = torch.cos(WINDOWS), torch.sin(WINDOWS)


@reported("LIHANG-HONG/birdclef2023-2nd-place-solution#2", "fp16", OVER, normal(8, 64, scale=80.0))
class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cosine", COSINE)
        self.register_buffer("sine", SINE)

    def forward(self, x):
        real, imaginary = x @ self.cosine, x @ self.sine
        power = real.square() + imaginary.square()  # <- here
        return torch.log10(power + 1)


class SpectrumFixed(Spectrum):
    def forward(self, x):
        real, imaginary = (x / 64) @ self.cosine, (x / 64) @ self.sine
        power = real.square() + imaginary.square()
        return torch.log10(power + 1 / 4096) + math.log10(4096)


@reported("adobe-research/convmelspec#3", "fp16", (*UNDER, *OVER), SILENT)
def log_spectrum(x):
    power = (x @ COSINE.to(x.dtype)).square()
    floor = power.clamp(min=1e-10)  # <- here
    return torch.log10(floor)


def log_spectrum_fixed(x):
    power = (x @ COSINE.to(x.dtype)).square().float()
    return torch.log10(power.clamp(min=1e-10)).to(x.dtype)


@reported("pytorch/pytorch#187180", "fp16", OVER, normal(4, 32))
def wide_softplus(x):
    y = F.softplus(x, beta=1e-6)  # <- here
    return y / y.amax(-1, keepdim=True) + x


def wide_softplus_fixed(x):
    y = F.softplus(x.float(), beta=1e-6)
    return (y / y.amax(-1, keepdim=True)).to(x.dtype) + x


@reported("fastino-ai/GLiNER2#155", "bf16", (*LOST, *OVER), normal(6, 16, scale=3.0) + 4)
def survival(x):
    p = torch.sigmoid(x)  # <- here
    log_survival = torch.log1p(-p.clamp(max=1.0 - 1e-6))  # <- here
    return log_survival.sum(-1)


def survival_fixed(x):
    return F.logsigmoid(-x).clamp(min=math.log(1e-6)).sum(-1)


WIDTHS = uniform(12, seed=4) * 0.8 + 0.1
WIDTHS[5] = 0


@reported(
    "rwightman/efficientdet-pytorch#291", "fp16", (*UNDER, *OVER), WIDTHS, uniform(12, seed=5) + 0.2
)
def box_targets(width, anchor):
    ratio = width / (anchor + 1e-8)
    return torch.log(ratio + 1e-8)  # <- here


def box_targets_fixed(width, anchor):
    ratio = width.float() / (anchor.float() + 1e-8)
    return torch.log(ratio + 1e-8).to(width.dtype)


@reported(
    "facebookresearch/xformers#96",
    "fp16",
    UNDER,
    normal(1, 12, 16, scale=2.2),
    normal(1, 12, 16, seed=1, scale=2.2),
    normal(16, 64, seed=2),
)
def random_features(q, k, w):
    def features(x):
        size = x.square().sum(-1, keepdim=True) / 2
        return torch.exp(x @ w - size)  # <- here

    a, b = features(q), features(k)
    return (a @ (b.mT @ k)) / (a @ b.sum(1)[..., None])


def random_features_fixed(q, k, w):
    def features(x):
        y = x.float() @ w.float() - x.float().square().sum(-1, keepdim=True) / 2
        return torch.exp(y)

    a, b = features(q), features(k)
    return ((a @ (b.mT @ k.float())) / (a @ b.sum(1)[..., None])).to(k.dtype)


@reported("NVIDIA-NeMo/Automodel#2248", "bf16", LOST, normal(64) + 3)
def decayed(w):
    start, rate = w, torch.tensor(1e-3, dtype=w.dtype)
    for _ in range(8):
        w = w * (1 - rate * 0.1)  # <- here
    return (start - w) * 1e4


def decayed_fixed(w):
    start = wide = w.float()
    for _ in range(8):
        wide = wide * (1 - 1e-3 * 0.1)
    return ((start - wide) * 1e4).to(w.dtype)


@reported(
    "pytorch/pytorch#94816",
    "fp16",
    (*LOST, "decision"),
    torch.linspace(-0.9, 0.9, 50).half().float(),
    normal(1024),
)
def sampled(grid, line):
    place = (grid + 1) * 511.5  # <- here
    left = torch.floor(place)
    part = place - left
    at = left.long()
    return line[at] * (1 - part) + line[at + 1] * part


def sampled_fixed(grid, line):
    place = (grid.float() + 1) * 511.5
    left = torch.floor(place)
    part = (place - left).to(line.dtype)
    at = left.long()
    return line[at] * (1 - part) + line[at + 1] * part


@reported("pytorch/pytorch#36108", "bf16", LOST, uniform(600))
def warped(flow):
    place = torch.arange(600, dtype=flow.dtype) + flow  # <- here
    return torch.sin(place * 0.3)


def warped_fixed(flow):
    place = torch.arange(600) + flow.float()
    return torch.sin(place * 0.3).to(flow.dtype)


@reported(
    "pytorch/pytorch#42479",
    "fp16",
    LOST,
    normal(6, 32, scale=0.2) + 4,
    normal(6, 32, seed=1, scale=0.2) + 4,
)
def pairwise(a, b):
    squares = a.square().sum(-1)[:, None] + b.square().sum(-1)[None]
    distance = squares - 2 * a @ b.mT  # <- here
    return distance.clamp_min(1e-3).sqrt()


def pairwise_fixed(a, b):
    return (a[:, None] - b[None]).square().sum(-1).sqrt()


@reported("google/CommonLoopUtils#380", "bf16", LOST, uniform(48, 32) + 0.5)
def running_total(losses):
    total = torch.zeros((), dtype=losses.dtype)
    history = []
    for row in losses:
        total = total + row.sum()  # <- here
        history.append(total - 32 * len(history))
    return torch.stack(history)


def running_total_fixed(losses):
    total = torch.zeros(())
    history = []
    for row in losses.float():
        total = total + row.sum()
        history.append(total - 32 * len(history))
    return torch.stack(history).to(losses.dtype)


@reported("openvinotoolkit/openvino#36504", "fp16", OVER, normal(4, 32, scale=20.0))
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.gate.weight.mul_(20)
            self.up.weight.mul_(20)
            self.down.weight.mul_(0.01)

    def forward(self, x):
        hidden = F.gelu(self.gate(x)) * self.up(x)  # <- here
        return x + self.down(hidden)


class GatedFixed(Gated):
    def forward(self, x):
        hidden = F.gelu(self.gate(x)).float() * self.up(x).float()
        return x + F.linear(hidden, self.down.weight.float()).to(x.dtype)


@reported("common", "fp16", OVER, normal(8, 16, scale=20.0) + 400)
def router_loss(logits):
    z = torch.logsumexp(logits, -1).square()  # <- here
    return 1e-4 * z


def router_loss_fixed(logits):
    return (1e-2 * torch.logsumexp(logits, -1)).square()


@reported(
    "pyg-team/pytorch_geometric#2106", "fp16", (*LOST, *UNDER, *OVER), normal(32, scale=2.0) + 10
)
def negative_edges(z):
    p = torch.sigmoid(z)  # <- here
    return -torch.log(1 - p + 1e-15)  # <- here


def negative_edges_fixed(z):
    return F.softplus(z)


AXES = F.normalize(normal(32, 3), dim=-1)
ANGLES = torch.linspace(0.02, 0.3, 32)[:, None]
TURNS = torch.cat((torch.cos(ANGLES / 2), torch.sin(ANGLES / 2) * AXES), -1)


@reported("kornia/kornia#4162", "fp16", LOST, TURNS)
def rotation_angle(q):
    w, v = q[:, 0], q[:, 1:]
    angle = 2 * torch.acos(w.clamp(-1, 1))  # <- here
    return F.normalize(v, dim=-1, eps=1e-4) * angle[:, None]


def rotation_angle_fixed(q):
    w, v = q[:, 0], q[:, 1:]
    length = v.norm(dim=-1)
    return v / length[:, None] * (2 * torch.atan2(length, w))[:, None]


@reported("common", "fp16", UNDER, normal(32, scale=2e-4), normal(32, seed=1, scale=2e-4))
def haversine(latitude, longitude):
    a = torch.sin(latitude / 2) ** 2 + 0.6 * torch.sin(longitude / 2) ** 2  # <- here
    return 2 * 6371 * torch.asin(torch.sqrt(a))


def haversine_fixed(latitude, longitude):
    a = torch.sin(latitude.float() / 2) ** 2 + 0.6 * torch.sin(longitude.float() / 2) ** 2
    return (2 * 6371 * torch.asin(torch.sqrt(a))).to(latitude.dtype)


@reported("common", "fp16", OVER, normal(8, 16, scale=0.003), normal(8, 16, seed=1) - 12)
def gaussian_nll(error, logvar):
    precision = torch.exp(-logvar)  # <- here
    return 0.5 * (error * precision * error + logvar)


def gaussian_nll_fixed(error, logvar):
    return 0.5 * ((error * torch.exp(-logvar / 2)).square() + logvar)


@reported(
    "KevinMusgrave/pytorch-metric-learning#121", "fp16", OVER, F.normalize(normal(8, 32), dim=-1)
)
def contrastive(x):
    similarity = x @ x.mT / 0.05
    each = torch.exp(similarity)  # <- here
    return -torch.log(each.diagonal() / each.sum(-1) * 0.5)


def contrastive_fixed(x):
    return -torch.log_softmax(x @ x.mT / 0.05, -1).diagonal() + math.log(2)


@reported("pytorch/pytorch#40497", "fp16", (*UNDER, *OVER), normal(32, scale=4.0) - 18)
def focal_loss(x):
    p = torch.sigmoid(x)  # <- here
    return -((1 - p) ** 2) * torch.log(p)


def focal_loss_fixed(x):
    return -((1 - torch.sigmoid(x)) ** 2) * F.logsigmoid(x)


@reported("common", "fp16", (*UNDER, *OVER), uniform(12, 10) + 0.5)
def transport(cost):
    kernel = torch.exp(-cost / 0.05)  # <- here
    v = torch.ones(10, dtype=cost.dtype)
    for _ in range(3):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.mT @ u)
    return u[:, None] * kernel * v


def transport_fixed(cost):
    wide = -cost.float() / 0.05
    g = torch.zeros(10)
    for _ in range(3):
        f = -torch.logsumexp(wide + g, -1)
        g = -torch.logsumexp(wide.mT + f, -1)
    return torch.exp(f[:, None] + wide + g).to(cost.dtype)


@reported("huggingface/diffusers#4254", "bf16", LOST, BETAS[:64], normal(64))
def schedule(betas, x):
    alphas = 1 - betas  # <- here
    kept = torch.cumprod(alphas, 0)  # <- here
    return x * (1 - kept).sqrt()  # <- here


def schedule_fixed(betas, x):
    kept = torch.cumprod(1 - betas.float(), 0)
    return x * (1 - kept).sqrt().to(x.dtype)


@reported("common", "fp16", UNDER, normal(16, 8), normal(16), grad=True)
class TinyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        error = self.layer(x)[:, 0] - y  # <- here
        return (error * error).mean() * 1e-6  # <- here


@reported("common", "fp16", OVER, normal(64), grad=True)
class Quotient(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 1e-3))

    def forward(self, x):
        y = x / self.scale  # <- here
        return torch.tanh(y / 1000).sum()


class QuotientFixed(Quotient):
    def forward(self, x):
        y = x.float() / self.scale.float()
        return torch.tanh(y / 1000).sum()


@clean("fp16", normal(2, 6, 16), torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3]))
def half_of_the_lowest(x, attended):
    mask = (1 - attended) * (torch.finfo(x.dtype).min / 2)
    return torch.softmax(x @ x.mT / 4 + mask[:, None, :], -1) @ x


@clean("fp16", normal(4, 32, scale=900.0))
def wide_norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@clean("bf16", normal(8, 20, scale=4.0))
def token_losses(x):
    return F.cross_entropy(x, torch.arange(8), reduction="none")


@clean("fp16", normal(8, 16), normal(8, 16, seed=1))
def huber(x, y):
    return F.smooth_l1_loss(x, y, reduction="none", beta=0.5)


@clean("fp16", normal(2, 3, 12, 12))
class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.eval()

    def forward(self, x):
        return F.adaptive_avg_pool2d(F.relu(self.norm(self.conv(x))), 2)


@clean("bf16", normal(1, 64, 16))
def wide_rotation(x):
    angle = torch.outer(torch.arange(64).float(), 100.0 ** (-torch.arange(8) / 8))
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


@clean("fp16", normal(6, 16), normal(4, 16, 16, seed=1, scale=0.3))
def routed(x, experts):
    chosen = torch.softmax(x[:, :4].float() * 4, -1)
    weights = torch.where(chosen == chosen.amax(-1, keepdim=True), chosen, 0.0).to(x.dtype)
    return torch.einsum("be,bd,edh->bh", weights, x, experts)


@clean("bf16", normal(4, 8), normal(4, 8, seed=1))
def gated_unit(x, h):
    z, r = torch.sigmoid(x + h), torch.sigmoid(x - h)
    return (1 - z) * h + z * torch.tanh(x + r * h)


@clean("fp16", normal(6, 64), normal(6, 64, seed=1))
def similarity(a, b):
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).mT


@clean("bf16", normal(64), normal(64, seed=1))
def wide_average(average, weight):
    wide = average.float()
    for _ in range(4):
        wide = wide * 0.999 + weight.float() * 0.001
    return wide.to(weight.dtype)


@clean("fp16", torch.linspace(-30, 30, 32), (uniform(32) > 0.5).float())
def extreme_logits(x, y):
    return F.binary_cross_entropy_with_logits(x, y, reduction="none")


@clean("fp16", normal(4, 16, scale=2.0), (uniform(4, 16, seed=2) > 0.4).float())
def masked_gate(x, kept):
    y = x + (1 - kept) * -1e4
    return torch.exp(y - y.amax(-1, keepdim=True)) * x
