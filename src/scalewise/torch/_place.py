"""Source lines: a rule's equations get the line of the model that called the operation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from .._jax import source_info_util
from .._types import PyTree
from ._torch import Module, Node, torch

_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
# Modules of torch's own that are models, whose lines say where in them a number is lost.
_MODELS = tuple(_TORCH + os.path.join("nn", "modules", x) for x in ("transformer.py", "rnn.py"))
_MODEL_NAMES = ("torch.nn.modules.transformer.", "torch.nn.modules.rnn.")

# An operation without a line of its own gets that of the call of scalewise, not one within it.
_SCALEWISE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EXPORT = os.path.join(_SCALEWISE, "torch", "_export.py")
for _own in ("torch/", "interpret/", "auditing/", "emulating/", "_jax.py"):
    source_info_util.register_exclusion(os.path.join(_SCALEWISE, *_own.split("/")))
for _own in ("_", "utils" + os.sep):  # where torch decomposes
    source_info_util.register_exclusion(_TORCH + _own)


@contextlib.contextmanager
def recorded_frames() -> Iterator[dict[tuple[str, int], frozenset[str]]]:
    """Lets nodes record the lines of all functions, not only those of ``forward``, and yields by
    file and line the names of Python numbers and of tensors of integers there."""
    numbers: dict[tuple[str, int], frozenset[str]] = {}

    def filtered(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
        own = _own_frames(stack)
        if own and (place := (own[-1].filename, own[-1].lineno or 0)) not in numbers:
            numbers[place] = _numbers_at(*place)
        return own

    with mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", filtered):
        yield numbers


def _numbers_at(file: str, line: int) -> frozenset[str]:
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
    if frame is None:
        return frozenset()
    read = frame.f_code.co_names
    known = {name: frame.f_globals[name] for name in read if name in frame.f_globals}
    known |= frame.f_locals
    of_self = vars(known["self"]) if hasattr(known.get("self"), "__dict__") else {}
    known |= {f"self.{name}": of_self[name] for name in read if name in of_self}
    return frozenset(name for name, x in known.items() if _stays(x))


def _stays(x: Any) -> bool:
    """Returns whether a value isn't converted: a Python number, or a tensor of integers."""
    integers = isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    return integers or isinstance(x, int | float)


def _own_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Returns the frames of a model: each ``forward``, the functions that the last one calls, and
    functions between them that aren't of an installed package, which wraps calls of modules."""
    start = max((i for i, f in enumerate(stack) if f.filename == _EXPORT), default=-1)
    made = _SCALEWISE, "<eval_with_key>"  # the second by Dynamo, which traces bodies of loops
    own = [f for f in stack[start + 1 :] if not f.filename.startswith(made)]
    own = [f for f in own if f.name == "forward" or not _is_internal(f.filename)]
    last = max((i for i, f in enumerate(own) if f.name == "forward"), default=-1)
    return traceback.StackSummary.from_list(
        f for i, f in enumerate(own)
        if f.name == "forward" or i > last or _INSTALLED not in f.filename
    )  # fmt: skip


def _is_internal(file: str) -> bool:
    own = file.startswith((_TORCH, _SCALEWISE, "<"))
    return own or (file.startswith(_PYTHON) and _INSTALLED not in file)


def frames(node: Node) -> list[tuple[str, int, str]]:
    """Returns file, line and function of each call that led to a node, outermost first.

    Frames of torch itself are left out, unless there are no others. ``forward`` gets its module's
    class: ``T5Block.forward``.
    """
    found = [(f, int(n), name) for f, n, name in _FRAME.findall(node.stack_trace or "")]
    own = [x for x in found if not x[0].startswith(_TORCH) or x[0].startswith(_MODELS)]
    classes = _classes(node)
    for i, (file, line, name) in enumerate(own):
        if name == "forward" and classes:
            own[i] = file, line, f"{classes.pop(0)}.forward"
    return own or found[-1:]


def _classes(node: Node) -> list[str]:
    entries = (node.meta.get("nn_module_stack") or {}).values()
    names = [x if isinstance(x, str) else f"{x.__module__}.{x.__qualname__}" for _, x in entries]
    own = [x for x in names if not x.startswith("torch.nn.") or x.startswith(_MODEL_NAMES)]
    return [x.rpartition(".")[2] for x in own]


def line_of(node: Node) -> str:
    found = frames(node)
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else "an unknown line"


def is_of_torch(file: str) -> bool:
    return file.startswith(_TORCH)


def is_torchs_own(error: BaseException) -> bool:
    parts = os.path.join("nn", "functional.py"), "distributions" + os.sep
    own = tuple(os.path.join(_TORCH, x) for x in parts)
    stack = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    places = [file for file in stack if file.startswith(own) or not _is_internal(file)]
    return bool(places) and places[-1].startswith(own)


def is_in_torch(error: BaseException) -> bool:
    stack = traceback.extract_tb(error.__traceback__)
    return any(f.filename.startswith(_TORCH) for f in stack)


def line_of_error(error: BaseException) -> str:
    """Returns ``(file.py:12)``, the line of a model that raised an error; "" if there is none."""
    stack = traceback.extract_tb(error.__traceback__)
    own = [f for f in stack if not _is_internal(f.filename)]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


def scope_of(node: Node) -> str:
    """Returns a node's module as a name scope: ``encoder/block.1/layer.0/wo``.

    A position in a list stays with the list's name, so that each part names one module.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(stack.values()))), "")
    path = re.sub(r"@\d+", "", path.removeprefix("L['self']").lstrip("."))
    return "/".join(re.findall(r"[^.]+(?:\.\d+(?![^.]))*", path))


def at(node: Node) -> Callable[[Callable[[], PyTree]], Any]:
    """Returns a function that calls another one from the lines that led to a node.

    JAX reads the lines of an equation from Python's stack. So the call goes through a function for
    each frame, compiled with that frame's file, line and name.
    """
    callers = [_caller(*frame) for frame in reversed(frames(node))]

    def call(function: Callable[[], PyTree]) -> Any:
        for caller in callers:
            function = functools.partial(caller, function)
        return function()

    return call


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """Lets equations of a custom backward pass have their own lines: JAX gives those of a backward
    pass the line of the call in the forward pass."""
    held = source_info_util._source_info_context
    before = held.context
    held.context = source_info_util.new_source_info().replace(name_stack=before.name_stack)
    try:
        yield
    finally:
        held.context = before


def at_class(module: Module) -> Callable[[Callable[[], PyTree]], Any]:
    """Returns a function that calls another one from the line where a module's class begins, or the
    function that it was made of.

    For a class without a file it is the line that called scalewise.
    """
    try:
        forward = type(module).forward
        own = inspect.unwrap(forward) if hasattr(forward, "__wrapped__") else type(module)
        file, (lines, line) = inspect.getfile(own), inspect.getsourcelines(own)
    except (OSError, TypeError):  # written at a prompt
        return _caller(*_line_outside(), type(module).__name__)
    line += next((i for i, x in enumerate(lines) if x.lstrip().startswith(("class ", "def "))), 0)
    return _caller(file, line, type(module).__name__)


def _line_outside() -> tuple[str, int]:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SCALEWISE):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno


_MARK = "<scalewise.torch>"
source_info_util.register_exclusion(_MARK)


def mark(name: str, function: Callable[[], PyTree]) -> Any:
    """Calls a function with a frame around it that names what it computes (see :func:`marked`)."""
    return _caller(_MARK, 1, name)(function)


def marked(eqn: Any) -> str:
    """Returns the name of the mark that an equation of JAX was made under, or ""."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return next((f.function_name for f in frames if f.file_name == _MARK), "")


@functools.cache
def _caller(file: str, line: int, name: str) -> Callable[[Callable[[], PyTree]], Any]:
    code = (lambda call: call()).__code__
    code = code.replace(co_filename=file, co_firstlineno=line, co_name=name, co_qualname=name)
    return types.FunctionType(code, {"__builtins__": {}})
