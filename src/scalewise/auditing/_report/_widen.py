"""A statement with the operands of its expression converted to float32."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp

# Functions whose positional arguments are numbers, so that each may be converted; the result of
# another function is converted instead.
ARITHMETIC = {
    "abs", "absolute", "add", "cos", "cosh", "cumprod", "cumsum", "divide", "dot", "einsum",
    "exp", "exp2", "expm1", "gelu", "hypot", "inner", "log", "log10", "log1p", "log2",
    "log_sigmoid", "log_softmax", "logaddexp", "logsumexp", "matmul", "max", "maximum", "mean",
    "min", "minimum", "multiply", "negative", "norm", "outer", "power", "prod", "reciprocal",
    "relu", "rsqrt", "sigmoid", "sign", "silu", "sin", "sinh", "softmax", "softplus", "sqrt",
    "square", "std", "subtract", "sum", "tan", "tanh", "var", "vdot",
}  # fmt: skip
ARRAYS = {"T", "mT", "real", "imag"}  # attributes of an array that are arrays
INTEGERS = {"shape", "size", "ndim"}


class _NotKnownError(Exception):
    """The expression has a part of which it isn't known how it is converted."""


def in_float32(source: str, node: ast.stmt, names: Mapping[str, Any]) -> str:
    value = getattr(node, "value", None)
    assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
    if not assigns or not isinstance(value, ast.expr) or _is_leaf(value):
        return source
    numpy = next((name for name, x in names.items() if x is jnp), "jnp")
    try:
        found = list(_operands(value, names, top=True))
    except _NotKnownError:
        return source
    places = [(x.end_lineno or 0, x.end_col_offset or 0, ")") for x in found]
    places += [(x.lineno, x.col_offset, f"{numpy}.float32(") for x in found]
    lines = [x.encode() for x in source.splitlines(keepends=True)]
    for line, column, text in sorted(places, reverse=True):
        row = line - node.lineno
        lines[row] = lines[row][:column] + text.encode() + lines[row][column:]
    return b"".join(lines).decode()


def _is_leaf(node: ast.expr) -> bool:
    """Returns True for a name, ``p["w"]`` and ``self.w``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name)


def _operands(node: ast.expr, names: Mapping[str, Any], top: bool = False) -> Iterator[ast.expr]:
    match node:
        case ast.Constant():
            return
        case ast.BinOp(left, _, right):
            yield from _operands(left, names)
            yield from _operands(right, names)
        case ast.UnaryOp(operand=operand):
            yield from _operands(operand, names)
        case ast.Tuple(elements):
            for x in elements:
                yield from _operands(x, names)
        case ast.Attribute(value, attribute) if attribute in ARRAYS | INTEGERS:
            yield from _operands(value, names) if attribute in ARRAYS else ()
        case ast.Attribute(value) if _is_module(value, names):
            return  # jnp.pi
        case ast.Subscript(value) if not _is_leaf(node):
            yield from _operands(value, names, top)
        case ast.Call(ast.Attribute(owner, name), arguments) if name in ARITHMETIC:
            if not _is_module(owner, names):
                yield from _operands(owner, names)
                return
            for i, x in enumerate(arguments):
                axis = i > 0 and len(arguments) == 2 and isinstance(x, ast.UnaryOp | ast.Tuple)
                yield from _operands(x, names) if not axis else ()
        case ast.Call(ast.Name() | ast.Attribute()) if not top:
            yield node
        case _ if _is_leaf(node):
            yield node
        case _:
            raise _NotKnownError


def _is_module(node: ast.expr, names: Mapping[str, Any]) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and isinstance(names.get(node.id), ModuleType)
