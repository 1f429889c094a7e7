"""Models of transformers and others with failures in 16 bits that are known from practice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mt5 import modeling_mt5
from transformers.models.pegasus import modeling_pegasus
from transformers.models.t5 import modeling_t5

from ..programs import Program, register
from . import LOST, OVER, UNDER, normal

OUTLIER = 3  # a feature that is much larger than the others, as trained models of this kind have it
TOKENS = {"vocab_size": 64, "use_cache": False}


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


def _of(
    make: Callable[[], tuple[nn.Module, Mapping[str, Any]]], low: str, kinds: tuple[str, ...],
    at: Callable, *source: str,
) -> Program:  # fmt: skip
    """Returns a model that fails, whose inputs have names."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return make()[0]

    return Program(
        model, lambda: make()[1], low, kinds, "common", source, (at,),
        reference="float32",
    )  # fmt: skip


T5, MT5, PEGASUS = (
    modeling_t5.T5DenseActDense,
    modeling_mt5.MT5DenseGatedActDense,
    modeling_pegasus.PegasusDecoderLayer,
)
WO = "hidden_states = self.wo(hidden_states)"
CLASSICS: dict[str, Program] = {
    "T5 in FP16": _of(t5, "fp16", OVER, T5.forward, WO),
    "mT5 in FP16": _of(mt5, "fp16", OVER, MT5.forward, WO),
    "Pegasus in FP16": _of(
        pegasus, "fp16", OVER, PEGASUS.forward, "hidden_states = self.fc2(hidden_states)"
    ),
    "Attention without a scale, FP16": _of(
        lambda: (UnscaledAttention(), {"x": normal(2, 8, 32, scale=4.0)}), "fp16", OVER,
        UnscaledAttention.forward, "scores = self.query(x) @ self.key(x).mT",
    ),
    "Rotary positions in BF16": _of(
        lambda: (RotaryPositions(), {"x": normal(1, 600, 8)}), "bf16", LOST,
        RotaryPositions.forward,
        "position = torch.arange(length, dtype=torch.float32).to(x.dtype)",
        "angle = position[:, None] * frequency.to(x.dtype)",
        "cosine, sine = angle.cos(), angle.sin()",
    ),
    "A mask of -1e9, FP16": _of(
        masked, "fp16", OVER, MaskedAttention.forward,
        "scores = torch.where(attended[:, None, :] > 0, scores, -1e9)",
    ),
    "Adam's epsilon in FP16": _of(
        adam, "fp16", (*UNDER, *OVER), AdamStep.forward,
        "denominator = (second / 0.001).sqrt() + 1e-8",
        "second = 0.001 * gradient * gradient",
        "return weight - 1e-3 * (first / 0.1) / denominator",
    ),
}  # fmt: skip

for name, program in CLASSICS.items():
    register("torch", name, program)
