"""A plan as the configuration of the tools that quantise and serve models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from .._types import Json
from ..autoscaling import Operand
from ..checkpoints import _layouts as layouts
from ..checkpoints._layouts import Layout, Strategy, algorithm_of, writable
from ..formats import E8M0, BlockFormat

Layer = tuple[str, Operand | None, Operand | None]  # its name, its weight, its activation
Rename = Callable[[str], str]
KEY = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.(\w+)")
WIDE_BITS = 16
AO = "torchao.quantization"
AO_MX = "torchao.prototype.mx_formats"
# by format of weight and activation: the module and the call
TORCHAO = {
    ("nvfp4", None): (AO_MX, "NVFP4WeightOnlyConfig()"),
    ("nvfp4", "nvfp4"): (AO_MX, "NVFP4DynamicActivationNVFP4WeightConfig()"),
    ("mxfp8_e4m3", "mxfp8_e4m3"): (
        AO_MX, "MXDynamicActivationMXWeightConfig(activation_dtype=torch.float8_e4m3fn, "
        "weight_dtype=torch.float8_e4m3fn)",
    ),
    ("mxfp4", "mxfp4"): (
        AO_MX, "MXDynamicActivationMXWeightConfig(activation_dtype=torch.float4_e2m1fn_x2, "
        "weight_dtype=torch.float4_e2m1fn_x2)",
    ),
    ("e4m3fn", None): (AO, "Float8WeightOnlyConfig()"),
    ("e4m3fn", "e4m3fn"): (AO, "Float8DynamicActivationFloat8WeightConfig()"),
}  # fmt: skip


def module_name(path: str) -> str:
    """Returns ``blocks.1.qkv`` of an argument's path ``[0]['blocks'][1]['qkv']``."""
    keys = [next(x for x in found if x) for found in KEY.findall(path)]
    if path.startswith("[") and len(keys) > 1 and keys[0].isdigit():
        keys = keys[1:]  # the position of the argument
    name = re.sub(r"^states\.\d+\.", "", ".".join(keys) or path)  # of Flax NNX's objects
    return re.sub(r"(\.(weight|kernel|w|value))+$", "", name)


def compressed_tensors(layers: Sequence[Layer], rename: Rename) -> dict[str, Json]:
    kinds: dict[tuple[Operand, Operand | None], list[str]] = {}
    ignored = []
    for name, weight, activation in layers:
        if (weight := _narrow(weight)) is None:
            ignored.append(rename(name))
        else:
            kinds.setdefault((weight, _narrow(activation)), []).append(rename(name))
    groups = [
        (_layout("compressed-tensors", weight), activation and _activation(activation), names)
        for (weight, activation), names in kinds.items()
    ]
    return layouts.compressed_tensors(groups, ignored)


def modelopt(layers: Sequence[Layer], rename: Rename) -> dict[str, Json]:
    each, ignored = {}, []
    for name, weight, activation in layers:
        if (weight := _narrow(weight)) is None:
            ignored.append(rename(name))
            continue
        algorithm = algorithm_of(*_layout("modelopt", weight))
        if algorithm["quant_algo"] == "W4A16_NVFP4" and _narrow(activation) is not None:
            algorithm["quant_algo"] = "NVFP4"
        each[rename(name)] = algorithm
    return {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": sorted(ignored),
        "quantized_layers": each,
    }


def torchao(layers: Sequence[Layer], rename: Rename) -> str:
    calls = dict(_torchao_calls(layers, rename))
    modules: dict[str, set[str]] = {AO: {"FqnToConfig", "quantize_"}}
    for module, call in filter(None, calls.values()):
        modules.setdefault(module, set()).add(call.partition("(")[0])
    text = " ".join(call[1] for call in calls.values() if call)
    if "PerRow" in text:
        modules[AO].add("PerRow")
    lines = [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(modules.items())]
    if "torch." in text:
        lines.insert(0, "import torch")
    rows = [f"        {n!r}: {call[1] if call else None}," for n, call in calls.items()]
    body = ["", "config = FqnToConfig(", "    {", *rows, "    }", ")"]
    return "\n".join([*lines, *body, "quantize_(model, config, filter_fn=None)", ""])


def _torchao_calls(
    layers: Sequence[Layer], rename: Rename
) -> Iterator[tuple[str, tuple[str, str] | None]]:
    for name, weight, activation in layers:
        if (weight := _narrow(weight)) is None:
            yield rename(name), None
            continue
        narrow = _narrow(activation)
        pair = weight.format.name, narrow and narrow.format.name
        if pair not in TORCHAO:
            known = ", ".join(f"{w} x {a or 'unrounded'}" for w, a in TORCHAO)
            raise ValueError(
                f"torchao has no configuration for weights in {pair[0]} with activations in "
                f"{pair[1] or 'their own dtype'} ({name}); expected one of {known}"
            )
        module, call = TORCHAO[pair]
        if pair == ("e4m3fn", "e4m3fn") and weight.per == "channel":
            call = call.replace("()", "(granularity=PerRow())")
        yield rename(name), (module, call)


def _narrow(operand: Operand | None) -> Operand | None:
    """Returns None for formats that are dtypes, too: what is in one isn't quantised."""
    if operand is None or isinstance(operand.format, BlockFormat):
        return operand
    return operand if operand.format.bits < WIDE_BITS else None


def _layout(family: str, operand: Operand) -> tuple[Layout, Strategy]:
    layout = writable(family, operand.format.name)
    return layout, layout.block or ("channel" if operand.per == "channel" else "tensor")


def _activation(operand: Operand) -> dict[str, Json]:
    common = {"num_bits": operand.element.bits, "symmetric": True, "type": "float"}
    fmt = operand.format
    if not isinstance(fmt, BlockFormat):
        strategy = "token" if operand.per == "channel" else "tensor"
        return {**common, "dynamic": True, "strategy": strategy}
    blocks = {**common, "group_size": fmt.size}
    if fmt.scale == E8M0:
        return {**blocks, "dynamic": True, "strategy": "group", "scale_dtype": "torch.uint8"}
    scale = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return {**blocks, "dynamic": "local", **scale}
