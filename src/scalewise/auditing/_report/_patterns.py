"""Expressions of a user's source that a fix replaces, found by patterns of Python's syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp

# By the text of a fix before "in place of": the expression that is replaced, and what replaces it.
# Single capitals stand for any expression, the same one each time; `...` for a call's further
# arguments. Squares are written `square(X)`, methods of arrays as functions.
PATTERNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "log1p(x)": [("log(1 + X)", "jnp.log1p(X)")],
    "log1p(-x)": [("log(1 - X)", "jnp.log1p(-(X))")],
    "expm1(x)": [("exp(X) - 1", "jnp.expm1(X)")],
    "-expm1(x)": [("1 - exp(X)", "-jnp.expm1(X)")],
    "log(-expm1(x))": [("log(1 - exp(X))", "jnp.log(-jnp.expm1(X))")],
    "x + log(-expm1(-x))": [("log(exp(X) - 1)", "X + jnp.log(-jnp.expm1(-X))")],
    "x + log(-expm1(y - x))": [("log(exp(X) - exp(Y))", "X + jnp.log(-jnp.expm1(Y - X))")],
    "x + log(s)": [("log(S * exp(X))", "X + jnp.log(S)")],
    "exp(n * log1p(x))": [("(1 + X) ** N", "jnp.exp(N * jnp.log1p(X))")],
    "2 * sin(x / 2)**2": [("1 - cos(X)", "2 * jnp.sin(X / 2) ** 2")],
    "2 * arcsin(sqrt(x / 2))": [("arccos(1 - X)", "2 * jnp.arcsin(jnp.sqrt(X / 2))")],
    "2 * arcsinh(sqrt(x / 2))": [("arccosh(1 + X)", "2 * jnp.arcsinh(jnp.sqrt(X / 2))")],
    "sigmoid(-x)": [("1 - sigmoid(X)", "jax.nn.sigmoid(-X)")],
    "logaddexp(x, -x) - log(2)": [("log(cosh(X))", "jnp.logaddexp(X, -X) - jnp.log(2.0)")],
    "cumlogsumexp(x)": [("log(cumsum(exp(X)))", "jax.lax.cumlogsumexp(X)")],
    "slogdet(a)": [("log(det(X))", "jnp.linalg.slogdet(X)[1]")],
    "logsumexp(x) - log(n)": [
        ("log(mean(exp(X)))", "jax.nn.logsumexp(X) - jnp.log(jnp.size(X))"),
        ("log(mean(exp(X), axis=A))", "jax.nn.logsumexp(X, axis=A) - jnp.log(jnp.shape(X)[A])"),
        ("log(mean(exp(X), A))", "jax.nn.logsumexp(X, axis=A) - jnp.log(jnp.shape(X)[A])"),
    ],
    "sqrt((x - y) * (x + y))": [("sqrt(square(X) - square(Y))", "jnp.sqrt((X - Y) * (X + Y))")],
    "log_sigmoid(x)": [("log(sigmoid(X))", "jax.nn.log_sigmoid(X)")],
    "log_sigmoid(-x)": [("log(1 - sigmoid(X))", "jax.nn.log_sigmoid(-(X))")],
    "softplus(x)": [("log(1 + exp(X))", "jax.nn.softplus(X)")],
    "logaddexp(x, y)": [("log(exp(X) + exp(Y))", "jnp.logaddexp(X, Y)")],
    "logsumexp(x)": [("log(sum(exp(X), ...))", "jax.nn.logsumexp(X, ...)")],
    "logsumexp(x, b=w)": [("log(sum(W * exp(X), ...))", "jax.nn.logsumexp(X, ..., b=W)")],
    "log_softmax(x)": [
        ("log(softmax(X, ...))", "jax.nn.log_softmax(X, ...)"),
        ("log(exp(X) / sum(exp(X)))", "jax.nn.log_softmax(X, axis=None)"),
        ("log(exp(X) / sum(exp(X), ..., axis=A))", "jax.nn.log_softmax(X, axis=A)"),
        ("log(exp(X) / sum(exp(X), A, ...))", "jax.nn.log_softmax(X, axis=A)"),
    ],
    "softmax(x)": [
        ("exp(X) / sum(exp(X))", "jax.nn.softmax(X, axis=None)"),
        ("exp(X) / sum(exp(X), ..., axis=A)", "jax.nn.softmax(X, axis=A)"),
        ("exp(X) / sum(exp(X), A, ...)", "jax.nn.softmax(X, axis=A)"),
    ],
    "sum(x)": [("log(prod(exp(X), ...))", "jnp.sum(X, ...)")],
    "hypot": [("sqrt(square(X) + square(Y))", "jnp.hypot(X, Y)")],
    "the mean of squared deviations": [
        ("mean(square(X)) - square(mean(X))", "jnp.mean(jnp.square(X - jnp.mean(X)))"),
        (
            "mean(square(X), ..., axis=A) - square(mean(X, ..., axis=A))",
            "jnp.mean(jnp.square(X - jnp.mean(X, axis=A, keepdims=True)), ..., axis=A)",
        ),
        (
            "mean(square(X), A, ...) - square(mean(X, A, ...))",
            "jnp.mean(jnp.square(X - jnp.mean(X, A, keepdims=True)), A, ...)",
        ),
    ],
    "ops.l2_norm": [
        ("sqrt(sum(square(X), A, ...))", "scalewise.ops.l2_norm(X, ..., axis=A)"),
        ("sqrt(sum(square(X), ...))", "scalewise.ops.l2_norm(X, ...)"),
        ("norm(X, O, A, ...)", "scalewise.ops.l2_norm(X, ..., axis=A)"),
        ("norm(X, O, ...)", "scalewise.ops.l2_norm(X, ...)"),
        ("norm(X, ..., ord=O)", "scalewise.ops.l2_norm(X, ...)"),
        ("norm(X, ...)", "scalewise.ops.l2_norm(X, ...)"),
    ],
    # of a product that isn't taken the logarithm of, the meaning would change
    "sum(log(x))": [("log(prod(X, ...))", "jnp.sum(jnp.log(X), ...)")],
}
SCALED = (
    "(lambda *args: jax.tree.map(lambda g: jnp.float32(g) / {k}, "
    "{grad}(lambda *args: {k} * ({f})(*args){rest})(*args)))"
)
GRADIENTS = ("grad", "value_and_grad")
INLINED = 4  # names that are looked up within each other
Found = dict[str, ast.expr]  # what names stand for; of `...` a call with these arguments


def replacement(node: ast.expr, text: str, scope: ast.AST) -> str | None:
    for pattern, template in PATTERNS.get(text, ()):
        found: Found = {}
        expected = ast.parse(pattern, mode="eval").body
        if _matches(expected, node, found, _definitions(scope)):
            new = _Fill(found).visit(ast.parse(template, mode="eval").body)
            loose = isinstance(new, ast.BinOp | ast.UnaryOp) and isinstance(node, ast.Call)
            return f"({ast.unparse(new)})" if loose else ast.unparse(new)
    return None


def scaled_gradient(node: ast.expr, scale: str, source: str) -> str | None:
    if not isinstance(node, ast.Call) or _name(node.func) not in GRADIENTS or len(node.args) != 1:
        return None
    if any(x.arg in (None, "has_aux") for x in node.keywords):
        return None
    rest = "".join(f", {x.arg}={_text(x.value, source)}" for x in node.keywords)
    grad, loss = _text(node.func, source), _text(node.args[0], source)
    return SCALED.format(k=scale, grad=grad, f=loss, rest=rest)


def uncast(node: ast.expr, dtype: str, source: str) -> str | None:
    match node:
        case ast.Call(ast.Attribute(value, "astype"), [to]) if dtype in ast.unparse(to):
            return _text(value, source)
    return None


def _text(node: ast.expr, source: str) -> str:
    return ast.get_source_segment(source, node) or ast.unparse(node)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _normal(node: ast.expr) -> ast.expr:
    """Returns a square as ``square(x)``, and a method's call as a function's."""
    match node:
        case ast.BinOp(left, ast.Pow(), ast.Constant(2 | 2.0)):
            return ast.Call(ast.Name("square"), [left], [])
        case ast.BinOp(left, ast.Mult(), right) if ast.dump(left) == ast.dump(right):
            return ast.Call(ast.Name("square"), [left], [])
        case ast.Call(ast.Attribute(owner, name), arguments, keywords) if not _is_module(owner):
            return ast.Call(ast.Name(name), [owner, *arguments], keywords)
    return node


def _is_module(node: ast.expr) -> bool:
    return _name(node) in ("jnp", "np", "numpy", "jax", "lax", "nn", "linalg", "nnx", "optax")


def _definitions(scope: ast.AST) -> dict[str, ast.expr]:
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(None)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
    return {k: x for k, own in found.items() if len(own) == 2 for x in own if x is not None}


def _matches(
    expected: ast.expr,
    node: ast.expr,
    found: Found,
    known: Mapping[str, ast.expr],
    depth: int = INLINED,
) -> bool:
    if isinstance(expected, ast.Name) and len(expected.id) == 1:
        return ast.dump(found.setdefault(expected.id, node)) == ast.dump(node)

    def same(a: ast.expr, b: ast.expr) -> bool:
        return _matches(a, b, found, known, depth)

    node = _normal(node)
    if isinstance(node, ast.Name) and node.id in known and depth:
        return _matches(expected, known[node.id], found, known, depth - 1)
    match expected, node:
        case ast.Constant(a), ast.Constant(b):
            return type(b) in (int, float) and a == b
        case ast.BinOp(a, operator, b), ast.BinOp(c, other, d) if type(operator) is type(other):
            before = dict(found)
            if same(a, c) and same(b, d):
                return True
            found.clear()
            found.update(before)
            swaps = isinstance(operator, ast.Add | ast.Mult)
            return swaps and same(a, d) and same(b, c)
        case ast.Call(), ast.Call() if _name(expected.func) == _name(node.func):
            return _arguments_match(expected, node, found, same)
    return False


def _arguments_match(expected: ast.Call, node: ast.Call, found: Found, same) -> bool:
    *first, last = expected.args
    rest = isinstance(last, ast.Constant) and last.value is ...
    own = first if rest else expected.args
    if len(node.args) < len(own) or (len(node.args) > len(own) and not rest):
        return False
    if not all(map(same, own, node.args)):
        return False
    given = {x.arg: x.value for x in node.keywords}
    for keyword in expected.keywords:
        if keyword.arg not in given or not same(keyword.value, given.pop(keyword.arg)):
            return False
    if given and not rest:
        return False
    more = ast.Call(ast.Name("f"), node.args[len(own) :], [ast.keyword(*x) for x in given.items()])
    return not rest or ast.dump(found.setdefault("...", more)) == ast.dump(more)


class _Fill(ast.NodeTransformer):
    """Puts what its names stand for into a template."""

    def __init__(self, found: Found):
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.found.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        kept = [x for x in node.args if not (isinstance(x, ast.Constant) and x.value is ...)]
        rest = self.found.get("...") if len(kept) < len(node.args) else None
        node.args = kept
        self.generic_visit(node)
        if isinstance(rest, ast.Call):
            node.args += rest.args
            node.keywords += rest.keywords
        return node


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Returns all but names, whose expressions are found where they are written."""
    inside = (x for x in ast.walk(node) if not isinstance(x, ast.Name))
    return (x for x in inside if isinstance(x, ast.expr))


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
    """Returns what has to be converted so that a statement computes in another dtype; [] if that
    isn't known. With ``gathers`` arrays are converted before numbers are taken of them, so that the
    gradient is added up in that dtype."""
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

    Of a part that is itself converted, ``x.astype(y.dtype)`` or ``jnp.arange(n, dtype=x.dtype)``,
    that is changed."""
    numpy = next((name for name, x in names.items() if x is jnp), "jnp")
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
    around = [
        x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.Lambda)
        and x.lineno <= line <= (x.end_lineno or 0)
    ]  # fmt: skip
    for scope, own in zip([tree, *around], around, strict=False):  # from the outermost function in
        for call in (x for x in ast.walk(scope) if isinstance(x, ast.Call)):
            body, start, carry = LOOPS.get(_name(call.func), (0, len(call.args), 0))
            found = call.args[body] if len(call.args) > start else None
            if found is own or (found and _name(found) == getattr(own, "name", None)):
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
        case ast.Call(function, [ast.Lambda(body=body), *_]) if _name(function) in MAPS:
            yield from _operands(body, names, top=True)
        case ast.Attribute(value, attribute) if attribute in ARRAYS | INTEGERS:
            yield from _operands(value, names) if attribute in ARRAYS else ()
        case ast.Attribute(value) if _is_imported(value, names):
            return  # jnp.pi
        case ast.Subscript(value) if not _is_leaf(node):
            known = list(_operands(value, names, top))
            yield from [node] if known == [value] else known  # which may be one of several results
        case ast.Call(ast.Name() | ast.Attribute(), arguments) if _name(node.func) in NUMBERS_AT:
            for i in NUMBERS_AT[_name(node.func)]:
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
