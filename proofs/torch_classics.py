"""Known failures of PyTorch models in 16 bits: what the audit and what torch's checks say.

    python -m proofs.torch_classics            # with the Python of `make test-torch`
    python -m proofs.torch_classics --write    # and writes the table of docs/torch.md

Each program is one model with inputs on which it fails. The audit gets the model in float32.
transformers' ``DebugUnderflowOverflow`` and ``torch.autograd.detect_anomaly`` look at what torch
computes, forward and backward, with the model in float16 or bfloat16 on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.debug_utils import DebugUnderflowOverflow

import scalewise.torch as st

DOCS = Path(__file__).parents[1] / "docs" / "torch.md"
BEGIN, END = "<!-- made by proofs/torch_classics.py -->\n", "<!-- end -->\n"
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


class Said(NamedTuple):
    """A check's words on a program, and its seconds."""

    text: str
    seconds: float


def made(name: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    torch.manual_seed(1)
    return CLASSICS[name].make()


def audited(name: str, trials: int = TRIALS) -> Any:
    """Returns the report of a program."""
    model, kwargs = made(name)
    low = "fp16" if CLASSICS[name].dtype == HALF else "bf16"
    return st.audit(model, (), kwargs, low=low, trials=trials)


def audit(name: str) -> Said:
    begin = time.perf_counter()
    report = audited(name)
    seconds = time.perf_counter() - begin
    worst = (*report.findings, *report.unfixed)[0]
    right = "" if worst.source in CLASSICS[name].source else " (another line)"
    fix = f"{worst.fix}: error {worst.error_before:.2g} to {worst.error_after:.2g}"
    where = f"{worst.kind} at {Path(worst.file).name}:{worst.line} `{worst.source}`{right}"
    return Said(f"{where}; {fix if worst.fix else 'no fix helps'}", seconds)


def _step(model: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
    outs = model(*args, **kwargs)
    loss = outs["loss"] if isinstance(outs, Mapping) else (outs * outs).mean()
    if loss.requires_grad:
        loss.backward()


def _low(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, kwargs = made(name)
    dtype = CLASSICS[name].dtype
    cast = {k: x.to(dtype) if x.is_floating_point() else x for k, x in kwargs.items()}
    floats = [x.requires_grad_() for x in cast.values() if x.is_floating_point()]
    assert floats or list(model.parameters())
    return copy.deepcopy(model).to(dtype), cast


def debug_underflow_overflow(model: nn.Module, args: Any, kwargs: Any) -> Said:
    """Returns what transformers' check says of a step of a model in 16 bits."""
    printed = io.StringIO()
    begin = time.perf_counter()
    try:
        with contextlib.redirect_stdout(printed):
            DebugUnderflowOverflow(model)
            _step(model, args, kwargs)
    except ValueError as error:
        if "DebugUnderflowOverflow" not in str(error):
            raise
        seconds = time.perf_counter() - begin
        module, kind = re.findall(r"^ {18}(\S*) (\w+)$", printed.getvalue(), re.MULTILINE)[-1]
        seen = ", ".join(dict.fromkeys(re.findall(r"^\S+ has \w+$", printed.getvalue(), re.M)))
        return Said(f"module `{module or 'the model'}` ({kind}): {seen}", seconds)
    return Said("nothing", time.perf_counter() - begin)


def detect_anomaly(model: nn.Module, args: Any, kwargs: Any) -> Said:
    """Returns what torch's check says of a step of a model in 16 bits."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                _step(model, args, kwargs)
        except RuntimeError as error:
            seconds = time.perf_counter() - begin
            text = "".join(str(w.message) for w in told if "Traceback of forward" in str(w.message))
            lines = re.findall(r'File "(.+?)", line (\d+)', text)
            own = [x for x in lines if not x[0].startswith(str(Path(torch.__file__).parent))]
            at = f" at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
            return Said(f"{str(error).splitlines()[0]}{at}", seconds)
    return Said("nothing", time.perf_counter() - begin)


def table() -> str:
    """Returns the table, with the versions that it was made with."""
    lines = [
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads; seconds in parentheses.",
        "",
        "| program | `st.audit` | `DebugUnderflowOverflow` | `detect_anomaly` |",
        "|---|---|---|---|",
    ]
    for name in CLASSICS:
        cells = [audit(name)]
        for check in (debug_underflow_overflow, detect_anomaly):
            model, kwargs = _low(name)
            cells.append(check(model, (), kwargs))
        texts = [f"{said.text} ({said.seconds:.1f})".replace("|", "\\|") for said in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table to docs/torch.md")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    made_table = table()
    if given.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(before + BEGIN + made_table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
