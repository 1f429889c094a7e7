"""Contractions of operands in at most 16 bits without scales, added up in float32."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import with_common_axes
from ..formats import BF16, FP16
from ..interpret import Equation, bind, by_platform
from ..primitives import params
from ._value import wide_dtype

SIXTEEN = (FP16.dtype, BF16.dtype)
ROUNDED_TO_BF16 = (lax.DotAlgorithmPreset.BF16_BF16_F32, lax.DotAlgorithmPreset.BF16_BF16_BF16)


def contract(equation: Equation, operands: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """Returns a contraction in a dtype: of wide numbers on a CPU, elsewhere of the operands' own.

    Products of two 16-bit numbers are exact in float32.
    """
    total = wide_dtype(dtype)
    if all(x.dtype == dtype for x in operands):
        return bound(equation, operands, dtype)
    narrow = sixteen_bits(equation, [x.dtype for x in operands])

    def on_cpu(_: None, *arrays: jax.Array) -> jax.Array:
        return bound(equation, [x.astype(total) for x in arrays], total).astype(dtype)

    def on_device(_: None, *arrays: jax.Array) -> jax.Array:
        precise = equation.with_params(precision=precision_of(equation))
        return bound(precise, [x.astype(narrow) for x in arrays], dtype)

    if total != jnp.float32 or narrow is None:
        return on_cpu(None, *operands)
    arrays, routes = with_common_axes(tuple(operands)), {"cpu": on_cpu, "default": on_device}
    if equation.held:  # JAX traces here what holds tracers, a group's sizes
        known = {name: lambda *x, f=f: f(None, *x) for name, f in routes.items()}
        return lax.platform_dependent(*arrays, **known)
    result = jax.ShapeDtypeStruct(equation.out_avals[0].shape, dtype)
    return by_platform(routes, None, result, *arrays)


def bound(equation: Equation, operands: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """Returns a contraction of operands, accumulated in a dtype."""
    changed = params.replaced(equation, preferred_element_type=jnp.dtype(dtype))
    return bind(equation.primitive, changed, equation.varied(operands))[0]


def sixteen_bits(equation: Equation, dtypes: Sequence[np.dtype]) -> np.dtype | None:
    """Returns the dtype in which units multiply operands of at least 16 bits; None for float32."""
    own = set(dtypes)
    if params.precision(equation) in ROUNDED_TO_BF16:  # XLA would round them for each product
        own = {jnp.dtype(BF16.dtype) if d == jnp.float32 else d for d in own}
    return own.pop() if len(own) == 1 and own <= set(SIXTEEN) else None


def precision_of(equation: Equation, exact: bool = False) -> lax.PrecisionLike:
    """Returns the precision for operands in units; ``exact`` if they have at most 8 bits."""
    precision = params.precision(equation)
    own = precision if isinstance(precision, tuple) else (precision,)
    if precision is not None and all(isinstance(p, lax.Precision) for p in own):
        return precision
    # an algorithm (``lax.DotAlgorithm``) names the dtypes of wide operands
    return (lax.Precision.HIGHEST, lax.Precision.HIGHEST) if exact else None
