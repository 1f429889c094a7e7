"""The interpretations of both runs: arithmetic in formats given as data, and the reference."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._jax import ShapedArray, is_reference, jex
from ..._types import PyTree
from ...emulating import Emulation, added_in_order, in_arithmetic, is_exact, rounds_each
from ...formats import BF16, FP16, FP32
from ...interpret import (
    Argument,
    Equation,
    Interpretation,
    Program,
    Value,
    all_equations,
    is_float,
    is_quantization,
    rebind,
    trace,
)
from ...primitives import having
from ...rounding import (
    FP32_PARAMS,
    RANGE,
    format_params,
    is_wider,
    round_by,
    to_float64,
)
from ._wide_constants import with_wide_constants

SINGLE = having("single")
FP32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class TableEmulation(Emulation):
    """Emulation that takes the format of each equation's results as its state, from a table.

    Another table of formats needs no compilation. Values are held in ``carrier``: under a wider
    format that is tried as a fix, a value that the carrier can't hold (for float32: below 2^-126,
    or with more bits) is rounded a second time.
    """

    # stands for the format: arrays of its size are rounded to it, others to float32; None: all are
    low_dtype: DTypeLike | None = None
    cast_dtype: DTypeLike | None = None  # of the program's float arguments while it is traced
    unlifted = Interpretation.unlifted  # without a warning

    def abstract(self, leaf: Argument) -> Argument:
        own = self.cast_dtype is None or is_reference(leaf) or not is_float(leaf)
        return leaf if own else jnp.asarray(leaf).astype(self.cast_dtype)

    def is_low(self, aval: ShapedArray) -> bool:
        return self.low_dtype is None or bits_of(aval.dtype) <= bits_of(self.low_dtype)

    def params_of(self, aval: ShapedArray) -> np.ndarray:
        return format_params(self.fmt, self.saturate) if self.is_low(aval) else FP32_PARAMS

    def own_params(self, equation: Equation) -> np.ndarray | None:
        """Returns the parameters of the format that the program itself asks for in an equation, and
        that this run keeps: of its casts to 8 bits and, as written, float32; None without one."""
        floats = [a for a in equation.out_avals if is_float(a)]
        if is_quantization(equation):
            return format_params(floats[0].dtype)
        return FP32_PARAMS if floats and not any(map(self.is_low, floats)) else None

    def in_float32(self, x: np.ndarray) -> np.ndarray:
        """Returns a literal as it would be if the program had float32 in place of 16 bits.

        ``finfo(dtype).max`` and 1000 less, to which transformers clamps, become float32's largest
        number; ``x`` itself is returned without such numbers.
        """
        if self.low_dtype is None or jnp.finfo(self.low_dtype).bits > 16:
            return x
        limits = float(jnp.finfo(self.low_dtype).max) - np.array([0.0, 1000.0])
        is_limit = np.isin(np.abs(x), limits)
        if not is_limit.any():
            return x
        wide = x.astype(np.float64)  # 16 bits don't hold float32's largest number
        return np.where(is_limit, np.copysign(FP32_MAX, wide), wide)

    @functools.cached_property
    def carrier(self) -> DTypeLike:
        """float32 if rounding to it first never changes a result, else float64.

        That holds for sums, products, quotients and roots of the format's numbers if float32 has
        at least twice the format's digits and two more (Figueroa, see :class:`Emulation`), and if
        all of them are normal in float32 (backends flush subnormal numbers).
        """
        fmt = self.fmt
        lowest, beyond = fmt.min_exponent - fmt.mantissa_bits, fmt.max_exponent + 1
        fits = 2 * fmt.precision + 2 <= 24 and 2 * lowest >= -126 and 2 * beyond < 128
        return jnp.float32 if fits else jnp.float64

    def _round(self, x: jax.Array) -> jax.Array:
        return super()._round(x).astype(self.carrier)

    def lift(self, x: Argument, aval: ShapedArray) -> jax.Array:
        return _round(jnp.asarray(x), jnp.asarray(self.params_of(aval))).astype(self.carrier)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> jax.Array:
        if not self.is_low(aval):
            return jnp.asarray(x, self.carrier)
        rounded = self.fmt.decode(self.fmt.encode(x, saturate=self.saturate))
        return jnp.asarray(np.where(np.isnan(x), np.nan, rounded), self.carrier)

    def lower(self, value: jax.Array, aval: ShapedArray) -> jax.Array:
        return super().lower(value.astype(jnp.float64), aval)

    def apply(
        self, state: jax.Array, equation: Equation, inputs: Sequence[Value]
    ) -> tuple[jax.Array, Sequence[Value]]:
        if is_exact(equation):
            return state, rebind(equation, inputs, self.carrier)
        if computes_in_float32(equation):
            of_float64 = functools.partial(exact, equation)
            of_float32 = functools.partial(_in_float32, equation)
            outs = jax.lax.cond(is_wider(state), of_float64, of_float32, list(inputs))
        elif (own := in_arithmetic(equation, self.fmt)) is not None:
            of_format, of_float64 = (functools.partial(exact, e) for e in (own, equation))
            known = format_params(self.fmt)[:RANGE]
            outs = jax.lax.cond(
                jnp.all(state[:RANGE] == known), of_format, of_float64, list(inputs)
            )
        elif rounds_each(equation):
            wide = [x.astype(jnp.float64) if is_float(x) else x for x in inputs]
            own, rounded = functools.partial(exact, equation), lambda y: round_by(y, state)
            outs = added_in_order(equation, wide, own, rounded)
        else:
            outs = exact(equation, inputs)
        return state, [
            round_by(y, state).astype(self.carrier) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


def bits_of(dtype: DTypeLike) -> int:
    return jnp.finfo(dtype).bits


def computes_in_float32(equation: Equation) -> bool:
    """Returns True for decompositions and solvers of linear algebra, which have no 16-bit kernel.

    Their roundings add up inside: the exact result, rounded once, can be better by any factor.
    """
    return equation.name in SINGLE and not equation.of_complex


def exact(equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    return _computed(equation, inputs, jnp.float64)


def _in_float32(equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    outs = _computed(equation, inputs, jnp.float32)
    return [
        y.astype(jnp.float64) if is_float(a) else y
        for y, a in zip(outs, equation.out_avals, strict=True)
    ]


def _computed(equation: Equation, inputs: Sequence[Value], dtype: DTypeLike) -> list[Value]:
    cast = [
        x.astype(dtype) if is_float(a) else x
        for x, a in zip(inputs, equation.in_avals, strict=True)
    ]
    return rebind(equation, cast, dtype)


@jax.jit
def _round(x: jax.Array, params: jax.Array) -> jax.Array:
    return round_by(to_float64(x), params)


Dtypes: TypeAlias = Literal["as_written", "all"]
# Formats in which programs can be written; of another one, arrays of 16 bits have it.
NATIVE = {FP16: jnp.float16, BF16: jnp.bfloat16}


def traced_as_written(
    f: Callable,
    low: Interpretation,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    program: Program,
    dtypes: Dtypes | None,
) -> tuple[Program, Interpretation]:
    """Returns the program to audit, and the interpretation of its low-precision run.

    As written, float arguments are cast to the format's dtype, results are rounded to it where the
    program has it then, and computed in float32 elsewhere: in what the program converts to float32
    itself, as ``model.half()`` leaves it in torch. Arguments of a program that converts to a 16-bit
    dtype itself keep their own.
    """
    if dtypes not in (None, "as_written", "all"):
        raise ValueError(f"audit: dtypes={dtypes!r}; expected 'as_written', 'all' or None")
    native = None
    if type(low) is TableEmulation and low.fmt.precision < FP32.precision:
        native = NATIVE.get(low.fmt, jnp.bfloat16)
    if native is None and dtypes == "as_written":
        raise ValueError(
            "audit: dtypes='as_written'; expected low to be a format of fewer bits than float32"
        )
    # the host's functions return the dtypes that the program declares
    if native is None or dtypes == "all" or (dtypes is None and program.calls_back):
        return program, low
    assert isinstance(low, TableEmulation)
    written = dataclasses.replace(low, low_dtype=native)
    if _narrow(program):
        return restored(program, f, written, args, kwargs), written
    written = dataclasses.replace(written, cast_dtype=native)
    try:
        with warnings.catch_warnings():  # of its constants: the audit says what becomes of them
            warnings.simplefilter("ignore")
            narrow = trace(f, written, args, kwargs, name="audit", as_jit=True)
    except Exception:
        if dtypes is None:  # it runs in float32 alone
            return program, low
        raise
    return with_wide_constants(narrow, program), written


def restored(
    program: Program,
    f: Callable,
    low: TableEmulation,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> Program:
    """Returns a program traced in 16 bits with the constants of its trace in float32, if any."""
    low = dataclasses.replace(low, cast_dtype=jnp.float32)
    try:
        wide = trace(f, low, args, kwargs, name="audit", as_jit=True)
    except Exception:  # it converts to 16 bits itself, and mixes them with no other dtype
        wide = program
    return with_wide_constants(program, wide)


def _narrow(program: Program) -> bool:
    equations = all_equations(program.jaxpr)
    return any(bits == 16 for e in equations for bits in _float_bits([*e.invars, *e.outvars]))


def _float_bits(atoms: Sequence[jex.Var | jex.Literal]) -> list[int]:
    avals = [atom.aval for atom in atoms if isinstance(atom.aval, ShapedArray)]
    return [bits_of(a.dtype) for a in avals if is_float(a)]
