"""A program's own dtypes: traced as if its arguments were cast to a narrow dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from ..._jax import ShapedArray, entry, jex
from ..._types import PyTree
from ...formats import BF16, FP16
from ...interpret import Interpretation, Program, all_equations, is_float, trace
from ._interpretations import TableEmulation, bits_of

Dtypes: TypeAlias = Literal["as_written", "all"]
NATIVE = {FP16: jnp.float16, BF16: jnp.bfloat16}  # formats in which programs can be written
CASTS = {"astype", "array", "asarray", "convert_element_type"}


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
    native = NATIVE.get(low.fmt) if type(low) is TableEmulation else None
    if native is None and dtypes == "as_written":
        raise ValueError("audit: dtypes='as_written'; expected low to be 'fp16' or 'bf16' then")
    if native is None or dtypes == "all":
        return program, low
    assert isinstance(low, TableEmulation)
    written = dataclasses.replace(low, low_dtype=native)
    if _narrow(program):
        return program, written
    written = dataclasses.replace(written, casts=True)
    try:
        narrow = trace(f, written, *as_cast(written, (args, kwargs)), name="audit", as_jit=True)
    except Exception:
        if dtypes is None:  # it runs in float32 alone
            return program, low
        raise
    if dtypes is None and not any(map(_widens, all_equations(narrow.jaxpr))):
        return program, low
    return dataclasses.replace(narrow, arrays=program.arrays), written


def as_cast(low: Interpretation, arguments: PyTree) -> PyTree:
    if not isinstance(low, TableEmulation) or not low.casts:
        return arguments

    def cast(x):
        is_array = hasattr(x, "dtype") and hasattr(x, "shape")
        return jnp.asarray(x).astype(low.low_dtype) if is_array and is_float(x) else x

    return jax.tree.map(cast, arguments)


def _narrow(program: Program) -> bool:
    equations = all_equations(program.jaxpr)
    return any(bits == 16 for e in equations for bits in _float_bits([*e.invars, *e.outvars]))


def _float_bits(atoms: Sequence[jex.Var | jex.Literal]) -> list[int]:
    avals = [atom.aval for atom in atoms if isinstance(atom.aval, ShapedArray)]
    return [bits_of(a.dtype) for a in avals if is_float(a)]


def _widens(eqn: jex.JaxprEqn) -> bool:
    """Returns whether the program itself asks for a wider dtype than that of the operands.

    It does by a conversion, or by an operation with another dtype for its result. The promotion of
    an operand to another one's dtype, and what JAX does within an operation, are no such request.
    """
    before, after = (_float_bits(some) for some in (eqn.invars, eqn.outvars))
    if not before or max(before) > 16 or max(after, default=0) <= 16:
        return False
    if eqn.primitive.name == "convert_element_type":
        return entry(eqn) in CASTS
    if eqn.primitive.name in ("jit", "pjit"):  # of JAX's own: in the user's, each equation tells
        return bool(called := entry(eqn)) and "." not in called
    return True
