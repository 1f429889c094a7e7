"""Models of transformers and others with failures in 16 bits that are known from practice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import scalewise.torch as st

TRIALS = 12
OUTLIER = 3  # a feature that is much larger than the others, as trained models of this kind have it
TOKENS = {"vocab_size": 64, "use_cache": False}


class Classic(NamedTuple):
    """A model that fails in a dtype.

    Attributes:
        make: returns the model, in float32, and keyword arguments.
        dtype: torch's.
        source: the source lines of which the audit has to name one.
    """

    make: Callable[[], tuple[nn.Module, Mapping[str, Tensor]]]
    dtype: torch.dtype
    source: tuple[str, ...]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _sequences(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 64, (2, 7), generator=random)
    return model.eval(), {"input_ids": ids, "labels": ids}


def _enlarge(first: nn.Linear, second: nn.Linear) -> None:
    """Multiplies two layers' weights, so that the second one's result exceeds FP16's maximum."""
    with torch.no_grad():
        first.weight *= 30
        second.weight *= 3e4


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="relu", **TOKENS,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    layer = model.encoder.block[1].layer[-1].DenseReluDense
    _enlarge(layer.wi, layer.wo)
    return _sequences(model)


def mt5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MT5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, **TOKENS
    )
    model = transformers.MT5ForConditionalGeneration(config)
    layer = model.encoder.block[1].layer[-1].DenseReluDense
    _enlarge(layer.wi_1, layer.wo)
    return _sequences(model)


def pegasus() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.PegasusConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, **TOKENS,
    )  # fmt: skip
    model = transformers.PegasusForConditionalGeneration(config)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight *= 100
        model.model.decoder.layers[0].fc2.weight[OUTLIER] *= 1e6
    return _sequences(model)


class UnscaledAttention(nn.Module):
    """GPT-Neo's attention as it was trained, in bfloat16: no division by the root of the width."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            self.query.weight *= 60
            self.key.weight *= 60

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        rows, columns = scores.shape[-2:]
        causal = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
        return F.softmax(scores, -1) @ self.value(x)


class RotaryPositions(nn.Module):
    """Rotates pairs of features by angles that are computed in the dtype of the model."""

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        position = torch.arange(length, dtype=torch.float32).to(x.dtype)
        frequency = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = position[:, None] * frequency.to(x.dtype)
        cosine, sine = angle.cos(), angle.sin()
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class MaskedAttention(nn.Module):
    """Attention with a mask of -1e9, which is -inf in FP16, for padding."""

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        scores = x @ x.mT / x.shape[-1] ** 0.5
        scores = torch.where(attended[:, None, :] > 0, scores, -1e9)
        return F.softmax(scores, -1) @ x


class AdamStep(nn.Module):
    """A weight after one step of Adam, with torch's defaults."""

    def forward(self, weight: Tensor, gradient: Tensor) -> Tensor:
        first = 0.1 * gradient
        second = 0.001 * gradient * gradient
        denominator = (second / 0.001).sqrt() + 1e-8
        return weight - 1e-3 * (first / 0.1) / denominator


def masked() -> tuple[nn.Module, dict[str, Tensor]]:
    attended = torch.ones(2, 6)
    attended[0] = 0  # an empty sequence
    return MaskedAttention(), {"x": normal(2, 6, 8), "attended": attended}


def adam() -> tuple[nn.Module, dict[str, Tensor]]:
    gradient = normal(64, seed=1, scale=1e-2) * (torch.arange(64) % 2)
    return AdamStep(), {"weight": normal(64), "gradient": gradient}


HALF, BRAIN = torch.float16, torch.bfloat16
WO = ("hidden_states = self.wo(hidden_states)",)
CLASSICS: dict[str, Classic] = {
    "T5 in FP16": Classic(t5, HALF, WO),
    "mT5 in FP16": Classic(mt5, HALF, WO),
    "Pegasus in FP16": Classic(pegasus, HALF, ("hidden_states = self.fc2(hidden_states)",)),
    "Attention without a scale, FP16": Classic(
        lambda: (UnscaledAttention(), {"x": normal(2, 8, 32, scale=4.0)}), HALF,
        ("scores = self.query(x) @ self.key(x).mT",),
    ),
    "Rotary positions in BF16": Classic(
        lambda: (RotaryPositions(), {"x": normal(1, 600, 8)}), BRAIN,
        (
            "position = torch.arange(length, dtype=torch.float32).to(x.dtype)",
            "angle = position[:, None] * frequency.to(x.dtype)",
            "cosine, sine = angle.cos(), angle.sin()",
        ),
    ),
    "A mask of -1e9, FP16": Classic(
        masked, HALF, ("scores = torch.where(attended[:, None, :] > 0, scores, -1e9)",)
    ),
    "Adam's epsilon in FP16": Classic(
        adam, HALF,
        (
            "denominator = (second / 0.001).sqrt() + 1e-8",
            "second = 0.001 * gradient * gradient",
            "return weight - 1e-3 * (first / 0.1) / denominator",
        ),
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    torch.manual_seed(1)
    return CLASSICS[name].make()


def audited(name: str, trials: int = TRIALS) -> Any:
    """Returns the report of a program."""
    model, kwargs = made(name)
    low = "fp16" if CLASSICS[name].dtype == HALF else "bf16"
    return st.audit(model, (), kwargs, low=low, trials=trials)
