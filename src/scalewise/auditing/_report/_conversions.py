"""Statements of a user's source in another dtype: the parts of them that are converted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp

from ._patterns import name_of

# Functions whose positional arguments are numbers, so that each may be converted; the result of
# another function is converted instead.
ARITHMETIC = {
    "abs", "absolute", "add", "betaln", "cholesky", "clip", "cos", "cosh", "cumprod", "cumsum",
    "det", "digamma", "divide", "dot", "eigh", "eigvalsh", "einsum", "elu", "entr", "erf",
    "erfc", "erfinv", "exp", "exp2", "expit", "expm1", "gammaln", "gelu", "hypot", "inner",
    "inv", "leaky_relu", "log", "log10", "log1p", "log2", "log_sigmoid", "log_softmax",
    "logaddexp", "logit", "logsumexp", "lstsq", "matmul", "max", "maximum", "mean", "min",
    "minimum", "multiply", "negative", "norm", "outer", "pinv", "power", "prod", "qr",
    "reciprocal", "relu", "rsqrt", "sigmoid", "sign", "silu", "sin", "sinh", "slogdet",
    "softmax", "softplus", "solve", "solve_triangular", "sqrt", "square", "std", "subtract",
    "sum", "svd", "tan", "tanh", "var", "vdot", "xlogy",
}  # fmt: skip
# Functions of which some positional arguments are numbers, and the positions of these.
NUMBERS_AT = {"segment_sum": (0,), "take": (0,), "take_along_axis": (0,), "where": (1, 2)}
MAPS = {"map", "tree_map"}  # functions that call another for each array, and carry nothing
METHODS = {  # of an array
    "clip", "cumprod", "cumsum", "dot", "max", "mean", "min", "prod", "std", "sum", "var",
}  # fmt: skip
ARRAYS = {"T", "mT", "real", "imag"}  # attributes of an array that are arrays
INTEGERS = {"shape", "size", "ndim"}


class _NotKnownError(Exception):
    """The expression has a part of which it isn't known how it is converted."""


def operands(node: ast.stmt, names: Mapping[str, Any], gathers: bool) -> list[ast.expr]:
    """Returns the parts to convert so that a statement computes in another dtype; [] if they aren't
    known. With ``gathers`` an array is converted before it is indexed, so that its gradient is
    accumulated in that dtype."""
    value = getattr(node, "value", None)
    assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
    if not assigns or not isinstance(value, ast.expr) or _is_leaf(value):
        return []
    try:
        found = list(_operands(value, names, top=True))
    except _NotKnownError:
        return []
    return [x.value if gathers and _takes(x) else x for x in found]


def _takes(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant)


def converted(
    source: str, parts: Sequence[ast.expr], first: int, names: Mapping[str, Any], dtype: str
) -> str:
    """Returns the source of a statement that begins at line ``first`` with parts converted.

    A part's own cast, ``x.astype(y.dtype)``, is removed; its ``dtype=`` is replaced."""
    numpy = numpy_in(names)
    changes: set[tuple[Position, Position, str]] = set()
    for part in parts:
        given = [x.value for x in getattr(part, "keywords", ()) if x.arg == "dtype"]
        if given:
            changes.add((_start(given[0]), _end(given[0]), f"{numpy}.{dtype}"))
            continue
        match part:
            case ast.Call(ast.Attribute(inner, "astype")):
                pass
            case _:
                inner = part
        changes.add((_start(part), _start(part), f"{numpy}.{dtype}("))
        changes.add((_end(inner), _end(part), ")"))
    lines = [x.encode() for x in source.splitlines(keepends=True)]
    for (row, column), (last, end), text in sorted(changes, reverse=True):
        row, last = row - first, last - first
        after = lines[last][end:]
        lines[row : last + 1] = [lines[row][:column] + text.encode() + after]
    return b"".join(lines).decode()


def numpy_in(names: Mapping[str, Any]) -> str:
    """Returns the name that a file has for ``jax.numpy``."""
    return next((name for name, x in names.items() if x is jnp), "jnp")


Position = tuple[int, int]  # line and column


def _start(node: ast.expr) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> Position:
    return node.end_lineno or 0, node.end_col_offset or 0


class Loop(NamedTuple):
    """A loop whose body has a line."""

    carry: str  # the body's parameter, "" for one of ``*args``
    start: ast.expr  # what it is at first


# By function: the positions of the body and of the start among the arguments, and of the carry
# among the body's parameters.
LOOPS = {"scan": (0, 1, 0), "fori_loop": (2, 3, 1), "while_loop": (1, 2, 0)}


def loop_around(tree: ast.Module, line: int) -> Loop | None:
    """Returns the outermost of JAX's loops whose body, a function of this file, has a line."""
    around = [
        x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.Lambda)
        and x.lineno <= line <= (x.end_lineno or 0)
    ]  # fmt: skip
    for scope, own in zip([tree, *around], around, strict=False):  # from the outermost function in
        for call in (x for x in ast.walk(scope) if isinstance(x, ast.Call)):
            body, start, carry = LOOPS.get(name_of(call.func), (0, len(call.args), 0))
            found = call.args[body] if len(call.args) > start else None
            if found is own or (found and name_of(found) == getattr(own, "name", None)):
                names = [x.arg for x in own.args.args]
                return Loop(names[carry] if carry < len(names) else "", call.args[start])
    return None


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
        case ast.Tuple(elements):  # which may be trees of arrays
            for x in elements:
                computes = any(isinstance(y, ast.BinOp | ast.Call) for y in ast.walk(x))
                yield from _operands(x, names, top) if computes else ()
        case ast.Lambda(body=body) if top:
            yield from _operands(body, names, top)
        case ast.Call(function, [ast.Lambda(body=body), *_]) if name_of(function) in MAPS:
            yield from _operands(body, names, top=True)
        case ast.Attribute(value, attribute) if attribute in ARRAYS | INTEGERS:
            yield from _operands(value, names) if attribute in ARRAYS else ()
        case ast.Attribute(value) if _is_imported(value, names):
            return  # jnp.pi
        case ast.Subscript(value) if not _is_leaf(node):
            known = list(_operands(value, names, top))
            yield from [node] if known == [value] else known  # which may be one of several results
        case ast.Call(ast.Name() | ast.Attribute(), arguments) if name_of(node.func) in NUMBERS_AT:
            for i in NUMBERS_AT[name_of(node.func)]:
                yield from _operands(arguments[i], names) if i < len(arguments) else ()
        case ast.Call(ast.Attribute(ast.Subscript(ast.Attribute(array, "at"))), arguments):
            for x in (array, *arguments):
                yield from _operands(x, names)
        case ast.Call(keywords=keywords) if any(x.arg == "dtype" for x in keywords):
            yield from _result(node, top)
        case ast.Call(ast.Attribute(owner, name)) if name in ARITHMETIC:
            if _root(owner) in names and names[_root(owner)] is None:
                raise _NotKnownError  # a module, or an array
            if _is_imported(owner, names):
                yield from _arguments(node, names)
            elif name in METHODS:
                yield from _operands(owner, names)
            else:
                yield from _result(node, top)
        case ast.Call(ast.Name(name)) if name in ARITHMETIC and _is_jaxs(names, name):
            yield from _arguments(node, names)
        case ast.Call(ast.Name() | ast.Attribute()):
            yield from _result(node, top)
        case _ if _is_leaf(node):
            yield node
        case _:
            raise _NotKnownError


def _result(node: ast.Call, top: bool) -> Iterator[ast.expr]:
    inside = (x for own in node.args for x in ast.walk(own))
    if top or any(isinstance(x, ast.BinOp) for x in inside):
        raise _NotKnownError  # what the function does, or what it gets, may be at fault
    yield node


def _arguments(node: ast.Call, names: Mapping[str, Any]) -> Iterator[ast.expr]:
    for i, x in enumerate(node.args):
        axis = i > 0 and len(node.args) == 2 and isinstance(x, ast.UnaryOp | ast.Tuple)
        yield from _operands(x, names) if not axis else ()


def _is_jaxs(names: Mapping[str, Any], name: str) -> bool:
    return str(getattr(names.get(name), "__module__", "")).partition(".")[0] == "jax"


def _root(node: ast.expr) -> str:
    """Returns the name that an attribute is of, "" for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_imported(node: ast.expr, names: Mapping[str, Any]) -> bool:
    return isinstance(names.get(_root(node)), ModuleType)
