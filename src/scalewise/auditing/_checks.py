"""What an audit refuses: programs and reference runs with nothing to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from jax.typing import ArrayLike

from .._jax import Tracer, open_jaxpr
from ..interpret import Program, is_float, is_inexact
from ..primitives import PRIMITIVES
from ._file import name_of
from ._run._compared import decides, float_arguments
from ._run._outcome import Outcome, output_name
from ._run._session import Session
from ._tape._statistics import is_discrete

# Primitives that give other numbers at each call, and what to do instead.
UNREPEATABLE = {"rng_uniform": "draws other numbers at each call: use jax.random with a key"}


def check_program(program: Program, f: Callable) -> None:
    """Raises if a program can't be audited: traced arguments, nothing to compare, its own draws."""
    name = name_of(f)
    if any(isinstance(x, Tracer) for x in program.arrays):
        raise TypeError(
            f"audit({name}, ...) was called under jit, grad or vmap; call it with arrays, and put "
            "the transformation inside: audit(jax.grad(f), ...)"
        )
    if any(isinstance(x, Tracer) for x in open_jaxpr(program.jaxpr)[1]):
        raise TypeError(
            f"audit: {name} closes over an array that another transformation traces (jit, grad, "
            "vmap): audit outside of it, with the array among the arguments"
        )
    if decides(program) and not any(map(is_discrete, program.out_avals)):
        raise _nothing_to_compare(program, f)
    for primitive, why in UNREPEATABLE.items():
        if f" {primitive}" in str(program.jaxpr):
            raise ValueError(f"audit: {name} calls {primitive}, which {why}")


def check_rounds(session: Session, outcome: Outcome, f: Callable) -> None:
    """Raises if a program that doesn't return floats computes, or decides, nothing by floats."""
    program = session.program
    floats = any(map(is_float, (*program.in_avals, *program.out_avals)))
    if not outcome.recorded and (decides(program) or not floats):
        raise _nothing_to_compare(program, f)


def _nothing_to_compare(program: Program, f: Callable) -> ValueError:
    advice = "return a loss, or what it is computed from"
    if any(is_inexact(a) and not is_float(a) for a in program.out_avals):
        advice += ". Complex numbers stay in their own dtype, which no narrow format has"
    if not any(map(is_float, program.in_avals)):
        advice += ". A Python number among the arguments is a constant: pass jnp.asarray(x)"
    return ValueError(
        f"audit: {name_of(f)} returns no float, and nothing that floats decide, so that there is "
        f"no error to measure; {advice}"
    )


def check_steps(session: Session, f: Callable) -> None:
    """Raises if a program whose state is carried over several steps returns another state."""
    if session.steps < 1:
        raise ValueError(f"audit: steps is {session.steps}; expected 1 or more")
    if session.steps > 1:
        n, program = session.state_size, session.program
        before = [(a.shape, a.dtype) for a in program.in_avals[:n]]
        after = [(a.shape, a.dtype) for a in program.out_avals[:n]]
        if not n or before != after:
            raise ValueError(
                f"audit: steps={session.steps}, but the first result of {name_of(f)} has other "
                "shapes or dtypes than its first argument; expected f(state, ...) -> state, or "
                "(state, ...)"
            )


def check_reference(session: Session, outcome: Outcome, f: Callable) -> None:
    """Raises if the reference run's outputs have NaN; says where the first one comes from."""
    if not outcome.reference_nans:
        return
    sizes = float_arguments(session.program)
    given = next((path for path, size in sizes if np.isnan(size).any()), None)
    first = next((e for e in outcome.equations if e["reference_nan"]), None)
    if given is not None or first is None:
        where = f"argument {given or 'or constant'} has NaN"
        advice = "replace it first"
    else:
        row = PRIMITIVES.get(first.primitive)
        why = (row and row.nan) or "a number without a real result"
        where = f"the first comes from {first.primitive} at {first.file}:{first.line} ({why})"
        advice = "fix that first"
    raise ValueError(
        f"audit: {name_of(f)} gives NaN in the reference run too "
        f"({output_name(outcome.reference_nans[0])}); {where}; {advice}"
    )


def check_repeatable(session: Session, outcome: Outcome, f: Callable) -> None:
    """Raises if a host callback, which each run calls anew, returns other numbers each time."""
    if not session.program.calls_back:
        return
    results = [_references(outcome)]
    for _ in range(2):  # what compiles a loop may round another way than what ran it
        results.append(_references(session.run()))
        if all(map(partial(np.array_equal, equal_nan=True), *results[-2:])):
            return
    raise ValueError(
        f"audit: {name_of(f)} calls back to the host, and gets other numbers at each call: "
        "draw them before, or with jax.random and a key"
    )


def _references(outcome: Outcome) -> list[ArrayLike]:
    return [*outcome.reference, *(x for *_, x in outcome.decisions)]
