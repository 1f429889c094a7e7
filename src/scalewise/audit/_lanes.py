"""The two lanes of an audit: arithmetic in a format that is data, and a wide shadow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..emulate import EXACT, Emulation
from ..interpret import Equation, Interpretation, is_float, rebind
from ..rounding import from_float64, to_float64
from ._rounding import as_row, round_by


@dataclasses.dataclass(frozen=True)
class Rounded(Emulation):
    """Emulation whose state is, at each equation, the format of that equation's results.

    A run with another format for some equations needs nothing compiled anew.
    """

    def lift(self, x: Any, aval: Any) -> jax.Array:
        return _lift(jnp.asarray(x), jnp.asarray(as_row(self.fmt, self.saturate)))

    def apply(
        self, state: jax.Array, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[jax.Array, Sequence[Any]]:
        outs = rebind(equation, inputs, jnp.float64)
        if equation.name in EXACT:
            return state, outs
        return state, [
            round_by(y, state) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


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
