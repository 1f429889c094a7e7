"""Programs of JAX in low precision, as checks that look at real numbers need them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import scalewise as sw
from scalewise.emulating._emulation import Constant, EmulationWithDraws
from scalewise.formats import FP32, FP64, Format, format
from scalewise.interpret import Equation, is_float, run, trace, transform
from scalewise.interpret._rebind import InDtype

from .programs import Place, Program

DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16}
FORMATS = (*DTYPES, "float32")

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class WideLines(EmulationWithDraws):
    """Emulation that computes some lines, and the libraries called there, in another format.

    Their constants aren't rounded.
    """

    lines: frozenset[Place] = frozenset()
    wide: Format = FP32

    def apply(self, state, equation, inputs):
        if not self.lines & {place[:2] for place in (equation.source, equation.caller) if place}:
            return super().apply(state, equation, inputs)
        inputs = [x.exact if isinstance(x, Constant) else x for x in inputs]
        return EmulationWithDraws(self.wide, self.saturate).apply(state, equation, inputs)


@dataclasses.dataclass(frozen=True)
class InLow(InDtype):
    """Runs every equation on floats of one dtype; converts literals with NumPy, as JAX does.

    A conversion that is an operation would be one more for a check to look at.
    """

    def lift(self, x: Any, aval: Any) -> Any:
        if isinstance(x, Tracer) or getattr(x, "dtype", None) == self.dtype:
            return super().lift(x, aval)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a number that overflows
            return np.asarray(x).astype(self.dtype)

    def apply(self, state: Any, equation: Equation, inputs: Sequence[Any]) -> Any:
        if equation.name == "convert_element_type" and isinstance(
            inputs[0], np.ndarray | np.generic
        ):
            return state, list(inputs)
        return super().apply(state, equation, inputs)


def is_emulated(program: Program) -> bool:
    """Returns True if a program fails in a format, rather than by a policy, recipe or cast."""
    return not program.native and not isinstance(program.low, sw.Recipe) and _format(program.low)


def _format(low: Any) -> bool:
    return low in FORMATS or (isinstance(low, str) and low in ("e4m3fn",))


def emulated(
    program: Program, call: Callable, low: Any, lines: frozenset[Place] = frozenset()
) -> Run:
    """Returns ``call`` in low precision, but for some lines in the reference's format.

    Formats are emulated, with float32 between operations.
    """
    if program.native:
        return lambda *args: call(*cast(args, format(low).name))
    if isinstance(low, str) and "=" in low:
        return jax.jit(sw.autocast(call, low))
    if not _format(low):
        return jax.jit(sw.autoscale(call, recipe(low, program.device)))
    wide = FP64 if low == "float32" else FP32
    return jax.jit(transform(call, WideLines(format(low), lines=lines, wide=wide), name="expert"))


def recipe(low: Any, device: Any = None) -> sw.Recipe:
    """Returns a recipe by name, whose products are added as a device does it."""
    found = sw.recipes.CATALOGUE[low] if isinstance(low, str) else low
    return found if device is None else dataclasses.replace(found, emulate=device)


def in_low_precision(program: Program, args: Sequence[Any]) -> tuple[Run, Sequence[Any]]:
    """Returns a program that computes in its low-precision arithmetic, and what to call it with.

    Each operation of its jaxpr is on float16 or bfloat16 arrays. A CPU computes in no narrower
    format, so there it is emulated.
    """
    call = repeated(program.call, program.steps)
    if program.native:
        return call, cast(args, format(program.low).name)
    if program.low == "float32":
        return call, args
    if isinstance(program.low, sw.Recipe) or program.low not in DTYPES:
        return emulated(program, call, program.low), args
    dtype = InLow(DTYPES[program.low])
    traced = trace(call, dtype, args, {}, name="failures")
    arrays = [
        jnp.asarray(x).astype(dtype.dtype) if is_float(a) else jnp.asarray(x)
        for x, a in zip(traced.arrays, traced.in_avals, strict=True)
    ]
    return lambda *arrays: run(traced, dtype, (), arrays)[1], arrays


def cast(args: Any, dtype: Any) -> Any:
    """Returns pytrees with their float arrays in ``dtype``."""
    dtype = jnp.dtype({"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))

    def one(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return jnp.asarray(np.asarray(x), dtype)
        return x

    return jax.tree.map(one, args)


def repeated(call: Callable, steps: int) -> Callable:
    """Returns ``call`` applied to its own first result, in a loop; the last result."""

    def loop(first: Any, *rest: Any) -> Any:
        def body(state: Any, _: None) -> tuple[Any, None]:
            outs = call(state, *rest)
            return (outs[0] if isinstance(outs, tuple) else outs), None

        return jax.lax.scan(body, first, None, length=steps)[0]

    return loop if steps > 1 else call
