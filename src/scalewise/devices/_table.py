"""The devices, the operands that their matrix units multiply, as XLA can ask for them, and how."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import jax

from .._check import checked
from .._resolve import near
from ..formats import BLOCK_FORMATS, CATALOGUE, BlockFormat, Format

Pair = tuple[str, str]


def _rates(rate: float, *pairs: str) -> dict[Pair, float]:
    """Returns a table of pairs of formats, ``"e4m3fn"`` or ``"e4m3fn x e5m2"``, with one rate."""
    found: dict[Pair, float] = {}
    for text in pairs:
        first, _, second = text.partition(" x ")
        found |= {(first, second or first): rate, (second or first, first): rate}
    return found


@dataclasses.dataclass(frozen=True)
class Device:
    """The formats that a device's matrix units multiply.

    Attributes:
        name: lower case, as in ``Recipe(device="h100")``.
        title: as people write it.
        platform: as JAX lowers for it: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.
        kinds: beginnings of ``jax.Device.device_kind``, in lower case.
        products: pairs of formats (of block formats, too) by name, with the rate of their products
            relative to those of 16-bit operands. All are added up in float32 (float64's in it).
            Pairs that XLA computes otherwise, or not at all, are left out whatever the data sheet
            says of the unit.
        source: the document that states it.
        flops: operations a second of dense 16-bit products; 0 if unknown (a CPU).
        bandwidth: bytes a second to and from memory; 0 if unknown.

    Example:
        >>> device("h100").rate("e4m3fn", "e5m2"), device("h100").rate("e5m2", "e5m2")
        (2.0, 0.0)
    """

    name: str
    title: str
    platform: str
    kinds: tuple[str, ...]
    products: tuple[tuple[Pair, float], ...]
    source: str
    flops: float = 0.0
    bandwidth: float = 0.0

    def rate(self, a: Format | BlockFormat | str, b: Format | BlockFormat | str) -> float:
        """Returns the rate of a product relative to 16-bit operands; 0 if there is no unit."""
        names = tuple(x if isinstance(x, str) else x.name for x in (a, b))
        return dict(self.products).get((names[0], names[1]), 0.0)

    @property
    def pairs(self) -> list[str]:
        """The products of the units, each pair once: ``"e4m3fn x e5m2"``."""
        return list(dict.fromkeys(" x ".join(sorted(pair)) for pair, _ in self.products))


def _device(
    name: str, title: str, platform: str, kinds: tuple[str, ...], source: str, *rates: dict,
    **speed: float,
) -> Device:  # fmt: skip
    products = tuple(item for table in rates for item in table.items())
    return Device(name, title, platform, kinds, products, source, **speed)


# cuBLASLt multiplies E4M3 by E4M3 and by E5M2, not E5M2 by E5M2 (cuBLAS documentation, table of
# cublasLtMatmul() for FP8 kernels).
_AMPERE = _rates(1.0, "fp16", "bf16") | _rates(0.5, "tf32")
_HOPPER = _AMPERE | _rates(2.0, "e4m3fn", "e4m3fn x e5m2")
# cuDNN's block-scaled products, as XLA calls them (`__cudnn$blockScaledDot`). The units also take
# MXFP6 and MXFP4 (PTX ISA, tcgen05.mma), which no library that XLA calls offers.
_BLACKWELL = _HOPPER | _rates(2.0, "mxfp8_e4m3", "mxfp8_e4m3 x mxfp8_e5m2") | _rates(4.0, "nvfp4")
_TPU = _rates(1.0, "bf16")
# By XLA's cost model for products of 4096 x 4096 (libtpu of JAX 0.10.2): these two pairs, and no
# others of 8 bits, take fewer cycles than bfloat16's.
_PAIRS = ("e5m2", "e4m3b11fnuz")

# Speeds are those of the vendors' data sheets; of TPUs, of Google Cloud's pages on each version.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _device(
            "cpu", "a CPU", "cpu", ("cpu",),
            "XLA's CPU backend, which widens narrower operands to float32",
            _rates(1.0, "fp32"), _rates(0.5, "fp64"),
        ),
        _device(
            "a100", "NVIDIA A100", "cuda", ("nvidia a100",),
            "NVIDIA A100 Tensor Core GPU data sheet", _AMPERE, _rates(1 / 16, "fp64"),
            flops=312e12, bandwidth=2.039e12,
        ),
        _device(
            "h100", "NVIDIA H100", "cuda", ("nvidia h100", "nvidia gh200"),
            "NVIDIA H100 Tensor Core GPU data sheet (SXM)", _HOPPER, _rates(67 / 989, "fp64"),
            flops=989e12, bandwidth=3.35e12,
        ),
        _device(
            "h200", "NVIDIA H200", "cuda", ("nvidia h200",),
            "NVIDIA H200 Tensor Core GPU data sheet (SXM)", _HOPPER, _rates(67 / 989, "fp64"),
            flops=989e12, bandwidth=4.8e12,
        ),
        _device(
            "b200", "NVIDIA B200", "cuda", ("nvidia b200", "nvidia gb200"),
            "NVIDIA DGX B200 data sheet", _BLACKWELL, _rates(37 / 2250, "fp64"),
            flops=2250e12, bandwidth=7.7e12,
        ),
        _device(
            "mi300x", "AMD Instinct MI300X", "rocm", ("amd instinct mi300x",),
            "AMD Instinct MI300X data sheet; AMD CDNA 3 instruction set architecture",
            _rates(1.0, "fp16", "bf16"), _rates(0.5, "tf32"), _rates(1 / 8, "fp32", "fp64"),
            _rates(2.0, "e4m3fnuz", "e4m3fnuz x e5m2fnuz", "e5m2fnuz"),
            flops=1307e12, bandwidth=5.3e12,
        ),
        _device(
            "v5e", "TPU v5e", "tpu", ("tpu v5 lite", "tpu v5e"),
            "XLA's cost model for TPU v5e", _TPU, _rates(2.0, *_PAIRS),
            flops=197e12, bandwidth=0.819e12,
        ),
        _device(
            "v5p", "TPU v5p", "tpu", ("tpu v5", "tpu v5p"),
            "XLA's cost model for TPU v5p", _TPU, _rates(2.0, *_PAIRS),
            flops=459e12, bandwidth=2.765e12,
        ),
        _device(
            "v6e", "TPU v6e", "tpu", ("tpu v6 lite", "tpu v6e"),
            "XLA's cost model for TPU v6e", _TPU, _rates(1.28, *_PAIRS),
            flops=918e12, bandwidth=1.64e12,
        ),
        _device(
            "tpu7x", "TPU7x", "tpu", ("tpu7x", "tpu v7"),
            "XLA's cost model for TPU7x", _TPU, _rates(2.0, "e4m3fn", "e4m3fn x e5m2", "e5m2"),
            flops=1153e12, bandwidth=3.69e12,  # of one of a chip's two devices, as JAX lists them
        ),
    )
}  # fmt: skip


@checked
def device(name: str | Device) -> Device:
    """Returns the device of a name; a Device is returned as it is.

    Raises:
        ValueError: no device of the table has that name.
    """
    if isinstance(name, Device):
        return name
    if found := DEVICES.get(str(name).lower()):
        return found
    expected = f"expected one of {', '.join(DEVICES)}"
    raise ValueError(f"no device is called {name!r}; {near(str(name), DEVICES)}{expected}")


def device_for(name: str | Device | None) -> Device | None:
    """Returns the device of a name; for None that of JAX's default backend, if the table has it.

    A program is traced before it is lowered for a platform: to compile for another device, name it.
    """
    return present() if name is None else device(name)


@functools.cache
def present() -> Device | None:
    """Returns the row for the first device of JAX's default backend; None if it has no row."""
    return by_kind(jax.devices()[0].device_kind)


def by_kind(kind: str) -> Device | None:
    """Returns the row whose ``kinds`` has the longest prefix of a ``jax.Device.device_kind``."""
    kind = kind.lower()
    found = [(len(k), d) for d in DEVICES.values() for k in d.kinds if kind.startswith(k)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


@dataclasses.dataclass(frozen=True)
class Units:
    """The formats in which a unit takes two operands.

    Attributes:
        formats: of the operands as the unit takes them.
        shifts: for each, the power of two that its numbers are divided by first, exactly; the
            product is multiplied by both. 0 where the unit takes the operand's own format.
        rate: of the product, relative to 16-bit operands.
    """

    formats: tuple[Format | BlockFormat, Format | BlockFormat]
    shifts: tuple[int, int]
    rate: float


def units_for(a: Format | BlockFormat, b: Format | BlockFormat, device: Device) -> Units | None:
    """Returns how a device's matrix units multiply two formats; None if none of them does.

    A unit for a format with another bias is used too, if that format holds every number times one
    power of two: TPUs before TPU7x multiply E4M3FN as E4M3B11FNUZ. An infinity becomes NaN if that
    format has none.

    Example:
        >>> from scalewise.formats import E4M3FN
        >>> from scalewise.devices import device
        >>> found = units_for(E4M3FN, E4M3FN, device("v6e"))
        >>> found.formats[0].name, found.shifts
        ('e4m3b11fnuz', (4, 4))
    """
    if rate := device.rate(a, b):
        return Units((a, b), (0, 0), rate)
    if isinstance(a, BlockFormat) or isinstance(b, BlockFormat):
        return None
    for (first, second), rate in device.products:
        if first in CATALOGUE and second in CATALOGUE:
            formats = CATALOGUE[first], CATALOGUE[second]
            shifts = shift_to(a, formats[0]), shift_to(b, formats[1])
            if shifts[0] is not None and shifts[1] is not None:
                return Units(formats, (shifts[0], shifts[1]), rate)
    return None


def shift_to(fmt: Format, other: Format) -> int | None:
    """Returns the k for which ``other`` holds ``x / 2**k`` for each finite number x of ``fmt``.

    The difference of their biases, if they have the same fields; otherwise None.
    """
    if fmt.bias is None or other.bias is None:
        return None
    fields = [
        (f.bits, f.signed, f.exponent_bits, f.mantissa_bits, f.subnormals) for f in (fmt, other)
    ]
    k = other.bias - fmt.bias
    if fields[0] != fields[1] or fmt.max > other.max * Fraction(2) ** k:
        return None
    return k


def partners_of(fmt: Format | BlockFormat, device: Device) -> dict[str, float]:
    known = BLOCK_FORMATS if isinstance(fmt, BlockFormat) else CATALOGUE
    found = {name: units_for(fmt, other, device) for name, other in known.items()}
    return {name: units.rate for name, units in found.items() if units is not None}


def best_units(fmt: Format | BlockFormat, device: Device) -> Units | None:
    """Returns units for two operands of a format, else the fastest for it and another format."""
    if own := units_for(fmt, fmt, device):
        return own
    partners = partners_of(fmt, device)
    known = BLOCK_FORMATS if isinstance(fmt, BlockFormat) else CATALOGUE
    other = max(partners, key=lambda name: partners[name], default=None)
    return None if other is None else units_for(fmt, known[other], device)
