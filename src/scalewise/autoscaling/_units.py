"""Whether a product of narrow operands is faster on a device, and what its matrix units lack."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..devices import Device, Units, units_for
from ..formats import E8M0, BlockFormat, Format
from ..interpret import Equation
from ..primitives import params
from ..scaled import is_known
from ..scalifying import ScaledValue
from ._grouped_kernel import TILE, is_supported
from ._operand_settings import Operand

GROUPED = ("ragged_dot", "ragged_dot_general")
HOPPER = ("h100", "h200")


def units_of(
    equation: Equation, a: Format | BlockFormat, b: Format | BlockFormat, device: Device
) -> Units | None:
    """Returns the units that multiply two operands as they are; None if XLA doesn't let them.

    XLA expands a grouped product to a dense one on a GPU. Convolutions take 16 bits at least.
    """
    blocks = isinstance(a, BlockFormat) or isinstance(b, BlockFormat)
    grouped = equation.name in GROUPED and not blocks and device.platform == "cuda"
    return units_for(a, b, device) if equation.name == "dot_general" or grouped else None


def warn_of_missing(
    equation: Equation,
    formats: Sequence[Format | BlockFormat | None],
    device: Device | None,
    told: set[str],
) -> None:
    """Warns, once for each pair of formats, that products are computed wide for lack of units."""
    a, b = formats
    if device is None or device.platform == "cpu" or a is None or b is None:
        return
    narrow = all(isinstance(f, BlockFormat) or f.bits < 16 for f in (a, b))
    if not narrow or units_of(equation, a, b, device) is not None:
        return
    what = " x ".join(sorted((a.name, b.name)))
    if equation.name != "dot_general":
        what = f"{what} in {equation.name}"
    if what not in told:
        told.add(what)
        warnings.warn(
            f"autoscale: {equation.where()}: {device.name} has no matrix units for {what}: "
            'such products are computed in 16 bits from here on. "scalewise formats --device '
            f'{device.name}" lists those that it has.',
            UserWarning,
            stacklevel=2,
        )


Narrow = Any  # of an operand: its setting, a quantized argument; None for one that stays in flight

NO_UNITS = "left alone: no units"
TOO_SMALL = "left alone: converting costs more"


def reason_to_leave(
    equation: Equation,
    values: Sequence[ScaledValue],
    narrow: Sequence[Narrow],
    made: Sequence[bool],
    device: Device,
) -> str:
    """Returns why a contraction is left as the program has it; empty for a faster narrow one.

    A product takes the larger of the time for its operations, at the rate of the units, and the
    time for its bytes, at the memory's bandwidth. An operand that isn't narrow yet (``made``) is
    read once for each scale that has to be found and once more to be rounded, and written
    narrow. Of a differentiated program every copy counts half, since two products read it; on a
    CUDA device they read different orders of its axes, of which the second is transposed, except
    by our kernel.
    """
    formats = [x and x.format for x in narrow]
    rate = _rate(equation, formats, device)
    if rate == 0:
        return NO_UNITS
    shapes = [v.data.shape for v in values] + [equation.out_avals[0].shape]
    if not all(is_known(n) for shape in shapes for n in shape):
        return ""
    kernel = has_group_kernel(equation, formats, device)
    shared = 1 if equation.direction == "update" else 2
    transposed = shared == 2 and device.platform == "cuda" and not kernel
    sizes = [math.prod(shape) for shape in shapes]
    in_flight = [float(np.dtype(v.data.dtype).itemsize) for v in values]
    stored = [f.bits_per_element / 8 if f else w for f, w in zip(formats, in_flight, strict=True)]
    converted, decoded = [0.0, 0.0], 0.0
    for i, (setting, own, whole) in enumerate(zip(narrow, stored, in_flight, strict=True)):
        if isinstance(setting, Operand) and not made[i]:
            reads = 1 + (setting.scaling.source not in ("history", "shapes"))
            passes = 3 if transposed and isinstance(setting.format, Format) else 1
            converted[i] = sizes[i] * (reads * whole + passes * own) / device.bandwidth
        elif setting is not None and not isinstance(setting, Operand):  # stored before
            decoded += sizes[i] * (own + whole) / device.bandwidth
    if all(v.data.dtype in (jnp.bfloat16, jnp.float16) for v in values):
        wide_rate = device.rate("bf16", "bf16") or device.rate("fp16", "fp16") or 1.0
    else:
        wide_rate = device.rate("tf32", "tf32") or device.rate("fp32", "fp32") or 0.5
    wide = _seconds(equation, sizes, in_flight, wide_rate, device) + decoded
    fast = _seconds(equation, sizes, stored, rate, device, kernel)
    if fast + sum(converted) / shared < wide:
        return ""
    of_weights = [c for v, c in zip(values, converted, strict=True) if v.origin == "stored"]
    if shared == 1 and fast + sum(converted) - max(of_weights, default=0.0) < wide:
        warnings.warn(
            f"autoscale: {equation.where()}: quantizing a weight in each call takes longer than "
            f"its product saves on {device.name}: the product is left as it is. "
            "scalewise.quantize_params quantizes weights once.",
            UserWarning,
            stacklevel=2,
        )
    return TOO_SMALL


def has_group_kernel(
    equation: Equation, formats: Sequence[Format | BlockFormat | None], device: Device
) -> bool:
    """Returns whether our kernel computes a grouped product, which is where its bound is lower.

    The bound is that of :func:`reason_to_leave`. XLA and the kernel read and write the same arrays;
    XLA multiplies all rows by each group's matrix, and the kernel at most a tile more than a
    group's rows by it. So many small groups are left to XLA.
    """
    a, b = formats
    if equation.name not in GROUPED or device.name not in HOPPER or a is None or b is None:
        return False
    shapes = [x.shape for x in (*equation.in_avals[:2], equation.out_avals[0])]
    if not all(is_known(n) and n for shape in shapes for n in shape):
        return False
    in_blocks = all(
        isinstance(f, BlockFormat) and (f.size, f.scale, f.element.bits) == (32, E8M0, 8)
        for f in formats
    )
    rate = 1.0 if in_blocks else device.rate(a, b) if a.bits_per_element == 8 else 0.0
    if not rate or not is_supported(params.ragged_dimensions(equation)):
        return False
    sizes = [math.prod(shape) for shape in shapes]
    by_xla, by_kernel = (_seconds(equation, sizes, (1, 1), rate, device, k) for k in (False, True))
    return by_kernel < by_xla


def _rate(
    equation: Equation, formats: Sequence[Format | BlockFormat | None], device: Device
) -> float:
    a, b = formats
    if equation.name not in ("dot_general", *GROUPED) or a is None or b is None:
        return 1.0 if all(f is None or f.bits_per_element > 8 for f in formats) else 0.0
    units = units_of(equation, a, b, device)
    in_blocks = isinstance(a, BlockFormat) and has_group_kernel(equation, formats, device)
    return 1.0 if in_blocks else 0.0 if units is None else units.rate


def _seconds(
    equation: Equation,
    sizes: Sequence[int],
    bytes_: Sequence[float],
    rate: float,
    device: Device,
    kernel: bool = False,
) -> float:
    own = math.prod(equation.in_avals[1].shape[a] for a in params.contracted_axes(equation)[1])
    grouped = params.ragged_dimensions(equation) if device.platform == "cuda" else None
    for axis in grouped.rhs_group_dimensions if grouped else ():
        own *= equation.in_avals[1].shape[axis]  # XLA multiplies all rows by each group's matrix
    if kernel:  # at most one more tile of rows for each group
        has_matrices = grouped is not None and grouped.rhs_group_dimensions
        groups = (equation.in_avals[1] if has_matrices else equation.out_avals[0]).shape[0]
        own *= 1 / groups + TILE / max(equation.in_avals[0].shape[0], 1)
    moved = sum(n * b for n, b in zip(sizes, bytes_, strict=False)) + 2 * sizes[2]
    return max(2 * sizes[2] * own / (device.flops * rate), moved / device.bandwidth)
