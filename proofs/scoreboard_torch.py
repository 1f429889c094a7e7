"""Runs the checks of PyTorch and Hugging Face on PyTorch programs like those of the gallery.

    make scoreboard                                        # in an environment of its own
    python -m proofs.scoreboard_torch "T5 in fp16" --again

Each program is an ``nn.Module`` in float16 or bfloat16 and one or two training steps, and fails as
the program of the same name in examples/ does. ``torch.autograd.detect_anomaly`` raises where a
backward pass returns NaN, and shows the forward line that it belongs to; transformers'
``DebugUnderflowOverflow`` raises behind the first module with infinity or NaN among its weights,
inputs or outputs, and prints its name. What they say is recorded in docs/scoreboard.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import io
import re
import statistics
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.debug_utils import DebugUnderflowOverflow

from proofs.experts import marked
from proofs.scoreboard import FAILED, LINE, NOTHING, OTHER, REPEATS, record, recorded, timed
from proofs.scoreboard import versions as versions_of_jax

HERE = __file__
MODULE, OTHER_MODULE = "module", "another module"


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


class Program(NamedTuple):
    """A model, a step, and where it fails.

    Attributes:
        model: makes it, in float32.
        step: called with the model and the inputs.
        inputs: returns them, in float32.
        dtype: of the model and its inputs.
        at: the functions with the marked lines; () for a healthy program.
        modules: the names of modules that compute those lines.
    """

    model: Callable[[], nn.Module]
    step: Callable[..., None]
    inputs: Callable[[], tuple[Tensor, ...]]
    dtype: torch.dtype
    at: tuple[Callable[..., Any], ...] = ()
    modules: tuple[str, ...] = ()


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


HALF, BRAIN = torch.float16, torch.bfloat16
PROGRAMS: dict[str, Program] = {
    "T5 in fp16": Program(
        lambda: FeedForward(normal(16, 64, seed=1, scale=40), normal(64, 16, seed=2, scale=300)),
        gradients, lambda: (normal(4, 16),), HALF, (FeedForward.forward,), ("", "wo"),
    ),
    "An empty sequence in a padded batch": Program(
        lambda: Encoder(16, Attention(16, -1e9)), gradients,
        lambda: (normal(3, 8, 16), padding(8, 5, 0)), HALF, (Attention.forward,), ("attention",),
    ),
    "LayerNorm of outliers": Program(
        lambda: Perceptron(32, 64, 4, LayerNorm()), gradients,
        lambda: (400.0 * normal(8, 32),), HALF, (LayerNorm.forward,), ("norm",),
    ),
    "Sum of squares in a norm": Program(
        lambda: Perceptron(4096, 16, 4, RMSNorm()), gradients,
        lambda: (6.0 * normal(1, 4096),), HALF, (RMSNorm.forward,), ("norm",),
    ),
    "A divergence with epsilons": Program(
        Distillation, gradients, lambda: (normal(16, 8, seed=3),), HALF,
        (Divergence.forward,), ("divergence",),
    ),
    "Logarithms of smoothed targets": Program(
        Classifier, gradients, lambda: (normal(16, 8, seed=3), smoothed()), HALF,
        (SmoothedCrossEntropy.forward,), ("loss",),
    ),
    "Small gradients": Program(
        lambda: linear(normal(16, 1)), tiny_loss, lambda: (normal(64, 16, seed=1),), HALF,
        (tiny_loss,),
    ),
    "A static loss scale of 65536": Program(
        lambda: perceptron(4), static_loss_scale,
        lambda: (normal(16, 8, seed=3), torch.arange(16) % 4), HALF, (static_loss_scale,),
    ),
    "Adam's epsilon behind clipping": Program(perceptron, adam, sparse_regression, HALF, (adam,)),
    "A gradient norm decides to skip": Program(
        perceptron, clipped, lambda: (regression()[0], 10.0 * regression()[1]), HALF, (clipped,)
    ),
    "Updates vanish": Program(perceptron, small_updates, regression, BRAIN, (small_updates,)),
    "Positions counted in BF16": Program(
        Embedding, gradients,
        lambda: (torch.arange(640).reshape(2, 320) % 32, torch.ones(2, 320)), BRAIN,
        (Embedding.forward,),
    ),
    "Transformer": Program(
        lambda: Encoder(16, Attention(16, -1e4)), gradients,
        lambda: (normal(3, 8, 16), padding(8, 5, 2)), BRAIN,
    ),
    "A mask of -inf": Program(
        lambda: Encoder(16, MaskedAttention(16, 0.0)), gradients,
        lambda: (normal(2, 8, 16), torch.full((8, 8), -torch.inf).triu(1)), HALF,
    ),
    "CNN, scaled gradients": Program(
        Convolutions, gradients, lambda: (normal(2, 3, 16, 16),), HALF
    ),
    "Adam": Program(perceptron, healthy_adam, regression, BRAIN),
}  # fmt: skip


class Said(NamedTuple):
    """What a check said: its verdict, its words, and the line or module that it names."""

    verdict: str
    message: str | None = None
    where: str = ""


def detect_anomaly(program: Program, model: nn.Module, inputs: Sequence[Tensor]) -> Said:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                program.step(model, *inputs)
        except RuntimeError as error:
            text = "".join(str(w.message) for w in told if "Traceback of forward" in str(w.message))
            return _at_line(program, str(error), _places(text))
    return Said(NOTHING)


def debug_underflow_overflow(program: Program, model: nn.Module, inputs: Sequence[Tensor]) -> Said:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            DebugUnderflowOverflow(model)
            program.step(model, *inputs)
    except ValueError as error:
        if "DebugUnderflowOverflow" not in str(error):
            raise
        name, kind = re.findall(r"^ {18}(\S*) (\w+)$", printed.getvalue(), re.MULTILINE)[-1]
        verdict = MODULE if program.at and name in program.modules else OTHER_MODULE
        seen = ", ".join(dict.fromkeys(re.findall(r"^\S+ has \w+$", printed.getvalue(), re.M)))
        return Said(verdict, seen, f"{name or 'the model'} ({kind})")
    return Said(NOTHING)


def _places(text: str) -> list[tuple[str, int]]:
    found = re.findall(r'File "(.+?)", line (\d+)', text)
    return [(file, int(line)) for file, line in found if file == HERE][-1:]


def _at_line(program: Program, message: str, places: Sequence[tuple[str, int]]) -> Said:
    verdict = LINE if marked(program.at) & set(places) else OTHER
    where = "".join(f"{Path(file).name}:{line}" for file, line in places)
    return Said(verdict, message, where)


TOOLS = {
    "torch.autograd.detect_anomaly": detect_anomaly,
    "DebugUnderflowOverflow": debug_underflow_overflow,
}


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def is_finite(model: nn.Module) -> bool:
    tensors = [t for w in model.parameters() for t in (w, w.grad) if t is not None]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def rows(program: Program, tools: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Runs a program's steps without and with each check; yields what each says, and the times."""
    torch.manual_seed(0)
    model = program.model().to(program.dtype)
    inputs = [cast(x, program.dtype) for x in program.inputs()]

    def plain() -> nn.Module:
        own = copy.deepcopy(model)
        program.step(own, *inputs)
        return own

    def steady(call: Callable[[], Any]) -> float:
        return statistics.median(timed(call)[1] for _ in range(REPEATS))

    trained, first = timed(plain)
    plain_times = first, steady(plain)
    for tool in tools:

        def check(tool: str = tool) -> Said:
            return TOOLS[tool](program, copy.deepcopy(model), inputs)

        try:
            said, first = timed(check)
        except Exception:  # recorded: a check that fails says nothing of the program
            said, first = Said(FAILED, traceback.format_exc().splitlines()[-1][:200]), 0.0
        again = steady(check) if said.verdict != FAILED else 0.0
        yield {
            "tool": tool,
            "verdict": said.verdict,
            "message": said.message and said.message.splitlines()[0][:200],
            "where": [said.where] if said.where else [],
            "finite": is_finite(trained),
            "first": [round(first, 4), round(plain_times[0], 4)],
            "steady": [round(again, 7), round(plain_times[1], 7)],
        }


def versions() -> dict[str, str]:
    own = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {k: v for k, v in versions_of_jax().items() if k != "jax"} | own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="program", help="by name; all by default")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in [x for x in PROGRAMS if x in given.programs or not given.programs]:
        there = {} if given.again else recorded()
        missing = [tool for tool in TOOLS if (name, tool) not in there]
        for row in rows(PROGRAMS[name], missing) if missing else ():
            record(name, row | versions())


if __name__ == "__main__":
    main()
