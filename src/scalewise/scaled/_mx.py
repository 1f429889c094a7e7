"""``Mx``: scales of blocks that are powers of two, by the rules of OCP, torchao and ONNX."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from ..formats import Format
from ._amax import amax_by_keys
from ._power import layout
from ._strategy import Axes, Scaling

# How the exponent of a scale is found from the largest magnitude of a block: torchao's names, then
# the modes in which ONNX's Cast rounds amax / max to E8M0.
EXPONENTS = ("floor", "ceil", "even", "rceil", "up", "down", "nearest")


@checked
@dataclasses.dataclass(frozen=True)
class Mx(Scaling):
    """Scales by the largest finite magnitude to a power of two, as OCP Microscaling 1.0, 6.3, does.

    Attributes:
        exponent: ``"floor"``, as specified: ``floor(log2(amax)) - emax``, where ``emax`` is the
            element format's largest exponent; a magnitude above the element's largest number
            saturates. ``"ceil"``: ``ceil(log2(amax)) - emax``. ``"even"``: floor, after amax is
            rounded to the element's precision, ties up. ``"rceil"``: ``ceil(log2(amax / max))``,
            the smallest power of two with which nothing saturates. ``"up"``, ``"down"`` and
            ``"nearest"``: ``amax / max``, computed exactly, rounded to a power of two as ONNX's
            Cast rounds to E8M0 (opset 24, ``round_mode``): ``"up"`` is ``"rceil"``; with
            ``"nearest"``, 1.5 times a power of two is rounded up; with both others than ``"up"``
            magnitudes above the element's largest number saturate.
        nan_scale: True makes the scale of a block with a NaN or an infinity NaN, and so all of its
            elements, as torchao's MX does. False keeps the finite elements where the element format
            has NaN; without NaN (MXFP6, MXFP4) such a block is NaN in any case.
    """

    exponent: str = "floor"
    nan_scale: bool = False
    name = "mx"
    source = "amax"
    for_blocks = True

    def __post_init__(self):
        if self.exponent not in EXPONENTS:
            expected = ", ".join(map(repr, EXPONENTS))
            raise ValueError(f"Mx: exponent is {self.exponent!r}; expected one of {expected}")

    def exponents(self, x: jax.Array, element: Format, axes: Axes) -> jax.Array:
        signed, mantissa_bits, bias = layout(x.dtype)
        integer = np.uint64 if signed is np.int64 else np.uint32
        amax = lax.bitcast_convert_type(amax_by_keys(x, axes), integer)
        field = (amax >> integer(mantissa_bits)).astype(jnp.int32)  # a subnormal's 0 ends at -127
        below, last = self.step(element, x.dtype)
        exponent = field - bias - element.max_exponent - below
        if last is not None:
            fraction = (amax & integer((1 << mantissa_bits) - 1)).astype(signed)
            exponent += (fraction > signed(last)).astype(jnp.int32)
        return jnp.clip(exponent, -127, 127)

    def step(self, element: Format, dtype: DTypeLike) -> tuple[int, int | None]:
        """Returns how the fraction of an amax in ``[2^e, 2^(e + 1))`` chooses between two scales.

        Returns:
            ``(below, last)``: the exponent is ``e - emax - below``, and one more if the fraction
            bits of amax exceed ``last``, which may be -1; None if they never do.
        """
        ones = 1 << layout(dtype)[1]  # a significand of 1, in units of the last place
        top = Fraction(element.max) / Fraction(2) ** element.max_exponent * ones
        match self.exponent:
            case "even":
                return 0, ones - (ones >> (1 + element.mantissa_bits)) - 1
            case "rceil" | "up":
                return 0, math.floor(top) - ones
            case "down":
                return 1, math.ceil(top) - 1 - ones
            case "nearest":  # amax / max has its tie at 3/2, or at 3/4 where max is above 4/3
                below, tie = (0, top * 3 / 2) if top * 3 < ones * 4 else (1, top * 3 / 4)
                return below, math.ceil(tie) - 1 - ones
        return 0, (0 if self.exponent == "ceil" else None)
