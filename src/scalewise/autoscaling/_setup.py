"""A recipe, and the facts that policies of one interpretation of stored values share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._jax import ShapedArray
from ..devices import Device, device_for
from ..formats import Format
from ..interpret import Equation, Value
from ..scalifying import FormatOverrides, wide_dtype
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A recipe, and what is known and recorded of the program that runs under it.

    Attributes:
        recipe: the formats.
        record: called with each decision on a format, by ``explain``; see ``_explain._Recorder``.
    """

    recipe: Recipe
    record: Callable[..., None] | None = None

    @functools.cached_property
    def overrides(self) -> FormatOverrides:
        """The recipe's ``keep``, and what of it has been met."""
        return FormatOverrides(self.recipe.keep)

    @functools.cached_property
    def without_units(self) -> set[str]:
        """The pairs of formats of which it was said that the device's units don't multiply them."""
        return set()

    @property
    def device(self) -> Device | None:
        """The device that products are compiled for; None for JAX's default."""
        return device_for(self.recipe.device)

    @property
    def prefers_speed(self) -> bool:
        device = self.device
        known = device is not None and device.platform != "cpu" and device.bandwidth > 0
        return known and self.recipe.narrow == "faster"

    def flight(self, aval: ShapedArray) -> DTypeLike:
        """Returns the dtype in which a float of the program is computed."""
        kept = self.recipe.flight == "program" and aval.dtype == jnp.bfloat16
        return aval.dtype if kept else wide_dtype(aval.dtype)

    def recorded(self, kind: str, equation: Equation, value: Value, fmt: Format | None) -> None:
        if self.record is not None and getattr(value, "constant_value", None) is None:
            self.record(kind, equation, value.data.shape, [fmt or value.data.dtype])
