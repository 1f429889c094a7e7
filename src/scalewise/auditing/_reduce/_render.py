"""Operations as lines of Python."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...emulating import is_exact
from ...interpret import Equation, is_float
from ._graph import Origin

INFIX = {
    "add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|",
    "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "prod": "prod", "and": "all", "or": "any"}
# Expressions of operands ({0}, {1}) and parameters; all others are calls of jax.lax.
EXPRESSIONS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in INFIX.items()},
    **{f"reduce_{x}": f"jnp.{own}({{0}}, axis={{axes}})" for x, own in REDUCTIONS.items()},
    "neg": "-{0}",
    "not": "~{0}",
    "max": "jnp.maximum({0}, {1})",
    "min": "jnp.minimum({0}, {1})",
    "integer_pow": "{0} ** {y}",
    "select_n": "jnp.where({0}, {2}, {1})",
    "argmax": "jnp.argmax({0}, axis={axes[0]})",
    "argmin": "jnp.argmin({0}, axis={axes[0]})",
    "dot_general": "lax.dot_general({0}, {1}, {dimension_numbers})",
    "broadcast_in_dim": "lax.broadcast_in_dim({0}, {shape}, {broadcast_dimensions})",
    "reshape": "{0}.reshape({new_sizes})",
    "transpose": "{0}.transpose({permutation})",
    "squeeze": "jnp.squeeze({0}, {dimensions})",
    "slice": "lax.slice({0}, {start_indices}, {limit_indices}, {strides})",
    "concatenate": "lax.concatenate([{all}], {dimension})",
    "copy": "{0}",
}
NAME = re.compile(r"\b[xv]\d+\b")
PLAIN = (bool, int, float, str)


def expression(equation: Equation, operands: Sequence[str]) -> str | None:
    if len(equation.out_avals) != 1:
        return None
    name, aval = equation.name, equation.out_avals[0]
    if name == "convert_element_type":
        return _converted(operands[0], equation.in_avals[0], aval)
    if name in EXPRESSIONS:
        return EXPRESSIONS[name].format(*operands, all=", ".join(operands), **equation.params)
    function = getattr(lax, name, None)
    if not inspect.isfunction(function):
        return None
    known = inspect.signature(function).parameters
    given = {k: v for k, v in equation.params.items() if v is not None}
    if not all(k in known and _is_plain(v) for k, v in given.items()):
        return None
    if len(operands) + len(given) > len(known):
        return None
    arguments = [*operands, *(f"{k}={v!r}" for k, v in given.items())]
    return f"lax.{name}({', '.join(arguments)})"


def _converted(operand: str, before: Any, after: Any) -> str | None:
    """Returns a conversion; one between floats is left to the rounding of its result."""
    if is_float(before) and is_float(after):
        return operand
    if jnp.issubdtype(after.dtype, jnp.complexfloating):
        return None
    return f"{operand}.astype({'FLOAT' if is_float(after) else f'jnp.{after.dtype}'})"


def _is_plain(x: object) -> bool:
    return all(map(_is_plain, x)) if isinstance(x, tuple | list) else isinstance(x, PLAIN)


@dataclasses.dataclass(frozen=True)
class Slice:
    """Operations that lead from some arrays to a result, as Python."""

    inputs: dict[str, Origin]  # the arrays that they begin with, by name
    lines: tuple[str, ...]  # one for each operation
    result: str  # the name of the result
    operations: tuple[Origin, ...]  # the origins of the lines, in their order


def rendered(origins: Sequence[Origin], holds: Callable[[float], bool] | None) -> Slice | None:
    """Returns the operations among ``origins`` as Python; None if the last one has no expression.

    ``holds`` tells which numbers the format has; with None, lines don't round.

    The others, and operations without an expression or on integers alone, become inputs.
    """
    names: dict[int, str] = {}
    inputs: dict[str, Origin] = {}
    lines, operations = [], []
    floats = _depending_on_floats(origins)

    def name(origin: Origin) -> str:
        scalar = _scalar(origin)
        if scalar is not None:
            return _literal(scalar, holds)
        if origin.serial not in names:
            names[origin.serial] = f"x{len(inputs)}"
            inputs[names[origin.serial]] = origin
        return names[origin.serial]

    for origin in origins:
        equation = origin.equation
        if equation is None or origin.serial not in floats:
            continue
        text = expression(equation, [name(o) for o in origin.operands])
        if text is None:
            continue
        rounds = holds is not None and is_float(origin.aval) and not is_exact(equation)
        text = f"cast({text})" if rounds else text
        names[origin.serial] = f"v{len(lines)}"
        lines.append(f"v{len(lines)} = {text}{_comment(equation)}")
        operations.append(origin)
    if not lines or operations[-1] is not origins[-1]:
        return None
    return _without_unused(Slice(inputs, tuple(lines), f"v{len(lines) - 1}", tuple(operations)))


def _without_unused(piece: Slice) -> Slice:
    needed, kept = {piece.result}, []
    for i, line in reversed(list(enumerate(piece.lines))):
        if f"v{i}" in needed:
            needed |= set(NAME.findall(line.partition("  #")[0]))
            kept.append(i)
    kept.reverse()
    return Slice(
        {name: origin for name, origin in piece.inputs.items() if name in needed},
        tuple(piece.lines[i] for i in kept),
        piece.result,
        tuple(piece.operations[i] for i in kept),
    )


def _depending_on_floats(origins: Sequence[Origin]) -> set[int]:
    found: set[int] = set()
    for o in origins:
        if is_float(o.aval) or any(x.serial in found or is_float(x.aval) for x in o.operands):
            found.add(o.serial)
    return found


def _scalar(origin: Origin) -> Origin | None:
    equation = origin.equation
    if equation is not None and equation.name in ("broadcast_in_dim", "convert_element_type"):
        operand = _scalar(origin.operands[0])
        return operand if operand and is_float(operand.aval) == is_float(origin.aval) else None
    return origin if origin.constant is not None and origin.constant.ndim == 0 else None


def _literal(origin: Origin, holds: Callable[[float], bool] | None) -> str:
    """Returns a literal; a float that the format doesn't hold is rounded, too."""
    assert origin.constant is not None
    value = origin.constant.item()
    if not is_float(origin.aval):
        return repr(value)
    text = repr(float(str(origin.constant[()])))  # in as few digits as identify it
    if not np.isfinite(value):
        text = {"inf": "jnp.inf", "-inf": "-jnp.inf"}.get(text, "jnp.nan")
    plain = holds is None or not np.isfinite(value) or holds(value)
    return text if plain else f"cast({text})"


def _comment(equation: Equation) -> str:
    own = equation.caller or equation.source
    if not own:
        return ""
    # a file's name may hold a line break, after which the rest would be code
    name = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in Path(own[0]).name)
    return f"  # {name}:{own[1]}"
