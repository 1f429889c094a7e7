"""Contractions of narrow operands: in the device's own narrow units where it has them.

Which way a product is computed is decided when a program is lowered, by the platform that it is
lowered for, so that a program compiled ahead of time on a host runs as it would on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import E8M0, BlockFormat, Format
from ..interpret import Equation, alike, bind
from ..scaled import ScaledArray
from ._value import InFlight, Side, leading, wide_dtype

SIXTEEN = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
EIGHT = (jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2"))

# An operand's numbers, and the power of two that each stands for a multiple of; None for 1.
Operand = tuple[jax.Array, jax.Array | None]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A ``dot_general`` of narrow operands, computed when its value is first read.

    JAX computes the gradient of a weight with its axes exchanged, and transposes it. XLA on CPU
    folds that into a product that its library doesn't take: a GPT's step took a fifth longer. Here
    the operands change places instead. Flattening it as a pytree computes the value.

    Attributes:
        equation: the contraction.
        operands: the numbers and the scales.
        dtype: of the result.
        exponent: of the result.
        side: of the result, as in :class:`InFlight`.
        spread: of the result.
    """

    equation: Equation
    operands: tuple[Operand, Operand]
    dtype: Any
    exponent: int | jax.Array
    side: Side = "stored"
    spread: float = 0.0
    memo: dict[str, InFlight] = dataclasses.field(default_factory=dict, repr=False)

    def wake(self) -> InFlight:
        """The value itself."""
        if "plain" not in self.memo:
            if "turned" in self.memo:
                data = lax.transpose(self.memo["turned"].data, self._exchange(1, 0))
                base = None
            else:
                product = multiplied(self.equation, self.operands, self.dtype)
                data, base = product.value(), product
            self.memo["plain"] = self._as_value(data, base)
        return self.memo["plain"]

    def turned(self, permutation: Sequence[int]) -> InFlight | None:
        """The transposed value, where its operands have only to change places for it."""
        params = self.equation.params
        exchanged = tuple(permutation) == self._exchange(0, 1)
        if "plain" in self.memo or not exchanged or params.get("out_sharding") is not None:
            return None
        if "turned" not in self.memo:
            numbers, precision = params["dimension_numbers"], params["precision"]
            changed = {
                "dimension_numbers": tuple((b, a) for a, b in numbers),
                "precision": precision[::-1] if isinstance(precision, tuple) else precision,
            }
            product = multiplied(self.equation, self.operands[::-1], self.dtype, changed)
            self.memo["turned"] = self._as_value(product.value(), product)
        return self.memo["turned"]

    def _exchange(self, first: int, second: int) -> tuple[int, ...]:
        """The permutation by which a result's axes of one operand go behind the other's."""
        contracted, batch = self.equation.params["dimension_numbers"]
        n = len(batch[0])
        own = [x.ndim - n - len(contracted[0]) for x, _ in self.operands]
        middle, end = n + own[first], n + own[first] + own[second]
        return (*range(n), *range(middle, end), *range(n, middle))

    def _as_value(self, data: jax.Array, base: Scaled | None) -> InFlight:
        return InFlight(data, self.exponent, self.side, spread=self.spread, base=base)

    def tree_flatten(self):
        return (self.wake(),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return children[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A product as a device computes it, and the factors that are still to be applied.

    Attributes:
        raw: the product of the numbers without their scales; on a CPU, the value itself.
        factors: their axes the first ones of ``raw``; on a CPU, ones.
    """

    raw: jax.Array
    factors: tuple[jax.Array, ...] = ()

    def value(self, raw: jax.Array | None = None) -> jax.Array:
        """The value, or that of another copy of ``raw``."""
        raw = self.raw if raw is None else raw
        out = raw.astype(wide_dtype(raw.dtype))
        for factor in self.factors:
            out = out * leading(factor, out).astype(out.dtype)
        return out.astype(raw.dtype)


def multiplied(
    equation: Equation,
    operands: Sequence[Operand],
    dtype: Any,
    params: Mapping[str, Any] | None = None,
) -> Scaled:
    """A contraction of narrow operands and their scales, powers of two.

    Products of two narrow numbers are exact in float32, so that both ways give the same result but
    for the order in which sums are added up, and what leaves float32's range in between.

    - On a CPU, which has no narrow units for all shapes, operands are widened and the scales are
      multiplied into them: what reads the product needs no rescale.
    - All other platforms multiply the numbers as they are stored, if their units take such a pair,
      and scale the result. Sums are added up in float32. A backward product asks for the exact
      accumulation that Hopper's FP8 units otherwise shorten to 14 bits (``Precision.HIGHEST``), a
      forward product keeps the program's own ``precision``.

    Args:
        equation: the contraction, a ``dot_general`` or ``conv_general_dilated``.
        operands: data in any float dtype, and a scale whose axes are data's first ones, or None.
        dtype: of the result; sums are added up in float32 at least.
        params: parameters in place of the equation's own.
    """
    (a, scale_a), (b, scale_b) = operands
    settings = {**equation.params, **(params or {})}
    total = wide_dtype(dtype)
    together = _together(equation, a, b) if total == jnp.float32 else None

    def wide(arrays: Sequence[Operand]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        factors = [
            x.astype(total) if scale is None else x.astype(total) * leading(scale, x).astype(total)
            for x, scale in arrays
        ]
        out = _bound(equation, settings, factors, total).astype(dtype)
        return out, tuple(jnp.ones_like(scale) for _, scale in arrays if scale is not None)

    def narrow(arrays: Sequence[Operand]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        assert together is not None
        factors = [x.astype(d) for (x, _), d in zip(arrays, together, strict=True)]
        precision = _precision(settings["precision"], equation, factors)
        out = _bound(equation, settings | {"precision": precision}, factors, dtype)
        return out, _ordered(tuple(scale for _, scale in arrays if scale is not None))

    if a.dtype == b.dtype == dtype and scale_a is scale_b is None:
        return Scaled(_bound(equation, settings, (a, b), dtype))
    if together is None:
        return Scaled(wide(operands)[0])
    found: Any = lax.platform_dependent(alike(tuple(operands)), cpu=wide, default=narrow)
    return Scaled(*found)


def _ordered(scales: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Two scales, the smaller first: a product may be in range though times the larger it is not.

    Behind a barrier: one small kernel finds both, and none of those that read the product does.
    """
    if len(scales) < 2:
        return scales
    pair = lax.concatenate([lax.expand_dims(f(*scales), [0]) for f in (lax.min, lax.max)], 0)
    pair = lax.optimization_barrier(pair)
    return tuple(lax.index_in_dim(pair, i, keepdims=False) for i in range(2))


def _bound(equation: Equation, params: Mapping[str, Any], operands: Any, dtype: Any) -> jax.Array:
    changed = {**params, "preferred_element_type": jnp.dtype(dtype)}
    return bind(equation.primitive, changed, equation.varied(operands))[0]


def _precision(precision: Any, equation: Equation, factors: Sequence[jax.Array]) -> Any:
    """The precision of a product of narrow numbers: the program's own, or an exact backward sum."""
    own = precision if isinstance(precision, tuple) else (precision,)
    if precision is not None and all(isinstance(p, lax.Precision) for p in own):
        return precision
    # an algorithm (``lax.DotAlgorithm``) names the dtypes of wide operands
    exact = equation.direction == "backward" and all(x.dtype.itemsize == 1 for x in factors)
    return (lax.Precision.HIGHEST,) * 2 if exact else None


def _together(equation: Equation, a: jax.Array, b: jax.Array) -> tuple[Any, Any] | None:
    """The dtypes in which a device multiplies two operands; None where only float32 holds both."""
    dtypes = {a.dtype, b.dtype}
    if not dtypes <= {*SIXTEEN, *EIGHT} or dtypes == set(SIXTEEN):
        return None
    eight = equation.name == "dot_general" and dtypes <= set(EIGHT)
    if eight and EIGHT[0] in dtypes:  # no GPU's unit multiplies E5M2 by E5M2
        return a.dtype, b.dtype
    wider = next(iter(dtypes & set(SIXTEEN)), SIXTEEN[0])  # each holds every FP8 number
    return wider, wider


def carried(x: ScaledArray, fmt: Format | BlockFormat, dtype: Any) -> jax.Array:
    """An array of several scales multiplied out, in the narrowest dtype that holds its numbers.

    BF16 has float32's exponents, so it holds an FP8, FP6 or FP4 number times a power of two.
    """
    exact = isinstance(fmt, BlockFormat) and fmt.scale == E8M0 and fmt.element.mantissa_bits <= 7
    holds = exact and dtype in (jnp.float32, jnp.bfloat16)
    return x.value().astype(jnp.bfloat16 if holds else dtype)
