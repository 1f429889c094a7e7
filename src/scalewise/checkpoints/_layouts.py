"""The layouts of quantised tensors as data: names, dtypes, blocks, nibbles, multiply or divide."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

Role = Literal["codes", "scale", "whole", "pre"]
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
WIDE = ("F32", "BF16", "F16")
E8M0 = ("U8", "F8_E8M0")
FAMILIES = {
    "scalewise": "ScaledArrays by `scalewise.scaled.save_safetensors`",
    "torchao": "metadata `tensor_names`, github.com/pytorch/ao prototype/safetensors",
    "comfyui": "metadata `_quantization_metadata` or tensors `*.comfy_quant`, "
    "github.com/comfyanonymous/ComfyUI",
    "gguf": "github.com/ggml-org/llama.cpp ggml-common.h, gguf-py",
    "compressed-tensors": "`quant_method: compressed-tensors`, github.com/vllm-project/"
    "compressed-tensors",
    "modelopt": "`hf_quant_config.json`, github.com/NVIDIA/TensorRT-Model-Optimizer",
    "deepseek": "`quant_method: fp8`, github.com/deepseek-ai/DeepSeek-V3 inference",
    "gpt-oss": "`quant_method: mxfp4`, github.com/openai/gpt-oss",
    "fbgemm": "`quant_method: fbgemm_fp8`, github.com/huggingface/transformers integrations",
}
METHODS = {
    "compressed-tensors": "compressed-tensors", "modelopt": "modelopt", "modelopt_fp4": "modelopt",
    "fp8": "deepseek", "mxfp4": "gpt-oss", "fbgemm_fp8": "fbgemm", "torchao": "torchao",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one kind of quantised tensor is stored.

    Attributes:
        name: of the layout, ``family/kind``.
        format: the format that the tensor has: a format's or block format's name.
        weight: template of the tensor's own name, of a base.
        codes, scale, whole: templates of the names of the parts, of a base, or of its ``stem``
            without ``.weight``; ``whole`` is the scale of the whole tensor over the scales of
            blocks, if there may be one.
        code_dtypes, scale_dtypes: safetensors' names of the dtypes that the parts may have.
        block: rows and columns that share a scale; None if the shapes say.
        nibbles: ``"pairs"``: elements 2j and 2j + 1 in the low and high half of a byte;
            ``"swapped"``: in the high and low half; ``"halves"``: element j and j + half a block.
        swizzled: whether the scales are in the order that cuBLAS reads.
        divides: whether values are divided by ``whole``; block scales always multiply.
        transposed: whether the last two axes are swapped in the value.
        needs_whole: whether ``whole`` is required.
        writes: whether :func:`scalewise.checkpoints.cast` writes it.
    """

    name: str
    format: str
    weight: str
    codes: str
    scale: str
    code_dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    whole: str | None = None
    block: tuple[int, int] | None = None
    nibbles: Literal["pairs", "swapped", "halves"] | None = None
    swizzled: bool = False
    divides: bool = False
    transposed: bool = False
    needs_whole: bool = False
    writes: bool = False
    pre: str | None = None

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
        stem = base.removesuffix(".weight")
        return {role: t.format(base, stem=stem) for role, t in templates.items() if t is not None}


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
    _fp8(f"{_AO}/Float8Tensor", **_NAMED, writes=True),
    _fp4(f"{_AO}/NVFP4Tensor", "nvfp4", **_NAMED, whole="{}_per_tensor_scale", writes=True),
    _fp4(f"{_AO}/MXTensor-fp4", "mxfp4", **_NAMED, writes=True),
    _fp8(f"{_AO}/MXTensor", **_NAMED | _MX8, writes=True),
    Layout("gguf/mxfp4", "mxfp4", "{}", "{}", "{}", ("GGUF_MXFP4",), ("U8",), block=(1, 32),
           nibbles="halves"),
    Layout("gguf/nvfp4", "nvfp4", "{}", "{}", "{}", ("GGUF_NVFP4",), ("U8",), block=(1, 16),
           nibbles="halves", whole="{stem}.scale"),
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
    """Returns the layout of a family that is written for a format."""
    able = {(x.family, x.format): x for x in LAYOUTS if x.writes}
    able |= {("deepseek", "e4m3fn"): BY_NAME["deepseek/v3"]}
    if family in ("compressed-tensors", "modelopt", "torchao", "deepseek", "gpt-oss"):
        if (family, fmt) in able:
            return able[family, fmt]
        have = ", ".join(sorted(f for name, f in able if name == family))
        raise ValueError(f"the layout {family} has no {fmt}; expected one of {have}")
    names = ", ".join(sorted({x.family for x in LAYOUTS if x.writes} | {"plain", "scalewise"}))
    raise ValueError(f"no layout to write is called {family!r}; expected one of {names}")
