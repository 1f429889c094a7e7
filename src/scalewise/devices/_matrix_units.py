"""How the matrix units of GPUs add up products: one description for each instruction.

The rules are those of MMA-Sim (Xie et al., arXiv 2511.10909), whose authors compared ten GPUs with
them bit by bit. :mod:`scalewise.ops` computes what a description says.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from numpy.typing import DTypeLike

from .._check import Count, checked
from .._resolve import near
from ..formats import BLOCK_FORMATS, CATALOGUE, FP16, FP32, FP64, BlockFormat, Format
from ..formats import format as format_
from ._table import DEVICES

SOURCE = "MMA-Sim, arXiv 2511.10909"
Result: TypeAlias = Literal["fp32", "fp16"]
Method: TypeAlias = Literal["fused", "fma", "pairwise", "two_stage", "two_stage_fp8"]

# A float32 of which 13 fractional bits are kept: the accumulator of Hopper's and Ada's FP8 units.
E8M13 = Format("e8m13", exponent_bits=8, mantissa_bits=13)


@checked
@dataclasses.dataclass(frozen=True)
class MatrixUnit:
    """The arithmetic of one instruction of a matrix unit, and the order of a product over K.

    Terms are added in ascending order of K, ``terms`` of them by one instruction, whose result is
    an addend of the next. Each ``method`` adds so:

    - ``"fused"``: the exponents of a term's factors add up to its exponent, without normalising
      (a zero has -126). Terms and accumulator are cut off, toward zero, ``fraction_bits`` below the
      largest exponent, added exactly, and the sum becomes a number of ``result``: cut off, or
      rounded to nearest even for FP16.
    - ``"fma"``: one fused multiply-add after the other, rounded to nearest even.
    - ``"pairwise"``: products and their sums in pairs, each rounded to nearest even, then one
      addition to the accumulator.
    - ``"two_stage"``: products are cut off as above and added; the sum is rounded down 31 bits, the
      accumulator 24 bits, below the larger of their exponents, and their sum to nearest even.
      ``"two_stage_fp8"`` adds products of even and of odd position apart first.

    Attributes:
        architecture: of the device: ``"hopper"``.
        instruction: the family of instructions that has this arithmetic: ``"wgmma"``.
        left, right: formats of the operands. Of float32 operands a TF32 unit cuts off 13 bits.
        terms: number of products that one step adds.
        fraction_bits: see ``"fused"``; None where nothing is cut off.
        result: format of the accumulator.
        method: how a step adds.
        flush: whether subnormal operands, products and sums become 0.
        promote: number of terms after which the accumulator is added to a float32 sum, rounded to
            nearest, and starts anew; None for one accumulator over all of K.
        splits: number of equal parts of K, added up in float32 in ascending order.
        source: the publication that states the rules.

    Raises:
        ValueError: ``promote`` or ``splits`` isn't positive, or ``promote`` no multiple of
            ``terms``.

    Example:
        >>> unit = matrix_unit("h100", "e4m3fn")
        >>> unit.terms, unit.fraction_bits, unit.result.name
        (32, 13, 'e8m13')
        >>> dataclasses.replace(unit, promote=128).promote  # as DeepGEMM does
        128
    """

    architecture: str
    instruction: str
    left: Format | BlockFormat
    right: Format | BlockFormat
    terms: int
    fraction_bits: int | None
    result: Format = FP32
    method: Method = "fused"
    flush: bool = False
    promote: Count | None = None
    splits: Count = 1
    source: str = SOURCE

    def __post_init__(self):
        if self.promote is not None and self.promote % self.terms:
            raise ValueError(
                f"MatrixUnit: promote is {self.promote}; expected a multiple of {self.terms}, "
                "the terms of one instruction"
            )

    def __str__(self) -> str:
        operands = " x ".join(dict.fromkeys((self.left.name, self.right.name)))
        return f"{self.architecture} {self.instruction} {operands}"


# Architectures by the devices of the table that have them; others are asked for by their own names.
ARCHITECTURES = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "blackwell",
                 "mi300x": "cdna3"}  # fmt: skip
_FP8 = ("e4m3fn", "e5m2")
_FP8_FNUZ = ("e4m3fnuz", "e5m2fnuz")
_NARROW = (*_FP8, "e3m2fn", "e2m3fn", "e2m1fn")  # operands of `f8f6f4`
_MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")


def _units(
    architecture: str, instruction: str, names: tuple[str, ...], terms: int,
    fraction_bits: int | None = None, result: Format = FP32, **fields: Any,
) -> list[MatrixUnit]:  # fmt: skip
    """Returns units for all pairs of formats of one width, which an instruction may mix."""
    known = CATALOGUE | BLOCK_FORMATS
    mixed = known[names[0]].element.bits <= 8
    pairs = [(known[a], known[b]) for a in names for b in names if mixed or a == b]
    rest = (terms, fraction_bits, result)
    return [MatrixUnit(architecture, instruction, *pair, *rest, **fields) for pair in pairs]


_SIXTEEN = ("fp16", "bf16")
_FP16_RESULTS = {"fp16", *_NARROW}
UNITS: tuple[MatrixUnit, ...] = (
    *_units("volta", "mma", ("fp16",), 4, 23),
    *_units("turing", "mma", ("fp16",), 8, 24),
    *(
        unit
        for name in ("ampere", "ada")
        for unit in (
            *_units(name, "mma", _SIXTEEN, 8, 24),
            *_units(name, "mma", ("tf32",), 4, 24),
            *_units(name, "mma", ("fp64",), 1, result=FP64, method="fma"),
        )
    ),
    *_units("ada", "mma", _FP8, 16, 13, E8M13),
    *_units("hopper", "wgmma", _SIXTEEN, 16, 25),
    *_units("hopper", "wgmma", ("tf32",), 8, 25),
    *_units("hopper", "wgmma", _FP8, 32, 13, E8M13),
    *_units("hopper", "mma", ("fp64",), 1, result=FP64, method="fma"),
    *(
        unit
        for name, instruction in (("blackwell", "tcgen05.mma"), ("rtx blackwell", "mma"))
        for unit in (
            *_units(name, instruction, _SIXTEEN, 16, 25),
            *_units(name, instruction, ("tf32",), 8, 25),
            *_units(name, f"{instruction} f8f6f4", _NARROW, 32, 25),
            *_units(name, f"{instruction} mxf8f6f4", _MX, 32, 25),
            *_units(name, f"{instruction} mxf4nvf4", ("mxfp4",), 64, 35),
            *_units(name, f"{instruction} mxf4nvf4", ("nvfp4",), 64, 35),
            *_units(name, "mma", ("fp64",), 1, result=FP64, method="fma"),
        )
    ),
    *_units("cdna1", "mfma", ("fp32",), 1, method="fma"),
    *_units("cdna1", "mfma", ("fp16",), 4, method="pairwise"),
    *_units("cdna1", "mfma", ("bf16",), 2, method="pairwise"),
    *_units("cdna2", "mfma", ("fp32",), 1, method="fma"),
    *_units("cdna2", "mfma", ("fp64",), 1, result=FP64, method="fma"),
    *_units("cdna2", "mfma", _SIXTEEN, 4, method="pairwise", flush=True),
    *_units("cdna3", "mfma", ("fp32",), 1, method="fma"),
    *_units("cdna3", "mfma", ("fp64",), 1, result=FP64, method="fma"),
    *_units("cdna3", "mfma", _SIXTEEN, 8, 24, method="two_stage"),
    *_units("cdna3", "mfma", ("tf32",), 4, 24, method="two_stage"),
    *_units("cdna3", "mfma", _FP8_FNUZ, 16, 24, method="two_stage_fp8"),
)
# Two operands in MXFP4 are multiplied by the instruction that is the faster, the last one.
_BY_NAME = {(u.architecture, u.left.name, u.right.name): u for u in UNITS}


def architecture_of(device: str) -> str:
    """Returns the architecture of a device's matrix units, ``"hopper"`` for ``"h100"``."""
    name = str(device).lower().replace("_", " ")
    known = sorted({unit.architecture for unit in UNITS})
    if (found := ARCHITECTURES.get(name, name)) in known:
        return found
    expected = f"expected one of {', '.join([*ARCHITECTURES, *known])}"
    if name in DEVICES or name.startswith("tpu"):
        title = DEVICES[name].title if name in DEVICES else str(device)
        raise ValueError(
            f"matrix units of {title} aren't modelled: nobody has published how they add; "
            + expected
        )
    hint = near(name, [*ARCHITECTURES, *known])
    raise ValueError(f"no matrix units are known of {device!r}; {hint}{expected}")


def _name(fmt: Format | BlockFormat | str | DTypeLike) -> str:
    if isinstance(fmt, BlockFormat):
        return fmt.name
    name = str(fmt).lower().replace("-", "_")
    return name if name in BLOCK_FORMATS else format_(fmt).name


@checked
def matrix_unit(
    device: str,
    left: Format | BlockFormat | str | DTypeLike,
    right: Format | BlockFormat | str | DTypeLike | None = None,
    *,
    result: Result = "fp32",
    promote: Count | None = None,
    splits: Count = 1,
) -> MatrixUnit:
    """Returns the unit of a device that multiplies two formats.

    Args:
        device: a device (``"h100"``) or an architecture (``"volta"``, ``"rtx blackwell"``).
        left, right: formats or block formats of the operands, or names or dtypes of them;
            ``right`` is that of ``left`` by default.
        result: ``"fp16"`` for an accumulator in FP16, which the units of NVIDIA have for FP16 and
            narrower operands.
        promote, splits: see :class:`MatrixUnit`.

    Raises:
        ValueError: no such unit, or a device whose units' arithmetic nobody has published.

    Example:
        >>> str(matrix_unit("h100", "bf16")), matrix_unit("volta", "fp16").terms
        ('hopper wgmma bf16', 4)
    """
    right = left if right is None else right
    names = [_name(x) for x in (left, right)]
    architecture = architecture_of(device)
    unit = _BY_NAME.get((architecture, names[0], names[1]))
    if unit is None:
        pairs = ", ".join(
            dict.fromkeys(
                " x ".join(sorted({u.left.name, u.right.name}))
                for u in UNITS
                if u.architecture == architecture
            )
        )
        raise ValueError(f"{device} has no unit for {' x '.join(names)}; it has units for {pairs}")
    if result == "fp16":
        if unit.method != "fused" or unit.left.name not in _FP16_RESULTS:
            raise ValueError(f"{unit} has no accumulator in fp16")
        unit = dataclasses.replace(unit, result=FP16)
    return dataclasses.replace(unit, promote=promote, splits=splits)


@checked
@dataclasses.dataclass(frozen=True)
class MatrixUnits:
    """All matrix units of a device, and the order in which a program adds products over K.

    Attributes:
        device: a device (``"h100"``) or an architecture, as for :func:`matrix_unit`.
        promote, splits: see :class:`MatrixUnit`. Units that add more than ``promote`` terms at a
            time, and those with an accumulator in float32, keep one accumulator.
        result: ``"fp16"`` for accumulators in FP16 where units have them.

    Raises:
        ValueError: an unknown device, or one whose units' arithmetic nobody has published; an
            unknown result; ``promote`` or ``splits`` isn't positive.

    Example:
        >>> MatrixUnits("h100", promote=128).unit("e4m3fn", "e5m2").promote
        128
        >>> MatrixUnits("h100").unit("mxfp4", "mxfp4") is None
        True
    """

    device: str
    promote: Count | None = None
    splits: Count = 1
    result: Result = "fp32"

    def __post_init__(self):
        architecture_of(self.device)  # checks it

    def __str__(self) -> str:
        said = [
            self.promote and f"promotion after {self.promote} terms",
            self.splits > 1 and f"K split in {self.splits}",
            self.result != "fp32" and f"accumulators in {self.result}",
        ]
        return ", ".join([self.device, *filter(None, said)])

    def unit(
        self,
        left: Format | BlockFormat | str | DTypeLike,
        right: Format | BlockFormat | str | DTypeLike,
    ) -> MatrixUnit | None:
        """Returns the unit that multiplies two formats; None if the device has none."""
        try:
            unit = matrix_unit(self.device, left, right)
        except ValueError:
            return None
        if self.result == "fp16" and unit.method == "fused" and unit.left.name in _FP16_RESULTS:
            unit = dataclasses.replace(unit, result=FP16)
        promoted = self.promote if unit.result == E8M13 else None
        if promoted is not None and promoted % unit.terms:
            promoted = None
        return dataclasses.replace(unit, promote=promoted, splits=self.splits)


MatrixUnitsLike: TypeAlias = MatrixUnits | str
"""The units of a device, or its name."""


def matrix_units(units: MatrixUnitsLike) -> MatrixUnits:
    """Returns the units of a device by its name; MatrixUnits are returned as they are."""
    if not isinstance(units, MatrixUnits | str):
        raise TypeError(f"device is {units!r}; expected a device's name or MatrixUnits")
    return units if isinstance(units, MatrixUnits) else MatrixUnits(units)
