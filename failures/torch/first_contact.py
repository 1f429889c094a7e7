"""Programs of first contact: written, and measured in torch, before an audit of any."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from failures.torch import LOST, OVER, UNDER, clean, normal, reported, uniform


def uni(*shape, seed=0, low=0.0, high=1.0):
    return low + (high - low) * uniform(*shape, seed=seed)


# CTC's forward variables as probabilities
@reported("CTC in probabilities", "fp16", UNDER, normal(40, 12))
class CtcForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("labels", torch.tensor([0, 3, 0, 5, 0, 7, 0]))

    def forward(self, logits):
        p = torch.softmax(logits, -1)[:, self.labels]
        alpha = F.one_hot(torch.tensor(0), 7).to(p.dtype)
        for t in range(p.shape[0]):
            moved = F.pad(alpha[:-1], (1, 0))
            alpha = (alpha + moved) * p[t]  # <- here
        return -torch.log(alpha[-1] + alpha[-2])


class CtcForwardFixed(CtcForward):
    def forward(self, logits):
        p = torch.log_softmax(logits.float(), -1)[:, self.labels]
        alpha = F.one_hot(torch.tensor(0), 7).to(p.dtype).log()
        for t in range(p.shape[0]):
            moved = F.pad(alpha[:-1], (1, 0), value=-1e9)
            alpha = torch.logaddexp(alpha.clamp(min=-1e9), moved) + p[t]
        return -torch.logaddexp(alpha[-1], alpha[-2]).to(logits.dtype)


# Returns of a long episode, normalized
@reported("GAE and advantage normalization", "bf16", LOST, normal(256, scale=0.5) + 1)
def advantages(rewards):
    total = torch.zeros((), dtype=rewards.dtype)
    out = []
    for r in rewards.flip(0).unbind():
        total = r + 0.99 * total  # <- here
        out.append(total)
    returns = torch.stack(out)[128:]
    return (returns - returns.mean()) / (returns.std() + 1e-8)


def advantages_fixed(rewards):
    total, out = torch.zeros(()), []
    for r in rewards.float().flip(0).unbind():
        total = r + 0.99 * total
        out.append(total)
    returns = torch.stack(out)[128:]
    return ((returns - returns.mean()) / (returns.std() + 1e-8)).to(rewards.dtype)


# A ratio of sequences' likelihoods
LOGP = -uni(6, 400, low=0.5, high=3.0)


@reported("sequence-level importance ratio", "fp16", LOST, LOGP, normal(6, 400, seed=2, scale=0.01))
def importance_ratio(logp, step):
    new = (logp + step).sum(-1)  # <- here
    old = logp.sum(-1)  # <- here
    return torch.exp(new - old)


def importance_ratio_fixed(logp, step):
    return torch.exp(((logp.float() + step.float()) - logp.float()).sum(-1)).to(logp.dtype)


# ALiBi's distances in the model's dtype
@reported("ALiBi in bf16", "bf16", LOST, normal(1, 4, 1, 16), normal(1, 4, 1024, 16, seed=1))
class Alibi(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5))

    def forward(self, q, k):
        n = k.shape[-2]
        position = torch.arange(n, dtype=q.dtype)  # <- here
        distance = position - (n - 1)  # <- here
        scores = q @ k.mT * 0.25 + self.slopes[:, None, None] * distance
        return torch.softmax(scores, -1) @ k


class AlibiFixed(Alibi):
    def forward(self, q, k):
        n = k.shape[-2]
        distance = torch.arange(n) - (n - 1)
        scores = (q @ k.mT).float() * 0.25 + self.slopes[:, None, None].float() * distance
        return torch.softmax(scores, -1).to(q.dtype) @ k


# A sink beside exponentials without their maximum
@reported(
    "attention sinks",
    "fp16",
    OVER,
    normal(2, 8, 32, scale=2.0),
    normal(2, 8, 32, seed=1, scale=2.5),
)
class SinkAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.tensor(1.0))

    def forward(self, q, k):
        scores = torch.einsum("bqd,bkd->bqk", q, k) / 32**0.5
        weights = torch.exp(scores)  # <- here
        return weights / (weights.sum(-1, keepdim=True) + torch.exp(self.sink)) @ k


class SinkAttentionFixed(SinkAttention):
    def forward(self, q, k):
        scores = torch.einsum("bqd,bkd->bqk", q, k).float() / 32**0.5
        both = torch.cat((scores, self.sink.float().expand(2, 8, 1)), -1)
        return torch.softmax(both, -1)[..., :-1].to(k.dtype) @ k


# A moving mean from prefix sums
@reported("sliding window by prefix sums", "fp16", LOST, uni(2, 4000, low=0.5, high=1.5))
def sliding_window(x):
    total = torch.cumsum(x, -1)  # <- here
    return (total[:, 8:] - total[:, :-8]) / 8


def sliding_window_fixed(x):
    total = torch.cumsum(x.double(), -1)
    return ((total[:, 8:] - total[:, :-8]) / 8).to(x.dtype)


# Batch norm in eval mode whose variances are tiny
@reported(
    "BatchNorm folding with tiny variances",
    "fp16",
    (*UNDER, "overflow", "nan"),
    normal(4, 8, scale=3e-5),
)
class FoldedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.logspace(-10, -7, 8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        scale = self.weight / torch.sqrt(self.running_var + 1e-12)  # <- here
        return (x - self.running_mean) * scale


class FoldedNormFixed(FoldedNorm):
    def __init__(self):
        super().__init__()
        self.register_buffer("root", torch.sqrt(self.running_var + 1e-12) * 1000)

    def forward(self, x):
        return (x - self.running_mean) * 1000 * (self.weight / self.root)


# Power iteration
@reported("spectral norm", "fp16", OVER, normal(4, 128))
class PowerIteration(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(128, 128, seed=3, scale=30.0))
        self.register_buffer("v", F.normalize(normal(128, seed=4), dim=0))

    def forward(self, x):
        u = self.weight @ self.v
        energy = torch.dot(u, u)  # <- here
        sigma = torch.sqrt(energy)
        return F.linear(x, self.weight / sigma)


class PowerIterationFixed(PowerIteration):
    def forward(self, x):
        u = self.weight @ self.v
        return F.linear(x, self.weight / torch.linalg.vector_norm(u.float()).to(x.dtype))


# Places of tokens within their expert
@reported("MoE capacity in bf16", "bf16", (*LOST, "decision"), torch.sign(normal(3000, 31)))
class Capacity(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(31, 2, bias=False)
        self.router.weight.data = torch.sign(normal(1, 31, seed=5)) * torch.tensor([[1.0], [-1.0]])

    def forward(self, x):
        gates = torch.softmax(self.router(x), -1)
        chosen = F.one_hot(gates.argmax(-1), 2).to(x.dtype)
        place = torch.cumsum(chosen, 0) * chosen  # <- here
        return x, (place.sum(-1) * 0.5).sin()


class CapacityFixed(Capacity):
    def forward(self, x):
        gates = torch.softmax(self.router(x), -1)
        chosen = F.one_hot(gates.argmax(-1), 2)
        place = torch.cumsum(chosen, 0) * chosen
        return x, ((place.sum(-1) * 0.5).sin()).to(x.dtype)


# Betas of a cosine schedule
@reported("cosine schedule", "fp16", (*LOST, "underflow"), normal(4, 32))
class CosineBetas(nn.Module):
    def forward(self, x):
        t = torch.linspace(0, 1, 501).to(x.dtype)
        kept = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2  # <- here
        betas = 1 - kept[1:] / kept[:-1]  # <- here
        return x * betas[:32].sqrt()


class CosineBetasFixed(CosineBetas):
    def forward(self, x):
        t = torch.linspace(0, 1, 501)
        kept = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = 1 - kept[1:] / kept[:-1]
        return x * betas[:32].sqrt().to(x.dtype)


# The divergence of a collapsed posterior
@reported("posterior collapse", "bf16", LOST, normal(8, 64))
class Collapsed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 32)
        self.head.weight.data *= 0.1

    def forward(self, x):
        mu, logvar = self.head(self.encoder(x)).chunk(2, -1)
        kl = 1 + logvar - mu * 0.1 * (mu * 0.1) - torch.exp(logvar)  # <- here
        return {"kl": -0.5 * kl.sum(-1), "mu": mu * 1e-3}


class CollapsedFixed(Collapsed):
    def forward(self, x):
        mu, logvar = self.head(self.encoder(x)).chunk(2, -1)
        wide, m = logvar.float(), mu.float() * 0.1
        kl = wide - m * m - torch.expm1(wide)
        return {"kl": (-0.5 * kl.sum(-1)).to(x.dtype), "mu": mu * 1e-3}


# A Jacobian's determinant as a product
@reported("RealNVP log determinant", "fp16", UNDER, normal(8, 64))
class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.net = nn.Linear(64, 64)

    def forward(self, x):
        scale = torch.sigmoid(self.net(x) + 1.5)
        determinant = torch.prod(scale, -1)  # <- here
        return (x * scale).mean() * 0.01, torch.log(determinant)


class CouplingFixed(Coupling):
    def forward(self, x):
        scale = torch.sigmoid(self.net(x) + 1.5)
        return (x * scale).mean() * 0.01, torch.log(scale).sum(-1)


# A state-space scan by cumulative sums of decays
class Scan(nn.Module):
    def forward(self, decay, u):
        total = torch.cumsum(decay, 1)
        inner = torch.cumsum(u * torch.exp(-total), 1)  # <- here
        return inner * torch.exp(total)


@reported("Mamba's scan in parallel form", "fp16", OVER, normal(1, 64, 16), inside=(Scan,))
class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.delta, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.rate = nn.Parameter(-uni(16, low=0.2, high=0.5))
        self.scan = Scan()

    def forward(self, x):
        delta = F.softplus(self.delta(x))
        return self.out(self.scan(delta * self.rate, x * delta))


class WideScan(Scan):
    def forward(self, decay, u):
        state, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            state = state * torch.exp(decay[:, t]) + u[:, t]
            out.append(state)
        return torch.stack(out, 1)


class MambaFixed(Mamba):
    def __init__(self):
        super().__init__()
        self.scan = WideScan()


# A counter in an LSTM's cell
@reported("LSTM counter", "bf16", LOST, uni(400, 4, low=0.05, high=0.35))
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.gate.weight.data = 0.1 * normal(4, 4, seed=11)
        self.gate.bias.data = torch.full((4,), 6.0)

    def forward(self, x):
        cell = torch.zeros(4, dtype=x.dtype)
        for row in x.unbind():
            cell = cell + torch.sigmoid(self.gate(row)) * row.tanh()  # <- here
        return cell / 400


class CounterFixed(Counter):
    def forward(self, x):
        cell = torch.zeros(4)
        for row in x.unbind():
            cell = cell + (torch.sigmoid(self.gate(row)) * row.tanh()).float()
        return (cell / 400).to(x.dtype)


# A polygon's area far from the origin
CORNERS = 180 + torch.round(8 * normal(16, 5, 2, seed=12)) / 8


@reported("shoelace formula", "fp16", LOST, CORNERS)
def shoelace(points):
    x, y = points.unbind(-1)
    x2, y2 = x.roll(-1, -1), y.roll(-1, -1)
    cross = x * y2 - x2 * y  # <- here
    return cross.sum(-1).abs() / 2


def shoelace_fixed(points):
    x, y = (points - points[:, :1]).unbind(-1)
    x2, y2 = x.roll(-1, -1), y.roll(-1, -1)
    return (x * y2 - x2 * y).sum(-1).abs() / 2


# A hub of a graph
@reported(
    "scatter mean of a hub",
    "fp16",
    OVER,
    uni(5000, 8, low=20.0, high=60.0),
    torch.arange(5000) % 7 // 3,
)
class MeanMessages(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.update = nn.Linear(8, 4)

    def forward(self, messages, node):
        count = torch.bincount(node, minlength=3).clamp(min=1)
        total = torch.zeros(3, 8, dtype=messages.dtype).index_add(0, node, messages)  # <- here
        return self.update(total / count[:, None].to(messages.dtype))


class MeanMessagesFixed(MeanMessages):
    def forward(self, messages, node):
        count = torch.bincount(node, minlength=3).clamp(min=1)
        total = torch.zeros(3, 8).index_add(0, node, messages.float())
        return self.update((total / count[:, None]).to(messages.dtype))


# An envelope of windows that vanishes at its ends
@reported("inverse STFT's envelope", "fp16", (*UNDER, "nan", "overflow"), normal(4, 400))
class OverlapAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(400, periodic=False)[1:-1])

    def forward(self, frames):
        window = self.window.square() * 0.02
        envelope = window * window  # <- here
        clipped = (frames[:, 1:-1] * window) * window
        return clipped / envelope.clamp(min=1e-11)  # <- here


class OverlapAddFixed(OverlapAdd):
    def forward(self, frames):
        window = self.window.float().square() * 0.02
        envelope = window * window
        clipped = (frames[:, 1:-1].float() * window) * window
        return (clipped / envelope.clamp(min=1e-11)).to(frames.dtype)


# A codebook's moving average
@reported("VQ-VAE codebook", "bf16", LOST, normal(24, 64, 8))
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.full((6,), 40.0))
        self.register_buffer("codes", normal(6, 8, seed=14))

    def forward(self, batches):
        size = self.size
        for x in batches.unbind():
            nearest = torch.cdist(x.float(), self.codes.float()).argmin(-1)
            counts = F.one_hot(nearest, 6).sum(0).to(x.dtype)
            size = size * 0.995 + counts * 0.005  # <- here
        return size - self.size


class CodebookFixed(Codebook):
    def forward(self, batches):
        size = self.size.float()
        for x in batches.unbind():
            nearest = torch.cdist(x.float(), self.codes.float()).argmin(-1)
            counts = F.one_hot(nearest, 6).sum(0)
            size = size * 0.995 + counts * 0.005
        return (size - self.size.float()).to(batches.dtype)


# The norm of all gradients
@reported(
    "clip_grad_norm by hand",
    "fp16",
    OVER,
    normal(300, 64, scale=4.0),
    normal(64, seed=1, scale=4.0),
)
def clipped(weight, bias):
    gradients = {"weight": weight, "bias": bias}
    squares = sum(torch.sum(g * g) for g in gradients.values())  # <- here
    factor = 1.0 / (torch.sqrt(squares) + 1e-6)
    return {name: g * factor.clamp(max=1.0) for name, g in gradients.items()}


def clipped_fixed(weight, bias):
    squares = sum(torch.sum(g.float() * g.float()) for g in (weight, bias))
    factor = (1.0 / (torch.sqrt(squares) + 1e-6)).clamp(max=1.0)
    return {"weight": (weight * factor).to(weight.dtype), "bias": (bias * factor).to(bias.dtype)}


# A trust ratio from small gradients
@reported("LARS trust ratio", "fp16", UNDER, normal(512), normal(512, seed=1, scale=1e-4))
def lars(weight, gradient):
    size = weight.square().sum().sqrt()
    slope = gradient.pow(2).sum().sqrt()  # <- here
    ratio = 1e-3 * size / slope
    return ratio * gradient


def lars_fixed(weight, gradient):
    ratio = 1e-3 * weight.float().norm() / gradient.float().norm()
    return (ratio * gradient.float()).to(weight.dtype)


# Adafactor's first epsilon
ROWS = normal(8, 16, scale=0.1)
ROWS[3] = 0


@reported("Adafactor epsilon1", "fp16", (*UNDER, "nan"), ROWS)
def adafactor(gradient):
    update = gradient.square() + 1e-30  # <- here
    row, column = update.mean(-1), update.mean(-2)
    r = torch.rsqrt(row / row.mean())
    return gradient * r[:, None] * torch.rsqrt(column)[None]


def adafactor_fixed(gradient):
    update = gradient.float().square() + 1e-30
    row, column = update.mean(-1), update.mean(-2)
    r = torch.rsqrt(row / row.mean())
    return (gradient * r[:, None] * torch.rsqrt(column)[None]).to(gradient.dtype)


# ArcFace's sine
FACES = normal(16, 64)


@reported("ArcFace sine", "bf16", LOST, FACES, FACES + normal(16, 64, seed=2, scale=0.08))
class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.cos_m, self.sin_m = math.cos(0.5), math.sin(0.5)

    def forward(self, x, centers):
        cosine = (F.normalize(x, dim=-1) * F.normalize(centers, dim=-1)).sum(-1)  # <- here
        sine = torch.sqrt((1 - cosine * cosine).clamp(min=0))  # <- here
        return 64 * sine * self.sin_m


class ArcFaceFixed(ArcFace):
    def forward(self, x, centers):
        a, b = F.normalize(x.float(), dim=-1), F.normalize(centers.float(), dim=-1)
        half = (a - b).norm(dim=-1) / 2
        return (64 * 2 * half * (1 - half * half).sqrt() * self.sin_m).to(x.dtype)


# Distances in the Poincare ball
BALL = 0.4 * F.normalize(normal(16, 8), dim=-1)


@reported(
    "Poincare embeddings",
    "fp16",
    (*LOST, "underflow"),
    BALL,
    (BALL + normal(16, 8, seed=3, scale=0.01)),
)
def poincare(u, v):
    gap = (u - v).square().sum(-1)
    sizes = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
    return torch.acosh(1 + 2 * gap / sizes)  # <- here


def poincare_fixed(u, v):
    u, v, dtype = u.float(), v.float(), u.dtype
    gap = (u - v).square().sum(-1)
    sizes = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
    return (2 * torch.asinh((gap / sizes).sqrt())).to(dtype)


# A discretized logistic
@reported(
    "PixelCNN++ likelihood",
    "fp16",
    LOST,
    normal(4, 100, scale=0.3),
    normal(4, 100, seed=1, scale=0.3),
)
def discretized_logistic(x, mean):
    inverse = 4.0
    upper = torch.sigmoid(inverse * (x - mean + 1 / 255))
    lower = torch.sigmoid(inverse * (x - mean - 1 / 255))
    mass = upper - lower  # <- here
    return torch.log(mass.clamp(min=1e-6)) + 5


def discretized_logistic_fixed(x, mean):
    middle = 4.0 * (x.float() - mean.float())
    upper, lower = torch.sigmoid(middle + 4 / 255), torch.sigmoid(middle - 4 / 255)
    return (torch.log((upper - lower).clamp(min=1e-6)) + 5).to(x.dtype)


# A Kalman filter that trusts its sensor
class Update(nn.Module):
    def forward(self, variance, noise):
        gain = variance / (variance + noise)  # <- here
        return (1 - gain) * variance, gain  # <- here


@reported("Kalman update", "bf16", LOST, uni(16, 6, low=0.5, high=2.0), inside=(Update,))
class Kalman(nn.Module):
    def __init__(self):
        super().__init__()
        self.update = Update()
        self.noise = nn.Parameter(torch.tensor(0.008))

    def forward(self, variance):
        state = torch.zeros_like(variance)
        for _ in range(3):
            state, _ = self.update(state + variance, self.noise)
        return state


class Joseph(nn.Module):
    def forward(self, variance, noise):
        return noise * variance / (variance + noise), None


class KalmanFixed(Kalman):
    def __init__(self):
        super().__init__()
        self.update = Joseph()


# NeRF's encoding
@reported(
    "NeRF positional encoding", "bf16", LOST, torch.arange(-60, 60).float().reshape(40, 3) / 64
)
class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(15)
        self.register_buffer("bands", 2.0 ** torch.arange(7))
        self.layer = nn.Linear(42, 8)

    def forward(self, x):
        angle = x[..., None] * self.bands * 3.14159265  # <- here
        features = torch.cat((angle.sin(), angle.cos()), -1)
        return self.layer(features.flatten(-2))


class EncodingFixed(Encoding):
    def forward(self, x):
        angle = x[..., None].float() * self.bands.float() * 3.14159265
        features = torch.cat((angle.sin(), angle.cos()), -1)
        return self.layer(features.flatten(-2).to(x.dtype))


# Pixels of points
POINTS = torch.cat((uni(64, 2, low=-30, high=30), uni(64, 1, seed=1, low=60, high=90)), -1)


class Camera(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("focal", torch.tensor([3000.0, 3000.0]))
        self.register_buffer("middle", torch.tensor([960.0, 540.0]))

    def forward(self, points):
        plane = points[:, :2] * self.focal  # <- here
        return plane / points[:, 2:] + self.middle


@reported("projection of points", "fp16", OVER, POINTS, inside=(Camera,))
class Reprojection(nn.Module):
    def __init__(self):
        super().__init__()
        self.camera = Camera()

    def forward(self, points):
        return (self.camera(points) / 1920,)


class GoodCamera(Camera):
    def forward(self, points):
        return points[:, :2] / points[:, 2:] * self.focal + self.middle


class ReprojectionFixed(Reprojection):
    def __init__(self):
        super().__init__()
        self.camera = GoodCamera()


# The gradient of a smoothed norm
APART = normal(8, 6)
APART[2] = 0


@reported("gradient of a norm at zero", "fp16", (*UNDER, "nan", "overflow"), APART, grad=True)
class SmoothNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        moved = x * self.scale
        length = torch.sqrt(moved.square().sum(-1) + 1e-10)  # <- here
        return length.mean()


class SmoothNormFixed(SmoothNorm):
    def forward(self, x):
        moved = x.float() * self.scale.float()
        return torch.sqrt(moved.square().sum(-1) + 1e-10).mean()


# Scores under autocast
@reported("scores under autocast", "fp16", OVER, normal(2, 12, 64, scale=6.0), autocast=True)
class AutocastScores(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(16)
        self.qkv = nn.Linear(64, 192)
        self.qkv.weight.data *= 20

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)  # <- here
        return torch.softmax(scores / 64**1.5 / 20, -1) @ v


class AutocastScoresFixed(AutocastScores):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q / 64**1.5 / 20) @ k.transpose(-2, -1)
        return torch.softmax(scores, -1) @ v


# Soft-DTW's soft minimum
@reported("soft-DTW", "fp16", (*UNDER, "overflow", "nan"), uni(6, 6, low=0.1, high=1.0))
class SoftDtw(nn.Module):
    def __init__(self, gamma=0.05):
        super().__init__()
        self.gamma = gamma

    def soft_minimum(self, *x):
        weights = torch.exp(-torch.stack(x) / self.gamma)  # <- here
        return -self.gamma * torch.log(weights.sum())

    def forward(self, cost):
        best = {(0, 0): cost[0, 0]}
        for i in range(6):
            for j in range(6):
                before = [best[p] for p in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if p in best]
                if before:
                    best[i, j] = cost[i, j] + self.soft_minimum(*before)
        return best[5, 5]


class SoftDtwFixed(SoftDtw):
    def soft_minimum(self, *x):
        return -self.gamma * torch.logsumexp(-torch.stack(x) / self.gamma, 0)


# A Gram matrix of style
@reported("style transfer's Gram matrix", "fp16", OVER, normal(1, 3, 32, 32))
class Style(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(17)
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.features[0].weight.data *= 20

    def forward(self, image):
        f = self.features(image).flatten(2)
        gram = torch.bmm(f, f.transpose(1, 2))  # <- here
        return gram / f.shape[1] / f.shape[2]


class StyleFixed(Style):
    def forward(self, image):
        f = self.features(image).flatten(2)
        return torch.bmm(f / f.shape[2], f.transpose(1, 2)) / f.shape[1]


# Times between events
STAMPS = 40000 + torch.cumsum(
    torch.randint(1, 9, (4, 32), generator=torch.Generator().manual_seed(18)), -1
)


@reported("time encodings from stamps", "bf16", LOST, STAMPS)
class TimeGaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1.0, 8))

    def forward(self, stamps):
        seconds = stamps.to(self.scale.dtype)  # <- here
        gaps = seconds[:, 1:] - seconds[:, :-1]
        return torch.sin(gaps[..., None] * self.scale)


class TimeGapsFixed(TimeGaps):
    def forward(self, stamps):
        gaps = (stamps[:, 1:] - stamps[:, :-1]).to(self.scale.dtype)
        return torch.sin(gaps[..., None] * self.scale)


# A gradient penalty
@reported("WGAN gradient penalty", "fp16", OVER, normal(4, 96))
class Penalty(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(19)
        self.critic = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 1))
        self.critic[0].weight.data *= 8
        self.critic[2].weight.data *= 200

    def forward(self, x):
        slope = torch.func.grad(lambda x: self.critic(x).sum())(x)
        squares = slope.pow(2).sum(-1)  # <- here
        return (squares.sqrt() - 1).abs() / 100


class PenaltyFixed(Penalty):
    def forward(self, x):
        slope = torch.func.grad(lambda x: self.critic(x).sum())(x)
        return (slope.norm(dim=-1) - 1).abs() / 100


# Healthy programs
@clean("bf16", normal(64), normal(64, seed=1))
def pinball(x, y):
    error = y - x
    return torch.stack([torch.maximum(q * error, (q - 1) * error) for q in (0.05, 0.5, 0.95)], -1)


@clean("fp16", normal(1, 40, 64, scale=3.0))
class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("filters", uni(20, 64, seed=2))

    def forward(self, x):
        x = torch.cat((x[:, :30], x[:, 30:] * 1e-4), 1)
        mel = F.linear(x * x, self.filters)
        logs = torch.clamp(mel, min=1e-10).log10()
        return (torch.maximum(logs, logs.amax() - 3) + 4) / 4


@clean("fp16", normal(2, 4, 24, 16))
class WindowAttention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(20)
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        gap = torch.arange(24)[:, None] - torch.arange(24)
        outside = (gap < 0) | (gap > 5)
        scores = q @ k.mT / 4
        return torch.softmax(scores.masked_fill(outside, torch.finfo(x.dtype).min), -1) @ v


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@clean("bf16", normal(2, 8, 32, scale=30.0))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(21)
        self.norm, self.up, self.down = RMSNorm(32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@clean("fp16", normal(24, 16))
class TopTwo(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(22)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        weights = torch.softmax(self.router(x).float(), -1)
        best, which = weights.topk(2, -1)
        best = (best / best.sum(-1, keepdim=True)).to(x.dtype)
        kept = (F.one_hot(which, 4).to(x.dtype) * best[..., None]).sum(1)
        return sum(kept[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)), weights


@clean("fp16", normal(2, 16, 8, 8))
class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(23)
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


@clean("bf16", normal(12, 3, 8))
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(24)
        self.lstm, self.head = nn.LSTM(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        return {"logits": self.head(out), "state": h}


@clean("fp16", normal(8, 16), normal(8, 4, seed=1))
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(25)
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x, noise):
        mu, logvar = self.encode(x).chunk(2, -1)
        logvar = logvar.clamp(-8, 8)
        z = mu + noise * torch.exp(0.5 * logvar)
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar)
        return self.decode(z), kl.sum(-1)


@clean("fp16", F.normalize(normal(32, 4), dim=-1), normal(32, 3, seed=1, scale=5.0))
def turned(q, v):
    w, u = q[:, :1], q[:, 1:]
    t = 2 * torch.linalg.cross(u, v)
    return v + w * t + torch.linalg.cross(u, t)


@clean("fp16", normal(1, 2, 32, 8), normal(1, 2, 32, 8, seed=1), normal(1, 2, 32, 8, seed=2))
class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        gap = torch.arange(32)[:, None] - torch.arange(32)
        decay = torch.tensor([0.9, 0.97])[:, None, None] ** gap.clamp(min=0)
        self.register_buffer("decay", decay * (gap >= 0))

    def forward(self, q, k, v):
        return (q @ k.mT / 8**0.5 * self.decay) @ v
