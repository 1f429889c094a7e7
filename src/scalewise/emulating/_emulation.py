"""The interpretations of ``emulate``: every result in one format, or products as a device adds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._check import checked
from .._jax import ShapedArray
from ..devices import MatrixUnits
from ..formats import Format, Saturation
from ..formats import format as format_
from ..interpret import (
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    State,
    Value,
    contracts,
    is_quantization,
    map_floats,
    operation_body,
    rebind,
    unit_for,
    unit_result,
    warn_kernel,
)
from ..primitives import having
from ..rounding import from_float64, round_to, to_float64

EXACT = having("exact")


def is_exact(equation: Equation) -> bool:
    """Returns whether float results are numbers of the operands or their negatives or magnitudes.

    Rounding leaves these unchanged. Parts and magnitudes of complex numbers, whose own computation
    isn't rounded, are not among them, and neither are the program's own casts to 8 bits.
    """
    of_complex = any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in equation.in_avals)
    return equation.name in EXACT and not of_complex and not is_quantization(equation)


@checked
@dataclasses.dataclass(frozen=True)
class Emulation(Interpretation):
    """Rounds each result to a format; values are float64 arrays that hold numbers of the format.

    float64 carries every format up to 25 significant bits so that ``+ - * /`` and the square root,
    rounded to float64 and then to the format, are the correctly rounded exact results (53 bits are
    at least 2p + 2: Figueroa, "When is double rounding innocuous?", 1995), and no backend flushes
    numbers that are subnormal in the format.
    """

    fmt: Format
    saturate: Saturation = False
    # which compute the products, if some of them are for `fmt`
    units: MatrixUnits | None = dataclasses.field(default=None, kw_only=True)

    def opens(self, equation: Equation) -> bool:
        return self.units is not None and contracts(equation.eqn)  # the units add up its products

    def context(self) -> contextlib.AbstractContextManager[object]:
        return jax.enable_x64(True)

    def _round(self, x: jax.Array) -> jax.Array:
        return round_to(x, self.fmt, saturate=self.saturate)

    def lift(self, x: Argument, aval: ShapedArray) -> jax.Array:
        return self._round(to_float64(jnp.asarray(x)))

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        rounded = self.fmt.decode(self.fmt.encode(x, saturate=self.saturate))
        return jnp.asarray(np.where(np.isnan(x), np.nan, rounded), jnp.float64)

    def lower(self, value: jax.Array, aval: ShapedArray) -> jax.Array:
        return from_float64(value, aval.dtype)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        warn_kernel(equation, "emulate")
        # rounds each equation of an update function, but no equation of a reduction's operator
        inside = self if equation.name == "scatter_apply" else None
        formats = (self.fmt, self.fmt)
        unit = None if self.units is None else unit_for(equation, self.units, formats)
        if is_quantization(equation):
            return state, [round_to(inputs[0], format_(equation.out_avals[0].dtype))]
        if unit is None:
            outs = rebind(equation, inputs, jnp.float64, inside)
        else:
            outs = [unit_result(equation, unit, inputs)]
        if is_exact(equation):
            return state, outs
        return state, map_floats(lambda y, _: self._round(y), outs, equation.out_avals)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Widened:
    """A float32 array within an operation of another library, whose operand has 16 bits."""

    narrow: jax.Array


@dataclasses.dataclass(frozen=True)
class OnDevice(Interpretation):
    """Computes products as the matrix units of a device do, all else as the program has it.

    An operation of another library computes in float32; its kernels multiply 16-bit operands.
    """

    units: MatrixUnits

    def opens(self, equation: Equation) -> bool:
        return True

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return value.narrow.astype(aval.dtype) if isinstance(value, Widened) else value

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> jax.Array:
        return self.lower(value, aval)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if len(inputs) == 1 and (kept := _kept(equation, inputs[0])) is not None:
            return state, [kept]
        widened = [x for x in inputs if isinstance(x, Widened)]
        formats = [format_(x.narrow.dtype) for x in widened]
        unit = unit_for(equation, self.units, formats if len(formats) == 2 else None)
        plain = [self.lower(x, a) for x, a in zip(inputs, equation.in_avals, strict=True)]
        if unit is None:
            return super().apply(state, equation, plain)
        wide = [x.astype(np.float64 if x.dtype == np.float64 else np.float32) for x in plain]
        return state, [unit_result(equation, unit, wide).astype(equation.out_avals[0].dtype)]


def _kept(equation: Equation, x: Value) -> Widened | None:
    """Returns the result of an equation that widens 16 bits in an operation, or moves elements."""
    if isinstance(x, Widened):
        return Widened(equation.bind(x.narrow)[0]) if equation.name in EXACT else None
    (before,), after = equation.in_avals, equation.out_avals[0]
    outer = equation.within
    inside = outer is not None and operation_body(outer) is not None
    widens = equation.name == "convert_element_type" and after.dtype == np.float32
    narrow = jnp.issubdtype(before.dtype, jnp.floating) and before.dtype.itemsize == 2
    return Widened(x) if inside and widens and narrow else None
