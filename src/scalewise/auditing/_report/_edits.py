"""Changes of a user's source that make a fix: the edited lines as a diff."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import linecache
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._run._equation_statistics import EquationStatistics
from .._search._findings import Finding
from .._search._fixes import Edit, Fix
from ._conversions import (
    Loop,
    converted,
    each,
    loop_around,
    numpy_in,
    operands,
    starts,
    targets,
    trees,
)
from ._patterns import expressions, replacement, scaled_gradient, text_of, uncast
from ._summary import Summary

# Arguments of libraries that keep numbers in float32, and what to pass; the first that the called
# function has is taken.
WIDE_ARGUMENTS = {
    "force_fp32_for_softmax": "True", "accumulator_dtype": "jnp.float32", "dtype": "jnp.float32",
    "mu_dtype": "jnp.float32",
}  # fmt: skip
# Modules that edited lines may need, by the names that these have there.
MODULES = {
    "jax": "import jax", "jnp": "import jax.numpy as jnp", "scalewise": "import scalewise",
}  # fmt: skip


def edits(report: Summary, finding: Finding, *, sources: bool = False) -> list[Edit]:
    """A constant is replaced where it is written, a library's by the argument that changes it.
    Lines that are computed in float32 get their operands converted; with ``sources`` also those
    that compute what they read, since a conversion rounds the gradient that it passes on. A module
    that they need, and that the file doesn't import, is imported."""
    found = _of_fix(report, finding, sources)
    return [*_new_imports(found), *found]


def _of_fix(report: Summary, finding: Finding, sources: bool) -> list[Edit]:
    fix = finding.fix
    if fix is None or (finding.file is None and not finding.callers):
        return []
    user = [_place(x) for x in finding.callers] or [(str(finding.file), finding.line)]
    if fix.replaces is not None and fix.replaces[0] == fix.replaces[1]:
        jaxs = not finding.callers and fix.edits is None
        return _kept(*user[0], fix.replaces[0], fix.word) if jaxs else []
    if fix.replaces is not None:
        constant = _first(_constant(*place, *fix.replaces) for place in user)
        if constant is not None:
            return _everywhere(report, constant, *fix.replaces)
        found = _first(_argument(finding, *place, fix.replaces) for place in user) or _first(
            _anywhere(file, *fix.replaces, bool(finding.callers)) for file, _ in user
        )
        return [found] if found else []
    if fix.edits is not None:
        return list(fix.edits)
    if not fix.indices:
        return _expressed(report, fix, user)
    chosen = [e for e in report.equations if e.index in set(fix.indices)]
    if chosen and all(e.quantizes for e in chosen):
        return _uncast(chosen[0].dtype, {(e.file, e.line) for e in chosen if e.file})
    if finding.callers and (found := _first(_argument(finding, *x, None) for x in user)):
        return [found]
    calls = {e.caller: str(e.file) for e in chosen if e.caller}
    parts = [[_called_with(library, *_place(x), fix.word)] for x, library in sorted(calls.items())]
    files: dict[str, dict[int, list[EquationStatistics]]] = {}
    for e in chosen:
        if e.file and not e.caller:
            files.setdefault(e.file, {}).setdefault(e.line, []).append(e)
    for file, lines in sorted(files.items()):
        more = dict.fromkeys(_sources(file, lines), ()) if sources else {}
        parts.append([*_widened(file, {**more, **lines}, fix.word)])
    found = [x for some in parts for x in some]
    return [x for x in found if x] if all(parts) and all(found) else []


def _new_imports(found: Sequence[Edit]) -> Iterator[Edit]:
    for file in dict.fromkeys(edit.file for edit in found):
        tree = _tree(file)
        if tree is None:
            continue
        names, text = _imports(tree), "\n".join(x for e in found if e.file == file for x in e.after)
        new = [
            line for name, line in MODULES.items()
            if names.get(name) is None and re.search(rf"(?<![\w.]){name}\.", text)
        ]  # fmt: skip
        own = [x.lineno for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)
               and getattr(x, "module", "") != "__future__"]  # fmt: skip
        if new:
            yield Edit(file, own[0] if own else 1, (), tuple(new))


def _first(found: Iterator[Edit | None]) -> Edit | None:
    return next(filter(None, found), None)


def _place(caller: str) -> tuple[str, int]:
    file, _, line = caller.rpartition(":")
    return file, int(line)


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def statement(file: str, line: int) -> ast.stmt | None:
    tree = _tree(file)
    return _statement(tree, line) if tree else None


def _statement(tree: ast.Module, line: int) -> ast.stmt | None:
    return max(_around(tree, line), key=lambda node: (node.lineno, node.col_offset), default=None)


def _around(tree: ast.Module, line: int) -> list[ast.stmt]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip


def _statements(tree: ast.Module, line: int) -> list[ast.stmt]:
    """Returns the statements of a line that have no other statements inside them."""
    return [node for node in _around(tree, line) if not hasattr(node, "body")]


def _edited(file: str, first: int, last: int, change: Callable[[str], str]) -> Edit | None:
    before = linecache.getlines(file)[first - 1 : last]
    after = change("".join(before)).splitlines()
    lines = [x.rstrip("\n") for x in before]
    return Edit(file, first, tuple(lines), tuple(after)) if after != lines else None


# -- expressions ----------------------------------------------------------------------------------


def _expressed(report: Summary, fix: Fix, user: Sequence[tuple[str, int]]) -> list[Edit]:
    """Returns the edits of the expressions that a fix replaces: a loss or a function's call.

    If a function has several such expressions, only the one nearest to the finding is edited,
    unless the fix is for all of them.

    A loss in the format can't be multiplied by a scale that the format doesn't hold.
    """
    found: list[Edit] = []
    if fix.power and 2.0**fix.power <= report.largest:
        places = {_place(e.caller) if e.caller else (e.file, e.line) for e in report.equations}
        for file in sorted({file for file, _ in places if file}):
            tree, source = _tree(file), "".join(linecache.getlines(file))
            if tree is None:
                continue
            change = partial(scaled_gradient, scale=f"2.0**{fix.power}", source=source)
            for edit in _changed(file, tree, change):
                lines = _body(_function(tree, edit.line))
                found += [edit] if any(x == file and line in lines for x, line in places) else []
        return found if len(found) == 1 else []
    for file, line in dict.fromkeys(user):
        tree = _tree(file)
        scope = _function(tree, line) if tree else None
        if scope:
            change = partial(replacement, texts=fix.better, scope=scope)
            edits = sorted(_changed(file, scope, change), key=lambda x: abs(x.line - line))
            found += edits if fix.everywhere or len(fix.better) > 1 else edits[:1]
    return found


def _uncast(dtype: str, places: Collection[tuple[str, int]]) -> list[Edit]:
    found = []
    for file, line in sorted(places):
        node = statement(file, line)
        change = partial(uncast, dtype=dtype, source="".join(linecache.getlines(file)))
        found += _changed(file, node, change) if node else []
    return found


def _function(tree: ast.Module, line: int) -> ast.AST:
    around = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]  # fmt: skip
    named = [node for node in around if isinstance(node, ast.FunctionDef)]
    return max(named, key=lambda node: node.lineno, default=tree)


def _body(node: ast.AST) -> Container[int]:
    """Returns the lines of a function; of a module, all."""
    last = getattr(node, "end_lineno", sys.maxsize)
    return range(getattr(node, "lineno", 1), last + 1)


def _changed(file: str, scope: ast.AST, change: Callable[[ast.expr], str | None]) -> list[Edit]:
    """Returns an edit of each statement with expressions that ``change`` returns another text for;
    of expressions within each other, for the outermost."""
    statements: dict[tuple[int, int], list[tuple[ast.expr, str]]] = {}
    inside: set[ast.AST] = set()
    imported = _imports(_tree(file))
    modules = {"jnp": jnp, "jax": jax, "scalewise": sys.modules["scalewise"]}
    names = {k: name for k, own in modules.items() for name, x in imported.items() if x is own}
    for node in expressions(scope):
        text = None if node in inside else change(node)
        if text is None:
            continue
        for module, short in names.items():
            text = re.sub(rf"\b{module}\.", f"{short}.", text)
        inside |= set(ast.walk(node))
        at = statement(file, node.lineno)
        whole = node if at is None or hasattr(at, "body") else at
        span = whole.lineno, whole.end_lineno or whole.lineno
        statements.setdefault(span, []).append((node, text))
    found = [spliced(file, *span, own) for span, own in statements.items()]
    return [edit for edit in found if edit]


def spliced(
    file: str, first: int, last: int, new: Sequence[tuple[ast.expr | ast.stmt, str]]
) -> Edit | None:
    """Returns the edit of some lines that gives expressions, or statements, other texts."""
    return _edited(file, first, last, partial(_spliced, new, first))


def _spliced(new: Sequence[tuple[ast.expr | ast.stmt, str]], first: int, source: str) -> str:
    lines = [x.encode() for x in source.splitlines(keepends=True)]
    for node, text in sorted(new, key=lambda x: (-x[0].lineno, -x[0].col_offset)):
        start, end = node.lineno - first, (node.end_lineno or node.lineno) - first
        after = lines[end][node.end_col_offset :]
        lines[start : end + 1] = [lines[start][: node.col_offset] + text.encode() + after]
    return b"".join(lines).decode()


# -- constants ------------------------------------------------------------------------------------


def _everywhere(report: Summary, first: Edit, old: float, new: float) -> list[Edit]:
    """Returns a constant's edit, and those of other lines of its file that use the same number."""
    alike = [x for x in report.literals if x.number == old and x.file == first.file]
    others = [_constant(str(x.file), x.line, old, new) for x in alike]
    return list(dict.fromkeys([first, *filter(None, others)]))


def _constant(file: str, line: int, old: float, new: float) -> Edit | None:
    return _edited(file, *_lines(file, line), lambda text: _replaced(text, old, new))


def _kept(file: str, line: int, number: float, dtype: str) -> list[Edit]:
    """Returns the edit that gives a number a wider dtype, to which JAX promotes what it meets."""
    text = f"{numpy_in(_imports(_tree(file)))}.{dtype}({{}})"
    found = _edited(file, *_lines(file, line), lambda own: _replaced(own, number, number, text))
    return [found] if found else []


def _lines(file: str, line: int) -> tuple[int, int]:
    """Returns the first and the last line of a simple statement."""
    node = statement(file, line)
    return _span(node) if node and not hasattr(node, "body") else (line, line)


def _anywhere(file: str, old: float, new: float, called: bool) -> Edit | None:
    """Returns the edit of a constant that only one line of a file has, such as ``EPS = 1e-8``.

    If a library is ``called`` with it, that line has to give it a name: in another one it may be
    the argument of another call."""
    lines = linecache.getlines(file)
    places = [n for n, text in enumerate(lines, 1) if _replaced(text, old, new) != text]
    if len(places) != 1:
        return None
    node = statement(file, places[0])
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    names = isinstance(value, ast.Constant) and isinstance(value.value, float)
    if called and not (names or isinstance(node, ast.FunctionDef)):
        return None
    return _edited(file, places[0], places[0], lambda text: _replaced(text, old, new))


def _replaced(text: str, old: float, new: float, written: str = "{}") -> str:
    """Returns source in which one number is another wherever it stands, as ``written`` has it."""
    indent = len(text) - len(text.lstrip())
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text[indent:]).readline):
            if token.type == tokenize.NUMBER and _equal(ast.literal_eval(token.string), abs(old)):
                found.append(token)
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass
    lines = text.splitlines(keepends=True)
    for token in found[::-1]:
        (row, start), (_, end) = token.start, token.end
        shift, own = indent if row == 1 else 0, lines[row - 1]
        number = token.string if old == new else f"{abs(new):.5g}"
        lines[row - 1] = own[: start + shift] + written.format(number) + own[end + shift :]
    return "".join(lines)


def _equal(a: Any, b: float) -> bool:
    with np.errstate(all="ignore"):
        return isinstance(a, float | int) and a is not True and np.float32(a) == np.float32(b)


# -- arguments of libraries -----------------------------------------------------------------------


def _argument(
    finding: Finding, file: str, line: int, replaces: tuple[float, float] | None
) -> Edit | None:
    """Returns the edit of a call of the library whose line is at fault: it gets an argument.

    With a constant, the call has a parameter with it as its default or argument. Without one, the
    function that is called is at fault itself, and has an argument for float32.
    """
    tree = _tree(file)
    if tree is None:
        return None
    names, found = _imports(tree), []
    for node in ast.walk(tree):
        called = _resolved(node.func, names) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or any(x.arg is None for x in node.keywords):
            continue  # ``**kwargs`` may have the argument
        if called is not None and _is_of(called, str(finding.file)):
            argument = _new_argument(called, node, finding, replaces)
            found += [(node, argument)] if argument else []
    own = next((x for x in tree.body if x.lineno <= line <= (x.end_lineno or 0)), None)
    near = [x for x in found if own is not None and own.lineno <= x[0].lineno <= own.end_lineno]
    read = [x for x in found if own and _is_read(tree, x[0], own)]
    found = near or read or (found if replaces else [])  # instead, the call at fault is edited
    if not found or (not near and len(found) > 1):  # which of several isn't known
        return None
    before = [x for x in found if x[0].lineno <= line]
    node, (name, value) = max(before or found, key=lambda x: x[0].lineno)
    return _with_argument(file, node, name, value)


def _called_with(library: str, file: str, line: int, dtype: str) -> Edit | None:
    """Returns the edit of a library's call at a line, whose trees of arrays get a dtype; so does
    the object whose method it is, if it has keywords alone."""
    tree = _tree(file)
    node, names = (_statement(tree, line), _imports(tree)) if tree else (None, {})
    found = [x for x in ast.walk(node) if isinstance(x, ast.Call)] if node else []
    calls = [(x, _resolved(x.func, names)) for x in found]
    # what isn't imported may be a method of an object that the library has made
    unknown = (x for x, f in calls if f is None)
    methods = {x: x.func.value for x in unknown if isinstance(x.func, ast.Attribute)}
    makers = {x for owner in methods.values() for x in ast.walk(owner)}  # of such objects
    own = [x for x, f in calls if _is_of(f, library) and x not in makers] or [*methods]
    if node is None or not own:
        return None
    numpy, source = numpy_in(names), "".join(linecache.getlines(file))
    given, fixed = own[0], (ast.Constant, ast.Starred)
    arrays = [*itertools.takewhile(lambda x: not isinstance(x, fixed), given.args)]
    if len(arrays) < 2:
        keywords = [x.value for x in given.keywords if not isinstance(x.value, fixed)]
        parts = [(x, f"{numpy}.{dtype}") for x in arrays or keywords]
        if given in methods and not arrays:  # of a state, which has integers
            parts.append((methods[given], each(numpy, dtype)))
        changes = [(x, f"jax.tree.map({f}, {text_of(x, source)})") for x, f in parts]
        return spliced(file, *_span(node), changes)
    texts = ", ".join(text_of(x, source) for x in arrays)
    span = ast.Tuple(
        arrays, lineno=arrays[0].lineno, col_offset=arrays[0].col_offset,
        end_lineno=arrays[-1].end_lineno, end_col_offset=arrays[-1].end_col_offset,
    )  # fmt: skip
    return spliced(file, *_span(node), [(span, f"*jax.tree.map({each(numpy, dtype)}, ({texts}))")])


def _is_read(tree: ast.Module, node: ast.expr, reader: ast.stmt) -> bool:
    """Returns whether a statement reads what the module's statement around ``node`` defines."""
    around = next(x for x in tree.body if x.lineno <= node.lineno <= (x.end_lineno or 0))
    defined = targets(around) | {getattr(around, "name", "")}
    return any(isinstance(x, ast.Name) and x.id in defined for x in ast.walk(reader))


def _with_argument(file: str, node: ast.Call, name: str, value: str) -> Edit | None:
    given = next((x.value for x in node.keywords if x.arg == name), None)
    at = given or node

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        row = (at.end_lineno or at.lineno) - node.lineno
        end = len(lines[row].encode()[: at.end_col_offset].decode())
        if given is not None and given.lineno == given.end_lineno:
            start = len(lines[row].encode()[: given.col_offset].decode())
            lines[row] = lines[row][:start] + value + lines[row][end:]
        else:
            comma = ", " if node.args or node.keywords else ""
            lines[row] = f"{lines[row][: end - 1]}{comma}{name}={value}{lines[row][end - 1 :]}"
        return "".join(lines)

    return _edited(file, node.lineno, node.end_lineno or node.lineno, change)


def _new_argument(
    called: Any, node: ast.Call, finding: Finding, replaces: tuple[float, float] | None
) -> tuple[str, str] | None:
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return None
    if replaces is None:
        own = inspect.getsourcefile(inspect.unwrap(called)) == finding.file
        moment = "moment" in finding.function  # optax keeps these functions in another file
        names = [
            x for x in WIDE_ARGUMENTS
            if x in parameters and (own or (moment and x.endswith("or_dtype")))
        ]  # fmt: skip
        return (names[0], WIDE_ARGUMENTS[names[0]]) if names else None
    old, new = replaces
    given = {x.arg: x.value for x in node.keywords}
    for name, parameter in parameters.items():
        value = parameter.default
        if name in given:
            value = getattr(given[name], "value", None)
        if _equal(value, old):
            return name, f"{new:.5g}"
    return None


def _imports(tree: ast.Module | None) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if tree is None:
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for x in node.names:
                own = x.name if x.asname else x.name.partition(".")[0]
                found[x.asname or own] = sys.modules.get(own)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for x in node.names:
                module = sys.modules.get(f"{node.module}.{x.name}")
                own = module or getattr(sys.modules.get(node.module), x.name, None)
                found[x.asname or x.name] = own
    names = [x for x in ast.walk(tree) if isinstance(x, ast.Name)]
    bound = {x.id for x in names if isinstance(x.ctx, ast.Store)}
    bound |= {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
    for name in {x.id for x in names} - bound - set(found):  # imported by a notebook's other cell
        found[name] = getattr(sys.modules["__main__"], name, None)
    return found


def _resolved(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _resolved(node.value, names)
        return getattr(base, node.attr, None) if base is not None else None
    return None


def _is_of(called: Any, library: str) -> bool:
    package = str(getattr(called, "__module__", None)).partition(".")[0]
    return package in Path(library).parts


# -- lines in float32 -----------------------------------------------------------------------------


def _widened(
    file: str, lines: Mapping[int, Sequence[EquationStatistics]], dtype: str
) -> list[Edit]:
    """Returns the edits of statements, and of what a loop begins with if a statement computes what
    it carries: a loop carries one type."""
    tree = _tree(file)
    if tree is None:
        return []
    names, found = _imports(tree), dict[tuple[int, int], list[ast.expr]]()
    loops: dict[ast.AST, tuple[Loop, dict[ast.stmt, list[ast.expr]]]] = {}
    mapped: list[ast.expr] = []
    for line, computed in sorted(lines.items()):
        loop = loop_around(tree, line)
        gathers = any(e.primitive.startswith("scatter") for e in computed)
        for node in _statements(tree, line):
            parts = operands(node, names, gathers)
            if not parts:
                continue  # a run of the program with the others tells whether they do
            found.setdefault(_span(node), []).extend(parts)
            mapped += trees(node)
            if loop is not None:
                loops.setdefault(loop.body, (loop, {}))[1][node] = parts
    for loop, changed in loops.values():
        known = starts(loop, changed)
        first = [loop.start] if known is None else known
        is_tree = known is None or any("tree" in ast.unparse(node) for node in changed)
        mapped += first if is_tree else []
        for part in first:
            around = _statement(tree, part.lineno)
            if around is None or hasattr(around, "body"):
                return []
            found.setdefault(_span(around), []).append(part)
    edits = []
    for (first, last), parts in found.items():
        change = partial(
            converted, parts=parts, first=first, names=names, dtype=dtype, trees=mapped
        )
        edits.append(_edited(file, first, last, change))
    return [x for x in edits if x] if all(edits) else []


def _sources(file: str, lines: Iterable[int]) -> Iterator[int]:
    """Yields the lines that assign the names that some lines read, in the same function."""
    tree = _tree(file) or ast.Module([], [])
    for line in lines:
        names = (x for own in _statements(tree, line) for x in ast.walk(own))
        read = {x.id for x in names if isinstance(x, ast.Name)}
        for node in ast.walk(_function(tree, line)):
            if isinstance(node, ast.stmt) and node.lineno < line and targets(node) & read:
                yield node.lineno


def _span(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno
