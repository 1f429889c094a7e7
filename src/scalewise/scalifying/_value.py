"""Values in flight: data times a power of two, and what was made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..formats import Format
from ..scaled import exponent_of, ldexp

Exponent: TypeAlias = int | jax.Array
"""An exponent of 2: an integer if the program alone determines it, else an int32 array."""

Factor: TypeAlias = float | jax.Array
TOP = 15  # log2 of the largest data under `scalify`: FP16 ends just below 2^16

Origin = Literal["stored", "residual", "forward", "backward"]


@dataclasses.dataclass(eq=False)
class Memo:
    """A cache of the copies that were made of a value, each once, and facts about its uses.

    Attributes:
        made: by purpose: the word for what was done, and its options. Narrow copies (``"copy"``),
            the value as it waits for the backward pass (``"stored"``), what that pass computes
            again from it (``"again"``), or a scale is found from (``"measured"``), the largest
            magnitude of delayed scaling (``"largest"``), and values that equations read in place of
            this one (``"changed"``: cast, moved, transformed, as the forward product read it).
        extreme: one number of the array's largest magnitude, with as many axes: of an argument's
            slice, found before the loop.
        untransformed: the array that this value is a Hadamard transform of, and the signs.
        in_float32: computes a product in float32, whose 16-bit result was converted to it.
        measure: by which the scale was found (``scalify``); empty if it was propagated.
        role: in the forward products that have read it.
        narrowed: whether a product of narrow operands has read it.
        unrounded: whether a product has read it unrounded, so that it is stored.
        in_exponential: whether an exponential or a logistic function has read it, which makes zeros
            of a mask's numbers.
        explained: whether ``explain`` has a row for it.
    """

    made: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    extreme: jax.Array | None = None
    untransformed: tuple[jax.Array, jax.Array] | None = None
    in_float32: Callable[[], jax.Array] | None = None
    measure: str = ""
    role: Any = ""
    narrowed: bool = False
    unrounded: bool = False
    in_exponential: bool = False
    explained: bool = False

    def once(self, purpose: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what was made for a purpose; makes it if nothing was."""
        if purpose not in self.made:
            self.made[purpose] = make()
        return self.made[purpose]

    def copy(self) -> Memo:
        made = {p: x.inside() if isinstance(x, ScaledValue) else x for p, x in self.made.items()}
        return dataclasses.replace(self, made=made, in_float32=None)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledValue:
    """``data * 2**exponent``, as a fused kernel would keep it in registers.

    Attributes:
        data: in the flight dtype of its interpretation (float32, or a bfloat16 or float64 that the
            program itself has), any shape.
        exponent: a Python integer if it depends on the program alone, which costs nothing at run
            time; an int32 array if it depends on data. Its axes are the first axes of ``data``.
        origin: ``"stored"`` for arguments and constants, which are in memory as they were stored;
            ``"residual"`` for what the forward pass has stored; ``"forward"`` if it was computed on
            the way to the loss; ``"backward"`` if it carries a gradient.
        constant_value: the number that every element equals; None if tracing doesn't know one. A
            constant takes the exponent of the other operands.
        log2_std: log2 of the standard deviation that shapes alone predict (for ``Unit`` scaling).
        largest_constant: the largest magnitude of the program's constants that may be among the
            numbers: a mask's.
        may_be_mask: whether an argument of two axes or more, which may be a mask, is among the
            numbers, or was added to them.
        narrowed: True if a product of narrow operands has read the value before it went through a
            loop. Within one trace, ``memo`` holds the same information.
        role: ``"weight"`` or ``"activation"`` if a forward product has read the value before it
            went through a loop, and the recipe tells them apart; else empty. Within one trace,
            ``memo`` holds the same information.
        is_statistic: True for a mean or a sum much smaller than the array it was computed from.
        lineage: how to compute the value again from an array that is stored anyway; None if it has
            to be stored itself, or has passed through a loop or a call.
        base: of a product, the product without its operands' scales, as a device stores it.
        integers: whether the program has the numbers as integers, which are never rounded.
        bound: under ``scalify``, log2 of the largest magnitude that finite data can have.
        independent: whether it depends on no float argument, but on constants, integers and random
            bits alone. Its data are then in the compute dtype, its exponent is 0.
        measured: whether the scale was found from these data, so that their largest magnitude is
            bounded from below as well, unless all are zero.
        packed: whether it holds matrices of several magnitudes, which no scale fits. Its data are
            then in the compute dtype.
        factor: where scales are only propagated, what the data are multiplied by beside
            ``2**exponent``, from 1 to 2: constant factors, which no power of two holds. A Python
            number if the program alone determines it, else a float32 array with the exponent's
            axes.
        memo: what was made of the value so far, which copies of it share.
    """

    STATIC: ClassVar = (
        "origin", "constant_value", "log2_std", "largest_constant", "may_be_mask",
        "narrowed", "role", "is_statistic", "bound", "independent", "measured", "packed",
    )  # fmt: skip

    data: jax.Array
    exponent: Exponent = 0
    origin: Origin = "stored"
    constant_value: float | None = None
    log2_std: float = 0.0
    largest_constant: float = 0.0
    may_be_mask: bool = False
    narrowed: bool = False
    role: Any = ""
    is_statistic: bool = False
    lineage: Any = dataclasses.field(default=None, repr=False)
    base: Any = dataclasses.field(default=None, repr=False)
    integers: bool = False
    bound: int = TOP
    independent: bool = False
    measured: bool = False
    packed: bool = False
    factor: Factor = 1.0
    memo: Memo = dataclasses.field(default_factory=Memo, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def scale(self) -> Exponent:
        """The exponent, to which rules of scales apply; 0 beside one for each slice."""
        return 0 if per_slice(self) else self.exponent

    @property
    def takes_scale(self) -> bool:
        return self.constant_value is not None

    def at(self, exponent: Exponent) -> jax.Array:
        if isinstance(exponent, int) and isinstance(self.exponent, int):
            if self.constant_value is not None and exponent != self.exponent:
                number = _ldexp(self.constant_value, -exponent)
                return jnp.full(self.shape, _finite(number, self.data.dtype), self.data.dtype)
            return shift(self.data, self.exponent - exponent)
        return shift(self.data, jnp.int32(self.exponent) - jnp.int32(exponent))

    def value(self) -> jax.Array:
        return materialize(self)

    def marked(self) -> ScaledValue:
        narrowed, role = self.narrowed or self.memo.narrowed, self.memo.role or self.role
        return dataclasses.replace(self, narrowed=narrowed, role=role)

    def inside(self) -> ScaledValue:
        return dataclasses.replace(self, memo=self.memo.copy(), lineage=None, base=None)

    @property
    def is_computed(self) -> bool:
        return self.origin == "forward" and self.constant_value is None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        # numbers of the program alone are static
        numbers = [
            (x, None) if isinstance(x, int | float) else (None, x)
            for x in (self.exponent, self.factor)
        ]
        known, traced = zip(*numbers, strict=True)
        static = (getattr(self, name) for name in self.STATIC)
        return (self.data, *traced, self.memo.extreme), (known, *static)

    @classmethod
    def tree_unflatten(cls, static, children):
        (known, *rest), (data, *traced, extreme) = static, children
        pairs = zip(traced, known, strict=True)
        exponent, factor = (x if number is None else number for x, number in pairs)
        fields = dict(zip(cls.STATIC, rest, strict=True))
        return cls(data, exponent, **fields, factor=factor, memo=Memo(extreme=extreme))


def wide_dtype(dtype: DTypeLike) -> DTypeLike:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def largest_rounded(fmt: Format, dtype: DTypeLike) -> float:
    """Returns a dtype's largest number of a format's precision; those above round to infinity."""
    return math.ldexp(2 - 2.0**-fmt.mantissa_bits, int(jnp.finfo(dtype).maxexp) - 1)


def shift(data: jax.Array, exponent: Exponent) -> jax.Array:
    """Returns ``data * 2**exponent``, exact if the result is a normal number of data's dtype."""
    if not isinstance(exponent, int):
        return ldexp(data, leading(exponent, data))
    if exponent == 0:
        return data
    half = exponent // 2
    limit = -jnp.finfo(data.dtype).minexp
    steps = (exponent,) if abs(exponent) <= limit else (half, exponent - half)
    for step in steps:
        step = max(-limit, min(limit, step))
        data = data * jnp.asarray(math.ldexp(1.0, step), data.dtype)
    return data


def leading(x: jax.Array, data: jax.Array) -> jax.Array:
    """Returns scales or exponents broadcast over data, of which they have the first axes."""
    return lax.broadcast_in_dim(x, data.shape, range(x.ndim))


def per_slice(x: ScaledValue) -> bool:
    """Returns whether the exponent has axes of its own, as after a scan that stacks values."""
    return not isinstance(x.exponent, int) and x.exponent.ndim > 0


def normalised(x: ScaledValue, top: int = 50) -> ScaledValue:
    """Returns the value with its largest finite magnitude at ``2^top``; Python exponents are
    unchanged.

    At 2^50, products of two data and sums of them stay in float32's range whatever the exponents
    are, and numbers down to 2^-176 of the largest are kept.
    """
    if isinstance(x.exponent, int) or x.exponent.ndim or x.constant_value is not None:
        return x
    largest = jnp.max(jnp.where(jnp.isfinite(x.data), jnp.abs(x.data), 0), initial=0.0)
    up = jnp.where(largest > 0, top - exponent_of(largest), 0)
    return dataclasses.replace(x, data=shift(x.data, up), exponent=x.exponent - up, memo=Memo())


def materialize(x: ScaledValue) -> jax.Array:
    """Returns the plain array, on which functions without a scale rule are computed."""
    if x.constant_value is not None:
        return jnp.full(x.shape, _finite(x.constant_value, x.data.dtype), x.data.dtype)
    return shift(x.data, x.exponent)


def _finite(number: float, dtype: DTypeLike) -> float:
    """Returns a finite number clipped to ``dtype``'s range: a mask of ``finfo.min`` is finite."""
    limit = float(jnp.finfo(dtype).max)
    return max(-limit, min(limit, number)) if math.isfinite(number) else number


def _ldexp(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)
