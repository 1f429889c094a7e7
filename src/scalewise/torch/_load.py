"""Models for the command line, of a function in a user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._types import PyTree
from .._user_file import InputError, describe_error
from ..auditing import as_arguments, load_function, made_by, user_errors
from ._torch import Module, torch


class Loaded(NamedTuple):
    model: Module
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    module: Any = None


def load(target: str, args: str | None = None, seed: int = 0) -> Loaded:
    """Returns the model that the function of ``path/to/file.py:function`` makes, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _loaded(target, args)


def _loaded(target: str, args: str | None) -> Loaded:
    function, module = load_function(target)
    name = target.rpartition(":")[2]
    with user_errors(module):
        try:
            made = function()
        except TypeError as error:
            raise InputError(f"{name}() failed: {describe_error(error)}") from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not is_model(model):
        raise InputError(
            f"{name}() returned a {type(made).__name__}; expected a torch.nn.Module, or a pair of "
            "it and its inputs (a tuple or a dict)"
        )
    if args is not None:
        given = made_by(module, args)
    if given is None:
        raise InputError(
            f"{name}() returned a model without inputs: return a pair (model, inputs), or name a "
            "function that returns the inputs with --args"
        )
    return Loaded(model, *as_arguments(given), module)


def is_model(made: Any) -> bool:
    model = made[0] if isinstance(made, tuple) and made else made
    return isinstance(model, torch.nn.Module)
