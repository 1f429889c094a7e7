"""The numbers that a program's source has, of which JAX's trace has only the rounded ones."""

from __future__ import annotations

import ast
import collections
import copy
import functools
import linecache
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..._jax import jex, user_positions

CONSTANT = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
Given: TypeAlias = Mapping[str | None, Sequence[ast.expr | None]]  # expressions by their names


def source_numbers(eqn: jex.JaxprEqn) -> list[float]:
    """Returns the numbers in the source's expression of an equation.

    A name stands for the numbers that its file assigns to it, gives it as a default, or passes as
    it.
    """
    file, *span = next(user_positions(eqn), ("", 0, 0, 0, 0))
    expressions, given = _parsed("".join(linecache.getlines(file)))
    return [n for x in expressions.get(tuple(span), ()) for n in _numbers(x, given)]


@functools.lru_cache(16)
def _parsed(text: str) -> tuple[dict[tuple, list[ast.expr]], Given]:
    """Returns the expressions of a source by their span, and those that it gives names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    found, given = collections.defaultdict(list), collections.defaultdict(list)
    for x in ast.walk(tree):
        if isinstance(x, ast.expr):
            found[x.lineno, x.col_offset, x.end_lineno, x.end_col_offset].append(x)
    for name, value in _given(tree):
        given[name].append(value)
    return found, given


def _numbers(node: ast.AST, given: Given) -> Iterator[float]:
    constant = _constant(node)
    if isinstance(node, ast.Name | ast.Attribute):
        yield from (x for value in given.get(_name(node), ()) for x in _constant(value))
    elif constant:
        yield from constant
    else:
        for child in ast.iter_child_nodes(node):
            yield from _numbers(child, given)


def _constant(node: ast.AST | None) -> list[float]:
    """Returns the number that an expression of numbers alone is; [] for another expression."""
    if not isinstance(node, ast.expr) or not all(isinstance(x, CONSTANT) for x in ast.walk(node)):
        return []
    own = copy.deepcopy(node)
    for x in ast.walk(own):
        if isinstance(x, ast.Constant):
            if not isinstance(x.value, int | float):
                return []
            x.value = float(x.value)  # a power of floats takes no time, and no memory
    try:
        return [float(eval(compile(ast.Expression(own), "", "eval"), {}))]
    except (ArithmeticError, TypeError):  # of code that never runs
        return []


def _name(node: ast.AST) -> str | None:
    return getattr(node, "attr", None) or getattr(node, "id", None)


def _given(tree: ast.Module) -> Iterator[tuple[str | None, ast.expr | None]]:
    """Yields the names that a file gives expressions, each with the expression."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets, value):
                yield from ((_name(x), value) for x in targets)
            case ast.AnnAssign(target, _, value):
                yield _name(target), value
            case ast.keyword(name, value):
                yield name, value
            case ast.arguments():
                positional = [*node.posonlyargs, *node.args]
                defaults: list[Any] = [None] * (len(positional) - len(node.defaults))
                pairs = zip(positional, [*defaults, *node.defaults], strict=True)
                yield from ((x.arg, value) for x, value in pairs)
                yield from zip((x.arg for x in node.kwonlyargs), node.kw_defaults, strict=True)
