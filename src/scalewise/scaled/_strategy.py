"""``Scaling``, the base class of the strategies that choose scales, and the table of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from ..formats import BlockFormat, Format
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
            ``"history"`` the arrays of earlier steps, ``"operand"`` the scale that a ScaledArray
            came with.
        saturates: whether elements may exceed the format's largest number once scaled.
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
    source: ClassVar[Literal["amax", "data", "shapes", "history", "operand"]] = "data"
    saturates: ClassVar[bool] = True
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
        return self.saturates

    def of_blocks(self) -> Scaling | None:
        """Returns the strategy for the blocks of a block format; None for the format's own."""
        return self

    def predicted(self, spread: float) -> Scaling:
        """Returns the strategy for arrays whose predicted standard deviation is ``2**spread``."""
        return self


def check_scaling(scaling: object, where: str) -> None:
    """Rejects objects that aren't strategies.

    Args:
        where: the argument or field, for the message.

    Raises:
        TypeError: a name, a class instead of an instance, or any other object.
    """
    if isinstance(scaling, Scaling):
        return
    if isinstance(scaling, type) and issubclass(scaling, Scaling):
        name = scaling.__name__
        raise TypeError(f"{where} is the class {name}: pass an instance, such as {name}()")
    close = difflib.get_close_matches(str(scaling).lower(), SCALINGS, n=1)
    hint = f"; did you mean {SCALINGS[close[0]].__name__}()?" if close else ""
    names = ", ".join(f"{cls.__name__}()" for cls in SCALINGS.values())
    raise TypeError(f"{where} is {scaling!r}; expected an instance such as {names}{hint}")
