"""Measures, without a tool, that a program of torch fails as it says, and how good a fix is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..programs import Program
from ..truth import CLEAN, Error, limit_of, limits, repaired

__all__ = ["arguments", "errors", "limit_of", "limits", "problems", "repaired"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Function(nn.Module):
    """A function as a module, as torch's checks want it."""

    def __init__(self, f: Callable[..., Tensor]):
        super().__init__()
        self.f = f

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(*args)


def model_of(call: Callable[..., Any]) -> nn.Module:
    """Returns the module of a program, in float32."""
    torch.manual_seed(0)
    made = isinstance(call, type) or not inspect.signature(call).parameters
    return call() if made else Function(call)


def arguments(program: Program) -> Any:
    return program.args()


def cast(args: Any, dtype: torch.dtype) -> Any:
    """Returns arguments with their float tensors in a dtype."""
    if isinstance(args, Mapping):
        return {name: cast(x, dtype) for name, x in args.items()}
    if isinstance(args, tuple):
        return tuple(cast(x, dtype) for x in args)
    return args.to(dtype) if isinstance(args, Tensor) and args.is_floating_point() else args


def called(model: nn.Module, args: Any) -> Any:
    return model(**args) if isinstance(args, Mapping) else model(*args)


def results(program: Program, model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns a model's results, or its gradients, from arguments in a dtype, as one vector."""
    args = cast(program.args(), dtype)
    if program.grad:
        own = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(called(model, args), own)
        return torch.cat([g.double().flatten() for g in found]) / getattr(model, "loss_scale", 1.0)
    with torch.no_grad():
        outs = called(model, args)
    leaves = torch.utils._pytree.tree_leaves(dict(outs) if isinstance(outs, dict) else outs)
    floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.cat([x.double().flatten() for x in floats])


def error(program: Program, model: nn.Module, dtype: torch.dtype | None = None) -> Error:
    """Returns how many results of a model aren't finite, and else their relative error.

    The model and its arguments are converted to the dtype; one without a dtype does that itself.
    """
    want = results(program, model_of(program.call), torch.float32)
    given = torch.float32 if program.autocast or dtype is None else dtype
    low = DTYPES[program.low]
    try:
        with torch.autocast("cpu", low, enabled=program.autocast and dtype is not None):
            got = results(program, model.to(given) if dtype else model, given)
    except RuntimeError as problem:
        if "without overflow" not in str(problem):  # torch refuses a constant
            raise
        return want.numel(), math.inf
    both = got.isfinite() & want.isfinite()
    lost = int((~got.isfinite() & want.isfinite()).sum())
    return lost, math.inf if lost else float((got - want)[both].norm() / want[both].norm())


def errors(program: Program, fixed: Callable) -> tuple[Error, Error | None, Error]:
    """Returns the errors of a program, with an expert's fix, and with a tool's."""
    dtype = DTYPES[program.low]
    expert = None
    if program.fixed is not None:
        expert = error(program, model_of(program.fixed), dtype)
    assert isinstance(fixed, nn.Module)
    return error(program, model_of(program.call), dtype), expert, error(program, fixed)


def problems(program: Program) -> list[str]:
    """Returns what contradicts a program's record; of a healthy one, that it isn't."""
    if program.step is not None:  # as the program of the same name in the gallery
        return []
    dtype, limit = DTYPES[program.low], limit_of(program)
    before = error(program, model_of(program.call), dtype)
    if not program.kinds:
        good = not before[0] and before[1] <= limits(program.low, CLEAN, 0.0, 0.0)
        return [] if good else [f"error {before}"]
    found = [] if before[0] or before[1] > limit else [f"does not fail: {before}"]
    if program.fixed is not None:
        after = error(program, model_of(program.fixed), dtype)
        if not repaired(after, before, limit):
            found.append(f"the expert's fix does not repair it: {before} to {after}")
    program.lines()
    return found
