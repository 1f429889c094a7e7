"""Arithmetic, comparisons, elementary functions, activations and softmax."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from .._registry import IN_STEPS, rule, rules
from .._torch import aten, torch
from ._promotion import as_array, as_dtype, as_float, common, promoted, ranked

A = aten


def _sign(x):
    return jnp.where(x == x, lax.sign(x), jnp.zeros_like(x))  # 0 for NaN


def relu(x):
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


def _digamma(x):
    return jnp.where(x == 0, -jnp.copysign(jnp.full_like(x, jnp.inf), x), lax.digamma(x))


FLOAT_FUNCTIONS = {
    "acos": lax.acos, "acosh": lax.acosh, "asin": lax.asin, "asinh": lax.asinh, "atan": lax.atan,
    "atanh": lax.atanh, "cos": lax.cos, "cosh": lax.cosh, "digamma": _digamma, "erf": lax.erf,
    "erfc": lax.erfc, "erfinv": lax.erf_inv, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1,
    "lgamma": lax.lgamma, "log": lax.log, "log10": jnp.log10, "log1p": lax.log1p,
    "log2": lambda x: lax.log(x) / np.log(2).item(), "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt, "sigmoid": lax.logistic, "sin": lax.sin,
    "sinc": jnp.sinc, "sinh": lax.sinh, "sqrt": lax.sqrt, "tan": lax.tan,
    "tanh": lax.tanh,
    "i0": special.i0, "special_i0e": special.i0e, "special_i1": special.i1,
    "special_i1e": special.i1e, "special_ndtri": special.ndtri,
    "special_log_ndtr": special.log_ndtr,
}  # fmt: skip
FUNCTIONS = {
    "abs": lax.abs, "neg": lax.neg, "sign": _sign, "sgn": _sign, "square": lax.square,
    "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not, "isinf": jnp.isinf,
    "isnan": jnp.isnan, "isfinite": jnp.isfinite, "signbit": jnp.signbit,
    "alias": lambda x: x, "detach": lambda x: x, "lift_fresh_copy": lambda x: x,
    "positive": lambda x: x,
}  # fmt: skip
TO_INTEGERS = {"ceil": lax.ceil, "floor": lax.floor, "trunc": jnp.trunc}
OF_TWO = {
    "minimum": jnp.minimum, "maximum": jnp.maximum, "hypot": jnp.hypot, "fmax": jnp.fmax,
    "fmin": jnp.fmin, "nextafter": jnp.nextafter, "igamma": special.gammainc,
    "igammac": special.gammaincc, "special_zeta": special.zeta, "floor_divide": operator.floordiv,
    "remainder": jnp.remainder, "fmod": jnp.fmod, "copysign": jnp.copysign,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "__and__": operator.and_, "__or__": operator.or_,
    "__xor__": operator.xor, "bitwise_left_shift": operator.lshift,
    "bitwise_right_shift": operator.rshift,
}  # fmt: skip
LOGICAL = {
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor,
}  # fmt: skip


def _of_floats(function: Callable) -> Callable:
    return lambda x: function(as_float(x))


def _of_truth(function: Callable) -> Callable:
    return lambda x, y: function(*ranked(x.astype(bool), y.astype(bool)))


def _of_numbers(function: Callable) -> Callable:
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _overloads(name: str) -> list[Any]:
    packet = getattr(A, name)
    names = packet.overloads()
    own = ["Tensor", "Scalar", "Tensor_Scalar"] if "Tensor" in names else ["default"]
    return [getattr(packet, x) for x in own if x in names]


for _wrap, _functions in (
    (_of_floats, FLOAT_FUNCTIONS), (lambda f: f, FUNCTIONS), (_of_numbers, TO_INTEGERS),
    (promoted, OF_TWO), (_of_truth, LOGICAL),
):  # fmt: skip
    for _name, _function in _functions.items():
        rule(*_overloads(_name))(_wrap(_function))


@rule(A.add.Tensor, A.add.Scalar)
def add(x, y, alpha=1):
    x, y = common(x, y)
    if x.dtype == jnp.bool_:
        return jnp.logical_or(x, y)
    return x + (y if alpha == 1 else y * alpha)


@rule(A.sub.Tensor, A.sub.Scalar)
def sub(x, y, alpha=1):
    x, y = common(x, y)
    return x - (y if alpha == 1 else y * alpha)


@rule(A.mul.Tensor, A.mul.Scalar)
@promoted
def mul(x, y):
    return jnp.logical_and(x, y) if x.dtype == jnp.bool_ else x * y


@rule(A.div.Tensor, A.div.Scalar)
def div(x, y):
    x, y = common(x, y, floating=True)
    return x / y


@rule(A.div.Tensor_mode, A.div.Scalar_mode)
def div_mode(x, y, rounding_mode=None):
    if rounding_mode is None:
        return div(x, y)
    x, y = common(x, y)
    if rounding_mode == "floor":
        return x // y
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(x, jnp.broadcast_to(as_array(y, x), x.shape))
    return jnp.trunc(x / y)


@rule(A.pow.Tensor_Scalar)
def pow_scalar(x, exponent):
    x, exponent = common(x, exponent)
    if isinstance(exponent, jax.Array):
        return jnp.power(x, exponent)
    whole = float(exponent).is_integer() and abs(exponent) <= 8
    if whole and (exponent >= 0 or jnp.issubdtype(x.dtype, jnp.inexact)):
        return lax.square(x) if exponent == 2 else lax.integer_pow(x, int(exponent))
    if exponent == 0.5:
        return lax.sqrt(x)
    return lax.rsqrt(x) if exponent == -0.5 else jnp.power(x, exponent)


@rule(A.pow.Scalar)
def pow_of_scalar(x, y):
    dtype = jnp.result_type(common(x, y)[1])
    return jnp.power(jnp.full_like(y, x, dtype), y.astype(dtype))


@rule(A.round.default)
def round_half_even(x):
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN) if as_float(x) is x else x


@rule(A.round.decimals)
def round_to_decimals(x, *, decimals):
    factor = 10.0 ** abs(decimals)
    scaled = x * factor if decimals > 0 else x / factor
    rounded = round_half_even(scaled)
    return rounded / factor if decimals > 0 else rounded * factor


@rule(A.clamp.default)
def clamp(x, low=None, high=None):
    bounds = [b for b in (low, high) if b is not None]
    x = common(x, *bounds)[0]
    return _clamped(x, *(b if b is None else as_array(b, x) for b in (low, high)))


def _clamped(x, low, high):
    if low is None:
        return jnp.minimum(x, high)
    return jnp.maximum(x, low) if high is None else jnp.minimum(jnp.maximum(x, low), high)


@rule(A.clamp.Tensor)
def clamp_tensor(x, low=None, high=None):
    x, *bounds = common(x, *(b for b in (low, high) if b is not None))
    return _clamped(x, None if low is None else bounds[0], None if high is None else bounds[-1])


@rule(A.where.self, A.where.ScalarOther, A.where.ScalarSelf, A.where.Scalar)
def where(condition, x, y):
    arrays = [v for v in (x, y) if isinstance(v, jax.Array | np.ndarray)]
    x, y = common(x, y) if arrays else (jnp.asarray(x), jnp.asarray(y))
    dtype = next((v.dtype for v in (x, y) if hasattr(v, "dtype")), jnp.float32)
    shape = np.broadcast_shapes(*(np.shape(v) for v in (condition, x, y)))
    pick = [jnp.broadcast_to(jnp.asarray(v, dtype), shape) for v in (x, y)]
    return lax.select(jnp.broadcast_to(condition.astype(jnp.bool_), shape), *pick)


IN_STEPS.add(A.xlogy.Tensor)


@rule(A.xlogy.Tensor)
def xlogy(x: Any, y: Any) -> Any:
    x, y = common(x, y, floating=True)
    safe = jnp.where(x == 0, jnp.ones_like(y), y)  # the derivative at 0 is finite
    return jnp.where(x == 0, jnp.where(jnp.isnan(y), y, jnp.zeros_like(y)), x * jnp.log(safe))


rules({
    (A.rsub.Tensor, A.rsub.Scalar): lambda x, y, alpha=1: (
        sub(y, x, alpha) if isinstance(y, jax.Array) else y - (x if alpha == 1 else x * alpha)),
    A.pow.Tensor_Tensor: promoted(jnp.power),
    (A.atan2.default, A.atan2.out): lambda x, y, out=None: (
        jnp.arctan2(*common(x, y, floating=True))),
    A.frexp.Tensor: lambda x: tuple(jnp.frexp(x)),
    A.clone.default: lambda x, memory_format=None: x,
    A.copy.default: lambda x, y, non_blocking=False: jnp.broadcast_to(y.astype(x.dtype), x.shape),
    (A._to_copy.default, torch.ops.prims.convert_element_type.default): (
        lambda x, dtype=None, *args, **options: as_dtype(x, dtype)),
    A.clamp_min.default: lambda x, low: clamp(x, low),
    A.clamp_max.default: lambda x, high: clamp(x, None, high),
    (A.masked_fill.Scalar, A.masked_fill.Tensor): lambda x, mask, value: (
        where(mask, as_array(value, x), x)),
    A.polygamma.default: lambda n, x: special.polygamma(n, as_float(x)),
    A.relu.default: relu,
})  # fmt: skip
