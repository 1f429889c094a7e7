"""Contractions of narrow operands: in the device's own narrow units where it has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import E8M0, BlockFormat, Format
from ..interpret import Equation, bind, rebind
from ..scaled import ScaledArray
from ._value import InFlight, Side, leading

SIXTEEN = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
EIGHT = (jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2"))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A ``dot_general`` of operands in the compute dtype, made when somebody reads it.

    JAX makes the gradient of a weight with its axes exchanged, and transposes it. XLA on CPU folds
    that into a product that its library doesn't take: a GPT's step took a fifth longer. Here the
    operands change places instead. Whatever else a value meets as a pytree, it is read there.

    Attributes:
        equation: the contraction.
        operands: the narrow numbers, their scales multiplied in.
        exponent: of the result.
        side: of the result, as in :class:`InFlight`.
        spread: of the result.
    """

    equation: Equation
    operands: tuple[jax.Array, jax.Array]
    exponent: int | jax.Array
    side: Side = "stored"
    spread: float = 0.0
    memo: dict[str, InFlight] = dataclasses.field(default_factory=dict, repr=False)

    def wake(self) -> InFlight:
        """The value itself."""
        if "plain" not in self.memo:
            if "turned" in self.memo:
                data = lax.transpose(self.memo["turned"].data, self._exchange(1, 0))
            else:
                (data,) = rebind(self.equation, self.operands, self.operands[0].dtype)
            self.memo["plain"] = self._as_value(data)
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
                "preferred_element_type": self.operands[0].dtype,
            }
            operands = self.operands[::-1]
            (data,) = bind(self.equation.primitive, {**params, **changed}, operands)
            self.memo["turned"] = self._as_value(data)
        return self.memo["turned"]

    def _exchange(self, first: int, second: int) -> tuple[int, ...]:
        """The permutation by which a result's axes of one operand go behind the other's."""
        contracted, batch = self.equation.params["dimension_numbers"]
        n = len(batch[0])
        own = [x.ndim - n - len(contracted[0]) for x in self.operands]
        middle, end = n + own[first], n + own[first] + own[second]
        return (*range(n), *range(middle, end), *range(n, middle))

    def _as_value(self, data: jax.Array) -> InFlight:
        return InFlight(data, self.exponent, self.side, spread=self.spread)

    def tree_flatten(self):
        return (self.wake(),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return children[0]


def contracted(
    product: Callable[..., jax.Array],
    equation: Equation,
    operands: Sequence[tuple[jax.Array, jax.Array | None]],
    exponent: int | jax.Array,
    dtype: Any,
) -> InFlight | Product:
    """A contraction of narrow operands and their scales, powers of two.

    Scales are multiplied in before: bit for bit what they would be behind it, but for what leaves
    ``dtype``'s range in between, as it does in any float32 program. It costs fewer operations: what
    reads a product reads it as it is. A device that multiplies narrow numbers gets them bare.

    Args:
        product: what multiplies two arrays: ``product(equation, a, b, dtype)``.
        equation: the contraction.
        operands: data, and a scale without axes; or None for 1.
        exponent: of the result.
        dtype: in which it is added up.
    """
    scales = [scale for _, scale in operands if scale is not None]
    if not scales or has_narrow_units():
        out = product(equation, *[x for x, _ in operands], dtype)
        # the smaller first: the product may be in range though the larger is not
        for scale in [lax.min(*scales), lax.max(*scales)] if len(scales) == 2 else scales:
            out = out * leading(scale, out)
        return InFlight(out, exponent)
    a, b = (
        x.astype(dtype) if scale is None else x.astype(dtype) * leading(scale, x)
        for x, scale in operands
    )
    if equation.name == "dot_general":
        return Product(equation, (a, b), exponent)
    return InFlight(product(equation, a, b, dtype), exponent)


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
