"""An equation's primitive on floats of another width than the equation was traced with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat
from ._equation import Equation, is_float

# Primitives that mean the bits of their operand's own dtype, or hold code traced for that dtype.
OWN_DTYPE = frozenset({
    "bitcast_convert_type", "reduce_precision", "nextafter", "custom_linear_solve", "custom_root",
    "pure_callback", "io_callback", "ffi_call", "pallas_call", "approx_top_k", "rng_uniform",
    "select_and_gather_add", "select_and_scatter", "tridiagonal_solve", "random_gamma_grad",
    "eig", "eigh", "svd", "lu", "qr", "householder_product", "geqrf", "geqp3", "cholesky",
    "triangular_solve", "schur", "hessenberg", "tridiagonal", "cholesky_update", "fft",
    "debug_callback", "debug_print", "custom_call",
})  # fmt: skip

SCATTER = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter-min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
    "scatter-max": lax.scatter_max,
    "scatter-sub": lax.scatter_sub,
    "scatter_sub": lax.scatter_sub,
}


def rebind(equation: Equation, inputs: Sequence[Any], dtype: Any) -> list[Any]:
    """The primitive with every float operand and result in ``dtype``.

    Args:
        equation: traced with floats of any width.
        inputs: float arrays of ``dtype``; whatever isn't a float as the equation has it.
        dtype: float32 or float64.

    Returns:
        The results, floats in ``dtype``. Primitives that mean the bits of their own dtype (a
        bitcast) or hold code traced for it (a callback) get and give that dtype, converted here.
    """
    floats = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
    if all(d == dtype for d in floats):
        return equation.bind(*inputs)
    if equation.name in OWN_DTYPE:
        return _in_own_dtype(equation, inputs, dtype)
    if equation.name in SCATTER:
        keep = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        params = {k: equation.params[k] for k in keep}
        params["dimension_numbers"] = equation.params["dimension_numbers"]
        return [SCATTER[equation.name](*inputs, **params)]
    if equation.name == "reduce":
        return _reduce(equation, inputs)
    params = {k: dtype if _is_float_dtype(v) else v for k, v in equation.params.items()}
    return _compat.bind(equation.primitive, params, inputs)


def _is_float_dtype(x: Any) -> bool:
    return isinstance(x, np.dtype) and jnp.issubdtype(x, jnp.floating)


def _in_own_dtype(equation, inputs, dtype):
    inputs = [
        lax.convert_element_type(x, a.dtype) if is_float(a) else x
        for x, a in zip(inputs, equation.in_avals, strict=True)
    ]
    return [
        lax.convert_element_type(y, dtype) if is_float(a) else y
        for y, a in zip(equation.bind(*inputs), equation.out_avals, strict=True)
    ]


def _reduce(equation, inputs):
    """``lax.reduce`` by a user's function: its equations, too, in the new dtype."""
    body, consts = _compat.open_jaxpr(equation.params["jaxpr"])
    consts = equation.params.get("consts", consts)
    half = len(inputs) // 2

    def computation(left, right):
        values = [*jax.tree.leaves(left), *jax.tree.leaves(right)]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(body, consts))(*values)

    return lax.reduce(
        list(inputs[:half]), list(inputs[half:]), computation, equation.params["dimensions"]
    )
