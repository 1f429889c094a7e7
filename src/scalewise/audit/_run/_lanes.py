"""The two lanes of an audit: arithmetic in a format that is data, and a wide shadow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...emulate import EXACT, Emulation
from ...interpret import Equation, Interpretation, is_float, rebind
from ...rounding import from_float64, to_float64
from ._rounding import as_row, round_by


@dataclasses.dataclass(frozen=True)
class Rounded(Emulation):
    """Emulation whose state is, at each equation, the format of that equation's results.

    A run with another format for some equations needs nothing compiled anew. Values wait in
    ``stored``; what a trial's wider format has beyond it (numbers under 2^-126, of float64 most
    bits) is rounded once more.
    """

    @functools.cached_property
    def stored(self) -> Any:
        """float32 if sums, products, quotients and roots of the format's numbers, rounded to it and
        then to the format, are rounded as if once, else float64.

        That is so if float32 has twice the format's digits and two more (Figueroa, see
        :class:`Emulation`), and holds all of them as normal numbers (backends flush others).
        """
        fmt = self.fmt
        lowest, beyond = fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1
        fits = 2 * fmt.precision + 2 <= 24 and 2 * lowest >= -126 and 2 * beyond < 128
        return jnp.float32 if fits else jnp.float64

    def lift(self, x: Any, aval: Any) -> jax.Array:
        row = jnp.asarray(as_row(self.fmt, self.saturate))
        return _lift(jnp.asarray(x), row).astype(self.stored)

    def constant(self, x: np.ndarray, aval: Any) -> jax.Array:
        rounded = self.fmt.decode(self.fmt.encode(x, saturate=self.saturate))
        return jnp.asarray(np.where(np.isnan(x), np.nan, rounded), self.stored)

    def lower(self, value: jax.Array, aval: Any) -> jax.Array:
        return super().lower(value.astype(jnp.float64), aval)

    def apply(
        self, state: jax.Array, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[jax.Array, Sequence[Any]]:
        if equation.name in EXACT:
            return state, rebind(equation, inputs, self.stored)
        return state, [
            round_by(y, state).astype(self.stored) if is_float(a) else y
            for y, a in zip(exact(equation, inputs), equation.out_avals, strict=True)
        ]


def exact(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """An equation's results in float64, on floats of any width."""
    wide = [
        x.astype(jnp.float64) if is_float(a) else x
        for x, a in zip(inputs, equation.in_avals, strict=True)
    ]
    return rebind(equation, wide, jnp.float64)


@jax.jit
def _lift(x: jax.Array, row: jax.Array) -> jax.Array:
    return round_by(to_float64(x), row)


@dataclasses.dataclass(frozen=True)
class Wide(Interpretation):
    """The program as it stands, every float in one wide dtype: the plain run if that is its own."""

    dtype: Any

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def lift(self, x: Any, aval: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x if x.dtype == self.dtype else from_float64(to_float64(x), self.dtype)

    def constant(self, x: np.ndarray, aval: Any) -> jax.Array:
        return jnp.asarray(x, self.dtype)

    def lower(self, value: jax.Array, aval: Any) -> jax.Array:
        return from_float64(to_float64(value), aval.dtype)

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        return state, rebind(equation, inputs, self.dtype)
