"""The layouts of quantised tensors as data, and the configs by which packages read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from .._types import Json
from ._packed import Packed

Role = Literal["codes", "scale", "whole", "pre"]
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
WIDE = ("F32", "BF16", "F16")
E8M0 = ("U8", "F8_E8M0")
METHODS = {
    "compressed-tensors": "compressed-tensors", "modelopt": "modelopt", "modelopt_fp4": "modelopt",
    "fp8": "deepseek", "mxfp4": "gpt-oss", "fbgemm_fp8": "fbgemm", "torchao": "torchao",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one kind of quantised tensor is stored.

    Names of parts are templates of a base.
    """

    name: str  # family/kind
    format: str  # that the tensor has: a format's or block format's name
    weight: str  # the tensor's own name
    codes: str
    scale: str
    code_dtypes: tuple[str, ...]  # safetensors' names
    scale_dtypes: tuple[str, ...]
    whole: str | None = None  # the scale of the whole tensor over the scales of blocks, if any
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: by the shapes
    # elements 2j and 2j + 1 in the low and high half of a byte, or swapped
    nibbles: Literal["pairs", "swapped"] | None = None
    swizzled: bool = False  # whether the scales are in the order that cuBLAS reads
    divides: bool = False  # whether values are divided by ``whole``; block scales always multiply
    transposed: bool = False  # whether the last two axes are swapped in the value
    needs_whole: bool = False
    writes: bool = False  # whether ``cast`` writes it
    pre: str | None = None  # factors of the input's channels

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def exponents(self) -> bool:
        return set(self.scale_dtypes) <= set(E8M0)

    def names(self, base: str) -> dict[Role, str]:
        templates: dict[Role, str | None] = {
            "codes": self.codes, "scale": self.scale, "whole": self.whole, "pre": self.pre
        }  # fmt: skip
        return {role: t.format(base) for role, t in templates.items() if t is not None}


def _fp4(name: str, fmt: str, **fields: Any) -> Layout:
    given: dict[str, Any] = {
        "weight": "{}.weight",
        "code_dtypes": ("U8", "F4"),
        "scale_dtypes": ("F8_E4M3",) if fmt == "nvfp4" else E8M0,
        "block": {"nvfp4": (1, 16), "mxfp4": (1, 32)}[fmt],
        "nibbles": "pairs",
    }
    return Layout(name, fmt, **given | fields)


def _fp8(name: str, **fields: Any) -> Layout:
    given: dict[str, Any] = {
        "format": "e4m3fn",
        "weight": "{}.weight",
        "codes": "{}.weight",
        "scale": "{}.weight_scale",
        "code_dtypes": FP8,
        "scale_dtypes": WIDE,
    }
    return Layout(name, **given | fields)


_CT, _MO, _AO = "compressed-tensors", "modelopt", "torchao"
_PACKED = {"codes": "{}.weight_packed", "scale": "{}.weight_scale"}
_WEIGHT = {"codes": "{}.weight", "scale": "{}.weight_scale"}
_NAMED = {"weight": "{}", "codes": "{}_qdata", "scale": "{}_scale"}
_MX8 = {"format": "mxfp8_e4m3", "scale_dtypes": E8M0, "block": (1, 32)}
LAYOUTS: tuple[Layout, ...] = (
    _fp4(f"{_CT}/nvfp4-pack-quantized", "nvfp4", **_PACKED, whole="{}.weight_global_scale",
         divides=True, needs_whole=True, writes=True),
    _fp4(f"{_CT}/mxfp4-pack-quantized", "mxfp4", **_PACKED, writes=True),
    _fp8(f"{_CT}/mxfp8-quantized", **_MX8, writes=True),
    _fp8(f"{_CT}/float-quantized", writes=True),
    _fp4(f"{_MO}/nvfp4", "nvfp4", **_WEIGHT, whole="{}.weight_scale_2", needs_whole=True,
         writes=True, pre="{}.pre_quant_scale"),
    _fp4(f"{_MO}/mxfp4", "mxfp4", **_WEIGHT, pre="{}.pre_quant_scale"),
    _fp8(f"{_MO}/mxfp8", **_MX8, writes=True),
    _fp8(f"{_MO}/fp8", pre="{}.pre_quant_scale", writes=True),
    _fp8("deepseek/v3", scale="{}.weight_scale_inv", scale_dtypes=(*WIDE, "F8_E8M0"),
         block=(128, 128), format="deepseek", writes=True),
    _fp8("deepseek/v3-experts", weight="{}", codes="{}", scale="{}_scale_inv",
         scale_dtypes=(*WIDE, "F8_E8M0"), block=(128, 128), format="deepseek"),
    _fp4("deepseek/v4-experts", "mxfp4", codes="{}.weight", scale="{}.scale",
         code_dtypes=("I8", "U8", "F4")),
    _fp8("deepseek/v4", scale="{}.scale", scale_dtypes=E8M0, block=(128, 128)),
    _fp4("gpt-oss/mxfp4", "mxfp4", weight="{}", codes="{}_blocks", scale="{}_scales",
         transposed=True, writes=True),
    _fp4("gpt-oss/original", "mxfp4", weight="{}", codes="{}.blocks", scale="{}.scales",
         transposed=True),
    _fp8("fbgemm/fp8"),
    _fp8("fbgemm/fp8-experts", weight="{}", codes="{}", scale="{}_scale"),
    _fp4("comfyui/nvfp4", "nvfp4", **_WEIGHT, whole="{}.weight_scale_2", needs_whole=True,
         nibbles="swapped", swizzled=True, pre="{}.pre_quant_scale"),
    _fp8("comfyui/mxfp8", **_MX8, swizzled=True),
    _fp8("comfyui/fp8"),
    _fp8("comfyui/scale_weight", scale="{}.scale_weight"),
    _fp8(f"{_AO}/Float8Tensor", **_NAMED),
    _fp4(f"{_AO}/NVFP4Tensor", "nvfp4", **_NAMED, whole="{}_per_tensor_scale"),
    _fp4(f"{_AO}/MXTensor-fp4", "mxfp4", **_NAMED),
    _fp8(f"{_AO}/MXTensor", **_NAMED | _MX8),
)  # fmt: skip
BY_NAME = {layout.name: layout for layout in LAYOUTS}
SIDE = (  # of a layer, beside its weight: activations' and KV caches' scales stay as they are
    ".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale",
    ".output_scale", ".k_proj.k_scale", ".v_proj.v_scale", ".scale_input", ".pre_quant_scale",
    ".input_activation_scale", ".activation_scale", "._weight_act_per_tensor_scale",
    ".input_scale_ub", ".weight_shape", ".comfy_quant",
)  # fmt: skip


def fused_key(name: str) -> tuple[str, bool, bool] | None:
    """Returns what weights have in common that loaders fuse: q, k and v, or gate and up."""
    match = re.match(r"(.*\.)(?:(?:[qkv]_proj)|(gate_proj|up_proj)|(w1|w3))\.weight$", name)
    return match and (match[1], bool(match[2]), bool(match[3]))


def writable(family: str, fmt: str) -> Layout:
    able = {(x.family, x.format): x for x in LAYOUTS if x.writes}
    able |= {("deepseek", "e4m3fn"): BY_NAME["deepseek/v3"]}
    if family in ("compressed-tensors", "modelopt", "deepseek", "gpt-oss"):
        if (family, fmt) in able:
            return able[family, fmt]
        have = ", ".join(sorted(f for name, f in able if name == family))
        raise ValueError(f"the layout {family} has no {fmt}; expected one of {have}")
    names = ", ".join(sorted({x.family for x in LAYOUTS if x.writes} | {"plain", "scalewise"}))
    raise ValueError(f"no layout to write is called {family!r}; expected one of {names}")


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


def quantization_config(
    written: Written, kept: Sequence[str], channels: Container[str] = ()
) -> dict[str, Json]:
    """Returns the config by which packages read the tensors written. ``channels`` names those that
    have factors of the input's channels (AWQ) beside them."""
    if not written:
        return {}
    ignored = sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight"))
    first, _ = next(iter(written.values()))
    if first.family == "compressed-tensors":
        kinds: dict[tuple[Layout, Strategy], list[str]] = {}
        for name, (layout, strategy) in written.items():
            kind = layout, strategy if layout.block is None else ""
            kinds.setdefault(kind, []).append(name.removesuffix(".weight"))
        groups = [(kind, _activations(*kind), names) for kind, names in kinds.items()]
        found = compressed_tensors(groups, ignored)
        if len(groups) == 1:
            found["config_groups"]["group_0"]["targets"] = ["Linear"]
        return found | {"quantization_status": "compressed"}
    if first.family == "modelopt":
        each = {
            name.removesuffix(".weight"): algorithm_of(*kind, name in channels)
            for name, kind in written.items()
        }
        algorithm = next(iter(each.values()))
        common = {"kv_cache_quant_algo": None, "exclude_modules": list(ignored)}
        if any(own != algorithm for own in each.values()):
            algorithm = {"quant_algo": "MIXED_PRECISION"}
            common["quantized_layers"] = each
        return {"quant_method": "modelopt", **algorithm, **common}
    if first.family == "deepseek":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128], "modules_to_not_convert": ignored}  # fmt: skip
    if first.family == "gpt-oss":
        return {"modules_to_not_convert": ignored, "quant_method": "mxfp4"}
    return {}


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


def algorithm_of(layout: Layout, strategy: Strategy, awq: bool = False) -> dict[str, Json]:
    name = ALGORITHMS[layout.format]
    if awq:
        own: dict[str, Json] = {"has_zero_point": False, "pre_quant_scale": True}
        size = {} if layout.block is None else {"group_size": layout.block[1]}
        return {"quant_algo": f"{name}_AWQ" if layout.block else name, **size, **own}
    if layout.block is None:
        return {"quant_algo": name if strategy == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN"}
    weight_only = "W4A16_NVFP4" if name == "NVFP4" else name
    return {"quant_algo": weight_only, "group_size": layout.block[1]}


def hf_quant_config(quantization: Mapping[str, Json]) -> dict[str, Json] | None:
    if quantization.get("quant_method") != "modelopt":
        return None
    own = {key: value for key, value in quantization.items() if key != "quant_method"}
    return {"producer": PRODUCER, "quantization": own}
