"""Runs a program with edits of its source: the code of its live functions is exchanged meanwhile.

IPython's autoreload exchanges functions' code in the same way, which decorated functions, methods
and closures keep using. JAX's caches are cleared before and after.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import jax

from .._run._outcome import OutputError
from .._search._findings import Finding
from .._search._measure import better
from .._thresholds import ENOUGH, FEW_ROUNDINGS, TIMES_PREDICTED
from ._edits import Edit

COMPREHENSIONS = ("comp>", "expr>")
FIELDS = ("__code__", "__defaults__", "__kwdefaults__")


class NotEditableError(Exception):
    """The edits can't be run: the file has changed, or other than functions and constants do."""


def as_predicted(
    some: Sequence[tuple[Finding, Sequence[Edit]]], more: Callable[[], Sequence[Edit]],
    run: Callable[[], OutputError], before: OutputError, predicted: OutputError, precision: int,
) -> tuple[Edit, ...]:  # fmt: skip
    """Returns edits after which the program has the error that the audit predicts; () if none do.

    All edits are tried, then those of the first finding alone, then more.

    Args:
        some: findings and what to edit for their fixes.
        more: returns edits of further lines as well.
        run: audits the program, without looking for fixes.
        before: the error without edits.
        predicted: the error with all fixes.
        precision: of the low format.
    """
    every = dict.fromkeys(edit for _, own in some for edit in own)

    def choices() -> Iterator[tuple[Sequence[Edit], OutputError]]:
        yield [*every], predicted
        if len(some) > 1:
            first, own = some[0]
            yield own, OutputError(first.non_finite_after, first.error_after)
        if (others := dict.fromkeys(more())) != every:
            yield [*others], predicted

    for edits, error in choices():
        try:
            with edited(edits), warnings.catch_warnings(action="ignore"):
                after = run()
        except Exception:  # the edited program may raise anything
            continue
        largest = max(TIMES_PREDICTED * error.relative, FEW_ROUNDINGS * 2.0**-precision)
        fits = after.non_finite <= error.non_finite and after.relative <= largest
        # of a fix that the outputs hardly show, the edit's error is the fix's
        hardly = not better(error, before, ENOUGH)
        same = after.relative <= (error.relative + before.relative) / 2
        same = same and after.relative < before.relative
        if fits and (same or after.regained if hardly else better(after, before, ENOUGH)):
            return tuple(edits)
    return ()


@contextlib.contextmanager
def edited(edits: Sequence[Edit]) -> Iterator[None]:
    """Lets the live functions of the edited files compute what the edited source says.

    Raises:
        NotEditableError: see there.
    """
    undo: list[Callable[[], object]] = []
    files: dict[str, list[Edit]] = collections.defaultdict(list)
    for edit in edits:
        files[edit.file].append(edit)
    try:
        for file, own in files.items():
            _exchange(file, own, undo)
        jax.clear_caches()
        yield
    finally:
        for back in reversed(undo):
            back()
        jax.clear_caches()


def _exchange(file: str, edits: Sequence[Edit], undo: list[Callable[[], object]]) -> None:
    lines = linecache.getlines(file)
    new = _lines(lines, edits)
    pairs = dict(_pairs("".join(lines), "".join(new), file))
    imports = "\n".join(line for edit in edits if not edit.before for line in edit.after)
    functions = [
        f for f in gc.get_objects()
        if type(f) is FunctionType  # isinstance raises for a dead weak reference
        and f.__code__.co_filename == file
        and f.__builtins__  # without them it only lends its line to tracebacks
        and not f.__code__.co_name.endswith(COMPREHENSIONS)  # one that runs now
    ]  # fmt: skip
    for scope in {id(f.__globals__): f.__globals__ for f in functions}.values():
        _keep(scope, undo)
        exec(imports, scope)
        for statement in _constants("".join(lines), "".join(new)):
            exec(statement, scope)
    for f in functions:
        code, defaults = pairs.get(_name(f.__code__), (None, None))
        if code is None or code.co_freevars != f.__code__.co_freevars:
            raise NotEditableError(f.__qualname__)
        undo += [_restored(f, {name: getattr(f, name) for name in FIELDS})]
        f.__code__ = code
        if defaults is not None:
            made: dict[str, Any] = {}
            exec(defaults, f.__globals__, made)
            f.__defaults__, f.__kwdefaults__ = made["f"].__defaults__, made["f"].__kwdefaults__
    _keep(linecache.cache, undo)
    linecache.cache[file] = (sum(map(len, new)), None, new, file)


def _restored(f: FunctionType, fields: dict[str, Any]) -> Callable[[], object]:
    return lambda: [setattr(f, name, value) for name, value in fields.items()]


def _keep(scope: dict[str, Any], undo: list[Callable[[], object]]) -> None:
    names = dict(scope)
    undo += [lambda: scope.update(names), lambda: [scope.pop(x) for x in {*scope} - {*names}]]


def _lines(lines: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    new = list(lines)
    for edit in sorted(edits, key=lambda x: (x.line, len(x.before)), reverse=True):
        here = slice(edit.line - 1, edit.line - 1 + len(edit.before))
        if [line.rstrip("\n") for line in new[here]] != list(edit.before):
            raise NotEditableError(f"line {edit.line} isn't what it was")
        new[here] = [line + "\n" for line in edit.after]
    return new


def _name(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _pairs(
    old: str, new: str, file: str
) -> Iterator[tuple[tuple[str, int], tuple[CodeType, CodeType | None]]]:
    """Yields, by the name and line of a function, its new code and, if its defaults are other ones,
    code that defines a function ``f`` with them."""
    codes = [_codes_by_name(text, file) for text in (old, new)]
    definitions = [_definitions(text) for text in (old, new)]
    # an edit may add functions; which of several of one name a live one is, isn't known then
    same = [name for name, own in codes[0].items() if len(own) == len(codes[1].get(name, ()))]
    for own, other in (pair for x in same for pair in zip(codes[0][x], codes[1][x], strict=True)):
        before = definitions[0].get(own.co_firstlineno)
        after = definitions[1].get(other.co_firstlineno)
        defaults = None
        if before and after and ast.dump(before.args) != ast.dump(after.args):
            function = ast.FunctionDef("f", after.args, [ast.Pass()], [])
            tree = ast.fix_missing_locations(ast.Module([function], []))
            defaults = compile(tree, file, "exec")
        yield _name(own), (other, defaults)


def _codes_by_name(text: str, file: str) -> dict[str, list[CodeType]]:
    found = collections.defaultdict(list)
    for code in _codes(compile(text, file, "exec")):
        found[code.co_qualname].append(code)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of functions; that of comprehensions belongs to the function around it."""
    if not code.co_name.endswith(COMPREHENSIONS):
        yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _definitions(text: str) -> dict[int, ast.FunctionDef]:
    """Returns the functions by the line with which their code begins: a decorator's, if any."""
    return {
        min([x.lineno, *(y.lineno for y in x.decorator_list)]): x
        for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)
    }  # fmt: skip


def _constants(old: str, new: str) -> Iterator[str]:
    """Yields the module's own statements that the edits change."""
    before = {ast.dump(x) for x in ast.parse(old).body}
    other = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for statement in ast.parse(new).body:
        if not isinstance(statement, other) and ast.dump(statement) not in before:
            yield ast.unparse(statement)
