"""Strategies for the scales of blocks: OCP's rules, QuEST, four over six and MS-EDEN."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._check import Positive, Range, checked
from ..formats import E2M1FN, E8M0, BlockFormat, Format
from ..rounding import EncodedArray, encode, round_to
from ._amax import amax, amax_by_keys, to_top
from ._array import ScaledArray
from ._power import exponent_of, layout
from ._scaling import Amax, Axes, Scales, Scaling


def in_scale_range(exponent: jax.Array, element: Format, dtype: DTypeLike) -> jax.Array:
    """Clips exponents to E8M0's range, and to those with which no element decodes to infinity."""
    highest = min(127, layout(dtype)[2] - element.max_exponent)
    return jnp.clip(exponent, -127, highest)


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

    # torchao's names, then the modes in which ONNX's Cast rounds amax / max to E8M0
    exponent: Literal["floor", "ceil", "even", "rceil", "up", "down", "nearest"] = "floor"
    nan_scale: bool = False
    name = "mx"
    source = "amax"
    for_blocks = True

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
        return in_scale_range(exponent, element, x.dtype)

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


class _FractionalScales(Scaling):
    """Scales of blocks of E2M1 that aren't powers of two; the largest of a tensor's becomes 256.

    256 in place of 448, the largest E4M3 number, allows a scale to be raised afterwards.
    """

    power_of_two: bool = False
    for_blocks = True
    largest_block_scale = 256.0

    def check(self, fmt: Format | BlockFormat) -> None:
        blocks = isinstance(fmt, BlockFormat)
        if not blocks or fmt.element != E2M1FN or fmt.scale == E8M0:
            raise ValueError(
                f"{type(self).__name__} is for blocks of e2m1fn with scales that aren't powers of "
                f"two (nvfp4), not for {fmt.name}"
            )


@dataclasses.dataclass(frozen=True)
class FourOverSix(_FractionalScales):
    """Scales a block's largest magnitude to 6 or to 4, whichever has the smaller squared error.

    E2M1 has no numbers between 4 and 6, so that numbers a little below a block's largest have large
    errors if that is scaled to 6 ("Four Over Six", arXiv 2512.02010). For block formats of E2M1
    with scales that aren't powers of two (NVFP4). Of a tensor scale, the largest block scale
    becomes 256 instead of 448, so that 3/2 of it is representable too. Where both errors are equal
    to 16 bits, the largest magnitude becomes 6.
    """

    name = "four_over_six"

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        return Amax(power_of_two=False).scale(x, fmt, axes, keepdims)


@checked
@dataclasses.dataclass(frozen=True)
class MsEden(_FractionalScales):
    """Corrects each block's scale so that nearest rounding is unbiased after a random rotation.

    MS-EDEN of "Quartet II" (arXiv 2601.22813, algorithm 1). The numbers of a block are rounded to
    nearest, its scale is multiplied by ``<x, x> / <x, q>``, where q are the rounded numbers, and
    the product is rounded stochastically to the scales' format. The squared error is less than half
    of stochastic rounding's. For block formats of E2M1 with scales that aren't powers of two.

    The numbers have to be a randomised Hadamard transform's. The mean over the rotation's signs is
    then exact only in the limit of many dimensions. Of 128 normal numbers the mean of 10,000 draws
    was within 4 standard errors; where one of the 128 was 100 times the others, it was off by up to
    1.2 % of the largest (tests/autoscale/test_unbiased_recipes.py).

    The correction is per block, as in the algorithm. The paper's own programs
    (github.com/IST-DASLab/Quartet-II) compute it over the rotation's 128 numbers, each divided by
    its block's scale.

    Attributes:
        clip: the block's largest magnitude becomes ``6 / (17/16 * clip)`` before its scale is
            rounded: below 16/17 the largest numbers are cut off, which lowers the error of all.
    """

    clip: Annotated[float, Range(lambda x: 0 < x <= 2, "a number in (0, 2]")] = 0.93
    name = "ms_eden"
    draws = True

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        return Amax(False, headroom=17 / 16 * self.clip).scale(x, fmt, axes, keepdims)

    def corrected(
        self,
        scale: jax.Array | EncodedArray | ScaledArray,
        scaled: jax.Array,
        fmt: BlockFormat,
        axis: int,
        key: jax.Array | None,
        encode: Callable[..., jax.Array | EncodedArray] = encode,
    ) -> jax.Array | EncodedArray | ScaledArray:
        """Returns the blocks' scales times their corrections, rounded stochastically.

        Args:
            scale: the blocks' scales, or a ScaledArray of them with a tensor scale.
            scaled: the blocks' numbers divided by their scales.
            fmt: the block format.
            axis: of the numbers of a block in ``scaled``.
            key: a JAX random key.
            encode: rounds and stores them.
        """
        if key is None:
            raise ValueError("MsEden rounds scales stochastically: expected key, a JAX random key")
        scaled = jnp.where(jnp.isfinite(scaled), scaled, 0)
        rounded = round_to(scaled, fmt.element, saturate="finite")
        own, cross = (jnp.sum(scaled * y, axis) for y in (scaled, rounded))
        correction = jnp.where(cross == 0, 1, own / cross).astype(jnp.float32)
        blocks = scale.data if isinstance(scale, ScaledArray) else scale
        options = {"rounding": "stochastic", "saturate": True, "key": key}
        stored = encode(blocks.astype(jnp.float32) * correction, fmt.scale, **options)
        if isinstance(scale, ScaledArray):
            return dataclasses.replace(scale, data=stored)
        return stored


@checked
@dataclasses.dataclass(frozen=True)
class Quest(Scaling):
    """Scales by a multiple of a block's standard deviation, rounded to a power of two.

    QuEST's forward scales in "Quartet" (arXiv 2505.14669): numbers beyond some ``sigmas`` standard
    deviations are cut off. Rounded to the nearest power, the mean squared error of normal numbers
    is 0.0134 of their variance, less than with a scale from the largest magnitude (0.0137); a
    Hadamard transform makes numbers nearly normal. The authors' kernels round down: 0.0226, and
    they give no gradient to what is cut off.

    Numbers whose mean exceeds their standard deviation aren't nearly normal: all would be cut off.
    The root mean square then takes its place. The transform of a row that is zero except for its
    first element is such a block: all of its numbers are equal. The authors' kernels take the
    standard deviation alone, so that such a block becomes zero.

    Attributes:
        sigmas: the multiple; by default the best for normal numbers and E2M1.
        exponent: ``"nearest"`` power of two by ratio, or ``"floor"``.
    """

    sigmas: Positive = 2.92247856
    exponent: Literal["nearest", "floor"] = "nearest"
    name = "quest"
    for_blocks = True

    def check(self, fmt: Format | BlockFormat) -> None:
        if getattr(fmt, "scale", None) != E8M0:
            raise ValueError(
                "Quest is for blocks with powers of two for scales (mxfp4, mxfp8_e4m3), not for "
                f"{fmt.name}"
            )

    def exponents(self, x: jax.Array, element: Format, axes: Axes) -> jax.Array:
        finite = jnp.where(jnp.isfinite(x), x, 0)
        # through a scale of its own: the squares neither overflow nor flush
        unit, inverse = to_top(amax(finite, axes, True), element, True)
        unit_data = finite * inverse
        mean = jnp.mean(unit_data, axis=tuple(axes), keepdims=True)
        spread = jnp.std(unit_data, axis=tuple(axes), keepdims=True)
        spread = jnp.where(jnp.abs(mean) > spread, jnp.hypot(mean, spread), spread)
        nearest = math.sqrt(2) if self.exponent == "nearest" else 1.0
        spread = spread * np.asarray(nearest * self.sigmas / float(element.max), x.dtype)
        exponent = exponent_of(spread) + exponent_of(unit)
        exponent = jnp.where(spread == 0, -127, exponent)
        return in_scale_range(jnp.squeeze(exponent, tuple(axes)), element, x.dtype)
