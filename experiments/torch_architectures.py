"""Errors in 16 bits of 40 architectures, as an audit predicts them and as torch computes them.

    python -m experiments.torch_architectures            # with the Python of `make test-torch`
    python -m experiments.torch_architectures --write    # and writes the page of results
    python -m experiments.torch_architectures Mamba ViT  # some of them

Models are made from small configs, with random weights. torch's error is that of the model
converted by ``model.half()`` or ``model.bfloat16()``, beside the model in float32, on the CPU, but
with sums of a tensor and a Python number as CUDA computes them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import math
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import scalewise.torch as st
from experiments import torch_models
from scalewise.auditing._thresholds import unusable
from scalewise.formats import format as format_

DOCS = Path(__file__).parents[1] / "docs" / "results" / "torch.md"
BEGIN = "<!-- made by experiments/torch_architectures.py -->\n"
END = "<!-- end of the architectures -->\n"
RATIO = 1.5  # of the two errors, at most
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = SIZES | {"intermediate_size": 32}
TEXT = WIDE | {"vocab_size": 64, "use_cache": False}
GROUPED = TEXT | {"num_key_value_heads": 1}
IMAGE = {"image_size": 16, "patch_size": 4}
SEQUENCES = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "use_cache": False,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}  # fmt: skip
# The prefix of the classes' names, the model's suffix, the arguments of the config, the inputs.
TRANSFORMERS = [
    ("ViT", "Model", WIDE | IMAGE, "image"),
    ("CLIP", "Model", {
        "text_config": WIDE | {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63},
        "vision_config": WIDE | IMAGE,
    }, "text image"),
    ("Whisper", "Model", SEQUENCES | {
        "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
        "pad_token_id": 0, "decoder_start_token_id": 1,
    }, "speech"),
    ("Bart", "ForConditionalGeneration", SEQUENCES | {"max_position_embeddings": 32}, "text"),
    ("Mamba", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
        "use_cache": False,
    }, "text"),
    ("Mixtral", "ForCausalLM", GROUPED | {"num_local_experts": 4}, "text"),
    ("Qwen3", "ForCausalLM", GROUPED | {"head_dim": 8}, "text"),
    ("Gemma2", "ForCausalLM", GROUPED | {"head_dim": 8}, "text"),
    ("Falcon", "ForCausalLM", TEXT, "text"),
    ("GPTNeo", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "use_cache": False,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
        "window_size": 4,
    }, "text"),
    ("OPT", "ForCausalLM", SIZES | {
        "vocab_size": 64, "use_cache": False, "ffn_dim": 32, "word_embed_proj_dim": 16,
        "max_position_embeddings": 32,
    }, "text"),
    ("DebertaV2", "Model", WIDE | {
        "vocab_size": 64, "max_position_embeddings": 32, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    }, "text"),
    ("ConvNext", "Model", {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}, "photo"),
    ("ResNet", "Model", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "photo"),
    ("Swin", "Model", {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4,
    }, "image"),
    ("Wav2Vec2", "Model", WIDE | {
        "vocab_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }, "sound"),
]  # fmt: skip
# Beside those that tests/pytorch/test_architectures.py runs.
MORE = [
    ("GPT2", "LMHeadModel", {
        "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
        "use_cache": False,
    }, "text"),
    ("Bert", "ForMaskedLM", TEXT | {"max_position_embeddings": 32}, "text"),
    ("Llama", "ForCausalLM", GROUPED, "text"),
    ("T5", "ForConditionalGeneration", {
        "vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
        "use_cache": False, "decoder_start_token_id": 0,
    }, "text decoder"),
    ("DistilBert", "ForMaskedLM", {
        "vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
        "max_position_embeddings": 32,
    }, "text"),
    ("GPTNeoX", "ForCausalLM", TEXT, "text"),
    ("Bloom", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False,
    }, "text"),
    ("DeepseekV3", "ForCausalLM", TEXT | {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "qk_nope_head_dim": 4, "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    }, "text"),
    ("Mamba2", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "n_groups": 1,
        "num_heads": 4, "head_dim": 8, "chunk_size": 4, "use_cache": False,
    }, "text"),
    ("Dinov2", "Model", SIZES | IMAGE, "image"),
    ("Segformer", "Model", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }, "photo"),
]  # fmt: skip
# Of timm's registry: the arguments that make the model small.
TIMM = {
    "vit_tiny_patch16_224": {
        "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
    },
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
}  # fmt: skip


class FrozenBatchNorm2d(nn.Module):
    """A class that no layer of the models is an instance of."""


def timm() -> Any:
    """Returns timm, imported with stand-ins for what it takes from torchvision.

    torchvision's release has to match torch's, and its wheels need CUDA's build of it. So timm is
    installed without its dependencies.
    """
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    names = ("ops", "datasets", "transforms", "transforms.functional")
    modules: dict[str, Any] = {f"torchvision.{name}": mock.MagicMock() for name in names}
    misc = types.ModuleType("torchvision.ops.misc")
    vars(misc)["FrozenBatchNorm2d"] = FrozenBatchNorm2d
    modules |= {"torchvision": mock.MagicMock(), "torchvision.ops.misc": misc}
    sys.modules.update(modules)
    try:
        return importlib.import_module("timm")
    finally:
        for name in modules:
            del sys.modules[name]


def inputs(kind: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    ids = torch.randint(1, 63, (2, 7), generator=random)
    return {
        "text": {"input_ids": ids},
        "decoder": {"decoder_input_ids": ids},
        "image": {"pixel_values": normal(2, 3, 16, 16)},
        "photo": {"pixel_values": normal(2, 3, 32, 32)},
        "sound": {"input_values": normal(2, 400)},
        "speech": {"input_features": normal(2, 8, 20), "decoder_input_ids": ids},
    }[kind]


Made = tuple[nn.Module, tuple[Tensor, ...], Mapping[str, Tensor]]


def of_transformers(name: str, head: str, config: Mapping[str, Any], kinds: str) -> Made:
    """Returns a model of transformers with random weights, and its inputs."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, name + head)(made).eval()
    return model, (), {k: v for kind in kinds.split() for k, v in inputs(kind).items()}


def of_timm(name: str) -> Made:
    """Returns a model of timm with random weights, and an image."""
    torch.manual_seed(0)
    options = {"in_chans": 3, "num_classes": 10} | TIMM[name]
    model = timm().create_model(name, pretrained=False, **options).eval()
    return model, tuple(inputs("image" if name.startswith("vit") else "photo").values()), {}


def own(name: str) -> Made:
    """Returns a model of ``experiments.torch_models``, and its inputs."""
    torch.manual_seed(0)
    model, args = torch_models.MODELS[name]()
    return model.eval(), args, {}


def architectures() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yields name and maker of each model."""
    for row in (*TRANSFORMERS, *MORE):
        yield row[0], lambda row=row: of_transformers(*row)
    for name in TIMM:
        yield name, lambda name=name: of_timm(name)
    for name in torch_models.MODELS:
        yield name, lambda name=name: own(name)


class FloatScalars(TorchDispatchMode):
    """Lets torch on a CPU add Python numbers to tensors in float32, and multiply by ``alpha``, as
    CUDA does: its own kernels round the number to the tensor's dtype first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x: Any = next(iter(args), None)
        name = func.overloadpacket._qualified_op_name.removesuffix("_")
        added = name in ("aten::add", "aten::sub", "aten::rsub") and isinstance(x, Tensor)
        number = not all(isinstance(y, Tensor) for y in args) or kwargs.get("alpha", 1) != 1
        if not (added and number and x.dtype in DTYPES.values()):
            return func(*args, **kwargs)
        wide = func(*(y.float() if isinstance(y, Tensor) else y for y in args), **kwargs)
        return x.copy_(wide) if func._schema.is_mutable else wide.to(x.dtype)


def torchs_error(made: Made, dtype: torch.dtype) -> tuple[int, float]:
    """Returns how many numbers torch makes non-finite in a dtype, and the error of the others: the
    root of the mean of the squares of the results' relative errors, as an audit has it."""
    model, args, kwargs = made

    def results(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        given, named = torch.utils._pytree.tree_map(cast, (args, dict(kwargs)))
        with torch.no_grad(), FloatScalars():
            outs = copy.deepcopy(model).to(dtype)(*given, **named)
        outs = dict(outs) if isinstance(outs, Mapping) else outs
        leaves = torch.utils._pytree.tree_leaves(outs)
        return [x.double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    non_finite, squares = 0, []
    for got, want in zip(results(model, dtype), results(model, torch.float32), strict=True):
        finite = got.isfinite() & want.isfinite()
        non_finite += int((~got.isfinite() & want.isfinite()).sum())
        size = want[finite].norm().item()
        squares.append(((got - want)[finite].norm().item() / size) ** 2 if size else 0.0)
    return non_finite, math.sqrt(sum(squares) / len(squares))


class Row(NamedTuple):
    """A model in a format: torch's error, the audit's, its verdict, and seconds of CPU time."""

    name: str
    low: str
    torchs: float
    audits: float
    verdict: str
    seconds: float
    wrong: str


def compared(name: str, make: Callable[[], Made], low: str) -> Row:
    """Audits a model in a format, and runs it with torch."""
    made = make()
    non_finite, torchs = torchs_error(made, DTYPES[low])
    begin = time.process_time()
    report = st.audit(*made, low=low, trials=0)
    seconds = time.process_time() - begin
    error, limit = report.error, unusable(format_(low).precision)
    ratio = max(error.relative, 1e-12) / max(torchs, 1e-12)
    says_yes, is_fine = not report.verdict.startswith("No"), torchs < limit and not non_finite
    wrong = []
    if not 1 / RATIO <= ratio <= RATIO or error.non_finite != non_finite:
        wrong.append(f"{error} for torch's {torchs:.2g} ({non_finite} not finite)")
    if says_yes != is_fine and not 1 / RATIO < torchs / limit < RATIO:
        wrong.append(f"{report.verdict!r} where torch is {'fine' if is_fine else 'not'}")
    return Row(name, low, torchs, error.relative, report.verdict, seconds, "; ".join(wrong))


def line(rows: list[Row]) -> str:
    cells = [rows[0].name]
    for row in rows:
        cells += [f"{row.torchs:.2g}", f"{row.audits:.2g}", f"{row.audits / row.torchs:.2f}"]
        cells += ["No" if row.verdict.startswith("No") else "Yes", f"{row.seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def written(lines: list[str]) -> None:
    """Puts rows of models into the table of the page, in place of older ones of the same models."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {x.split(" | ")[0]: x for x in [*old.splitlines(), *lines] if x.startswith("| ")}
    rows = {f"| {name}": rows[f"| {name}"] for name, _ in architectures() if f"| {name}" in rows}
    ratios = [float(x.split(" | ")[i]) for x in rows.values() for i in (3, 8)]
    head = "torch | audit | ratio | usable | CPU s"
    table = [
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}.", "",
        f"| model | FP16: {head} | BF16: {head} |", f"|{'---|' * 11}", *rows.values(), "",
        f"{len(rows)} models: ratios of the errors from {min(ratios)} to {max(ratios)}.", "",
    ]  # fmt: skip
    DOCS.write_text(before + BEGIN + "\n".join(table) + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="models, all without any")
    parser.add_argument("--write", action="store_true", help="write to docs/results/torch.md")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.backends.mkldnn.set_flags(False)  # its LSTM needs other processors in 16 bits
    wrong = []
    for name, make in architectures():
        if given.names and name not in given.names:
            continue
        try:
            rows = [compared(name, make, low) for low in DTYPES]
        except (ValueError, NotImplementedError, RuntimeError) as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            print(wrong[-1], flush=True)
            continue
        found = [f"{name} in {row.low}: {row.wrong}" for row in rows if row.wrong]
        print(line(rows), *found, sep="\n", flush=True)
        wrong += found
        if given.write:
            written([line(rows)])
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
