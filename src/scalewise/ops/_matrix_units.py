"""Matrix products as the matrix units of GPUs compute them, bit for bit, and as one JAX equation.

The rules are those of :class:`scalewise.devices.MatrixUnit`. Numbers are carried in float64: every
term, cut off, and every sum of them has at most 53 bits. An interpretation,
which rounds or records the result of each equation, sees one product, not the thousands of steps
that compute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import ShapedArray, batching, jex, mlir, with_common_axes
from ..devices import MatrixUnit
from ..formats import FP16, FP32, TF32, BlockFormat, Format
from ..rounding import round_bits, round_to, to_float64
from ._arithmetic import Arithmetic, to_odd, two_sum
from ._operation import in_dtype

ZERO = 2.0**-126  # the units' exponent of a zero
GROUP = 16  # products of FP4 that `mxf4nvf4` adds exactly


@dataclasses.dataclass(frozen=True)
class _Terms:
    """Operands of one side: numbers, and powers of two that are their exponents to the unit."""

    values: jax.Array  # float64 ``[steps, terms, rows, columns]``, one of the last two of size 1
    powers: jax.Array


jax.tree_util.register_dataclass(_Terms, ["values", "powers"], [])


def power(x: jax.Array, smallest: float) -> jax.Array:
    """Returns 2^floor(log2|x|), at least ``smallest``; 2^-126 for zeros. For float64 arrays."""
    bits = lax.bitcast_convert_type(x, np.int64) & np.int64(0x7FF0000000000000)
    floor = lax.bitcast_convert_type(bits, np.float64)
    return jnp.where(x == 0, np.float64(ZERO), jnp.maximum(floor, np.float64(smallest)))


def truncate(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0, jnp.ceil(x), jnp.floor(x))


def cut(x: jax.Array, fraction_bits: int, smallest: float = 2.0**-126) -> jax.Array:
    """Cuts numbers off toward zero, so many bits below their leading bits; infinite from 2^128."""
    unit = jnp.maximum(power(x, smallest), np.float64(smallest)) * np.float64(2.0**-fraction_bits)
    y = jnp.where(jnp.abs(x) < unit, 0.0, truncate(x / unit) * unit)
    return jnp.where(jnp.abs(x) >= 2.0**128, jnp.copysign(np.float64(np.inf), x), y)


def _fused(unit: MatrixUnit, c: jax.Array, left: _Terms, right: _Terms) -> jax.Array:
    """Adds one step's products to the accumulator. ``left``: ``[terms, M, 1]``."""
    terms = range(0, left.values.shape[0], GROUP if unit.terms == 64 else 1)
    products = [left.values[k] * right.values[k] for k in range(left.values.shape[0])]
    if unit.terms == 64:
        products = [sum(products[k + 1 : k + GROUP], products[k]) for k in terms]
    largest = power(c, 2.0**-14 if unit.result == FP16 else 2.0**-126)
    for k in terms:
        largest = jnp.maximum(largest, left.powers[k] * right.powers[k])
    unit_bits = np.float64(2.0 ** (unit.fraction_bits or 0))
    scale = unit_bits / largest
    total, plain = truncate(c * scale), c
    for product in products:
        total = total + truncate(product * scale)
        plain = plain + product
    total = total / scale
    if unit.result == FP16:
        total = jnp.where(jnp.abs(total) <= 2.0**-25, 0.0, round_bits(total, FP16))
    else:
        total = cut(total, unit.result.mantissa_bits)
    return jnp.where(jnp.isfinite(plain), total, plain)


def _two_stage(unit: MatrixUnit, c: jax.Array, left: _Terms, right: _Terms) -> jax.Array:
    """The same for CDNA 3: the products are added first, then their sum and the accumulator."""
    terms = range(left.values.shape[0])
    products = [left.values[k] * right.values[k] for k in terms]
    plain = sum(products, c)
    parts = 2 if unit.method == "two_stage_fp8" else 1
    unit_bits = np.float64(2.0 ** (unit.fraction_bits or 0))
    sums, tops = [], []
    for part in range(parts):
        own = terms[part::parts]
        top = jnp.zeros_like(c)
        for k in own:
            top = jnp.maximum(top, left.powers[k] * right.powers[k])
        scale = unit_bits / top
        cut_off = (truncate(products[k] * scale) for k in own)
        sums.append(sum(cut_off, jnp.zeros_like(c)) / scale)
        tops.append(top)
    top = tops[0]
    if parts == 2:
        top = jnp.maximum(*tops)
        scale = unit_bits / top
        sums = [jnp.floor(s * scale) / scale for s in sums]
    own = power(c, 2.0**-126)
    most = jnp.maximum(top, own)
    fine, coarse = np.float64(2.0**31) / most, np.float64(2.0**24) / most
    kept = jnp.floor(c * coarse) / coarse
    if parts == 2:
        kept = jnp.where(own >= most * np.float64(2.0**-25), kept, 0.0)
    y = round_bits(jnp.floor(sum(sums, jnp.zeros_like(c)) * fine) / fine + kept, FP32)
    # a product of 2^128 counts as infinite, of both signs as NaN
    over = [jnp.where(jnp.abs(p) >= 2.0**128, p * np.float64(np.inf), 0.0) for p in products]
    y = y + sum(over, jnp.zeros_like(c))
    return jnp.where(jnp.isfinite(plain), y, plain)


def _multiply_add(unit: MatrixUnit, c: jax.Array, left: _Terms, right: _Terms) -> jax.Array:
    for k in range(left.values.shape[0]):
        c = fused_multiply_add(unit.result, left.values[k], right.values[k], c)
    return c


def fused_multiply_add(fmt: Format, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Returns ``a * b + c``, rounded once to FP32 or FP64; of float64 arrays.

    In FP64 where the product's last bit isn't below 2^-1022.
    """
    if fmt == FP32:
        return Arithmetic(FP32).fma(a, b, c)
    # a product beyond 2^900 is computed divided by 2^1040, and the addend's sign decides a tie
    half = np.float64(2.0**-520)
    large = jnp.abs(a * half) * jnp.abs(b * half) > 2.0**-140
    first, second = jnp.where(large, a * half, a), jnp.where(large, b * half, b)
    small = jnp.copysign(jnp.maximum(jnp.abs(c) * half * half, 2.0**-900), c)
    product, addend = first * second, jnp.where(large & (c != 0), small, c)
    high, low = two_sum(product, addend)
    exact = high + to_odd(*two_sum(low, _product_error(first, second, product)))
    exact = jnp.where(large, exact / half / half, exact)
    special = ~(jnp.isfinite(a) & jnp.isfinite(b) & jnp.isfinite(c))
    return jnp.where(special, jnp.where(jnp.isfinite(a) & jnp.isfinite(b), c, a * b + c), exact)


def _product_error(a: jax.Array, b: jax.Array, product: jax.Array) -> jax.Array:
    """Returns ``a * b - product`` exactly, by splitting factors into halves (Dekker, 1971)."""

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        high = lax.reduce_precision(x, 11, 25)
        return high, x - high

    (a1, a2), (b1, b2) = halves(a), halves(b)
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _pairwise(unit: MatrixUnit, c: jax.Array, left: _Terms, right: _Terms) -> jax.Array:
    def rounded(x: jax.Array) -> jax.Array:
        y = round_bits(x, FP32)
        return jnp.where(jnp.abs(y) < 2.0**-126, y * 0.0, y) if unit.flush else y

    sums = [rounded(left.values[k] * right.values[k]) for k in range(left.values.shape[0])]
    while len(sums) > 1:
        sums = [rounded(a + b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return rounded(c + sums[0])


_STEPS = {
    "fused": _fused, "fma": _multiply_add, "pairwise": _pairwise,
    "two_stage": _two_stage, "two_stage_fp8": _two_stage,
}  # fmt: skip


def _operand(
    unit: MatrixUnit, x: jax.Array, fmt: Format | BlockFormat, scales: jax.Array | None, axis: int
) -> _Terms:
    element = fmt.element
    values = to_float64(x)
    if element == TF32:  # the units cut float32 off
        bits = lax.bitcast_convert_type(x.astype(np.float32), np.int32) & np.int32(-1 << 13)
        values = to_float64(lax.bitcast_convert_type(bits, np.float32))
    smallest = float(element.smallest_normal) if unit.left != FP32 else 2.0**-126
    if unit.flush:
        values = jnp.where(jnp.abs(values) < smallest, 0.0, values)
    powers = power(values, smallest)
    if isinstance(fmt, BlockFormat) and scales is not None:
        factors = to_float64(jnp.abs(scales) if fmt.scale.signed else scales)
        tops = power(factors, float(fmt.scale.smallest_normal))
        of_element = (jnp.repeat(t, fmt.size, axis=0) for t in (factors, tops))
        factors, tops = (t[: values.shape[0]] for t in of_element)
        values, powers = values * factors, powers * tops
        if unit.terms == 64:
            powers = tops  # of a group, whatever the elements
    fill = -values.shape[0] % unit.terms
    if fill:
        values = jnp.pad(values, ((0, fill), (0, 0)))
        powers = jnp.pad(powers, ((0, fill), (0, 0)), constant_values=ZERO)
    shape = (values.shape[0] // unit.terms, unit.terms, values.shape[1])
    return jax.tree.map(
        lambda t: jnp.expand_dims(t.reshape(shape), 3 - axis), _Terms(values, powers)
    )


def unit_product(
    unit: MatrixUnit,
    a: jax.Array,
    b: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    initial: jax.Array | None = None,
) -> jax.Array:
    """Returns ``a @ b`` as a matrix unit adds it up, float64; to be called with x64 on.

    ``a`` is ``[M, K]`` and ``b`` ``[K, N]``, numbers of the unit's formats, or elements of block
    formats with ``scales``, ``[M, K / size]`` and ``[K / size, N]``. ``initial`` is the accumulator
    at the beginning; zeros by default.
    """
    of_a, of_b = (scales[0].T, scales[1]) if scales else (None, None)
    left = _operand(unit, a.T, unit.left, of_a, 0)
    right = _operand(unit, b, unit.right, of_b, 1)
    zero = jnp.zeros((a.shape[0], b.shape[1]), np.float64)
    left, right, zero = with_common_axes((left, right, zero))  # of a `shard_map`
    step = partial(_STEPS[unit.method], unit)

    def run(c: jax.Array, terms: tuple[_Terms, _Terms]) -> jax.Array:
        return lax.scan(lambda c, t: (step(c, *t), None), c, terms)[0]

    def added(c: jax.Array, terms: tuple[_Terms, _Terms], size: int, inner: Callable) -> jax.Array:
        """Adds up parts of ``size`` steps in float32, each computed by ``inner`` from zero."""

        def add(total: jax.Array, part: tuple[_Terms, _Terms]) -> tuple[jax.Array, None]:
            return round_bits(total + inner(zero, part), FP32), None

        def parts(t: jax.Array) -> jax.Array:
            t = jnp.pad(t, [(0, -t.shape[0] % size)] + [(0, 0)] * (t.ndim - 1))
            return t.reshape(t.shape[0] // size, size, *t.shape[1:])

        return lax.scan(add, c, jax.tree.map(parts, terms))[0]

    inner: Callable = run
    if unit.promote is not None:
        inner = partial(added, size=unit.promote // unit.terms, inner=run)
    c = zero if initial is None else to_float64(initial)
    if unit.splits > 1:
        steps = max(1, -(-left.values.shape[0] // unit.splits))
        return added(c, (left, right), steps, inner)
    return inner(c, (left, right))


unit_p = jex.Primitive("matrix_unit")


def unit_matmul(unit: MatrixUnit, out: np.dtype, *operands: jax.Array) -> jax.Array:
    """Returns the product of matrices, and scales of block formats, with equal leading axes."""
    if not jax.sharding.get_abstract_mesh().empty:  # types carry more than shapes and dtypes
        return _computed(unit, out, *operands)
    return unit_p.bind(*operands, unit=unit, out=out)


@partial(jax.jit, static_argnums=(0, 1))
def _computed(
    unit: MatrixUnit, out: np.dtype, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> jax.Array:
    operands = [
        x if fmt == TF32 else round_to(x, fmt)
        for x, fmt in ((a, unit.left.element), (b, unit.right.element))
    ]
    with jax.enable_x64(True):

        def product(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
            return unit_product(unit, a, b, scales or None)  # pyright: ignore[reportArgumentType]

        for _ in range(a.ndim - 2):
            product = jax.vmap(product)
        return in_dtype(product(*operands, *scales), out)


def _run(*operands: jax.Array, unit: MatrixUnit, out: np.dtype) -> jax.Array:
    return _computed(unit, out, *operands)


def _abstract(
    a: ShapedArray, b: ShapedArray, *scales: ShapedArray, unit: MatrixUnit, out: np.dtype
) -> ShapedArray:
    return ShapedArray((*a.shape[:-1], b.shape[-1]), out)


def _batch(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, unit: MatrixUnit, out: np.dtype
) -> tuple[jax.Array, int]:
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    with jax.enable_x64(True):
        whole = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in pairs
        ]
        return unit_p.bind(*whole, unit=unit, out=out), 0


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, **params: Any
) -> Sequence[mlir.ir.Value]:
    # `emulate` binds float64 operands with x64 on; an outer `jit` lowers them after it has ended.
    with jax.enable_x64(True):
        return mlir.lower_fun(_run, multiple_results=False)(ctx, *operands, **params)


unit_p.def_impl(_run)
unit_p.def_abstract_eval(_abstract)
batching.primitive_batchers[unit_p] = _batch
mlir.register_lowering(unit_p, _lower)
