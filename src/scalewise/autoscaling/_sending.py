"""Collectives that send narrow data, with one scale for all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import gather_invariant
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
        gathers = equation.name in GATHERS
        if not gathers and equation.name not in SUMS:
            return None
        (x, *others), axes = inputs, params.axis_name(equation)
        whole = gathers or params.axis_groups(equation) is None
        if others or not isinstance(x, ScaledValue) or per_slice(x) or not whole:
            return None
        fmt = self.setup.overrides.find(equation, self.setup.recipe.collective)
        fmt = fmt if isinstance(fmt, Format) and not holds(x.data.dtype, fmt) else None
        self.setup.recorded("collective", equation, x, fmt)
        if fmt is None:
            return None
        wide = x.data.astype(wide_dtype(x.data.dtype))
        scale = lax.pmax(Amax().scale(wide, fmt, range(wide.ndim))[0], axes)
        narrow = encode(wide * (1 / scale), fmt)
        assert isinstance(narrow, jax.Array)
        if gathers:
            received = equation.bind(narrow)[0].astype(wide.dtype)
        else:
            received = jnp.sum(gather_invariant(narrow, axes).astype(wide.dtype), 0)
        return [ScaledValue((received * scale).astype(x.data.dtype), x.exponent)]
