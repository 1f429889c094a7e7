"""``emulate``: what a machine computes whose results have one format, or that adds as a device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .._check import checked
from .._decorator import Params, Result
from .._jax import ShapedArray
from .._resolve import as_format
from ..devices import MatrixUnits, MatrixUnitsLike, matrix_units
from ..formats import FP64, Format, FormatLike, Saturation
from ..formats import format as format_
from ..interpret import (
    COMPLEX,
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    State,
    Value,
    contracts,
    is_float,
    is_quantization,
    map_floats,
    operation_body,
    rebind,
    transform,
    unit_for,
    unit_result,
    warn_kernel,
)
from ..ops import in_format
from ..primitives import Family, having, names
from ..rounding import from_float64, round_to, saturation, to_float64
from ._scatter import added_in_order, rounds_each

EXACT = having("exact")
MOVES = names(lambda row: row.family is Family.STRUCTURAL)


def is_exact(equation: Equation) -> bool:
    """Returns whether float results are numbers of the operands or their negatives or magnitudes.

    Rounding leaves these unchanged. Parts and magnitudes of complex numbers, whose own computation
    isn't rounded, are not among them, and neither are the program's own casts to 8 bits.
    """
    own = equation.name in EXACT and not equation.of_complex
    return own and not is_quantization(equation)


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
        equation = in_arithmetic(equation, self.fmt) or equation
        # rounds each equation of an update function, but no equation of a reduction's operator
        inside = self if equation.name == "scatter_apply" else None
        formats = (self.fmt, self.fmt)
        unit = None if self.units is None else unit_for(equation, self.units, formats)
        if is_quantization(equation):
            return state, [round_to(inputs[0], format_(equation.out_avals[0].dtype))]
        if rounds_each(equation):
            outs = added_in_order(equation, inputs, partial(_exact, equation), self._round)
        elif unit is None:
            outs = rebind(equation, inputs, jnp.float64, inside)
        else:
            outs = [unit_result(equation, unit, inputs)]
        if is_exact(equation):
            return state, outs
        return state, map_floats(lambda y, _: self._round(y), outs, equation.out_avals)

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if equation.of_complex and equation.name not in MOVES:
            warn_kernel(equation, "emulate", what=COMPLEX)
        return super().unlifted(state, equation, inputs)


def in_arithmetic(equation: Equation, fmt: Format) -> Equation | None:
    """Returns an operation of :mod:`scalewise.ops` in the arithmetic of a format; None for another
    equation, and for an operation whose format the program has chosen."""
    eqn = in_format(equation.eqn, fmt)
    return None if eqn is None else dataclasses.replace(equation, eqn=eqn)


def _exact(equation: Equation, inputs: Sequence[Value]) -> Sequence[Value]:
    return rebind(equation, inputs, jnp.float64)


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
    if isinstance(x, Widened):
        return Widened(equation.bind(x.narrow)[0]) if equation.name in EXACT else None
    (before,), after = equation.in_avals, equation.out_avals[0]
    outer = equation.within
    inside = outer is not None and operation_body(outer) is not None
    widens = equation.name == "convert_element_type" and after.dtype == np.float32
    narrow = jnp.issubdtype(before.dtype, jnp.floating) and before.dtype.itemsize == 2
    return Widened(x) if inside and widens and narrow else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WideDraw:
    """A value computed from random bits and constants alone, in float64 without rounding."""

    exact: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that depends on no argument and no random bits, in float64, rounded and not.

    Attributes:
        exact, rounded: the value without rounding, and as the format has it.
        literal: whether it is a literal of the program, no result of arithmetic.
    """

    exact: jax.Array
    rounded: jax.Array
    literal: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class EmulationWithDraws(Emulation):
    """``Emulation`` that rounds a random draw once, rather than at each step from its bits.

    ``jax.random`` makes a float of random bits, and of that a normal or another variate. In a
    narrow format the first step would round numbers next to 1 up to 1, where the next step is
    infinite. A machine of that format has a sampler made for it. Here the draw is computed as the
    program has it, and rounded where it meets a value that depends on an argument, at a loop's
    carry, a branch or an output. A comparison reads it unrounded.
    """

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Constant:
        return self.unrounded(x, super().constant(x, aval))

    def unrounded(self, x: np.ndarray, rounded: jax.Array) -> Constant:
        """Returns a constant with its value in the format."""
        return Constant(jnp.asarray(np.asarray(x, np.float64)), rounded, literal=True)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return super().lower(self._rounded(value), aval)

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Value:
        return self._rounded(value)

    def residual(self, value: Value, aval: ShapedArray) -> Value:
        return self._rounded(value)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        drawn = _is_drawn(equation, floats)
        constant = not drawn and not equation.of_complex
        constant = constant and all(isinstance(x, Constant) for x in floats)
        exact = []
        if drawn or constant:
            wide = [x.exact if isinstance(x, WideDraw | Constant) else x for x in inputs]
            exact = rebind(equation, wide, jnp.float64)
        if drawn:
            return state, map_floats(lambda x, _: WideDraw(x), exact, equation.out_avals)
        compared = not any(map(is_float, equation.out_avals))
        plain = [
            x.exact if compared and isinstance(x, WideDraw) else self._rounded(x) for x in inputs
        ]
        state, outs = super().apply(state, equation, plain)
        if constant:
            literal = is_exact(equation) and all(x.literal for x in floats)
            outs = [
                Constant(x, y, literal) if is_float(a) else y
                for x, y, a in zip(exact, outs, equation.out_avals, strict=True)
            ]
        return state, outs

    def _rounded(self, x: Value) -> jax.Array:
        if isinstance(x, Constant):
            return x.rounded
        return self._round(x.exact) if isinstance(x, WideDraw) else x


def _is_drawn(equation: Equation, floats: Sequence[Value]) -> bool:
    if not floats:
        return equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
    drawn = any(isinstance(x, WideDraw) for x in floats)
    return drawn and all(isinstance(x, WideDraw | Constant) for x in floats)


@checked
def emulate(
    f: Callable[Params, Result],
    fmt: FormatLike | None = None,
    *,
    saturate: Saturation = False,
    device: MatrixUnitsLike | None = None,
) -> Callable[Params, Result]:
    """Returns ``f`` as a machine computes it whose only floating-point format is ``fmt``.

    Arguments, constants and the float result of each equation are rounded to the nearest number of
    the format, once, subnormals and all. ``+ - * /`` and the square root are correctly rounded;
    elementary functions are, except for the one case in 2^27 or so where float64's own error
    decides a tie; a contraction or a sum is accumulated in float64 and rounded at its end.
    Additions to elements that indices choose (``x.at[i].add(y)``, a gather's gradient) round one by
    one.

    A Python number among the arguments is one in ``f`` too: Python computes with it, exactly, until
    it meets an array. To have it rounded, pass ``jnp.asarray(x)``.

    Random draws are computed wide from their bits on and rounded once: see
    :class:`EmulationWithDraws`. Complex numbers stay in their own dtype, with a warning: their
    parts are rounded where they become real.

    It models the source's operations one by one: no fused multiply-add, no rewriting, the same bits
    under ``jit`` and eagerly.

    Args:
        f: any function of pytrees made of JAX primitives.
        fmt: a format of up to 25 significant bits, or FP64; or a name or dtype of one. None, with a
            device: every operation computes in the program's own dtypes.
        saturate: what overflow does, as for :func:`scalewise.round_to`.
        device: the device whose matrix units add up every product and convolution that they take,
            bit for bit (:func:`scalewise.devices.matrix_unit`): with one accumulator over all of K,
            in ascending order; ``devices.MatrixUnits("h100", promote=128)`` for another schedule.
            Libraries such as cuBLAS may split K. Operands in float32 are multiplied as TF32, as XLA
            does by default.

    Returns:
        A function of the same signature; float results have ``f``'s own dtypes and are numbers of
        the format (NaN and infinities where the format has none come from ``saturate=False``).

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
        ValueError: an unknown format or device, a format too wide, or neither of the two.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> float(sw.emulate(norm, "fp16")(jnp.full(4096, 16.0)))
        inf
        >>> float(sw.emulate(norm, "bf16")(jnp.full(4096, 16.0)))
        1024.0
    """
    if fmt is None:
        if device is None:
            raise ValueError("emulate: expected a format, a device, or both; got neither")
        return transform(f, OnDevice(matrix_units(device)), name="emulate")
    fmt = as_format(fmt, "emulate")
    if fmt.mantissa_bits > 24 and fmt != FP64:
        raise ValueError(
            f"emulate: {fmt.name} has {fmt.precision} significant bits; expected at most 25, or "
            "FP64 itself, since results are carried in float64"
        )
    units = None if device is None else matrix_units(device)
    emulation = EmulationWithDraws(fmt, saturation(saturate, fmt), units=units)
    return transform(f, emulation, name="emulate")
