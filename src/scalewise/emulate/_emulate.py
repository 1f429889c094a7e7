"""``emulate``: what a machine whose every result is of one format would compute."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import FP64, Format
from ..formats import format as format_
from ..interpret import (
    Equation,
    Interpretation,
    is_float,
    rebind,
    transform,
    warn_kernel,
)
from ..rounding import from_float64, round_to, to_float64

# Primitives whose results are among their operands' values, negated or not: nothing to round.
EXACT = frozenset({
    "abs", "argsort", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "cummax",
    "cummin", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "max", "min", "neg",
    "optimization_barrier", "pad", "reduce_max", "reduce_min", "reshape", "rev", "scatter",
    "select_n", "sharding_constraint", "sign", "slice", "sort", "split", "squeeze",
    "stop_gradient", "top_k", "transpose",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Emulation(Interpretation):
    """Values are float64 arrays that hold numbers of a format; each result is rounded to it.

    float64 carries every format up to 25 significant bits so that ``+ - * /`` and the square root,
    rounded to float64 and then to the format, are the correctly rounded exact results (53 bits are
    at least 2p + 2: Figueroa, "When is double rounding innocuous?", 1995), and no backend flushes
    what is a subnormal of the format.
    """

    fmt: Format
    saturate: bool | str = False

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def _round(self, x: jax.Array) -> jax.Array:
        return round_to(x, self.fmt, saturate=self.saturate)

    def lift(self, x: Any, aval: Any) -> jax.Array:
        return self._round(to_float64(jnp.asarray(x)))

    def constant(self, x: np.ndarray, aval: Any) -> jax.Array:
        rounded = self.fmt.decode(self.fmt.encode(x, saturate=self.saturate))
        return jnp.asarray(np.where(np.isnan(x), np.nan, rounded), jnp.float64)

    def lower(self, value: jax.Array, aval: Any) -> jax.Array:
        return from_float64(value, aval.dtype)

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        warn_kernel(equation, "emulate")
        # an update function's equations are rounded one by one; a reduction's operator isn't
        inside = self if equation.name == "scatter_apply" else None
        outs = rebind(equation, inputs, jnp.float64, inside)
        if equation.name in EXACT:
            return state, outs
        return state, [
            self._round(y) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


def emulate(f: Callable, fmt: Format | str | Any, *, saturate: bool | str = False) -> Callable:
    """``f`` as a machine would compute it that has no other floating-point format than ``fmt``.

    Arguments, constants and the float result of each equation are rounded to the nearest number of
    the format, once, subnormals and all. ``+ - * /`` and the square root are correctly rounded;
    elementary functions are, but for the one case in 2^27 or so where float64's own error decides
    a tie; a contraction or a sum is accumulated in float64 and rounded at its end.

    It models the source's operations one by one: no fused multiply-add, no rewriting, the same bits
    under ``jit`` and eagerly.

    Args:
        f: any function of pytrees made of JAX primitives.
        fmt: a format of up to 25 significant bits, or FP64; or a name or dtype of one.
        saturate: what overflow does, as for :func:`scalewise.round_to`.

    Returns:
        A function of the same signature; float results have ``f``'s own dtypes and are numbers of
        the format (NaN and infinities where the format has none come from ``saturate=False``).

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
        ValueError: an unknown format, or one too wide.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> float(sw.emulate(norm, "fp16")(jnp.full(4096, 16.0)))
        inf
        >>> float(sw.emulate(norm, "bf16")(jnp.full(4096, 16.0)))
        1024.0
    """
    fmt = format_(fmt)
    if fmt.mantissa_bits > 24 and fmt != FP64:
        raise ValueError(
            f"emulate: {fmt.name} has {fmt.precision} significant bits; accepted: up to 25, or "
            "FP64 itself, since results are carried in float64"
        )
    return transform(f, Emulation(fmt, saturate), name="emulate")
