"""Contractions of narrow operands: in the device's own narrow units where it has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import E8M0, BlockFormat, Format
from ..interpret import Equation, bind, rebind
from ..scaled import ScaledArray

SIXTEEN = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
EIGHT = (jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2"))


def multiplied(equation: Equation, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """The contraction of ``a`` and ``b``, added up in ``dtype`` and returned in it.

    Products of two narrow numbers are exact in float32, so it makes no difference to a result
    whether operands are widened before (XLA on CPU has no narrow products for all shapes) or
    multiplied as they are, but for the order of the sums. It makes one to the time.
    """
    if dtype == jnp.float32 and has_narrow_units():
        operands = _together(equation, a, b)
        if operands is not None:
            params = {**equation.params, "preferred_element_type": jnp.dtype(dtype)}
            return bind(equation.primitive, params | {"precision": None}, operands)[0]
    wide = [lax.convert_element_type(x, dtype) for x in (a, b)]
    return rebind(equation, wide, dtype)[0]


def has_narrow_units() -> bool:
    """Whether the device that programs run on by default multiplies narrow numbers itself."""
    return jax.default_backend() != "cpu"


def _together(equation: Equation, a: jax.Array, b: jax.Array) -> list[jax.Array] | None:
    """Two operands in dtypes that go into one product; None where only float32 holds both."""
    dtypes = {a.dtype, b.dtype}
    if not dtypes <= {*SIXTEEN, *EIGHT} or dtypes == set(SIXTEEN):
        return None
    eight = equation.name == "dot_general" and dtypes <= set(EIGHT)
    if eight and EIGHT[0] in dtypes:  # no unit multiplies E5M2 by E5M2
        return [a, b]
    wider = next(iter(dtypes & set(SIXTEEN)), SIXTEEN[0])  # each holds every FP8 number
    return [lax.convert_element_type(x, wider) for x in (a, b)]


def carried(x: ScaledArray, fmt: Format | BlockFormat, dtype: Any) -> jax.Array:
    """An array of several scales multiplied out, in the narrowest dtype that holds its numbers.

    BF16 has float32's exponents, so it holds an FP8, FP6 or FP4 number times a power of two.
    """
    exact = isinstance(fmt, BlockFormat) and fmt.scale == E8M0 and fmt.element.mantissa_bits <= 7
    bf16 = exact and dtype == jnp.float32 and has_narrow_units()
    return x.value().astype(jnp.bfloat16 if bf16 else dtype)
