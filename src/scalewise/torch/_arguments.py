"""Checks of what a torch model is audited with, before anything is exported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._types import PyTree
from ..auditing import name_of
from ._export import register_dataclasses
from ._torch import Module, torch


def checked_model(model: Any, args: Sequence[PyTree], kwargs: Any, method: str = "forward") -> Any:
    """Returns a module, or a plain function as one; raises where it can't be audited."""
    if not callable(model):
        raise TypeError(f"expected a torch.nn.Module or a function, not {type(model).__name__}")
    model = as_module(model)
    for name, given, expected in (("args", args, tuple | list), ("kwargs", kwargs, Mapping | None)):
        if not isinstance(given, expected):
            kind = "a tuple of inputs, as in (x,)" if name == "args" else "a dict of inputs"
            raise TypeError(f"{name} is a {type(given).__name__}; expected {kind}")
    held = [*model.named_parameters(), *model.named_buffers()]
    empty = next((name for name, x in held if x.is_meta), None)
    if empty is not None:
        raise ValueError(f"{empty} is on the meta device, without numbers: load weights first")
    quantized = (type(m) for m in model.modules())
    if any("quantized" in kind.__module__ for kind in quantized):
        raise ValueError(f"{type(model).__name__} has quantized layers: pass it as it was before")
    inputs = check_inputs(args, kwargs)
    numbered = [(f"input {i}", x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    wide = next((name for name, x in [*held, *numbered] if x.dtype == torch.float64), None)
    if wide is not None:
        raise ValueError(
            f"{wide} has float64, and the reference run is the model in float32: pass model.float()"
            " and inputs .float()"
        )
    return model


_WRAPPERS = torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel


def check_inputs(args: Sequence[PyTree], kwargs: Any) -> list[Any]:
    """Returns the leaves of a model's arguments; refuses NumPy arrays and caches of keys and
    values."""
    register_dataclasses((args, kwargs))
    leaves = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and x.is_nested:
            raise TypeError(f"input {i} is a nested tensor; pass it padded: x.to_padded_tensor(0)")
        if isinstance(x, np.ndarray):
            raise TypeError(f"input {i} is a NumPy array; pass torch.from_numpy(x)")
        if type(x).__name__.endswith("Cache"):
            raise TypeError(
                f"input {i} is a {type(x).__name__}; pass whole sequences, without past_key_values"
            )
    return leaves


def as_module(function: Module | Callable[..., Any]) -> Module:
    if isinstance(function, _WRAPPERS):
        return as_module(function.module)  # type: ignore[attr-defined]
    if isinstance(function, torch.nn.Module):
        return function

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    try:
        own = [*inspect.signature(function).parameters.values()]
    except ValueError:  # of a function in C++
        own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    instance = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    vars(forward)["__signature__"] = inspect.Signature([instance, *own])
    name = getattr(function, "__name__", "function")
    name = name_of(function) if name == "<lambda>" else name
    members = {"forward": forward, "__module__": getattr(function, "__module__", None) or ""}
    return type(name, (torch.nn.Module,), members)()
