"""Loads a function from a user's file and makes arguments for it."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from .._output import place
from .._user_file import InputError, call_user, describe_error, function_file, load_module
from ._run._equation_statistics import display_name


def load_function(target: str) -> tuple[Callable, ModuleType]:
    """Runs the file of ``path/to/file.py:name``; returns the function and its module.

    Raises:
        InputError: no such file, the file fails, or it defines no function of that name.
    """
    file, name = function_file(target)
    module = load_module(file)
    function = getattr(module, name, None)
    if not callable(function):
        found = [
            k for k, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        ]  # fmt: skip
        raise InputError(f"{file} defines no function {name!r}; there are: {', '.join(found)}")
    return function, module


@contextmanager
def user_errors(module: ModuleType) -> Iterator[None]:
    """Replaces an exception that passed through the user's module by one that names the line.

    Raises:
        InputError: in place of any such exception.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, or a class of the user's own
        frames = traceback.extract_tb(error.__traceback__)
        passed = [f for f in frames if module.__file__ == f.filename]
        if not passed:
            raise
        raise InputError(f"{passed[-1].name} failed: {describe_error(error, passed)}") from error


def arguments(
    function: Callable, module: ModuleType, factory: str | None, seed: int = 0
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns positional and keyword arguments: a factory's, or random ones of annotated shapes.

    A factory is a function of the module that returns a tuple of positional arguments, or a dict of
    keyword arguments. Without one they are standard normal numbers of the shapes that annotations
    give (jaxtyping's ``Float[Array, "8 16"]``).

    Raises:
        InputError: no such factory, it fails, or a parameter has no usable annotation.
    """
    if factory is not None:
        return as_arguments(made_by(module, factory))
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception as error:  # annotations may be arbitrary expressions
        raise InputError(
            f"the annotations of {name_of(function)} can't be evaluated: {describe_error(error)}"
        ) from error
    keys = iter(jax.random.split(jax.random.key(seed), max(64, len(parameters))))
    made = {}
    for name, parameter in parameters.items():
        shape = shape_of(parameter.annotation)
        if shape is not None:
            made[name] = _random(next(keys), shape, parameter.annotation)
        elif parameter.default is inspect.Parameter.empty:
            vague = getattr(parameter.annotation, "dim_str", None)
            said = (
                f'the shape {vague!r}, not all numbers, which may be written as "batch=8 16"'
                if vague
                else 'no annotation with a shape such as Float[Array, "8 16"]'
            )
            raise InputError(
                f"{name_of(function)}({name}) has {said}; or name a factory of arguments with "
                "--args"
            )
    return (), made


def inputs(
    function: Callable,
    module: ModuleType,
    args: str | None = None,
    batches: str | None = None,
    data: str | None = None,
    seed: int = 0,
) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """Returns positional and keyword arguments, and what ``audit(batches=)`` takes."""
    if data is None:
        per_step = None if batches is None else _function_of(module, batches)
        return *arguments(function, module, args, seed), per_step
    if args is not None or batches is not None:
        raise InputError("--data gives arguments and batches: expected no --args or --batches")
    made = made_by(module, data)
    if not isinstance(made, tuple) or len(made) != 2:
        what = f"{type(made).__name__}{f' of {len(made)}' if isinstance(made, tuple) else ''}"
        raise InputError(f"{data}() returned a {what}; expected a pair (arguments, batches)")
    return *as_arguments(made[0]), made[1]


def _function_of(module: ModuleType, name: str, what: str = "function") -> Callable:
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{module.__file__} defines no {what} {name!r}")
    return function


def made_by(module: ModuleType, factory: str) -> Any:
    return call_user(_function_of(module, factory, "factory"), f"the factory {factory}")


def as_arguments(made: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(made, dict):
        return (), made
    return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}


def name_of(function: Any) -> str:
    """Returns a function's name, qualified where the bare one is ambiguous.

    Example:
        >>> name_of(functools.partial(print, 1)), name_of(Path(".").__hash__)
        ('partial(print)', 'PurePath.__hash__')
    """
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    name = getattr(function, "__qualname__", None)
    if name is None:  # an object that can be called
        return f"{type(function).__qualname__}.__call__"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if name.endswith("<lambda>") and code is not None:
        return f"<lambda> at {place(code.co_filename, code.co_firstlineno)}"
    return display_name(name)


def shape_of(annotation: Any) -> tuple[int, ...] | None:
    """Returns the shape of a jaxtyping annotation whose sizes are numbers (``batch=8`` is 8)."""
    text = getattr(annotation, "dim_str", None)
    if text is None:
        return None
    sizes = [word.rpartition("=")[2] for word in text.split()]
    return tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else None


def _random(key: jax.Array, shape: tuple[int, ...], annotation: Any) -> jax.Array:
    kinds = [str(d) for d in getattr(annotation, "dtypes", ())]
    if kinds and all(k.startswith(("int", "uint")) for k in kinds):
        return jax.random.randint(key, shape, 0, 2)
    if kinds and all(k.startswith("bool") for k in kinds):
        return jax.random.bernoulli(key, 0.5, shape)
    return jax.random.normal(key, shape, jnp.float32)
