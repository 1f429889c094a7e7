"""`quantization_config` and `hf_quant_config.json`, as the packages of the layouts read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from .._types import Json
from ._layouts import Layout
from ._packed import Packed

PRODUCER = {"name": "scalewise"}
ALGORITHMS = {"nvfp4": "NVFP4", "e4m3fn": "FP8", "mxfp8_e4m3": "MXFP8", "mxfp4": "MXFP4"}


Strategy: TypeAlias = str | tuple[int, int]
Written: TypeAlias = Mapping[str, tuple[Layout, Strategy]]


def strategy_of(packed: Packed) -> Strategy:
    """Returns what shares a scale: ``"tensor"``, ``"channel"``, or rows and columns of a tile."""
    columns = packed.stored_shape[-1]
    if packed.scale.shape[-2:] == (1, 1):
        return "tensor"
    return "channel" if packed.block == (1, columns) else packed.block


def quantization_config(written: Written, kept: Sequence[str], powers: bool) -> dict[str, Json]:
    """Returns the value of ``quantization_config`` for a written checkpoint, {} for none."""
    if not written:
        return {}
    ignored = sorted(_module(name) for name in kept if name.endswith(".weight"))
    first, _ = next(iter(written.values()))
    if first.family == "compressed-tensors":
        return _compressed_tensors(written, ignored)
    if first.family == "modelopt":
        return {"quant_method": "modelopt", **_modelopt(written, ignored)}
    if first.family == "deepseek":
        scale = {"scale_fmt": "ue8m0"} if powers else {}
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", **scale,
                "weight_block_size": [128, 128], "modules_to_not_convert": ignored}  # fmt: skip
    if first.family == "gpt-oss":
        return {"modules_to_not_convert": ignored, "quant_method": "mxfp4"}
    return {}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _compressed_tensors(written: Written, ignored: Sequence[str]) -> dict[str, Json]:
    kinds: dict[tuple[Layout, Strategy], list[str]] = {}
    for name, kind in written.items():
        kinds.setdefault(kind if kind[0].block is None else (kind[0], ""), []).append(_module(name))
    groups = [(kind, _activations(*kind), names) for kind, names in kinds.items()]
    found = compressed_tensors(groups, ignored)
    if len(groups) == 1:
        found["config_groups"]["group_0"]["targets"] = ["Linear"]
    return found | {"quantization_status": "compressed"}


def compressed_tensors(
    groups: Iterable[tuple[tuple[Layout, Strategy], Json, Sequence[str]]], ignored: Sequence[str]
) -> dict[str, Json]:
    """Returns the config of groups: how weights are stored, activations' arguments, modules."""
    found = {
        f"group_{i}": {
            "format": layout.name.partition("/")[2],
            "input_activations": activations,
            "output_activations": None,
            "targets": [f"re:^{re.escape(name)}$" for name in names],
            "weights": weight_arguments(layout, strategy),
        }
        for i, ((layout, strategy), activations, names) in enumerate(groups)
    }
    formats = {group["format"] for group in found.values()}
    return {
        "config_groups": found,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": sorted(ignored),
        "quant_method": "compressed-tensors",
    }


def weight_arguments(layout: Layout, strategy: Strategy) -> dict[str, Json]:
    common = {"dynamic": False, "symmetric": True, "type": "float"}
    bits = 4 if layout.nibbles else 8
    if layout.format == "nvfp4":
        scale = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    elif layout.block:
        scale = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    elif isinstance(strategy, tuple):
        scale = {"strategy": "block", "block_structure": list(strategy)}
    else:
        scale = {"strategy": strategy}
    return {"num_bits": bits, **common, **scale}


def _activations(layout: Layout, strategy: Strategy) -> dict[str, Json] | None:
    """FP8 products round activations by token or group; layouts of blocks are for weights alone."""
    if layout.block is not None:
        return None
    common = {"num_bits": 8, "dynamic": True, "symmetric": True, "type": "float"}
    if isinstance(strategy, tuple):
        return {**common, "strategy": "group", "group_size": strategy[1]}
    return {**common, "strategy": "token"}


def algorithm_of(layout: Layout, strategy: Strategy) -> dict[str, Json]:
    name = ALGORITHMS[layout.format]
    if layout.block is None:
        return {"quant_algo": name if strategy == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN"}
    weight_only = "W4A16_NVFP4" if name == "NVFP4" else name
    return {"quant_algo": weight_only, "group_size": layout.block[1]}


def _modelopt(written: Written, ignored: Sequence[str]) -> dict[str, Json]:
    each = {_module(name): algorithm_of(*kind) for name, kind in written.items()}
    first = next(iter(each.values()))
    common: dict[str, Json] = {"kv_cache_quant_algo": None, "exclude_modules": list(ignored)}
    if all(algorithm == first for algorithm in each.values()):
        return first | common
    return {"quant_algo": "MIXED_PRECISION", **common, "quantized_layers": each}


def hf_quant_config(quantization: Mapping[str, Json]) -> dict[str, Json] | None:
    if quantization.get("quant_method") != "modelopt":
        return None
    own = {key: value for key, value in quantization.items() if key != "quant_method"}
    return {"producer": PRODUCER, "quantization": own}
