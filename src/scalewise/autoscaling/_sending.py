"""Collectives that send narrow data, with one scale for all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._jax import gather_invariant
from .._types import AxisName
from ..formats import Format
from ..interpret import Equation, Value
from ..primitives import params
from ..rounding import encode
from ..scaled import Amax
from ..scalifying import ScaledValue, per_slice, wide_dtype
from ._setup import Setup
from ._value import holds

GATHERS = ("all_gather", "all_gather_invariant")
SUMS = ("psum", "psum_invariant")


@dataclasses.dataclass(frozen=True)
class Sending:
    """The policy for what devices send each other: in ``Recipe.collective``."""

    setup: Setup

    def results(self, equation: Equation, inputs: Sequence[Value]) -> list[Value] | None:
        """Returns what devices get that send narrow data; None for any other equation."""
        if equation.name not in (*GATHERS, *SUMS):
            return None
        (x, *others), axes = inputs, params.axis_name(equation)
        whole = equation.name in GATHERS or params.axis_groups(equation) is None
        if others or not isinstance(x, ScaledValue) or per_slice(x) or not whole:
            return None
        sent = self._narrowed(x, axes, equation)
        if sent is None:
            return None
        data, scale = sent
        if equation.name in GATHERS:
            (gathered,) = equation.bind(data)
            return [ScaledValue(_loaded(gathered, scale, x.data.dtype), x.exponent)]
        parts = gather_invariant(data, axes).astype(scale.dtype)
        return [ScaledValue(_loaded(jnp.sum(parts, 0), scale, x.data.dtype), x.exponent)]

    def _narrowed(
        self, value: ScaledValue, axis_name: AxisName, equation: Equation
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns the narrow data that a collective sends, and all devices' scale, or None."""
        fmt = self.setup.overrides.find(equation, self.setup.recipe.collective)
        sent = fmt if isinstance(fmt, Format) and not holds(value.data.dtype, fmt) else None
        self.setup.recorded("collective", equation, value, sent)
        if sent is None:
            return None
        x = value.data.astype(wide_dtype(value.data.dtype))
        scale, _ = Amax().scale(x, sent, range(x.ndim))
        scale = lax.pmax(scale, axis_name)
        data = encode(x * (1 / scale), sent)
        assert isinstance(data, jax.Array)
        return data, scale


def _loaded(data: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    return (data.astype(scale.dtype) * scale).astype(dtype)
