"""Collectives that send narrow data, with one scale for all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import gather_invariant
from .._types import AxisName
from ..formats import Format
from ..interpret import Equation, Value
from ..primitives import Family, names, params
from ..rounding import encode
from ..scaled import Amax, at_least
from ..scalifying import ScaledValue, per_slice, wide_dtype
from ._setup import Setup
from ._value import holds

# which move numbers from device to device and leave them as they are
COLLECTIVES = names(lambda row: row.family is Family.STRUCTURAL and "collective" in row.facts)
SUMS = ("psum", "psum_invariant")


def as_bits(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Sends an array as unsigned integers of its width.

    A CPU's compiler sends FP8 in 16 bits, and a device that gets nothing gets zeros, which are NaN
    in E8M0.
    """
    bits = jnp.finfo(x.dtype).bits
    if bits < 8:
        return send(x)
    code = lax.bitcast_convert_type(x, f"uint{bits}")
    return lax.bitcast_convert_type(send(code), x.dtype)


def narrow_over(x: jax.Array, axes: AxisName, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns an array in a format, and its scale, a power of two that all devices agree on."""
    scale = lax.pmax(Amax().scale(x, fmt, range(x.ndim))[0], axes)
    narrow = encode(x * (1 / scale), fmt)
    assert isinstance(narrow, jax.Array)
    return narrow, scale


def sending_results(
    setup: Setup, equation: Equation, inputs: Sequence[Value]
) -> list[Value] | None:
    """Returns what devices get that send each other narrow data, in ``Recipe.collective``; None for
    any other equation."""
    moves = equation.name in COLLECTIVES
    if not moves and equation.name not in SUMS:
        return None
    (x, *others), axes = inputs, params.axis_name(equation)
    whole = moves or params.axis_groups(equation) is None
    if others or not isinstance(x, ScaledValue) or per_slice(x) or not whole:
        return None
    if not at_least(x.data.size, setup.recipe.min_size) or lax.axis_size(axes) == 1:
        return None
    fmt = setup.overrides.find(equation, setup.recipe.collective)
    fmt = fmt if isinstance(fmt, Format) and not holds(x.data.dtype, fmt) else None
    if fmt and not moves and lax.axis_size(axes) * fmt.bits > 16 * x.data.dtype.itemsize:
        fmt = None  # a ring's sum sends fewer bytes than a gather
    setup.recorded("collective", equation, x, fmt)
    if fmt is None:
        return None
    wide = x.data.astype(wide_dtype(x.data.dtype))
    narrow, scale = narrow_over(wide, axes, fmt)
    if moves:
        received = as_bits(lambda x: equation.bind(x)[0], narrow).astype(wide.dtype)
    else:
        gathered = as_bits(lambda x: gather_invariant(x, axes), narrow)
        received = jnp.sum(gathered.astype(wide.dtype), 0)
    return [ScaledValue((received * scale).astype(x.data.dtype), x.exponent)]
