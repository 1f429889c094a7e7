"""Programs like those of the gallery as modules of PyTorch with one or two training steps.

Each fails as the program of the same name in the gallery does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..programs import Program, load, register
from . import normal


def linear(weight: Tensor) -> nn.Linear:
    """Returns a layer without bias that multiplies by ``weight``, of shape (inputs, outputs)."""
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight.data = weight.T.contiguous()
    return layer


class FeedForward(nn.Module):
    def __init__(self, wi: Tensor, wo: Tensor):
        super().__init__()
        self.wi, self.wo = linear(wi), linear(wo)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(F.relu(self.wi(x)))  # <- here


class Attention(nn.Module):
    """Attention to the tokens of each sequence, with ``fill`` for the scores of its padding."""

    def __init__(self, width: int, fill: float):
        super().__init__()
        self.query, self.keys, self.value, self.out = (
            linear(normal(width, width, seed=i, scale=width**-0.5)) for i in range(4)
        )
        self.fill = fill

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.query(x) @ self.keys(x).mT * x.shape[-1] ** -0.5
        scores = scores + padding[:, None, :] * self.fill  # <- here
        return x + self.out(F.softmax(scores, dim=-1) @ self.value(x))


class MaskedAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.keys(x).mT * x.shape[-1] ** -0.5
        return x + self.out(F.softmax(scores + mask, dim=-1) @ self.value(x))


class Encoder(nn.Module):
    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.head = linear(normal(width, 4, seed=9, scale=width**-0.5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(self.norm(x), mask))


class LayerNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        square = centred * centred  # <- here
        return centred * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-3)  # <- here


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = torch.sum(x * x) / x.numel()  # <- here
        return x * torch.rsqrt(mean + 1e-3)


class Perceptron(nn.Module):
    """Two layers, and a norm in front of them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, norm: nn.Module, scale: float = 1.0):
        super().__init__()
        self.norm = norm
        self.first = linear(normal(inputs, hidden, seed=1, scale=inputs**-0.5))
        self.head = linear(normal(hidden, outputs, seed=2, scale=scale * hidden**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.first(self.norm(x))))


class Divergence(nn.Module):
    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        p, q = F.softmax(teacher, dim=-1), F.softmax(student, dim=-1)  # <- here
        return torch.sum(p * (torch.log(p + 1e-10) - torch.log(q + 1e-10)))  # <- here


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = linear(normal(8, 10, seed=1, scale=12.0))
        self.teacher = linear(normal(8, 10, seed=2, scale=12.0))
        self.divergence = Divergence()

    def forward(self, x: Tensor) -> Tensor:
        return self.divergence(self.student(x), self.teacher(x).detach())


class SmoothedCrossEntropy(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return -torch.mean(torch.sum(targets * torch.log(F.softmax(logits, dim=-1)), -1))  # <- here


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = Perceptron(8, 32, 10, nn.Identity(), scale=6.0)
        self.loss = SmoothedCrossEntropy()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.layers(x), targets)


class Embedding(nn.Module):
    """Embeds tokens and their positions, which count the tokens before them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(321, 16)

    def forward(self, tokens: Tensor, attended: Tensor) -> Tensor:
        position = torch.cumsum(attended, -1) * attended  # <- here
        return self.tokens(tokens) + self.positions(position.long())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 16, 3, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x)))).mean((2, 3))
        return F.log_softmax(self.head(x), -1)


# The steps: forward and backward, some with an optimizer.


def gradients(model: nn.Module, *inputs: Tensor) -> None:
    out = model(*inputs)
    out.backward(torch.ones_like(out))


def tiny_loss(model: nn.Module, x: Tensor) -> None:
    loss = torch.mean(torch.square(model(x))) * 1e-6  # <- here
    loss.backward()


def static_loss_scale(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Skips the step if a gradient isn't finite."""
    loss = F.cross_entropy(model(x), y) * 65536.0  # <- here
    loss.backward()
    weights = list(model.parameters())
    grads = [w.grad / 65536.0 for w in weights if w.grad is not None]  # <- here
    if all(bool(torch.isfinite(g).all()) for g in grads):
        with torch.no_grad():
            for w, g in zip(weights, grads, strict=True):
                w -= 0.5 * g


def adam(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two steps; the inputs' last feature is always 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()  # <- here


def healthy_adam(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.875, 0.9375), eps=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (4096.0 * F.mse_loss(model(x), y)).backward()
    weights = [w for w in model.parameters() if w.grad is not None]
    norm = torch.sqrt(sum(torch.sum(torch.square(w.grad)) for w in weights))  # <- here
    with torch.no_grad():
        for w in weights:
            w -= 0.1 * w.grad / torch.clamp(norm, min=1.0)


def small_updates(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    F.mse_loss(model(x), y).backward()
    optimizer.step()  # <- here


def program(
    model: Callable[[], nn.Module], step: Callable[..., None], inputs: Callable[[], Any], low: str,
    at: tuple[Callable[..., Any], ...] = (), modules: tuple[str, ...] = (),
) -> Program:  # fmt: skip
    """Returns a model and its step; a healthy one without functions that have marked lines."""
    return Program(model, inputs, low, inside=at, modules=modules, step=step)


def padding(*lengths: int) -> Tensor:
    """Returns 1 for padding; as floats, since DebugUnderflowOverflow fails on inputs of bools."""
    return (torch.arange(8)[None, :] >= torch.tensor(lengths)[:, None]).float()


def regression() -> tuple[Tensor, ...]:
    return normal(16, 8, seed=3), normal(16, 1, seed=4)


def sparse_regression() -> tuple[Tensor, ...]:
    x, y = regression()
    return x * (torch.arange(8) < 7), y


def perceptron(outputs: int = 1) -> nn.Module:
    return Perceptron(8, 16, outputs, nn.Identity())


def smoothed() -> Tensor:
    return 0.9 * F.one_hot(torch.arange(16) % 10, 10).float() + 0.01


HALF, BRAIN = "fp16", "bf16"
PROGRAMS: dict[str, Program] = {
    "T5 in fp16": program(
        lambda: FeedForward(normal(16, 64, seed=1, scale=40), normal(64, 16, seed=2, scale=300)),
        gradients, lambda: (normal(4, 16),), HALF, (FeedForward.forward,), ("", "wo"),
    ),
    "An empty sequence in a padded batch": program(
        lambda: Encoder(16, Attention(16, -1e9)), gradients,
        lambda: (normal(3, 8, 16), padding(8, 5, 0)), HALF, (Attention.forward,), ("attention",),
    ),
    "LayerNorm of outliers": program(
        lambda: Perceptron(32, 64, 4, LayerNorm()), gradients,
        lambda: (400.0 * normal(8, 32),), HALF, (LayerNorm.forward,), ("norm",),
    ),
    "Sum of squares in a norm": program(
        lambda: Perceptron(4096, 16, 4, RMSNorm()), gradients,
        lambda: (6.0 * normal(1, 4096),), HALF, (RMSNorm.forward,), ("norm",),
    ),
    "A divergence with epsilons": program(
        Distillation, gradients, lambda: (normal(16, 8, seed=3),), HALF,
        (Divergence.forward,), ("divergence",),
    ),
    "Logarithms of smoothed targets": program(
        Classifier, gradients, lambda: (normal(16, 8, seed=3), smoothed()), HALF,
        (SmoothedCrossEntropy.forward,), ("loss",),
    ),
    "Small gradients": program(
        lambda: linear(normal(16, 1)), tiny_loss, lambda: (normal(64, 16, seed=1),), HALF,
        (tiny_loss,),
    ),
    "A static loss scale of 65536": program(
        lambda: perceptron(4), static_loss_scale,
        lambda: (normal(16, 8, seed=3), torch.arange(16) % 4), HALF, (static_loss_scale,),
    ),
    "Adam's epsilon behind clipping": program(
        lambda: perceptron(), adam, sparse_regression, HALF, (adam,)
    ),
    "A gradient norm decides to skip": program(
        lambda: perceptron(), clipped, lambda: (regression()[0], 10.0 * regression()[1]), HALF,
        (clipped,),
    ),
    "Updates vanish": program(
        lambda: perceptron(), small_updates, regression, BRAIN, (small_updates,)
    ),
    "Positions counted in BF16": program(
        Embedding, gradients,
        lambda: (torch.arange(640).reshape(2, 320) % 32, torch.ones(2, 320)), BRAIN,
        (Embedding.forward,),
    ),
    "Transformer": program(
        lambda: Encoder(16, Attention(16, -1e4)), gradients,
        lambda: (normal(3, 8, 16), padding(8, 5, 2)), BRAIN,
    ),
    "A mask of -inf": program(
        lambda: Encoder(16, MaskedAttention(16, 0.0)), gradients,
        lambda: (normal(2, 8, 16), torch.full((8, 8), -torch.inf).triu(1)), HALF,
    ),
    "CNN, scaled gradients": program(
        Convolutions, gradients, lambda: (normal(2, 3, 16, 16),), HALF
    ),
    "Adam": program(lambda: perceptron(), healthy_adam, regression, BRAIN),
}  # fmt: skip

for name, made in PROGRAMS.items():
    kinds = load("gallery")[name].kinds if made.inside else ()
    register("steps", name, dataclasses.replace(made, kinds=kinds))
