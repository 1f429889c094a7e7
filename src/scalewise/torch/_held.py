"""A model while it is exported or run: in another dtype, and afterwards as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from .._types import PyTree
from ._torch import Dtype, Module, torch

CONVERSIONS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}


@contextlib.contextmanager
def held(model: Module, dtype: Dtype | None = None) -> Iterator[None]:
    """Lets a model be converted as by ``model.half()``, and takes back all changes of its modules.

    A model that has run may not be copied: ``copy.deepcopy`` refuses tensors with a history, and
    hooks of a copy still change the original.
    """
    tensors = [(p, p.data, p.grad) for p in model.parameters()]
    attributes = [(vars(m), dict(vars(m))) for m in model.modules()]
    contents = [
        (x, x.copy()) for _, own in attributes for x in own.values() if isinstance(x, list | dict)
    ]
    try:
        if dtype is not None:
            for p, *_ in tensors:
                p.grad = None
            getattr(model, CONVERSIONS[dtype])()
        yield
    finally:
        for mapping, before in [*attributes, *contents]:
            mapping.clear()
            (mapping.extend if isinstance(mapping, list) else mapping.update)(before)
        for p, data, gradient in tensors:
            p.data, p.grad = data, gradient


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    with mock.patch.object(torch.distributions.Distribution, "_validate_args", False):
        yield


def register_dataclasses(tree: PyTree) -> None:
    for x in torch.utils._pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            torch.export.register_dataclass(type(x))
            register_dataclasses(x)


def registering(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        outs = forward(*args, **kwargs)
        register_dataclasses(outs)
        return outs

    vars(call)["__wrapped__"] = forward  # its signature
    return call
