"""Edits of source lines of torch that compute some operations in float32."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..auditing import Edit, spliced, statement
from ._torch import Node, torch

BINARY: dict[str, type[ast.operator]] = {
    "mul": ast.Mult, "add": ast.Add, "sub": ast.Sub, "rsub": ast.Sub, "div": ast.Div,
    "reciprocal": ast.Div, "pow": ast.Pow, "matmul": ast.MatMult, "mm": ast.MatMult,
    "bmm": ast.MatMult,
}  # fmt: skip
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
# Functions and methods that don't promote their operands.
BOTH = ("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "tensordot", "vecdot", "addmm",
        "addmv", "addbmm", "baddbmm", "lerp", "cross", "cdist", "bilinear", "prelu", "linear",
        "outer", "einsum", *CONVOLUTIONS)  # fmt: skip
# Modules of these aren't methods: ``self.layer(x)``.
LAYERS = {"linear", "addmm", "convolution", *CONVOLUTIONS, "layer_norm", "embedding", "group_norm"}
# Operations that raise where operands have two dtypes.
STRICT = {*BOTH, *LAYERS, "batch_norm", "scaled_dot_product_attention", "prelu_kernel",
          "cdist_forward", "trilinear"}  # fmt: skip
# Methods whose last operand is written into the first, and has its dtype.
INTO = ("index_add", "index_copy", "index_put", "scatter", "scatter_add", "masked_scatter")
STRICT.update(INTO)
CALLED = ("self", "torch", "F", "nn")  # a module of the first may return float32
CASTS = ("to", "float", "half", "bfloat16", "type", "type_as")
WITHOUT_AUTOCAST = 'with torch.autocast("cuda", enabled=False):'
FLOAT32 = ast.parse("torch.float32", mode="eval").body
# Functions that torch.export decomposes, and the operations that they become.
DECOMPOSED = {
    "square": {"pow", "mul"}, "outer": {"mul"}, "einsum": {"bmm", "mm", "mul", "sum"},
    "norm": {"linalg_vector_norm"}, "normalize": {"linalg_vector_norm", "div"},
    "logsumexp": {"exp", "sum", "log"}, "cosine_similarity": {"mul", "sum", "div"},
    "inner": {"mm", "mul", "sum"}, "tensordot": {"mm"}, "vecdot": {"mul", "sum"},
    "cross": {"linalg_cross", "to"}, "cdist": {"cdist_forward"}, "bilinear": {"trilinear"},
    "prelu": {"prelu_kernel"},
}  # fmt: skip
NUMBERS = ("math.pi", "math.e", "np.pi", "numpy.pi", "torch.pi", "math.inf", "torch.inf")
SIZES = ("size", "numel", "dim", "item")
CREATION = ("arange", "full", "zeros", "ones", "empty", "eye", "linspace", "logspace", "tensor")


def operation_of(node: Node) -> str:
    """Returns the name that torch's users have for an operation: ``softmax`` for ``_softmax``."""
    name = getattr(node.target, "_opname", str(node.target)).removeprefix("_").removeprefix("_")
    return "to" if name == "to_copy" else name.removeprefix("safe_").removeprefix("native_")


@dataclasses.dataclass(frozen=True)
class Line:
    """What a line needs: operations whose operands are cast, and what isn't or needn't be.

    Attributes:
        operations: by name, the method that casts the operands.
        numbers: names of Python numbers and of tensors of integers, which have no such method.
        scalars: operations whose first operand has no axes, so that its dtype isn't the result's.
    """

    operations: Mapping[str, str]
    numbers: Collection[str] = ()
    scalars: Collection[str] = ()


def edits(
    file: str, lines: Mapping[int, Line], *, wide: str = "float", autocast: bool = False
) -> list[Edit]:
    """Returns the edits of a file's statements: operands become ``wide``, "float" or "double".

    Under ``autocast`` each statement gets a region without it; else the parameters of modules have
    16 bits.
    """
    found: dict[tuple[int, int], tuple[ast.stmt, ast.stmt]] = {}
    for number, line in sorted(lines.items()):
        old, new = statement(file, number), statement(file, number)
        if old is None or new is None or (autocast and hasattr(old, "body")):
            continue
        old, new = found.setdefault((old.lineno, old.col_offset), (old, new))
        changed = _Editor(line, number, modules=not autocast).visit(new)
        found[old.lineno, old.col_offset] = old, ast.fix_missing_locations(changed)
    edits = [_edit(file, *pair, wide, autocast) for pair in found.values()]
    return [edit for edit in edits if edit is not None]


def _edit(file: str, old: ast.stmt, new: ast.stmt, wide: str, autocast: bool) -> Edit | None:
    changed = [(node, _as_dtype(text, wide)) for node, text in _differences(old, new)]
    for node, text in changed:
        _with_parentheses(file, node, text)
    compound = hasattr(old, "body") and changed
    last = max(node.end_lineno or 0 for node, _ in changed) if compound else old.end_lineno
    edit = spliced(file, old.lineno, last or old.lineno, changed)
    if edit is None or not autocast:
        return edit
    indent = edit.before[0][: len(edit.before[0]) - len(edit.before[0].lstrip())]
    after = f"{indent}{WITHOUT_AUTOCAST}", *(f"    {line}" for line in edit.after)
    return dataclasses.replace(edit, after=after)


def _with_parentheses(file: str, node: ast.expr | ast.stmt, text: str) -> None:
    """Lets an expression that becomes ``(a * b).float()`` have its own parentheses, if any."""
    line, end = (linecache.getline(file, n or 0).encode() for n in (node.lineno, node.end_lineno))
    first, last = node.col_offset, node.end_col_offset or 0
    opened = line[max(first - 1, 0) : first] + end[last : last + 1] == b"()"
    called = re.search(rb"[\w\])]$", line[: max(first - 1, 0)])
    if text.startswith("(") and opened and not called:
        node.col_offset, node.end_col_offset = first - 1, last + 1


def _as_dtype(text: str, wide: str) -> str:
    if wide == "float":
        return text
    return text.replace(".float()", f".{wide}()").replace("float32", "float64")


def _differences(old: ast.AST, new: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yields the smallest expressions or statements that differ, and what they become."""
    fields: list[Any] = [(getattr(old, x), getattr(new, x, None)) for x in old._fields]
    lists = [x if isinstance(x[0], list) else ([x[0]], [x[1]]) for x in fields]
    same = type(old) is type(new) and all(
        len(a) == len(b)
        and all(x == y for x, y in zip(a, b, strict=True) if not isinstance(x, ast.AST))
        for a, b in lists
    )
    positioned = isinstance(old, ast.expr | ast.stmt)
    if positioned and not same:
        simple = isinstance(new, ast.Call | ast.Name | ast.Attribute | ast.stmt)
        yield old, ast.unparse(new) if simple else f"({ast.unparse(new)})"
        return
    for a, b in lists:
        for x, y in zip(a, b, strict=True):
            if isinstance(x, ast.AST):
                yield from _differences(x, y)


class _Editor(ast.NodeTransformer):
    def __init__(self, line: Line, number: int, modules: bool):
        self.operations, self.line, self.modules = {**line.operations}, number, modules
        self.numbers, self.scalars = line.numbers, line.scalars
        if "convolution" in self.operations:
            self.operations |= dict.fromkeys(CONVOLUTIONS, self.operations["convolution"])

    def method(self, *names: str) -> str:
        """Returns how the operands of one of some operations are cast; "" for others."""
        found = [self.operations[name] for name in names if name in self.operations]
        return max(found, key=lambda method: method == "float", default="")

    def is_here(self, node: ast.expr | ast.stmt) -> bool:
        return node.lineno <= self.line <= (node.end_lineno or node.lineno)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        names = [name for name, kind in BINARY.items() if isinstance(node.op, kind)]
        how = self.method(*names)
        self.generic_visit(node)
        if how and self.is_here(node):
            counts = self._is_number(node.left) or not self.method(
                *{*names}.intersection(self.scalars)
            )
            if counts:
                node.left = self._cast(node.left, how)
            if not counts or self._is_number(node.left) or isinstance(node.op, ast.MatMult):
                node.right = self._cast(node.right, how)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        own = [name for name, kind in BINARY.items() if isinstance(node.op, kind)]
        here = self.method(*own) and self.is_here(node)
        if not here or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        changed = self.visit_BinOp(ast.copy_location(value, node))
        return ast.copy_location(ast.Assign([node.target], changed), node)  # pyright: ignore

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self.is_here(node):
            return node
        func = node.func
        called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        of_module = (
            isinstance(func, ast.Attribute)
            and _root(func) == "self"
            and (isinstance(func.value, ast.Name) or not hasattr(torch.Tensor, called))
        )
        if called == "finfo" and "float" in self.operations.values():
            node.args = [FLOAT32]
        how = self.method(called, *DECOMPOSED.get(called, ()), *["to"] * (called in CASTS))
        layer = self.method(*LAYERS) if of_module and node.args else ""
        if called in CREATION:
            for keyword in node.keywords if how == "float" else ():
                if keyword.arg == "dtype":
                    keyword.value = FLOAT32
            return node
        if not (how or layer):
            return node
        if of_module and node.args:
            if {*self.operations} & LAYERS != {"embedding"}:  # whose argument are indices
                node.args[0] = self._cast(node.args[0], how or layer)
            if layer == "float" and self.modules:
                node.func = _called(func, layer)  # converts its parameters in place
        elif called in CASTS and isinstance(func, ast.Attribute):
            x = func.value  # also a tensor of integers
            return x if self._is_cast(x, how) else _called(x, how)
        elif called == "where":
            node.args[1:] = (self._cast(x, how) for x in node.args[1:])
        elif node.args and (isinstance(func, ast.Name) or _root(func) in CALLED[1:]):
            first = int(called == "embedding")  # behind the indices
            node.args = [self._cast(x, how) if i == first or called in BOTH else x
                         for i, x in enumerate(node.args)]  # fmt: skip
        elif isinstance(func, ast.Attribute):
            func.value = self._cast(func.value, how)
            node.args = [self._cast(x, how) if called in BOTH else x for x in node.args]
        if called in INTO and node.args:
            node.args[-1] = self._cast(node.args[-1], how)
        return node

    def _cast(self, node: ast.expr, how: str) -> ast.expr:
        if self._is_number(node) or self._is_cast(node, how):
            return node
        return _called(node, how)

    def _is_cast(self, node: ast.expr, how: str) -> bool:
        """Returns whether an expression has a dtype already, if its first operand is no scalar."""
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name == how or name in CASTS:
                return name == how
            case ast.Call(keywords=[*_, ast.keyword(arg="dtype", value=dtype)]):
                return how == "float" and ast.unparse(dtype) == ast.unparse(FLOAT32)
            case ast.Call(func=func, args=[x, *_]) if (
                _root(_module(func)) in CALLED[how != "float" :]
            ):
                return self._is_cast(x, how)
            case ast.BinOp(left=x, right=y):
                return self._is_cast(y if self._is_number(x) else x, how)
            case ast.Call(func=ast.Attribute(value=x)) | ast.UnaryOp(operand=x):
                return self._is_cast(x, how)
            case ast.Subscript(value=x):
                return self._is_cast(x, how)
        return False

    def _is_number(self, node: ast.expr) -> bool:
        match node:
            case ast.BinOp(left=left, right=right):
                return self._is_number(left) and self._is_number(right)
            case ast.UnaryOp(operand=x):
                return self._is_number(x)
            case ast.Subscript(value=ast.Attribute(attr="shape")) | ast.Constant():
                return True
            case ast.Call(func=ast.Name(id=name)):
                return name in ("len", "int", "float")
            case ast.Attribute() if "finfo" in ast.unparse(node):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name in SIZES:
                return True
            case ast.Call(func=func):
                return ast.unparse(func).startswith("math.")
        return ast.unparse(node) in self.numbers or ast.unparse(node) in NUMBERS


def _called(node: ast.expr, method: str) -> ast.expr:
    call = ast.Call(ast.Attribute(node, method, ast.Load()), [], [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def _module(func: ast.expr) -> ast.expr:
    """Returns ``self.layer`` of ``self.layer.float()``."""
    match func:
        case ast.Call(func=ast.Attribute(value=own, attr="float"), args=[]):
            return own
    return func


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
