"""The strategies that choose a scale: from the largest magnitude, the spread or shapes.

Most find a *magnitude* and scale it to the top of the format (:func:`to_top`). NaN and infinities
are left out: a scale depends on the finite elements alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Count, Positive, Range, checked
from .._repr import changed_fields
from ..formats import BLOCK_FORMATS, CATALOGUE, BlockFormat, Format
from ._amax import amax, to_top
from ._power import exponent_of, power_of_two

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
class Rms(Scaling):
    """Scales by a multiple of the root mean square; larger elements saturate.

    Outliers then don't cost the other elements their precision. If the largest magnitude is smaller
    than that multiple, the scale is that of :class:`Amax`.

    Attributes:
        sigmas: the multiple.
        power_of_two: as in :class:`Amax`.
    """

    sigmas: Positive = 8.0
    power_of_two: bool = True
    name = "rms"

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        # through a scale of its own: the squares neither overflow nor flush
        unit, inverse = to_top(amax(x, axes, True), fmt, True)
        finite = jnp.isfinite(x)
        squares = jnp.where(finite, jnp.square(x * inverse), 0)
        total, count = (
            jnp.sum(a, axis=tuple(axes), keepdims=True, dtype=x.dtype) for a in (squares, finite)
        )
        spread = jnp.sqrt(total / jnp.maximum(count, 1)) * unit * np.asarray(self.sigmas, x.dtype)
        magnitude = jnp.minimum(amax(x, axes, True), spread)
        return to_top(_kept(magnitude, axes, keepdims), fmt, self.power_of_two)


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

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        return Unit(4.0**self.exponent).scale(x, fmt, axes, keepdims)


@checked
@dataclasses.dataclass(frozen=True)
class Delayed(Scaling):
    """Scales by the largest magnitude of the last few arrays (delayed scaling), one per tensor.

    The magnitudes are explicit state of :func:`scalewise.autoscale`, see
    :class:`~scalewise.autoscaling.WithHistory`; without one the scale is that of the array itself.
    Elements that have grown beyond the history saturate. (FP8 training as in NVIDIA's Transformer
    Engine.)

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


def _kept(x: jax.Array, axes: Axes, keepdims: bool) -> jax.Array:
    return x if keepdims else jnp.squeeze(x, tuple(axes))


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
