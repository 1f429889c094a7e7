"""The strategies that choose a scale: from the largest magnitude, the error or shapes.

Most find a *magnitude* and scale it to the top of the format (:func:`to_top`). NaN and infinities
are left out: a scale depends on the finite elements alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._check import Count, Positive, Range, checked, checked_axes
from .._repr import changed_fields
from .._resolve import as_format
from ..formats import BLOCK_FORMATS, CATALOGUE, E2M1FN, E8M0, BlockFormat, Format, FormatLike
from ..rounding import EncodedArray, encode, float_array, round_to
from ._amax import amax, amax_by_keys, to_top
from ._array import ScaledArray
from ._least_squares import least_squares_scale
from ._power import exponent_of, layout, power_of_two

Axes = Sequence[int]
Scales = tuple[jax.Array, jax.Array]  # a scale and its inverse
SCALINGS: dict[str, type[Scaling]] = {}  # the strategies by name


class Scaling:
    """Base class of the strategies that choose scales; a subclass that sets ``name`` is registered
    in ``SCALINGS``.

    Attributes:
        name: what :func:`scalewise.explain` prints.
        source: what a scale is found from: ``"amax"`` is the largest magnitude of the array itself,
            ``"data"`` another statistic of it, ``"shapes"`` a prediction from shapes alone,
            ``"history"`` the arrays of earlier steps.
        reuses_copy: under :func:`scalewise.autoscale`, whether the backward pass reads the narrow
            copy of an operand that the forward pass made; else the operand is stored in the
            recipe's ``residuals`` and rounded again.
        for_blocks: whether the strategy chooses the scales of blocks: operands of a recipe that
            have one scale, in ``residuals`` for example, then have current scaling.
        draws: whether the scales of blocks are rounded stochastically, so that they need a key.
        largest_block_scale: what the largest scale of a block becomes under a tensor scale; None
            for the largest number of the scales' format.
        power_of_two: whether every scale is a power of two, so that ``x / scale`` is exact.
    """

    name: ClassVar[str] = ""
    source: ClassVar[Literal["amax", "data", "shapes", "history"]] = "data"
    reuses_copy: ClassVar[bool] = False
    for_blocks: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    largest_block_scale: ClassVar[float | None] = None
    power_of_two: bool = True

    def __init_subclass__(cls, **options: object):
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            SCALINGS[cls.name] = cls

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        """Returns the scale of ``x`` (float32 or float64) over ``axes``, and its inverse.

        It depends on the finite elements of ``x`` alone. A subclass defines this or
        :meth:`exponents`, from which the other follows.
        """
        exponent = jnp.clip(self.exponents(x, fmt, axes), -126, 126)
        exponent = jnp.expand_dims(exponent, tuple(axes)) if keepdims else exponent
        return power_of_two(exponent, x.dtype), power_of_two(-exponent, x.dtype)

    def exponents(self, x: jax.Array, element: Format, axes: Axes) -> jax.Array:
        """Returns the int32 exponents of scales that E8M0 holds, from -127 to 127."""
        scale, _ = self.scale(jnp.where(jnp.isfinite(x), x, 0), element, axes)
        return jnp.clip(exponent_of(scale), -127, 127)

    def check(self, fmt: Format | BlockFormat) -> None:
        """Raises ValueError for a format that can't have scales of this strategy."""

    def may_exceed(self, fmt: Format) -> bool:
        """Returns True if scaled elements may exceed the format's largest number."""
        return True

    def of_blocks(self) -> Scaling | None:
        """Returns the strategy for the blocks of a block format; None for the format's own."""
        return self

    def predicted(self, spread: float) -> Scaling:
        """Returns the strategy for arrays whose predicted standard deviation is ``2**spread``."""
        return self


@checked
@dataclasses.dataclass(frozen=True)
class Amax(Scaling):
    """Scales by the largest magnitude, in one pass over the data.

    A scale that is a power of two brings the largest magnitude to the format's last but one binade:
    neither it nor its rounding overflows, and ``x / scale`` is exact. In a format with more
    exponents it is brought to at most 2^15, so that sums of products stay in float32's range.
    Otherwise it becomes the format's largest number.

    Attributes:
        power_of_two: whether the scale is a power of two.
        headroom: a factor by which the largest magnitude counts as larger. 17/16 for blocks whose
            scales are E4M3: rounding such a scale down by at most 1/17 then saturates nothing.
    """

    power_of_two: bool = True
    headroom: Positive = 1.0
    name = "amax"
    source = "amax"
    reuses_copy = True

    def may_exceed(self, fmt: Format) -> bool:
        # XLA may compute a difference of products once to find its largest magnitude and once more
        # to round it, with multiply-adds in one and not in the other: where the products cancel,
        # the two differ by any factor. Formats with more exponents hold both.
        return fmt.max_exponent <= 16

    def of_blocks(self) -> Scaling | None:
        return None if self.headroom == 1 else self

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        magnitude = amax(x, axes, keepdims)
        if self.headroom != 1:
            magnitude = magnitude * np.asarray(self.headroom, x.dtype)
        return to_top(magnitude, fmt, self.power_of_two)


@checked
@dataclasses.dataclass(frozen=True)
class LeastSquares(Scaling):
    """Scales with the smallest squared error of the rounded elements among several candidates.

    With ``power_of_two`` the candidates are :class:`Amax`'s scale and its halves; each costs a
    rounding and a sum over the data. Without it a dense search finds a scale within 1 % of the
    error of an exhaustive one for common distributions; it rounds at most 8,192 elements per scale
    three times for each candidate.

    Attributes:
        candidates: how many scales are tried. None: 6 powers of two, or 256 on a grid from twice
            the largest magnitude's scale down, half of them in its two octaves.
        power_of_two: whether the scale is a power of two.
    """

    candidates: Count | None = None
    power_of_two: bool = True
    name = "least_squares"

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        if not self.power_of_two:
            scale = least_squares_scale(lax.stop_gradient(x), fmt, axes, self.candidates)
            scale = _kept(scale, axes, keepdims)
            return scale, 1 / scale
        top = amax(x, axes, True)
        unit = to_top(top, fmt, True)[1]  # the error's own scale: squares of it stay in range
        found: list[tuple[jax.Array, jax.Array, jax.Array]] = []
        for i in range(self.candidates or 6):
            scale, inverse = to_top(top * np.asarray(0.5**i, x.dtype), fmt, True)
            rounded = round_to(x * inverse, fmt, saturate="finite") * scale
            squares = jnp.where(jnp.isfinite(x), jnp.square((rounded - x) * unit), 0)
            error = jnp.sum(squares, axis=tuple(axes), keepdims=True)
            found.append((error, scale, inverse))
        best = found[0]
        for new in found[1:]:
            better = new[0] < best[0]
            best = tuple(jnp.where(better, *pair) for pair in zip(new, best, strict=True))
        return _kept(best[1], axes, keepdims), _kept(best[2], axes, keepdims)


@checked
def find_optimal_scaling(
    x: ArrayLike, fmt: FormatLike, *, axis: Axes | int = (), power_of_two: bool = True
) -> jax.Array:
    """Returns the scale s with the least squared error of ``s * round(x / s)`` in a format.

    It is that of :class:`LeastSquares`: ``ScaledArray(sw.cast(x / s, fmt), s)`` is ``sw.quantize(x,
    fmt, scaling=LeastSquares(power_of_two))``, where elements beyond the format's largest saturate.

    Args:
        x: an array of floats. NaN and infinities don't count.
        fmt: a format, or its name.
        axis: axes that keep a scale for each of their indices (the scales' other axes have length
            1); by default one scale, without axes.
        power_of_two: False for a search over all scales.

    Example:
        >>> import jax.numpy as jnp
        >>> float(find_optimal_scaling(jnp.array([1.0, 1.5, 6.0]), "e2m1fn"))
        1.0
        >>> s = find_optimal_scaling(jnp.array([0.7, 4.2]), "e2m1fn", power_of_two=False)
        >>> round(float(s), 4)
        1.4
    """
    x = float_array(x, "find_optimal_scaling")
    kept = checked_axes("find_optimal_scaling", axis, x.ndim)
    axes = [a for a in range(x.ndim) if a not in kept]
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    fmt = as_format(fmt, "find_optimal_scaling")
    scaling = LeastSquares(power_of_two=power_of_two)
    return scaling.scale(wide, fmt, axes, keepdims=bool(kept))[0]


def _kept(x: jax.Array, axes: Axes, keepdims: bool) -> jax.Array:
    return x if keepdims else jnp.squeeze(x, tuple(axes))


@checked
@dataclasses.dataclass(frozen=True)
class Unit(Scaling):
    """Scales by a standard deviation predicted from shapes: unit scaling (arXiv 2303.11257).

    The scale of an array of unit variance is 1; a sum of ``terms`` products of such arrays has the
    standard deviation ``sqrt(terms)``, which is the scale, rounded to a power of two. The data
    aren't read; elements beyond the format's largest number saturate.

    Attributes:
        terms: how many products each element is the sum of; 1 for weights, inputs, activations.
    """

    terms: Positive = 1.0
    name = "unit"
    source = "shapes"

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        exponent = round(math.log2(self.terms) / 2)
        shape = tuple(
            1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes
        )
        scale, inverse = (np.asarray(2.0**e, x.dtype) for e in (exponent, -exponent))
        return jnp.broadcast_to(scale, shape), jnp.broadcast_to(inverse, shape)

    def predicted(self, spread: float) -> Unit:
        return Unit(self.terms * 4.0**spread)


@checked
@dataclasses.dataclass(frozen=True)
class Fixed(Scaling):
    """Scales every array by the same power of two, without reading it; by default not at all.

    For programs whose weights, activations and gradients have unit variance by construction (µnit
    scaling, arXiv 2502.05967). Elements beyond the format's largest number saturate.

    Attributes:
        exponent: the scale is ``2**exponent``.
    """

    exponent: Annotated[int, Range(lambda n: -126 <= n <= 126, "an integer from -126 to 126")] = 0
    name = "fixed"
    source = "shapes"
    reuses_copy = True

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        return Unit(4.0**self.exponent).scale(x, fmt, axes, keepdims)


@checked
@dataclasses.dataclass(frozen=True)
class Delayed(Scaling):
    """Scales by the largest magnitude of the last few arrays (delayed scaling), one per tensor.

    The magnitudes are explicit state of :func:`scalewise.autoscale`, see
    :class:`~scalewise.autoscaling.WithHistory`; without a history each array determines its own
    scale. Elements that have grown beyond the history saturate. (FP8 training as in NVIDIA's
    Transformer Engine.)

    Attributes:
        history: how many arrays are remembered.
        power_of_two: as in :class:`Amax`.
    """

    history: Count = 16
    power_of_two: bool = True
    name = "delayed"
    source = "history"
    reuses_copy = True

    def check(self, fmt: Format | BlockFormat) -> None:
        if isinstance(fmt, BlockFormat):
            raise ValueError(f"Delayed keeps one scale for an array, {fmt.name} has one a block")

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        if len(axes) != x.ndim:
            raise ValueError("Delayed keeps one scale for the whole array; expected axis=None")
        return to_top(amax(x, axes, keepdims), fmt, self.power_of_two)


_NAMED = {*CATALOGUE.values(), *BLOCK_FORMATS.values()}


def shown(value: object) -> str:
    """Returns the text of a field from which it can be made; a catalogue format is its name."""
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == value[1]:
            return f"({shown(value[0])},) * 2"
        inner = ", ".join(map(shown, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, Format | BlockFormat) and value in _NAMED:
        return repr(value.name)
    if isinstance(value, Scaling) and dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(changed_fields(value, text=shown))})"
    return repr(value)


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
            ``"nearest"``, 1.5 times a power of two is rounded up; with ``"down"`` and ``"nearest"``
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
