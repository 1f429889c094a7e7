"""Values that wait for the backward pass, or for the scales of a product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..formats import Format
from ..interpret import Equation, Value, outlined
from ..scaled import ScaledArray, quantize
from ..scalifying import ScaledValue, leading, wide_dtype
from ._operand_settings import Role

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StoredValue:
    """A value that is narrow in memory until it is loaded: ``data * scale * 2**own``.

    Attributes:
        data: in the storage dtype; behind a barrier, so that no compiler keeps the wide original
            instead.
        scale: the rounding's power of two, in the compute dtype. Its axes are the first axes of
            ``data`` (a scan that stacks values stacks their scales).
        own: the exponent of the value in flight.
        dtype: of the value in flight.
        narrowed, role: as in :class:`ScaledValue`.
    """

    data: jax.Array
    scale: jax.Array
    own: int = dataclasses.field(metadata=STATIC)
    dtype: DTypeLike = dataclasses.field(metadata=STATIC)
    narrowed: bool = dataclasses.field(default=False, metadata=STATIC)
    role: Role | Literal[""] = dataclasses.field(default="", metadata=STATIC)

    def load(self) -> ScaledValue:
        narrow = self.data.astype(self.scale.dtype)
        data = narrow * leading(self.scale, self.data)
        # the dtype's last numbers round to one beyond it
        top = data.dtype.type(jnp.finfo(self.dtype).max)
        data = jnp.where(jnp.isinf(narrow), narrow, jnp.clip(data, -top, top))
        known = {"narrowed": self.narrowed, "role": self.role}
        return ScaledValue(data.astype(self.dtype), self.own, "residual", **known)

    def unstacked(self, count: int) -> StoredValue:
        """Returns a value with a scale for each of a loop's slices."""
        scale = self.scale if self.scale.ndim else jnp.broadcast_to(self.scale, (count,))
        return dataclasses.replace(self, scale=scale)


def store_value(value: ScaledValue, fmt: Format) -> StoredValue:
    def stored() -> StoredValue:
        x = value.data
        copy = value.memo.once(("copy", fmt), lambda: outlined(_one_scale, fmt, x))
        assert isinstance(copy.data, jax.Array)
        assert isinstance(copy.scale, jax.Array)
        assert isinstance(value.exponent, int)
        data = lax.optimization_barrier(copy.data)
        own, narrowed, role = value.exponent, value.narrowed, value.role
        return StoredValue(data, copy.scale, own, x.dtype, narrowed, role)

    return value.memo.once(("stored", fmt), stored)


def _one_scale(fmt: Format, x: jax.Array) -> ScaledArray:
    return quantize(x, fmt)


def may_be_masked(value: ScaledValue, fmt: Format) -> bool:
    """Returns whether a mask's numbers may be among others, which one scale would make zeros.

    It is a constant of the program that leaves numbers near 1 less than half of the format's
    binades, or an argument beside numbers of which an exponential is taken. A product that reads
    the value has one scale for all of them.
    """
    masked = value.may_be_mask and value.memo.in_exponential
    large = value.largest_constant >= 2.0 ** ((fmt.max_exponent - fmt.min_exponent) // 2)
    return (masked or large) and ("copy", fmt) not in value.memo.made


def holds(dtype: DTypeLike, fmt: Format) -> bool:
    """Returns whether an array of ``dtype`` takes no more memory than one in ``fmt``."""
    return jnp.dtype(dtype).itemsize * 8 <= fmt.bits


@dataclasses.dataclass(frozen=True, eq=False)
class Lineage:
    """How a value was computed from its source.

    Attributes:
        equation: the last operation.
        inputs: its operands; the lineages of these lead to the source.
        source: the one large array that the value depends on; None if all operands are small.
        costly: whether a function among the operations takes a device several instructions.
        normalises: whether statistics are among the operands, as in a softmax or a norm.
        depth: the number of operations.
    """

    equation: Equation
    inputs: tuple[Value, ...]
    source: ScaledValue | None
    costly: bool
    normalises: bool
    depth: int


@dataclasses.dataclass(frozen=True, eq=False)
class Copy:
    """A copy of a source, and the values that have been computed again from it.

    Attributes:
        source: of the lineages.
        copy: used in its place.
        done: by id, each value with the one that was computed from the copy.
    """

    source: ScaledValue
    copy: ScaledValue
    done: dict[int, tuple[ScaledValue, ScaledValue]] = dataclasses.field(default_factory=dict)

    def value(
        self, value: ScaledValue, apply: Callable[[Equation, Sequence[Value]], list[Value]]
    ) -> ScaledValue:
        """Computes ``value``, the source or a value whose lineage leads to it, from the copy."""
        if value is self.source:
            return self.copy
        if value.lineage is None:
            return value
        if id(value) not in self.done:
            inputs = [
                self.value(x, apply) if isinstance(x, ScaledValue) else x
                for x in value.lineage.inputs
            ]
            (again,) = apply(value.lineage.equation, inputs)
            self.done[id(value)] = value, again  # with the value, so that its id stays unique
        return self.done[id(value)][1]


@dataclasses.dataclass(frozen=True, eq=False)
class UnscaledProduct:
    """A product as a device computes it, and the factors that are still to be applied.

    Attributes:
        raw: the product of the numbers without their scales; on a CPU, the value itself.
        factors: their axes are the first axes of ``raw``; on a CPU, ones.
    """

    raw: jax.Array
    factors: tuple[jax.Array, ...] = ()

    def value(self, raw: jax.Array | None = None) -> jax.Array:
        raw = self.raw if raw is None else raw
        out = raw.astype(wide_dtype(raw.dtype))
        for factor in self.factors:
            out = lax.mul(out, leading(lax.convert_element_type(factor, out.dtype), out))
        return out.astype(raw.dtype)

    def by_one_factor(self) -> jax.Array:
        """Returns the value as a sum reads it: XLA computes both in the product's own kernel."""
        if not self.factors:
            return self.raw
        factor = functools.reduce(lax.mul, self.factors)
        return self.raw * lax.min(factor, factor.dtype.type(2.0**127))  # 0 times infinity is NaN
