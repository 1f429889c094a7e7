"""Arithmetic, comparisons, elementary functions, activations and softmax."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

from .._registry import IN_STEPS, rule, rules
from .._torch import aten, torch
from ._promotion import as_array, as_dtype, as_float, axes_of, common, promoted, ranked

A = aten


def derived(function: Callable, *slopes: Callable) -> Callable:
    """Returns a function whose derivative is torch's: by each of the first operands a tangent times
    a slope, a function of all operands. Where a slope is False, a tangent is dropped."""
    call = jax.custom_jvp(function)

    def jvp(operands, tangents):
        terms = [
            _sloped(t, slope(*operands))
            for t, slope in zip(tangents, slopes, strict=False)
            if type(t) is not SymbolicZero
        ]
        out = call(*operands)
        return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)

    call.defjvp(jvp, symbolic_zeros=True)
    return call


def _sloped(tangent, slope):
    if slope.dtype == jnp.bool_:
        return jnp.where(slope, tangent, jnp.zeros_like(tangent))
    return tangent * slope.astype(tangent.dtype)


def _sign(x):
    return jnp.where(x == x, lax.sign(x), jnp.zeros_like(x))  # 0 for NaN


def _safe(x):
    return jnp.where(x == 0, jnp.ones_like(x), x)


_absolute = derived(lax.abs, _sign)
_atan2 = derived(
    jnp.arctan2,
    lambda y, x: x / _safe(lax.square(x) + lax.square(y)),
    lambda y, x: -y / _safe(lax.square(x) + lax.square(y)),
)
_copysign = derived(jnp.copysign, lambda x, y: lax.sign(x) * jnp.copysign(lax.sign(x), y))
_power = derived(
    jnp.power,
    lambda x, y: y * jnp.power(x, jnp.where(y == 0, jnp.ones_like(y), y - 1)),
    lambda x, y: jnp.where((x == 0) & (y >= 0), jnp.zeros_like(x), jnp.power(x, y) * jnp.log(x)),
)
relu = derived(lambda x: jnp.maximum(x, as_array(0, x)), lambda x: ~(x <= 0))
_at_least = derived(jnp.maximum, lambda x, low: x >= low, lambda x, low: x < low)
_at_most = derived(jnp.minimum, lambda x, high: x <= high, lambda x, high: x > high)
_between = derived(
    lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    lambda x, low, high: (x >= low) & (x <= high),
    lambda x, low, high: (x < low) & (low < high),
    lambda x, low, high: (x > high) | (high < low),
)
_fmax, _fmin = (
    derived(
        function,
        lambda x, y, wins=wins: wins(x, y) | jnp.isnan(y),
        lambda x, y, wins=wins: ~(wins(x, y) | jnp.isnan(y)),
    )
    for function, wins in ((jnp.fmax, operator.ge), (jnp.fmin, operator.le))
)
_within = derived(
    lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    lambda x, low, high: (x > low) & (x < high),
)


_digamma = derived(
    lambda x: jnp.where(x == 0, -jnp.copysign(jnp.full_like(x, jnp.inf), x), lax.digamma(x)),
    lambda x: special.polygamma(1, x),
)


def absolute(x):
    return lax.abs(x) if jnp.iscomplexobj(x) else _absolute(x)


FLOAT_FUNCTIONS = {
    "acos": lax.acos, "acosh": lax.acosh, "asin": lax.asin, "asinh": lax.asinh, "atan": lax.atan,
    "atanh": lax.atanh, "cos": lax.cos, "cosh": lax.cosh, "digamma": _digamma, "erf": lax.erf,
    "erfc": lax.erfc, "erfinv": lax.erf_inv, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1,
    "lgamma": lax.lgamma, "log": lax.log, "log10": jnp.log10, "log1p": lax.log1p,
    "log2": lambda x: lax.log(x) / np.log(2).item(), "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt, "sigmoid": lax.logistic, "sin": lax.sin,
    "sinc": jnp.sinc, "sinh": lax.sinh, "sqrt": lax.sqrt, "tan": lax.tan,
    "tanh": lax.tanh,
    "i0": derived(special.i0, special.i1), "special_i0e": special.i0e, "special_i1": special.i1,
    "special_i1e": special.i1e, "special_ndtri": special.ndtri,
    "special_log_ndtr": special.log_ndtr,
}  # fmt: skip
FUNCTIONS = {
    "abs": absolute, "neg": lax.neg, "sign": _sign, "sgn": _sign, "square": lax.square,
    "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not, "isinf": jnp.isinf,
    "isnan": jnp.isnan, "isfinite": jnp.isfinite, "signbit": jnp.signbit,
    "alias": lambda x: x, "detach": lambda x: x, "lift_fresh_copy": lambda x: x,
    "positive": lambda x: x,
}  # fmt: skip
TO_INTEGERS = {"ceil": lax.ceil, "floor": lax.floor, "trunc": jnp.trunc}
OF_TWO = {
    "minimum": jnp.minimum, "maximum": jnp.maximum, "hypot": jnp.hypot, "fmax": _fmax,
    "fmin": _fmin, "nextafter": jnp.nextafter, "igamma": special.gammainc,
    "igammac": special.gammaincc, "special_zeta": special.zeta, "floor_divide": operator.floordiv,
    "remainder": jnp.remainder, "fmod": jnp.fmod, "copysign": _copysign,
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


@jax.custom_jvp
def _quotient(x, y):
    return x / y


def _quotient_jvp(operands, tangents):
    """Divides by y twice, as torch does, where JAX multiplies by 1 / y**2, which may overflow."""
    y, out = operands[1], _quotient(*operands)
    by_x, by_y = (None if type(t) is SymbolicZero else t for t in tangents)
    found = [] if by_x is None else [by_x / y]
    found += [] if by_y is None else [-by_y * (out / y)]
    return out, sum(found[1:], found[0])


_quotient.defjvp(_quotient_jvp, symbolic_zeros=True)


@rule(A.div.Tensor, A.div.Scalar)
def div(x, y):
    x, y = common(x, y, floating=True)
    return _quotient(x, y) if isinstance(y, jax.Array) else x / y


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
    return _power(jnp.full_like(y, x, dtype), y.astype(dtype))


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
        return _at_most(x, high)
    return _at_least(x, low) if high is None else _between(x, low, high)


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


@rule(A.softplus.default)
def softplus(x, beta=1, threshold=20):
    scaled = x * beta
    linear = scaled > threshold
    smooth = jnp.log1p(jnp.exp(jnp.where(linear, as_array(0, x), scaled))) / beta
    return jnp.where(linear, x, smooth)


@rule(A.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    negative = jnp.expm1(jnp.where(x > 0, as_array(0, x), x) * input_scale) * alpha
    return jnp.where(x > 0, x, negative) * scale


@rule(A.hardtanh.default)
def hardtanh(x, low=-1, high=1):
    return _within(x, as_array(low, x), as_array(high, x))


@rule(A._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    x = as_dtype(x, dtype)
    empty, zero = jnp.all(x == -jnp.inf, axes_of(x, dim), keepdims=True), as_array(0, x)
    return jnp.where(empty, zero, jax.nn.softmax(jnp.where(empty, zero, x), dim))


rules({
    (A.rsub.Tensor, A.rsub.Scalar): lambda x, y, alpha=1: (
        sub(y, x, alpha) if isinstance(y, jax.Array) else y - (x if alpha == 1 else x * alpha)),
    A.pow.Tensor_Tensor: promoted(_power),
    (A.atan2.default, A.atan2.out): lambda x, y, out=None: (
        _atan2(*common(x, y, floating=True))),
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
    A.selu.default: lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    A.celu.default: lambda x, alpha=1.0: elu(x, alpha, 1, 1 / alpha),
    A.hardsigmoid.default: lambda x: hardtanh(x + 3, 0, 6) / 6,
    A.hardswish.default: lambda x: x * (hardtanh(x + 3, 0, 6) / 6),
})  # fmt: skip
