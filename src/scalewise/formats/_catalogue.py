"""The catalogue of formats and block formats, lookup by name, and the types of such arguments."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from .._check import Count, Range, checked
from .._repr import changed_fields
from .._types import Converted, kept
from ._format import CATALOGUE_DTYPES, Format

FP64 = Format("fp64", 11, 52)
FP32 = Format("fp32", 8, 23)
TF32 = Format("tf32", 8, 10)
FP16 = Format("fp16", 5, 10)
BF16 = Format("bf16", 8, 7)
# IBM, "DLFloat: A 16-b floating point format for deep learning", ARITH 2019, and US patent
# application 2019/0369960: no subnormals, one symbol for NaN and infinity. IBM's hardware only
# rounds to nearest with ties up: ``rounding="nearest_away"`` here.
DLFLOAT16 = Format("dlfloat16", 6, 9, subnormals=False, infinities=False, nan="all_ones")
# OCP 8-bit floating point (OFP8) and the FNUZ pair (Graphcore, AMD, Qualcomm: arXiv 2206.02915).
E4M3FN = Format("e4m3fn", 4, 3, infinities=False, nan="all_ones")
E4M3FNUZ = Format("e4m3fnuz", 4, 3, bias=8, infinities=False, nan="negative_zero")
E5M2 = Format("e5m2", 5, 2)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, bias=16, infinities=False, nan="negative_zero")
# IEEE-like 8-bit formats of ml_dtypes, and Tesla's / JAX's biased variant.
E4M3 = Format("e4m3", 4, 3)
E3M4 = Format("e3m4", 3, 4)
E4M3B11FNUZ = Format("e4m3b11fnuz", 4, 3, bias=11, infinities=False, nan="negative_zero")
# OCP Microscaling (MX) 1.0: the format of scales and the 6-bit and 4-bit elements.
E8M0 = Format(
    "e8m0", 8, 0, signed=False, subnormals=False, infinities=False, nan="all_ones", zero=False
)
E2M3FN = Format("e2m3fn", 2, 3, infinities=False, nan="none")
E3M2FN = Format("e3m2fn", 3, 2, infinities=False, nan="none")
E2M1FN = Format("e2m1fn", 2, 1, infinities=False, nan="none")
# Unsigned variants, for norms, second moments and scales: the sign bit becomes a mantissa bit.
UE5M11 = FP16.unsigned()
UE8M8 = BF16.unsigned()
UE4M4 = E4M3FN.unsigned()
UE5M3 = E5M2.unsigned()

CATALOGUE: dict[str, Format] = {
    f.name: f
    for f in (
        FP64, FP32, TF32, FP16, BF16, DLFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E4M3, E3M4,
        E4M3B11FNUZ, E8M0, E2M3FN, E3M2FN, E2M1FN, UE5M11, UE8M8, UE4M4, UE5M3,
    )
}  # fmt: skip

CATALOGUE_DTYPES |= {
    FP64: np.float64, FP32: np.float32, FP16: np.float16, BF16: ml_dtypes.bfloat16,
    E8M0: ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
for _fmt in CATALOGUE.values():
    if dtype := getattr(ml_dtypes, f"float{_fmt.bits}_{_fmt.name}", None):
        CATALOGUE_DTYPES[_fmt] = dtype

ALIASES = {
    "float64": FP64, "double": FP64, "f64": FP64,
    "float32": FP32, "single": FP32, "f32": FP32,
    "tensorfloat32": TF32, "e8m10": TF32,
    "float16": FP16, "half": FP16, "f16": FP16, "e5m10": FP16,
    "bfloat16": BF16, "e8m7": BF16,
    "dlfloat": DLFLOAT16,
    "e8m0fnu": E8M0, "float8_e8m0fnu": E8M0,
}  # fmt: skip


@checked
def format(spec: Any) -> Format:
    """Returns a format by name, alias or dtype; a Format is returned as it is.

    Args:
        spec: ``"e4m3fn"``, ``"float16"``, ``"float8_e5m2"``, ``jnp.bfloat16``, ...; case is
            ignored, and hyphens are read as underscores.

    Raises:
        ValueError: no format has this name or dtype. The message lists the names, suggests the
            nearest, and says so if it is the name of a block format, a recipe, ...

    Example:
        >>> format("half") is FP16, format(np.float16) is FP16
        (True, True)
    """
    if isinstance(spec, Format):
        return spec
    if isinstance(spec, str):
        name = spec.lower().replace("-", "_")
        for prefix in ("", "float8_", "float6_", "float4_"):
            bare = name.removeprefix(prefix)
            if found := CATALOGUE.get(bare) or ALIASES.get(bare):
                return found
    else:
        try:
            dtype = None if spec is None else np.dtype(spec)  # np.dtype(None) is float64
        except (TypeError, ValueError):
            dtype = None
        for fmt, known in CATALOGUE_DTYPES.items():
            if dtype is not None and np.dtype(known) == dtype:
                return fmt
        resolver = importlib.import_module("scalewise._resolve")
        if dtype is not None and resolver.is_of_integers(dtype.name):
            raise ValueError(f"format: {spec!r} {resolver.OF_INTEGERS}")
    raise ValueError(unknown_name(spec, "format"))


def unknown_name(spec: Any, kind: str) -> str:
    name = spec if isinstance(spec, str) else getattr(spec, "name", None)
    if not isinstance(name, str):
        return f"{kind}: expected a {kind}, or the name or dtype of one, not {spec!r}"
    # imported by name: this module reads the tables of the layers above, formats need none of them
    resolver = importlib.import_module("scalewise._resolve")
    return resolver.unknown(name, kind, where=kind)


@checked
def p3109(bits: int, precision: int, signed: bool = True, extended: bool = True) -> Format:
    """Returns a format of the IEEE P3109 family (interim report 3.0, section 4).

    Args:
        bits: the width of a code, 3 to 16.
        precision: the significant bits, from 1 to ``bits - 1`` (to ``bits`` if unsigned), and
            enough that at most 11 exponent bits remain, as many as float64 has.
        signed: whether there is a sign bit. NaN has the code of -0 if so, else that of all ones.
        extended: whether there are infinities, with the largest codes below NaN's.
    """
    if not 3 <= bits <= 16:
        raise ValueError(f"p3109: bits is {bits!r}; expected 3 to 16")
    most = bits - 1 if signed else bits
    least = max(1, bits - 11 + (not signed))
    if not least <= precision <= most:
        why = " (below, float64 itself hasn't the exponents)" if least > 1 else ""
        raise ValueError(f"p3109: precision is {precision!r}; expected {least} to {most}{why}")
    exponent_bits = bits - precision + (not signed)
    return Format(
        f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}",
        exponent_bits, precision - 1, bias=2 ** (exponent_bits - 1), signed=signed,
        infinities=extended, nan="negative_zero" if signed else "all_ones",
    )  # fmt: skip


@checked
@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of arrays that stores blocks of elements with a common scale.

    A value is ``element * scale``, or ``element * (scale * tensor_scale)``.

    Example:
        >>> MXFP4.bits_per_element
        4.25
    """

    name: str  # in lower case
    element: Converted[Format, FormatLike] = kept()
    scale: Converted[Format, FormatLike] = kept(E8M0)  # the format of the blocks' scales
    size: Count = 32  # of a block
    # FP32: a scale of the whole array brings the blocks' scales into their range
    tensor_scale: Converted[Format | None, FormatLike | None] = kept(None)

    def __post_init__(self):
        for field in ("element", "scale", "tensor_scale"):
            value = getattr(self, field)
            if value is None and field != "tensor_scale":
                raise TypeError(
                    f"BlockFormat({self.name!r}): {field} is None; expected a format, or the name "
                    "of one"
                )
            object.__setattr__(self, field, None if value is None else format(value))
        if self.tensor_scale not in (None, FP32):
            raise ValueError(
                f"BlockFormat({self.name!r}): tensor_scale is {self.tensor_scale.name}; "
                "expected FP32 or None"
            )

    def __repr__(self) -> str:
        changed = changed_fields(self, "name", "element", text=_shown)
        return f"BlockFormat({', '.join([repr(self.name), _shown(self.element), *changed])})"

    @property
    def bits_per_element(self) -> float:
        """The bits of an element plus its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.size


def _shown(value: object) -> str:
    if isinstance(value, Format) and CATALOGUE.get(value.name) == value:
        return value.name.upper()
    return repr(value)


# OCP Microscaling Formats (MX) Specification 1.0, table 1.
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3FN)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3FN)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2FN)
MXFP4 = BlockFormat("mxfp4", E2M1FN)
# NVIDIA's two-level format: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
NVFP4 = BlockFormat("nvfp4", E2M1FN, scale=E4M3FN, size=16, tensor_scale=FP32)
BLOCK_FORMATS = {f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)}


@checked
def block_format(spec: BlockFormat | str) -> BlockFormat:
    """Returns a block format by name; a BlockFormat is returned as it is."""
    if isinstance(spec, BlockFormat):
        return spec
    if found := BLOCK_FORMATS.get(str(spec).lower().replace("-", "_")):
        return found
    raise ValueError(unknown_name(spec, "block format"))


class SupportsDType(Protocol):
    """An object with a NumPy dtype, such as ``jnp.bfloat16``."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


DTypeLike: TypeAlias = str | type[Any] | np.dtype | SupportsDType
"""A dtype, as ``jax.typing.DTypeLike``; formats import no JAX."""

FormatName: TypeAlias = Annotated[
    Literal[
        "fp64", "fp32", "tf32", "fp16", "bf16", "dlfloat16", "e4m3fn", "e4m3fnuz", "e5m2",
        "e5m2fnuz", "e4m3", "e3m4", "e4m3b11fnuz", "e8m0", "e2m3fn", "e3m2fn", "e2m1fn", "ue5m11",
        "ue8m8", "ue4m4", "ue5m3",
        "float64", "double", "f64", "float32", "single", "f32", "tensorfloat32", "e8m10",
        "float16", "half", "f16", "e5m10", "bfloat16", "e8m7", "dlfloat", "e8m0fnu",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3",
        "float8_e3m4", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn",
        "float4_e2m1fn",
    ],
    str,
]  # fmt: skip
"""The name of a format. For a name in a variable of type str, call :func:`format`."""

FormatLike: TypeAlias = Format | FormatName | type[Any] | np.dtype | SupportsDType
"""A format, or a name (``"e4m3fn"``) or dtype (``jnp.float16``) of one."""

BlockFormatName: TypeAlias = Annotated[
    Literal["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"],
    str,
]
"""The name of a block format. For one in a variable of type str, call :func:`block_format`."""

BlockFormatLike: TypeAlias = BlockFormat | BlockFormatName | FormatLike
"""A format or a block format (``"mxfp8_e4m3"``), or a name of one."""

FloatDType: TypeAlias = Annotated[
    DTypeLike, Range(lambda dtype: "float" in np.dtype(dtype).name, "a floating-point dtype")
]
"""A dtype of floating-point numbers."""

RoundingMode: TypeAlias = Literal[
    "nearest_even", "nearest_away", "toward_zero", "toward_positive", "toward_negative",
    "away_from_zero", "to_odd", "stochastic",
]  # fmt: skip
"""The name of a rounding mode, see ``scalewise.formats.ROUNDINGS``."""

Saturation: TypeAlias = bool | Literal["finite", "onnx", "onnx-19"]
"""What overflow gives: False an infinity or NaN, True the largest number, ``"finite"`` that too,
except for infinities, which stay; or a published rule, see ``scalewise.saturation``."""
