"""Runs a user's Python file, and describes what goes wrong in it in one line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Names under which packages are installed, where these aren't the names of their modules.
DISTRIBUTIONS = {"haiku": "dm-haiku", "sklearn": "scikit-learn"}


class InputError(ValueError):
    """Raised for input that can't be used; the message is one sentence that says what can."""


def function_file(target: str) -> tuple[Path, str]:
    """Returns the file and the name of ``path/to/file.py:name``.

    Raises:
        InputError: no such file, or no name.
    """
    path, colon, name = target.replace("::", ":").rpartition(":")
    if not colon or not name:
        raise InputError(f"{target!r} names no function: expected path/to/file.py:function")
    if not Path(path).is_file():
        raise InputError(f"no file at {path!r}: expected a Python file")
    return Path(path), name


def load_module(file: Path) -> ModuleType:
    """Runs a Python file and returns it as a module, under a name of its own in ``sys.modules``.

    Raises:
        InputError: the file isn't a Python file, or it raises an exception.
    """
    name = f"scalewise_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"no program at {str(file)!r}; expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything
        del sys.modules[name]
        missing = missing_module(error)
        raise InputError(
            f"{file} {missing}" if missing else f"{file} doesn't run: {describe_error(error)}"
        ) from error
    return module


def missing_module(error: BaseException) -> str | None:
    """Returns which module an import lacks and how it is installed; None for other exceptions."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.partition(".")[0]
    return f"needs {name}, which isn't installed: pip install {DISTRIBUTIONS.get(name, name)}"


def call_user(call: Callable[..., Any], what: str, *args: Any) -> Any:
    """Returns ``call(*args)``, where ``call`` runs a user's function.

    Raises:
        InputError: the function raised an exception; it is described in one sentence.
    """
    try:
        return call(*args)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:  # SystemExit, or a class of the user's own
        if isinstance(error, ValueError) and what.endswith(".batches"):  # it refuses its data
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{what}: {first}") from error
        missing = missing_module(error)
        raise InputError(
            f"{what} {missing}" if missing else f"{what} failed: {describe_error(error)}"
        ) from error


def describe_error(
    error: BaseException, frames: Sequence[traceback.FrameSummary] | None = None
) -> str:
    """Returns an exception as one line: type, first line of the message, file and line number.

    Args:
        error: the exception.
        frames: the last of these says where; by default, where it was raised.
    """
    frames = traceback.extract_tb(error.__traceback__) if frames is None else frames
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        place, text = f" ({Path(error.filename).name}:{error.lineno})", error.msg
    first = (text.strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{place}"
