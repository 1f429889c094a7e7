"""Failures of PyTorch programs in 16 bits, and programs that don't fail.

Lines at fault end with ``# <- here``; the function of the same name and ``_fixed``, or the class of
the same name and ``Fixed``, is what an expert would write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..programs import Program, register

OVER, UNDER = ("overflow", "nan"), ("underflow",)
LOST = ("precision", "swamping", "cancellation", "amplified")


def reported(
    source: str, low: str, kinds: tuple[str, ...], *args: Tensor, prefix: str = "", **fields: Any
) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a program that fails in a format."""

    def add(f: Callable) -> Callable:
        program = Program(f, lambda: args, low, kinds, source, reference="float32", **fields)
        register("torch", prefix + f.__name__, program)
        return f

    return add


def clean(low: str, *args: Tensor) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a program that torch computes well."""
    return reported("", low, (), *args)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
