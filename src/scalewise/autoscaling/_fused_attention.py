"""cuDNN's attention (``jax.nn.dot_product_attention(..., implementation="cudnn")``) in FP8.

What the kernel rounds to E4M3, by the documentation of cuDNN's "SDPA FP8" and its reference
(cudnn-frontend, test/python/sdpa/fp8_ref.py): queries, keys and values; exponentials of scores less
their row's maximum, at most 1; the result; in the backward pass the result's gradient,
probabilities, the scores' gradient, and the three gradients that it returns. All else is float32.
Every scale is an argument: what the kernel computes itself has those of bounds, or of a history.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._jax import fp8_attention, has_fp8_attention, jex, with_common_axes
from ..devices import Device
from ..formats import E4M3FN
from ..interpret import Equation, Value
from ..primitives import params
from ..rounding import encode, widened
from ..scaled import Fixed, is_known, to_top
from ..scalifying import ScaledValue
from ._history import OperandAmaxes
from ._kernels import kernel_primitive
from ._operand_settings import Attention, Operand
from ._operands import Operands
from ._products import DEFAULT_DEVICE
from ._units import HOPPER, TOO_SMALL

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
FUSED = (FORWARD, BACKWARD)
UNUSED = slice(3, 10)  # bias, lengths, offsets and pages: empty arrays
COMPUTED = ("scores", "queries", "keys", "values")  # whose gradients the backward kernel rounds
Rounded = tuple[jax.Array, jax.Array]  # numbers of E4M3, and their scale


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of cuDNN's attention.

    Attributes:
        own: what it computes.
        primitive, options: the program's own primitive, of 16 bits, and its parameters.
        dtype: the program's.
        probability: the scale of probabilities.
        narrow: whether what carries a gradient is rounded, too.
    """

    own: params.FusedAttention
    primitive: jex.Primitive
    options: tuple[tuple[str, Any], ...]
    dtype: DTypeLike
    probability: float
    narrow: bool

    def by_program(self, operands: Sequence[jax.Array], *others: ArrayLike) -> list[jax.Array]:
        empty = [jnp.zeros(0, self.dtype)] * (UNUSED.stop - UNUSED.start)
        return self.primitive.bind(*operands, *empty, *others, **dict(self.options))

    def by_kernel(
        self, operands: Sequence[jax.Array], scales: Sequence[ArrayLike], **options: bool
    ) -> list[jax.Array]:
        own = self.own
        options |= {"scale": own.scale, "use_causal_mask": own.causal}  # pyright: ignore
        return fp8_attention(operands, scales, layout=int(own.heads_first), **options)


def attention_results(
    operands: Operands, equation: Equation, inputs: Sequence[Value]
) -> list[Value] | None:
    """Returns the results of cuDNN's attention, under ``Recipe.attention``, with operands in FP8;
    None for other equations, and for attention that is left alone."""
    setup, attention = operands.setup, operands.setup.recipe.attention
    if attention is None or equation.name not in FUSED:
        return None
    setting, probabilities, gradients = attention.settings()
    why = "left alone: keep"
    if setup.overrides.find(equation, setup) is setup:
        why = why_left_alone(equation, attention, setup.device, setup.prefers_speed)
    backward = equation.name == BACKWARD
    narrow = backward and operands.amaxes is not None and _is_plain(gradients)
    if setup.record is not None:
        last = [gradients if narrow else inputs[-1].data.dtype] if backward else [probabilities]
        formats = [x.data.dtype for x in inputs[:3]] if why else [*[setting] * 3, *last]
        text = why or f"{attention.operands.scaling.name}; by cuDNN on CUDA, else emulated"  # pyright: ignore
        setup.record("contraction", equation, equation.out_avals[0].shape, formats, text)
    if why:
        setup.overrides.warn(equation, f"stays in the program's 16 bits ({why}).")
        return None

    def rounded(position: int, setting: Any) -> Rounded:
        value = inputs[position]
        copy = operands.rounded(value, setting, (), _operand_id(equation, position))
        return copy.data, copy.scale * np.float32(2.0**value.exponent)  # pyright: ignore

    call = Call(
        params.fused_attention(equation), equation.primitive, tuple(equation.params.items()),
        equation.out_avals[0].dtype, 2.0**probabilities.scaling.exponent, narrow,  # pyright: ignore
    )  # fmt: skip
    given = [rounded(i, setting) for i in range(3)]
    if backward:
        last = len(inputs) - 1
        own = rounded(last, gradients) if narrow else (inputs[last].value(), jnp.float32(1))
        given.append(own)
    arrays = [*(x for x, _ in given), jnp.stack([scale for _, scale in given])]
    if not backward:
        outs = forward_p.bind(*with_common_axes(arrays), rule=call)
    else:
        arrays += [inputs[-2].value(), inputs[-3].value()]
        bounds = _bounds(equation, given, call.own)
        outs = _gradients(operands.amaxes if narrow else None, equation, arrays, bounds, call)
    pairs = zip(outs, equation.out_avals, strict=True)
    return [ScaledValue(x.astype(setup.flight(a))) for x, a in pairs]


def _gradients(
    amaxes: OperandAmaxes | None, equation: Equation, arrays: list, bounds: jax.Array, call: Call
) -> list[jax.Array]:
    """Returns the gradients of queries, keys and values; the scales of what is rounded on the way
    come from a history, or from bounds where it has nothing."""
    ids = [_operand_id(equation, x) for x in COMPUTED]
    sizes = jnp.stack([amaxes.largest_before(i) for i in ids]) if amaxes else bounds
    # for a new history twice: a bound's scale may lose numbers, but no largest magnitude of them
    for _ in range(2 if amaxes and amaxes.earlier is None else 1):
        scales, _ = to_top(jnp.where(sizes > 0, sizes, bounds), E4M3FN, True)
        *outs, sizes = backward_p.bind(*with_common_axes([*arrays, scales]), rule=call)
    for i, size in zip(ids, sizes, strict=True) if amaxes else ():
        amaxes.record(i, size)  # pyright: ignore
    return outs  # pyright: ignore


def _operand_id(equation: Equation, operand: int | str) -> str:
    # named by its path: counted as a contraction, it would change the names of those behind it
    return f"{equation.name}.{'.'.join(map(str, equation.path))}/{operand}"


def _is_plain(setting: Operand | None) -> bool:
    """Returns whether an operand is E4M3 with one scale, a power of two."""
    return (
        setting is not None
        and setting == Operand(E4M3FN, setting.scaling)
        and setting.scaling.power_of_two
    )


def why_left_alone(
    equation: Equation, attention: Attention, device: Device | None, prefers_speed: bool
) -> str:
    """Returns why cuDNN's attention stays in 16 bits; empty if its operands are rounded to FP8.

    The answer is the same for both passes, whose scores have to agree. The forward pass spares half
    of its operations, and reads and writes operands to round them.
    """
    setting, probabilities, _ = attention.settings()
    device = DEFAULT_DEVICE if device is None or device.platform == "cpu" else device
    own, (q, k, v) = params.fused_attention(equation), (a.shape for a in equation.in_avals[:3])
    what = "left alone: cuDNN's FP8 attention"
    constant = probabilities is not None and isinstance(probabilities.scaling, Fixed)
    if not _is_plain(setting) or not _is_plain(probabilities) or not constant:
        return f"{what} takes E4M3, with one power of two a tensor, of probabilities a constant one"
    if device.platform != "cuda" or not device.rate(E4M3FN, E4M3FN):
        return f"{what} isn't on {device.name}"
    if not own.plain or any(a.size for a in equation.in_avals[UNUSED]):
        return f"{what} has no bias, dropout, window or lengths"
    times, width = [x[2 if own.heads_first else 1] for x in (q, k)], q[3]
    most = 256 if device.name in HOPPER else 128
    if not all(map(is_known, (*q, *k))) or k != v or width % 16 or width > most:
        return f"{what} has heads of 16 n numbers, at most {most}"
    if own.training and (width != 128 or any(n % 128 for n in times)):
        return f"{what} trains heads of 128 numbers and 128 n tokens"
    measured = setting is not None and setting.scaling.source == "amax"
    size = math.prod(q) + 2 * math.prod(k)
    converted = (5 if measured else 3) * size + 3 * math.prod(q)
    spared = 2 * math.prod(q) * times[1] / device.flops if prefers_speed else math.inf
    return TOO_SMALL if converted / device.bandwidth > spared else ""


def _bounds(equation: Equation, given: Sequence[Rounded], own: params.FusedAttention) -> jax.Array:
    """Returns bounds of the scores' gradient, and of those of queries, keys and values.

    A row of probabilities adds up to 1, a result is at most the largest value, and rounding adds at
    most 1/16 to each.
    """
    q, k = (a.shape for a in equation.in_avals[:2])
    heads, time = (1, 2) if own.heads_first else (2, 1)
    rows = np.float32(q[time] * q[heads] // k[heads])
    queries, keys, values, gradient = (np.float32(E4M3FN.max) * scale for _, scale in given)
    scores = np.float32(2.5 * abs(own.scale) * q[3]) * gradient * values
    others = scores * keys, scores * queries * rows, np.float32(1.25) * gradient * rows
    return jnp.stack([scores, *others])


# -- the kernels ---------------------------------------------------------------------------------


def _forward_by_kernel(*given: jax.Array, rule: Call) -> list[jax.Array]:
    *operands, scales = given
    own, out = rule.probability, 2 * scales[2]  # a result is at most the largest value
    factors = *scales, own, 1 / own, 1 / out
    training = rule.own.training
    x, _, _, *statistic = rule.by_kernel(operands, factors, backward=False, is_training=training)
    return [_times(x, out, rule.dtype), *statistic]


def _backward_by_kernel(*given: jax.Array, rule: Call) -> list[jax.Array]:
    if not rule.narrow:
        return _backward_by_xla(*given, rule=rule)
    q, k, v, gradient, scales, result, statistic, others = given
    own, out = rule.probability, 2 * scales[2]
    arrays = q, k, v, _encoded(result, out), gradient, statistic
    before = *scales[:3], out, scales[3], own, others[0]
    factors = *before, 1 / own, *(1 / x for x in others[1:]), 1 / others[0]
    *outs, dq, dk, dv, slope = rule.by_kernel(arrays, factors, backward=True)
    sizes = jnp.concatenate([x.reshape(1) for x in (slope, dq, dk, dv)])
    return [*(_times(x, s, rule.dtype) for x, s in zip(outs, others[1:], strict=True)), sizes]


# -- without them: the program's own in a program for CUDA that is split over devices, else the same
# -- arithmetic by XLA's operations --------------------------------------------------------------


def _by_xla(function: Any, *given: jax.Array, rule: Call) -> list[jax.Array]:
    routes = {p: partial(function, rule, p == "cuda") for p in ("cuda", "default")}
    return lax.platform_dependent(*given, **routes)


def _forward(rule: Call, by_program: bool, *given: jax.Array) -> list[jax.Array]:
    *operands, scales = given
    if by_program:
        return rule.by_program(_loaded(operands, scales, rule))
    scores, (_, _, v) = _scores(operands, scales, rule)
    top = jnp.max(scores, -1, keepdims=True)
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, -1, keepdims=True)
    out = _product(_rounded(exponentials, rule.probability), v) / total
    out = _rounded(_moved(out, rule), 2 * scales[2]).astype(rule.dtype)
    return [out, (top + jnp.log(total))[..., 0]] if rule.own.training else [out]


def _backward(rule: Call, by_program: bool, *given: jax.Array) -> list[jax.Array]:
    *operands, scales, result, statistic, others = given
    if by_program:  # with a barrier, without which they would wait for this pass in 16 bits
        *arrays, gradient = _loaded(lax.optimization_barrier(operands), scales, rule)
        outs = rule.by_program(arrays, statistic, result.astype(rule.dtype), gradient)
        sizes = [jnp.float32(0), *(jnp.max(jnp.abs(x)).astype(jnp.float32) for x in outs)]
        return [*outs, jnp.stack(sizes)]
    rounded = _rounded if rule.narrow else lambda x, _: x
    scores, (q, k, v) = _scores(operands, scales, rule)
    shares = jnp.exp(scores - statistic[..., None])
    gradient = _moved(widened(operands[3]) * scales[3], rule)
    result = _moved(rounded(result.astype(jnp.float32), 2 * scales[2]), rule)
    slope = _product(gradient, _turned(v)) - jnp.sum(gradient * result, -1, keepdims=True)
    slope = shares * slope * rule.own.scale
    narrow, heads = rounded(slope, others[0]), operands[1].shape[1 if rule.own.heads_first else 2]
    pairs = (narrow, q), (rounded(shares, rule.probability), gradient)
    dk, dv = (_product(_turned(a), b) for a, b in pairs)
    dk, dv = (x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    outs = [_moved(x, rule) for x in (_product(narrow, k), dk, dv)]
    sizes = jnp.stack([jnp.max(jnp.abs(x)) for x in (slope, *outs)])
    made = zip(outs, others[1:], strict=True)
    return [*(rounded(x, s).astype(rule.dtype) for x, s in made), sizes]


def _scores(operands: Sequence[jax.Array], scales: jax.Array, rule: Call):
    q, k, v = (_moved(widened(x) * s, rule) for x, s in zip(operands[:3], scales, strict=False))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _product(q, _turned(k)) * rule.own.scale
    if rule.own.causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return scores, (q, k, v)


def _moved(x: jax.Array, rule: Call) -> jax.Array:
    return x if rule.own.heads_first else jnp.swapaxes(x, 1, 2)


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _encoded(x: jax.Array, scale: ArrayLike) -> jax.Array:
    return encode(x.astype(jnp.float32) / scale, E4M3FN, saturate=True)  # pyright: ignore


def _rounded(x: jax.Array, scale: ArrayLike) -> jax.Array:
    return widened(_encoded(x, scale)) * scale


def _times(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    if x.dtype.itemsize > 1:  # a gradient that isn't rounded, whose scale is 1
        return x.astype(dtype)
    return (widened(x) * scale).astype(dtype)


def _loaded(operands: Sequence[jax.Array], scales: jax.Array, rule: Call) -> list[jax.Array]:
    return [_times(x, s, rule.dtype) for x, s in zip(operands, scales, strict=True)]


def _types(queries: Any, keys: Any, *others: Any, rule: Call) -> list[jax.ShapeDtypeStruct]:
    q = queries.shape
    if len(others) > 2:  # of the backward pass
        types = [jax.ShapeDtypeStruct(x.shape, rule.dtype) for x in (queries, keys, keys)]
        return [*types, jax.ShapeDtypeStruct((len(COMPUTED),), jnp.float32)]
    rows = q[:3] if rule.own.heads_first else (q[0], q[2], q[1])
    statistic = [jax.ShapeDtypeStruct(rows, jnp.float32)] if rule.own.training else []
    return [jax.ShapeDtypeStruct(q, rule.dtype), *statistic]


_forward_by_xla, _backward_by_xla = (partial(_by_xla, f) for f in (_forward, _backward))
forward_p = kernel_primitive(
    "fp8_attention", _forward_by_kernel, _forward_by_xla, _types, has_fp8_attention
)
backward_p = kernel_primitive(
    "fp8_attention_gradient", _backward_by_kernel, _backward_by_xla, _types, has_fp8_attention
)
