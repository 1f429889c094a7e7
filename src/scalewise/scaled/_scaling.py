"""The ways to choose a scale: from the largest magnitude, the spread, the error, or beforehand.

Each is a frozen dataclass with one method, ``scale(x, fmt, axes, keepdims)``: the scale over the
given axes, and its inverse. Most find a *magnitude* and have it put under the top of the format.
NaN and infinities never take part: a scale depends on the finite elements alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..rounding import round_to
from ._amax import amax
from ._least_squares import least_squares_scale
from ._power import layout


class Scaling(Protocol):
    """A way to choose a scale.

    Attributes:
        saturates: whether elements may lie beyond the format's largest number once scaled.
    """

    saturates: ClassVar[bool]

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The scale of ``x`` (float32 or float64) over ``axes``, and its inverse.

        It depends on the finite elements of ``x`` alone.
        """
        ...


def check_scaling(scaling: Any, where: str) -> None:
    """Refuses what is no instance of a scaling strategy.

    Args:
        where: the argument or field, for the message.

    Raises:
        TypeError: a name, a class instead of an instance, or an object without ``scale``.
    """
    if isinstance(scaling, type) and hasattr(scaling, "scale"):
        name = scaling.__name__
        raise TypeError(f"{where} is the class {name}: pass an instance, such as {name}()")
    if not hasattr(scaling, "scale"):
        raise TypeError(
            f"{where} is {scaling!r}; expected an instance such as Amax(), Rms(), LeastSquares(), "
            "Unit() or Delayed()"
        )


@dataclasses.dataclass(frozen=True)
class Amax:
    """The scale that the largest magnitude asks for.

    A power of two puts it under the format's last full binade: neither it nor its rounding
    overflows, and ``x / scale`` is exact. It isn't put above 2^15 in a format with more exponents,
    so that sums of products stay in float32's range. Otherwise it becomes the format's largest
    number. One pass over the data.

    Attributes:
        power_of_two: whether the scale is one.
    """

    power_of_two: bool = True
    saturates: ClassVar[bool] = False

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        return to_top(amax(x, axes, keepdims), fmt, self.power_of_two)


@dataclasses.dataclass(frozen=True)
class Rms:
    """The scale that a multiple of the root mean square asks for; what lies beyond saturates.

    Outliers don't cost all others their precision. Where the largest magnitude is smaller than
    that multiple, it alone decides.

    Attributes:
        sigmas: root mean squares that fit.
        power_of_two: as in :class:`Amax`.
    """

    sigmas: float = 8.0
    power_of_two: bool = True
    saturates: ClassVar[bool] = True

    def __post_init__(self):
        _positive("Rms", "sigmas", self.sigmas)

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
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


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """The scale with the smallest squared error of the rounded elements.

    Of powers of two, the best of several from :class:`Amax`'s down, each half of the one before: a
    rounding and a sum over the data for each. Without ``power_of_two``, the best scale that a dense
    search finds (within 1 % of the error of an exhaustive one for common distributions): about as
    many roundings, of 8,192 elements or fewer behind each scale, as there are candidates, and 16
    of all elements.

    Attributes:
        candidates: how many scales are tried. None: 6 powers of two, or 256 on a grid from twice
            the largest magnitude's scale down, half of them in its two octaves.
        power_of_two: whether the scale is a power of two.
    """

    candidates: int | None = None
    power_of_two: bool = True
    saturates: ClassVar[bool] = True

    def __post_init__(self):
        if self.candidates is not None and not (
            isinstance(self.candidates, int) and self.candidates >= 1
        ):
            raise ValueError(
                f"LeastSquares: candidates is {self.candidates!r}; accepted: a positive integer"
            )

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        if not self.power_of_two:
            scale = least_squares_scale(lax.stop_gradient(x), fmt, axes, self.candidates)
            scale = _kept(scale, axes, keepdims)
            return scale, 1 / scale
        top = amax(x, axes, True)
        unit = to_top(top, fmt, True)[1]  # the error's own scale: squares of it stay in range
        best = None
        for i in range(self.candidates or 6):
            scale, inverse = to_top(top * np.asarray(0.5**i, x.dtype), fmt, True)
            rounded = round_to(x * inverse, fmt, saturate="finite") * scale
            squares = jnp.where(jnp.isfinite(x), jnp.square((rounded - x) * unit), 0)
            error = jnp.sum(squares, axis=tuple(axes), keepdims=True)
            if best is None:
                best = (error, scale, inverse)
            else:
                better = error < best[0]
                best = tuple(
                    jnp.where(better, new, old)
                    for new, old in zip((error, scale, inverse), best, strict=True)
                )
        assert best is not None
        return _kept(best[1], axes, keepdims), _kept(best[2], axes, keepdims)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A scale known before the data, from shapes: unit scaling (arXiv 2303.11257).

    An array of unit variance needs none; a sum of ``terms`` products of such arrays has the
    standard deviation ``sqrt(terms)``, and that, as a power of two, is the scale. No pass over the
    data; what lies beyond the format's largest number saturates.

    Attributes:
        terms: how many products each element is the sum of; 1 for weights, inputs, activations.
    """

    terms: float = 1.0
    saturates: ClassVar[bool] = True

    def __post_init__(self):
        _positive("Unit", "terms", self.terms)

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        exponent = round(math.log2(self.terms) / 2)
        shape = tuple(
            1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes
        )
        scale, inverse = (np.asarray(2.0**e, x.dtype) for e in (exponent, -exponent))
        return jnp.broadcast_to(scale, shape), jnp.broadcast_to(inverse, shape)


@jax.tree_util.register_pytree_node_class
class Delayed:
    """The scale that the largest magnitude of the last few arrays asks for (delayed scaling).

    The history is explicit state: ``delayed.update(x)`` gives the one to use next. As long as it
    is empty, the array itself decides. What has grown beyond the history saturates. One scale for
    the whole array (FP8 training as in NVIDIA's Transformer Engine).

    Attributes:
        amaxes: float32, the largest magnitudes of the last arrays, the newest first; 0 where there
            was none.
        power_of_two: as in :class:`Amax`.

    Args:
        history: how many arrays back it looks.
    """

    saturates: ClassVar[bool] = True

    def __init__(self, history: int = 16, *, power_of_two: bool = True):
        if not isinstance(history, int) or history < 1:
            raise ValueError(f"Delayed: history is {history!r}; accepted: a positive integer")
        self.amaxes: Any = np.zeros(history, np.float32)
        self.power_of_two = power_of_two

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        if len(axes) != x.ndim:
            raise ValueError("Delayed keeps one scale for the whole array; accepted: axis=None")
        known = jnp.max(self.amaxes).astype(x.dtype)
        magnitude = lax.cond(known > 0, lambda x: known, lambda x: amax(x, range(x.ndim), False), x)
        return to_top(magnitude, fmt, self.power_of_two)

    def update(self, x: jax.Array) -> Delayed:
        """The history with the largest finite magnitude of ``x`` as its newest entry."""
        newest = amax(jnp.asarray(x).astype(jnp.float32), range(jnp.ndim(x)), False)
        amaxes = jnp.concatenate([newest[None], self.amaxes[:-1]])
        return self.tree_unflatten(self.power_of_two, (amaxes,))

    def __repr__(self) -> str:
        power = "" if self.power_of_two else ", power_of_two=False"
        if isinstance(self.amaxes, np.ndarray) and not self.amaxes.any():
            return f"Delayed(history={len(self.amaxes)}{power})"
        return f"Delayed(amaxes={self.amaxes!r}{power})"

    def tree_flatten(self):
        return (self.amaxes,), self.power_of_two

    @classmethod
    def tree_unflatten(cls, power_of_two, children):
        self = object.__new__(cls)
        self.amaxes, self.power_of_two = children[0], power_of_two
        return self


@dataclasses.dataclass(frozen=True)
class Propagated:
    """The scale that a ScaledArray came with: its data are cast, nothing is looked at.

    A plain array has the scale 1. What lies beyond the format's largest number saturates.
    """

    saturates: ClassVar[bool] = True

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        return Unit().scale(x, fmt, axes, keepdims)


def to_top(magnitude: jax.Array, fmt: Format, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """The scale that brings a magnitude to the top of a format, and its inverse; normal numbers.

    Few operations, since a program pays them at each of its contractions: the exponent field of
    the magnitude is the power of two below it, and adding to it scales.
    """
    dtype = magnitude.dtype
    signed, mantissa_bits, bias = layout(dtype)
    if not power_of_two:
        largest = float(fmt.max)
        lowest = np.asarray(2.0 ** (2 - bias), dtype)
        usable = jnp.where(jnp.isfinite(magnitude), magnitude, jnp.asarray(largest, dtype))
        scale = jnp.maximum(usable * np.asarray(1 / largest, dtype), lowest)
        return jnp.where(magnitude == 0, jnp.ones_like(scale), scale), 1 / scale
    integer = np.uint64 if signed is np.int64 else np.uint32
    top = _top(fmt)
    one = 1 << mantissa_bits  # the lowest bit of the exponent field
    field = lax.bitcast_convert_type(magnitude, integer) & integer(2 * bias * one + one)
    # scale and inverse are normal numbers: their fields are from 1 to 2 * bias
    lowest, highest = max(1, top + 1), 2 * bias + min(0, top - 1)
    field = lax.clamp(integer(lowest * one), field, integer(highest * one))
    scale = lax.bitcast_convert_type(
        field + integer(-top * one % 2 ** np.iinfo(integer).bits), dtype
    )
    inverse = lax.bitcast_convert_type(integer((2 * bias + top) * one) - field, dtype)
    return scale, inverse


def _top(fmt: Format) -> int:
    """The exponent of the binade to which a largest magnitude is brought.

    Not the last one, and 2^14 where a format goes far beyond that and has numbers below 1, too.
    """
    top = fmt.max_exponent - 1
    return top if fmt.min_exponent > 0 else min(top, 14)


def _kept(x: jax.Array, axes: Sequence[int], keepdims: bool) -> jax.Array:
    return x if keepdims else jnp.squeeze(x, tuple(axes))


def _positive(owner: str, field: str, value: Any) -> None:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{owner}: {field} is {value!r}; accepted: a positive number")
