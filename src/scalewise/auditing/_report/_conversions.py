"""Statements of a user's source in another dtype: the parts of them that are converted."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp

from ._patterns import GRADIENTS, name_of

# Functions whose positional arguments are numbers, so that each may be converted; the result of
# another function is converted instead.
ARITHMETIC = {
    "abs", "absolute", "acos", "acosh", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan",
    "arctan2", "arctanh", "argmax", "argmin", "argsort", "asin", "asinh", "atan", "atan2", "atanh",
    "average", "betaln", "cbrt", "ceil", "celu", "cholesky", "clip", "convolve", "cos", "cosh",
    "cross", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "det", "diff", "digamma",
    "digitize", "div", "divide", "dot", "eigh", "eigvalsh", "einsum", "elu", "entr", "erf",
    "erf_inv", "erfc", "erfinv", "exp", "exp2", "expit", "expm1", "float_power", "floor", "fmod",
    "gammaln", "gelu", "glu", "hypot", "i0e", "i1e", "inner", "inv", "kron", "leaky_relu", "lgamma",
    "log", "log10", "log1p", "log2", "log_ndtr", "log_sigmoid", "log_softmax", "logaddexp",
    "logaddexp2", "logistic", "logit", "logsumexp", "lstsq", "matmul", "max", "maximum", "mean",
    "median", "min", "minimum", "mish", "mod", "mul", "multiply", "nanmax", "nanmean", "nanmin",
    "nanstd", "nansum", "nanvar", "ndtr", "ndtri", "neg", "negative", "norm", "outer", "pinv",
    "pow", "power", "prod", "qr", "reciprocal", "relu", "relu6", "rem", "remainder", "round",
    "rsqrt", "searchsorted", "selu", "sigmoid", "sign", "silu", "sin", "sinc", "sinh", "slogdet",
    "soft_sign", "softmax", "softplus", "solve", "solve_triangular", "sort", "sqrt", "square",
    "squareplus", "std", "sub", "subtract", "sum", "svd", "swish", "tan", "tanh", "tensordot",
    "trapezoid", "var", "vdot", "xlog1py", "xlogy", "zeta",
}  # fmt: skip
# Functions of which the first positional argument is an array, and the others are not.
FIRST = {
    "broadcast_to", "expand_dims", "fft", "fft2", "flip", "fliplr", "flipud", "ifft", "irfft",
    "moveaxis", "pad", "ravel", "repeat", "reshape", "rfft", "roll", "segment_sum", "squeeze",
    "swapaxes", "take", "take_along_axis", "tile", "transpose", "tril", "triu",
}  # fmt: skip
# Functions of which some positional arguments are numbers, and the positions of these.
NUMBERS_AT = {**dict.fromkeys(FIRST, (0,)), "where": (1, 2)}
MAPS = {"map", "tree_map"}  # functions that call another for each array, and carry nothing
METHODS = {  # of an array
    "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "dot", "flatten", "max", "mean",
    "min", "prod", "ravel", "repeat", "reshape", "round", "sort", "squeeze", "std", "sum",
    "swapaxes", "take", "transpose", "var",
}  # fmt: skip
ARRAYS = {"T", "mT", "real", "imag"}  # attributes of an array that are arrays
INTEGERS = {"shape", "size", "ndim", "dtype"}
OWN = {*ARRAYS, *INTEGERS, *METHODS, "astype", "at"}  # attributes that only an array has


class _NotKnownError(Exception):
    """The expression has a part of which it isn't known how it is converted."""


def operands(node: ast.stmt, names: Mapping[str, Any], gathers: bool) -> list[ast.expr]:
    """Returns the parts to convert so that a statement computes in another dtype; [] if they aren't
    known. With ``gathers`` an array is converted before it is indexed, so that its gradient is
    accumulated in that dtype."""
    value = getattr(node, "value", None)
    assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
    if not assigns or not isinstance(value, ast.expr) or is_leaf(value):
        return []
    try:
        found = list(_operands(value, names, top=True))
    except _NotKnownError:
        return []
    return [x.value if gathers and _takes(x) else x for x in found]


def trees(node: ast.AST) -> list[ast.expr]:
    """Returns the trees of which ``jax.tree.map`` gives each array to a function."""
    calls = (x for x in ast.walk(node) if isinstance(x, ast.Call) and name_of(x.func) in MAPS)
    return [x for call in calls for x in call.args[1:]]


def _takes(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant)


def converted(
    source: str, parts: Sequence[ast.expr], first: int, names: Mapping[str, Any], dtype: str,
    trees: Collection[ast.expr] = (),
) -> str:  # fmt: skip
    """Returns the source of a statement that begins at line ``first`` with parts converted, those
    in ``trees`` leaf by leaf.

    A dtype that a part itself asks for, as ``x.astype(y.dtype)`` does, is replaced."""
    numpy = numpy_in(names)
    changes: set[tuple[Position, Position, str]] = set()
    for part in parts:
        asked = _dtypes(part)
        changes |= {(_start(x), _end(x), f"{numpy}.{dtype}") for x in asked}
        if not asked:
            call = f"jax.tree.map({each(numpy, dtype)}, " if part in trees else f"{numpy}.{dtype}("
            changes |= {(_start(part), _start(part), call), (_end(part), _end(part), ")")}
    lines = [x.encode() for x in source.splitlines(keepends=True)]
    for (row, column), (last, end), text in sorted(changes, reverse=True):
        row, last = row - first, last - first
        after = lines[last][end:]
        lines[row : last + 1] = [lines[row][:column] + text.encode() + after]
    return b"".join(lines).decode()


def each(numpy: str, dtype: str) -> str:
    """Returns the source of a function that converts the floats of a tree."""
    is_float = f"{numpy}.issubdtype({numpy}.result_type(x), {numpy}.floating)"
    return f"lambda x: {numpy}.{dtype}(x) if {is_float} else x"


def _dtypes(node: ast.expr) -> list[ast.expr]:
    """Returns the dtypes that a call asks for: ``dtype=``, or an argument that names one."""
    if not isinstance(node, ast.Call):
        return []
    given = [x.value for x in node.keywords if x.arg == "dtype"]
    casts = name_of(node.func) == "astype"
    named = [x for x in node.args if casts or name_of(x) in ("dtype", "float16", "bfloat16")]
    return [*given, *named[:1]]


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

    body: ast.FunctionDef | ast.Lambda
    carry: str  # the body's parameter, "" for one of ``*args``
    start: ast.expr  # what it is at first
    scans: bool  # whether the body returns the carry and an output


# By function: the positions of the body and of the start among the arguments, and of the carry
# among the body's parameters.
LOOPS = {"scan": (0, 1, 0), "fori_loop": (2, 3, 1), "while_loop": (1, 2, 0)}


def _inline(function: ast.expr, arguments: Sequence[ast.expr]) -> ast.expr | None:
    """Returns what a loop's body computes, if it is written in the loop's call."""
    at = LOOPS.get(name_of(function), (len(arguments),))[0]
    body = arguments[at] if at < len(arguments) else None
    return body.body if isinstance(body, ast.Lambda) else None


def loop_around(tree: ast.Module, line: int) -> Loop | None:
    """Returns the outermost of JAX's loops whose body, a function of this file, has a line."""
    around = [
        x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.Lambda)
        and x.lineno <= line <= (x.end_lineno or 0)
    ]  # fmt: skip
    assigned: dict[ast.AST, set[str]] = {
        x.value: targets(x) for x in ast.walk(tree) if isinstance(x, ast.Assign)
    }
    for scope, own in zip([tree, *around], around, strict=False):  # from the outermost function in
        known = assigned.get(own) or {getattr(own, "name", None)}
        for call in (x for x in ast.walk(scope) if isinstance(x, ast.Call)):
            name = name_of(call.func)
            body, start, carry = LOOPS.get(name, (0, len(call.args), 0))
            found = call.args[body] if len(call.args) > start else None
            if found is own or (found and name_of(found) in known):
                names = [x.arg for x in own.args.args]
                first = _assigned_tuple(tree, call.args[start])
                return Loop(own, names[carry] if carry < len(names) else "", first, name == "scan")
    return None


def _assigned_tuple(tree: ast.AST, node: ast.expr) -> ast.expr:
    """Returns the tuple that a name stands for, if its function assigns it once; other expressions
    as they are."""
    if not isinstance(node, ast.Name):
        return node
    around = [
        x for x in ast.walk(tree)
        if isinstance(x, ast.FunctionDef) and x.lineno <= node.lineno <= (x.end_lineno or 0)
    ]  # fmt: skip
    scope = max(around, key=lambda x: x.lineno, default=tree)
    values = [
        x.value for x in ast.walk(scope)
        if isinstance(x, ast.Assign) and [name_of(y) for y in x.targets] == [node.id]
    ]  # fmt: skip
    return values[0] if len(values) == 1 and isinstance(values[0], ast.Tuple) else node


def starts(loop: Loop, changed: Mapping[ast.stmt, Sequence[ast.expr]]) -> list[ast.expr] | None:
    """Returns which of the arrays that a loop begins with are converted, if parts of statements of
    its body are: each carry has one type. None if that isn't known."""
    first = loop.start.elts if isinstance(loop.start, ast.Tuple) else [loop.start]
    names, results = _carries(loop, len(first)), _results(loop, len(first))
    if names is None or results is None:
        return None
    parts = [part for own in changed.values() for part in own]
    wide, chosen = {x for node in changed for x in targets(node)}, set[int]()
    while True:
        for node in ast.walk(loop.body):
            if isinstance(node, ast.stmt) and _read(node) & wide:
                wide |= targets(node)
        made = {
            i for i, x in enumerate(results)
            if _read(x) & wide or any(y in parts for y in ast.walk(x))
        }  # fmt: skip
        if made <= chosen:
            break
        chosen |= made
        wide |= {names[i] for i in chosen}
    return [x for i, x in enumerate(first) if i in chosen and not _is_integer(x)]


def _is_integer(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _carries(loop: Loop, count: int) -> list[str] | None:
    """Returns the names of what a loop's body gets; None if they aren't known."""
    uses = [x for x in ast.walk(loop.body) if isinstance(x, ast.Name) and x.id == loop.carry]
    unpacked = [
        [x.id for x in node.targets[0].elts if isinstance(x, ast.Name)]
        for node in ast.walk(loop.body)
        if isinstance(node, ast.Assign) and node.value in uses
        and isinstance(node.targets[0], ast.Tuple)
    ]  # fmt: skip
    if unpacked:
        return unpacked[0] if len(unpacked[0]) == count and len(uses) == 1 else None
    parts = [
        x for x in ast.walk(loop.body)
        if (isinstance(x, ast.Subscript) or (isinstance(x, ast.Attribute) and x.attr not in OWN))
        and x.value in uses
    ]  # fmt: skip
    return [loop.carry] if count == 1 and loop.carry and not parts else None


def _results(loop: Loop, count: int) -> list[ast.expr] | None:
    """Returns what a loop's body returns for each of its carries; None if that isn't known."""
    if isinstance(loop.body, ast.Lambda):
        found: list[ast.expr | None] = [loop.body.body]
    else:
        found = [x.value for x in ast.walk(loop.body) if isinstance(x, ast.Return)]
    value = found[0] if len(found) == 1 else None
    if loop.scans:
        pair = value.elts if isinstance(value, ast.Tuple) else []
        value = pair[0] if len(pair) == 2 else None
    value = None if value is None else _assigned_tuple(loop.body, value)
    if isinstance(loop.start, ast.Tuple):
        return value.elts if isinstance(value, ast.Tuple) and len(value.elts) == count else None
    return None if value is None or isinstance(value, ast.Tuple) else [value]


def targets(node: ast.stmt) -> set[str]:
    """Returns the names that a statement gives to what it computes."""
    own = getattr(node, "targets", [getattr(node, "target", None)])
    inside = (x for target in own if target is not None for x in ast.walk(target))
    assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    return {x.id for x in inside if isinstance(x, ast.Name)} if assigns else set()


def _read(node: ast.AST) -> set[str]:
    """Returns the names of arrays that an expression, or a statement's value, is computed from; not
    of what it only compares, or of which it asks the shape."""
    if isinstance(node, ast.stmt):
        value = getattr(node, "value", None)
        return (_read(value) if value else set()) | (
            targets(node) if isinstance(node, ast.AugAssign) else set()
        )
    if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in INTEGERS):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return {name for x in ast.iter_child_nodes(node) for name in _read(x)}


def is_leaf(node: ast.expr) -> bool:
    """Returns True for a name, ``p["w"]`` and ``self.w``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name)


def _operands(node: ast.expr, names: Mapping[str, Any], top: bool = False) -> Iterator[ast.expr]:
    match node:
        case ast.Constant() | ast.Subscript(ast.Attribute(attr="shape")):
            return
        case ast.BinOp(left, _, right):
            yield from _operands(left, names)
            yield from _operands(right, names)
        case ast.UnaryOp(operand=operand):
            yield from _operands(operand, names)
        case ast.Compare(left, _, others):
            for x in (left, *others):
                yield from _operands(x, names)
        # which may be trees of arrays
        case ast.Tuple(elements) | ast.List(elements) | ast.Dict(values=elements):
            for x in elements:
                computes = any(isinstance(y, ast.BinOp | ast.Call) for y in ast.walk(x))
                yield from _operands(x, names, top) if computes else ()
        case ast.Lambda(body=body) if top:
            yield from _operands(body, names, top)
        case ast.Call(function, arguments) if top and (body := _inline(function, arguments)):
            yield from _operands(body, names, top)
        case ast.Call(function, [ast.Lambda(body=body), *_]) if name_of(function) in MAPS:
            yield from _operands(body, names, top=True)
        case ast.Call() if mapped := trees(node):
            yield from mapped
        case ast.Attribute(value, attribute) if attribute in ARRAYS | INTEGERS:
            yield from _operands(value, names) if attribute in ARRAYS else ()
        case ast.Attribute(value) if _is_imported(value, names):
            return  # jnp.pi
        case ast.Subscript(value) if not is_leaf(node):
            known = list(_operands(value, names, top))
            yield from [node] if known == [value] else known  # which may be one of several results
        case ast.Call(ast.Attribute(owner, name)) if name in FIRST & METHODS and not _is_imported(
            owner, names
        ):
            yield from _operands(owner, names)
        case ast.Call(ast.Name() | ast.Attribute(), arguments) if name_of(node.func) in NUMBERS_AT:
            for i in NUMBERS_AT[name_of(node.func)]:
                yield from _operands(arguments[i], names) if i < len(arguments) else ()
        case ast.Call(ast.Attribute(owner, "astype"), [dtype]) if _quantizes(dtype):
            yield from _operands(owner, names)
        case ast.Call(ast.Attribute(ast.Subscript(ast.Attribute(array, "at"))), arguments):
            for x in (array, *arguments):
                yield from _operands(x, names)
        case ast.Call(ast.Call(function, [ast.Lambda(body=body)])) if (
            name_of(function) in GRADIENTS
        ):
            yield from _operands(body, names, top=True)
        case ast.Call() if _dtypes(node):
            yield from _result(node)
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
        case ast.Call(ast.Name() | ast.Attribute()) if _is_of_scipy(node.func, names):
            yield from _arguments(node, names)
        case ast.Call(ast.Name() | ast.Attribute()):
            yield from _result(node, top)
        case _ if is_leaf(node):
            yield node
        case _:
            raise _NotKnownError


def _result(node: ast.Call, top: bool = False) -> Iterator[ast.expr]:
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


def _quantizes(dtype: ast.expr) -> bool:
    """Returns whether numbers of a dtype are codes of the program's own."""
    return name_of(dtype).startswith(("int", "uint", "bool", "float8", "float6", "float4"))


def _is_of_scipy(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Returns whether a function is one of ``jax.scipy``'s, whose arguments are numbers."""
    path = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    found = names.get(node.id) if isinstance(node, ast.Name) else None
    for name in reversed(path):
        found = getattr(found, name, None)
    return str(getattr(found, "__module__", "")).startswith("jax._src.scipy.")


def _root(node: ast.expr) -> str:
    """Returns the name that an attribute is of, "" for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_imported(node: ast.expr, names: Mapping[str, Any]) -> bool:
    return isinstance(names.get(_root(node)), ModuleType)
