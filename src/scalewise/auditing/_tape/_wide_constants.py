"""The constants of a program traced in 16 bits, as its float32 trace or its source has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..._jax import Jaxpr, Tracer, avals_of, jex, open_jaxpr, user_frames, with_literals
from ...interpret import Program, all_equations, is_float, nested_jaxprs
from ...primitives import having
from ._source_numbers import source_numbers

Place = tuple[object, ...]
OWN_DTYPE = having("own_dtype")


def with_wide_constants(program: Program, wide: Program) -> Program:
    """Returns a program traced in 16 bits with float32 numbers in place of its constants.

    While JAX traces, it rounds a Python number to the dtype of the array that it meets: the jaxpr
    of ``x + 1e-8`` adds 0 in FP16. The trace in float32 has the number, but not always the same
    equations, since the program may convert. So a literal becomes the one that stands at its place
    in ``wide``, or else the only one of its primitive and position that is rounded to it, or else
    the only number of the source's expression that is. An array becomes the only one that is
    rounded to it. Other constants stay as they are.
    """
    numbers: dict[int, np.ndarray] = {}
    for by_stack in (True, False):
        exact = _literals(wide.jaxpr, by_stack)
        for place, literals in _literals(program.jaxpr, by_stack).items():
            known = [x.val for x in exact.get(place, ()) if not _in_16_bits(x)]
            narrow = [x for x in literals if _in_16_bits(x) and id(x) not in numbers]
            for literal, number in zip(narrow, _matched(narrow, known), strict=True):
                if number is not None:
                    numbers[id(literal)] = np.asarray(number, np.float32)
    for eqn in all_equations(program.jaxpr):
        literals = [x for x in eqn.invars if isinstance(x, jex.Literal) and _in_16_bits(x)]
        for literal in literals:
            known = numbers.get(id(literal))
            if known is not None and not _rounds_to(literal.val, known):
                continue
            # float32 may have rounded the number to this one, too
            given = [x for x in source_numbers(eqn) if known is None or _rounds_to(x, known)]
            number = _only(literal.val, given)
            if number is not None:
                numbers[id(literal)] = np.asarray(number, np.float64)
    kernels = [e for e in all_equations(program.jaxpr) if e.primitive.name in OWN_DTYPE]
    for eqn in (e for kernel in kernels for x in nested_jaxprs(kernel) for e in all_equations(x)):
        for literal in eqn.invars:  # of code that computes in its own dtype
            numbers.pop(id(literal), None)
    body, consts = open_jaxpr(program.jaxpr)
    arrays = [x for x in open_jaxpr(wide.jaxpr)[1] if not isinstance(x, Tracer) and is_float(x)]
    wider = [_only(x, arrays) if _in_16_bits(x) else None for x in consts]
    consts = [x if y is None else y for x, y in zip(consts, wider, strict=True)]
    jaxpr = jex.ClosedJaxpr(with_literals(body, numbers), consts)
    return dataclasses.replace(program, jaxpr=jaxpr)


def _literals(jaxpr: Jaxpr, by_stack: bool) -> dict[Place, list[jex.Literal]]:
    """Returns the scalar floats of all equations by primitive and position, and by their stack."""
    found: dict[Place, dict[int, jex.Literal]] = {}
    for eqn in all_equations(jaxpr):
        stack = tuple(user_frames(eqn)) if by_stack else ()
        for i, x in enumerate(eqn.invars):
            if not isinstance(x, jex.Literal) or np.ndim(x.val):
                continue
            if is_float(avals_of([x])[0]):
                found.setdefault((eqn.primitive.name, i, stack), {})[id(x)] = x
    return {place: list(literals.values()) for place, literals in found.items()}


def _in_16_bits(x: Any) -> bool:
    aval = getattr(x, "aval", x)
    return not isinstance(x, Tracer) and is_float(aval) and aval.dtype.itemsize == 2


def _matched(narrow: Sequence[jex.Literal], known: Sequence[Any]) -> Iterator[Any]:
    """Yields for each literal the number that it was, or None."""
    in_order = len(narrow) == len(known) and all(map(_rounds_to, known, narrow))
    for i, literal in enumerate(narrow):
        yield known[i] if in_order else _only(literal.val, known)


def _only(rounded: Any, known: Sequence[Any]) -> Any:
    """Returns the one of the ``known`` that is rounded to an array; None for several or none."""
    found = [x for x in known if _rounds_to(x, rounded)]
    return found[0] if found and all(np.array_equal(x, found[0]) for x in found) else None


def _rounds_to(x: Any, rounded: Any) -> bool:
    rounded = np.asarray(getattr(rounded, "val", rounded))
    if np.shape(x) != rounded.shape:
        return False
    with np.errstate(over="ignore", under="ignore"):
        return np.array_equal(np.asarray(x).astype(rounded.dtype), rounded)
