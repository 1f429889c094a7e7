"""A program whose roundings are random: how far a transformation may be from float32.

Each equation of a program, those of its backward pass, of loops and of branches included, is
computed in float32, and what the transformation rounds there is rounded to one of the two numbers
beside it, at random, the nearer one more often: on the grid that the format has with the scale
that the transformation documents. The roundings alone explain as large a difference as there is
between a few such runs, ties that they make among the arguments of a maximum included.

Nothing is counted twice: a recipe that rounds the operands of products moves nothing else, but for
float32's own errors, and a number that is on the grid stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalewise.autoscaling._predict import of_argument, predict
from scalewise.formats import BlockFormat, Format
from scalewise.interpret import (
    CONTRACTIONS,
    Equation,
    Interpretation,
    Program,
    is_float,
    run,
    trace,
)
from scalewise.primitives import Family, params
from scalewise.scalifying import ScaledValue, features
from scalewise.scalifying._rules import RULES

# Of float32 XLA's elementary functions are some ulps off, and sums are added in another order.
FLOAT32 = 2.0**-20
LEAST = 1e-37  # about float32's smallest normal number, below which XLA flushes to zero
# Operations whose results are some of their operands' numbers, at the largest of their scales.
TAKES = (
    "neg", "abs", "reduce_max", "reduce_min", "cummax", "cummin", "real", "stop_gradient", "sort",
    "max", "min", "select_n", "concatenate", "pad", "dynamic_update_slice", "clamp",
)  # fmt: skip
BOUNDED = ("max", "min", "select_n", "clamp")  # their scale is found anew beside a constant
SUMS = (*CONTRACTIONS, "reduce_sum", "cumsum", "scatter-add")
MASK = 2.0**20  # a constant beyond it is meant as an infinity: its scale is that of this number


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The grid that numbers are rounded to.

    Attributes:
        bits: of the significand, without the leading one.
        least: the smallest number, as a multiple of the power of two below the magnitude that the
            tensor's scale is found from.
        most: the largest number, as a multiple of the same; what lies beyond saturates.
        nonzero: a number that isn't zero becomes the smallest one at least.
        finer: the scale may be up to so many binades smaller than the largest magnitude asks for,
            where something else decides (a mean, what was known before): each rounding takes one
            end or the other, since several together may decide.
        infinite: whether there are infinities; where not, they become NaN.
        up: where ``size`` itself would lie beyond ``most``, the scale is a binade larger.
    """

    bits: int
    least: float = 0.0
    most: float = math.inf
    nonzero: bool = False
    finer: int = 0
    infinite: bool = True
    up: bool = False


def current(fmt: Format | BlockFormat, *, up: bool = False) -> Rounding:
    """Rounding to a format behind a scale found from the largest magnitude.

    That lies below the format's last full binade, and not above 2^15. OCP MX brings it into the
    last binade, full or not; ``up`` into the one below where the largest magnitude would saturate.
    """
    if isinstance(fmt, BlockFormat):
        last = 2.0**fmt.element.max_exponent
        return Rounding(
            fmt.element.mantissa_bits,
            float(fmt.element.smallest) / last,
            float(fmt.element.max) / last,
            infinite=False,
            up=up,
        )
    least = float(fmt.smallest) / 2.0 ** min(fmt.max_exponent - 1, 14)
    return Rounding(fmt.mantissa_bits, least, infinite=fmt.infinities)


def static(fmt: Format) -> Rounding:
    """Rounding to a format behind a scale that isn't found from the tensor."""
    least, most = float(fmt.smallest), float(fmt.max)
    return Rounding(fmt.mantissa_bits, least, most, infinite=fmt.infinities)


@dataclasses.dataclass(frozen=True)
class Model:
    """The parts of a program that a transformation rounds; None for nothing.

    Attributes:
        results: each equation's results, and the arguments.
        forward, backward: a product's operands, of the forward pass, and those that carry a
            gradient.
        blocks: they have a scale for each block along the contracted axis.
        stacked: what a scan stacks for its backward pass, a scale for each turn.
        propagated: products and sums of two values have the scale that their operands' imply,
            whatever their own largest magnitude is.
        predicted: the operands' scale is that of ``ScaledValue.log2_std``, the standard deviation
            that the recipe predicts from shapes.
        few: both operands of a product of fewer features than ``features``.
    """

    results: Rounding | None = None
    forward: Rounding | None = None
    backward: Rounding | None = None
    blocks: bool = False
    stacked: Rounding | None = None
    propagated: bool = False
    predicted: bool = False
    few: Rounding | None = None
    features: int = 0


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Value(ScaledValue):
    """A value of :class:`Disturbed`; ``size`` is the power of two below what its scale was found
    from."""

    size: Any = 0.0

    def tree_flatten(self):
        return (self.data, self.size), (self.origin, self.constant_value, self.log2_std)

    @classmethod
    def tree_unflatten(cls, static, children):
        origin, constant_value, log2_std = static
        return cls(children[0], 0, origin, constant_value, log2_std, size=children[1])


class Disturbed(Interpretation):
    """One run of a program with random roundings, on the host."""

    inline = True

    def __init__(self, model: Model, rng: np.random.Generator):
        self.model, self.rng = model, rng
        self.constants: dict[tuple[float, Any], np.ndarray] = {}

    def lift(self, x: Any, aval: Any) -> Value:
        x = np.asarray(x)
        y = self.rounded(x, self.model.results, largest(x))
        size = power_below(largest(x))
        return Value(y, 0, "stored", log2_std=of_argument(aval.shape), size=size)

    def constant(self, x: Any, aval: Any) -> Value:
        x = np.asarray(x, aval.dtype)
        constant_value = float(x) if x.size == 1 else None
        size = 2 * power_below(largest(x))  # its data lie between 1/2 and 1
        y = self.rounded(x, self.model.results, 0.0)
        if constant_value is not None:  # the same in each turn of a loop
            y = self.constants.setdefault((constant_value, aval.dtype), y).reshape(x.shape)
        return Value(y, 0, constant_value=constant_value, size=size)

    def lower(self, value: Any, aval: Any) -> Any:
        return value.data

    def eager_iterations(self, state: Any, equation: Equation) -> int:
        return 1 << 20

    def canonical(self, value: Any, aval: Any, boundary: Any, equation: Equation) -> Value:
        origin = "backward" if equation.direction == "backward" else "forward"
        data = np.asarray(value.data)
        if boundary == "stacked" and equation.direction == "forward" and aval.shape:
            data = self.rounded(data, self.model.stacked, largest(data))
        return Value(data, 0, origin, size=np.asarray(np.max(value.size)))

    def unstack(self, value: Any, aval: Any) -> Value:
        size = np.broadcast_to(np.max(value.size), aval.shape[:1])
        return dataclasses.replace(value, size=size, memo={})

    def stack(self, value: Any, aval: Any) -> Value:
        size = float(np.max(value.size))
        data = self.rounded(np.asarray(value.data), self.model.results, size)
        return dataclasses.replace(value, data=data, size=size, memo={})

    def select(self, predicate: Any, on_true: Any, on_false: Any) -> Value:
        data = np.where(predicate, on_true.data, on_false.data)
        return dataclasses.replace(on_true, data=data, size=np.maximum(on_true.size, on_false.size))

    def apply(self, state: Any, equation: Equation, inputs: Sequence[Any]) -> tuple[Any, Any]:
        floats = [x for x in inputs if isinstance(x, Value)]
        data = [x.data if isinstance(x, Value) else x for x in inputs]
        if equation.name in CONTRACTIONS:
            axes = params.contracted_axes(equation)
            few = features(equation) < self.model.features
            data[:2] = [self.operand(*x, few=few) for x in zip(inputs[:2], axes, strict=True)]
        outs = equation.bind(*data)
        if equation.name in SUMS:  # in another order: relative to the terms, not to their sum
            terms = equation.bind(*[np.abs(x) if is_float(x) else x for x in data])
            pairs = zip(map(np.asarray, outs), map(np.asarray, terms), strict=True)
            outs = [self.as_float32(y, t) for y, t in pairs]
        family = RULES[equation.name].family
        origin = "backward" if equation.direction == "backward" else "forward"
        if family is Family.STRUCTURAL and all(x.origin == "stored" for x in floats):
            origin = "stored"
        log2_std = predict(equation, family, inputs) if self.model.predicted else 0.0
        return state, [
            self.result(equation, family, np.asarray(y), floats, origin, log2_std)
            if is_float(a)
            else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]

    def result(
        self, equation: Equation, family: Family, y: np.ndarray, floats: Sequence[Value],
        origin: Any, log2_std: float,
    ) -> Value:  # fmt: skip
        sizes = [min(float(np.max(x.size)), MASK if x.constant_value else math.inf) for x in floats]
        if family is Family.STRUCTURAL and floats:
            return Value(y, 0, origin, floats[0].constant_value, log2_std, size=max(sizes))
        constants = [abs(x.constant_value) for x in floats if x.constant_value is not None]
        number = {"mul": floats[-2:], "div": floats[1:]}.get(equation.name, [])
        number = [
            x for x in number if x.constant_value and math.frexp(x.constant_value)[0] in (0.5, -0.5)
        ]
        if number and len(floats) > len(number):  # a power of two changes the scale alone
            (own,) = (x for x in floats if x is not number[0])
            c = abs(number[0].constant_value or 0)
            size = float(np.max(own.size)) * (c if equation.name == "mul" else 1 / c)
            return Value(y, 0, origin, None, log2_std, size=size)
        propagated, size = self.model.propagated, float(power_below(largest(y)))
        constant_value = float(y) if not floats and y.size == 1 else None
        if equation.name not in TAKES:
            y = self.as_float32(y, np.abs(y))
            # a scale is propagated only from those that were found from the operands
            sizes = [
                size if x.constant_value is not None else float(power_below(largest(x.data)))
                for size, x in zip(sizes, floats, strict=True)
            ]
        elif equation.name not in BOUNDED or not any(
            0 < abs(x.constant_value or 0) < MASK for x in floats
        ):
            size = max(sizes)
        if equation.name == "mul" and (constants or propagated):
            size = math.prod(sizes)
        elif equation.name == "div" and floats[1].constant_value and equation.direction != "update":
            size = 2 * sizes[0] / sizes[1]
        elif equation.name in ("add", "sub", "add_any") and propagated:
            size = max(sizes)
        elif equation.name == "sqrt" and propagated:
            size = math.sqrt(max(sizes))
        y = self.rounded(y, self.model.results, size)
        return Value(y, 0, origin, constant_value, log2_std, size=size)

    def operand(self, x: Value, contracted: tuple[int, ...], *, few: bool) -> np.ndarray:
        rounding = self.model.backward if x.origin == "backward" else self.model.forward
        rounding = self.model.few if few and rounding is not None else rounding
        size: Any = largest(x.data)
        if self.model.predicted:
            size = 2.0 ** round(x.log2_std)
        elif self.model.blocks:
            along = contracted or tuple(range(np.ndim(x.data)))[-1:]  # of an outer product
            size = np.max(finite(x.data), along, keepdims=True, initial=0)
        return self.rounded(np.asarray(x.data), rounding, size)

    def as_float32(self, y: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """A result with float32's errors, which are relative to the terms that it is the sum of."""
        error = self.rng.integers(-1, 2, y.shape)  # often none: few bits add up exactly, to 0 too
        moved = np.where(np.isfinite(terms), terms, 0) * FLOAT32 * error
        return y + moved.astype(y.dtype)

    def rounded(self, x: np.ndarray, rounding: Rounding | None, size: Any) -> np.ndarray:
        """``x`` rounded at random; zeros, signs and what isn't finite stay."""
        if rounding is None:
            return x
        magnitude = finite(x).astype(np.float64)
        finer = self.rng.choice((0, rounding.finer)) if rounding.finer else 0
        scale = power_below(size) * 2.0**-finer
        if rounding.up:
            scale = np.where(size > rounding.most * scale, 2 * scale, scale)
        step = np.maximum(power_below(magnitude) * 2.0**-rounding.bits, rounding.least * scale)
        step = np.maximum(step, np.finfo(np.float64).smallest_normal)
        near = step * np.floor(magnitude / step + self.rng.random(x.shape))
        if rounding.nonzero:
            near = np.maximum(near, step)
        near = np.minimum(near, rounding.most * scale) if rounding.most < math.inf else near
        x = x if rounding.infinite else np.where(np.isinf(x), np.nan, x).astype(x.dtype)
        return np.where(magnitude > 0, np.copysign(near, x), x).astype(x.dtype)


def finite(x: Any) -> np.ndarray:
    """Magnitudes, those of NaN and infinities 0."""
    return np.abs(np.where(np.isfinite(x), x, 0))


def largest(x: Any) -> float:
    """The largest finite magnitude."""
    return float(np.max(finite(x), initial=0))


def power_below(x: Any) -> np.ndarray:
    """The largest power of two that isn't above a magnitude; 0 for 0."""
    return np.where(np.asarray(x) > 0, np.ldexp(1.0, np.frexp(x)[1] - 1), 0)


def traced(f: Any, arguments: Sequence[Any]) -> Program:
    """A function as :func:`disturbed` runs it."""
    return trace(f, Interpretation(), arguments, {}, name="disturbed")


def disturbed(program: Program, model: Model, rng: np.random.Generator) -> list[np.ndarray]:
    """The results of one disturbed run, in float64."""
    values = run(program, Disturbed(model, rng), ())[1]
    return [wide(y.data if isinstance(y, Value) else y) for y in values]


def wide(x: Any) -> np.ndarray:
    """Numbers in float64, complex ones in complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
