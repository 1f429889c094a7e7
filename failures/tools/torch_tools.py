"""``scalewise.torch.audit``, and the checks of PyTorch and Hugging Face, on programs of torch.

``torch.autograd.detect_anomaly`` raises where a backward pass returns NaN, and shows the forward
line that it belongs to; transformers' ``DebugUnderflowOverflow`` raises behind the first module
with infinity or NaN among its weights, inputs or outputs, and prints its name.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow

import scalewise.torch as st

from ..programs import Answer, Finding, Program
from ..torch.truth import DTYPES, called, cast, model_of
from . import checked


def scalewise(program: Program, args: Any) -> Answer:
    model = model_of(program.call)
    named = isinstance(args, Mapping)
    report = st.audit(
        model, () if named else args, args if named else None, low=program.low,
        autocast=program.autocast, grad=program.grad,
    )  # fmt: skip
    found = (*report.findings, *(x for x in report.unfixed if program.kinds or x.fix))
    fixes = [x.fix for x in report.findings] or [x.fix for x in found[:1] if x.fix is not None]
    return Answer(
        tuple(map(_finding, found)),
        _fixed(program, fixes, model) if fixes else None,
        details={"low": program.low},
    )


def _finding(x: Any) -> Finding:
    return Finding(x.kind, [(x.file or "", x.line)], str(x.source), str(x.fix or ""))


def _fixed(program: Program, fixes: list[Any], model: nn.Module) -> nn.Module:
    if fixes[0].text.startswith("loss scale"):
        return Scaled(model, 2.0 ** float(fixes[0].text.removeprefix("loss scale 2^")), program.low)
    for fix in fixes:
        model = fix.apply(model)
    return model


class Scaled(nn.Module):
    """A model in 16 bits with a loss scale."""

    def __init__(self, model: nn.Module, loss_scale: float, low: str):
        super().__init__()
        self.model, self.loss_scale, self.dtype = model.to(DTYPES[low]), loss_scale, DTYPES[low]

    def forward(self, *args: Any) -> Any:
        return self.model(*cast(args, self.dtype)) * self.loss_scale


def differentiable(args: Any) -> Any:
    """Returns copies of arguments, with gradients of those that are floats."""
    if isinstance(args, Mapping):
        return {name: differentiable(x) for name, x in args.items()}
    if isinstance(args, tuple):
        return tuple(map(differentiable, args))
    return args.detach().clone().requires_grad_(args.is_floating_point())


def _in_16_bits(program: Program, args: Any, check: Callable[[Callable, nn.Module], Answer]) -> Any:
    """Returns what a check says of a step of a program's model in its dtype."""
    dtype, model = DTYPES[program.low], model_of(program.call)
    if not program.autocast:
        model, args = model.to(dtype), cast(args, dtype)

    def step(own: nn.Module) -> None:
        with torch.autocast("cpu", dtype, enabled=program.autocast):
            if program.step is not None:
                program.step(own, *args)
                return
            outs = called(own, differentiable(args))
            outs = outs[0] if isinstance(outs, Mapping) else outs
            ((outs * outs).mean() if outs.ndim else outs).backward()

    def plain() -> bool:
        own = copy.deepcopy(model)
        step(own)
        tensors = [t for w in own.parameters() for t in (w, w.grad) if t is not None]
        return all(bool(torch.isfinite(t).all()) for t in tensors)

    return checked(plain, lambda: check(step, copy.deepcopy(model)))


def detect_anomaly(program: Program, args: Any) -> Answer:
    own = str(Path(torch.__file__).parent)

    def check(step: Callable, model: nn.Module) -> Answer:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with torch.autograd.detect_anomaly(check_nan=True):
                    step(model)
            except RuntimeError as error:
                texts = (str(w.message) for w in told)
                text = "".join(x for x in texts if "Traceback of forward" in x)
                found = re.findall(r'File "(.+?)", line (\d+)', text)
                lines = [(f, int(n)) for f, n in found if not f.startswith((own, __file__))]
                return Answer((Finding("nan", lines[-1:], str(error).splitlines()[0][:200]),))
        return Answer()

    return _in_16_bits(program, args, check)


def debug_underflow_overflow(program: Program, args: Any) -> Answer:
    def check(step: Callable, model: nn.Module) -> Answer:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                DebugUnderflowOverflow(model)
                step(model)
        except ValueError as error:
            if "DebugUnderflowOverflow" not in str(error):
                raise
            text = printed.getvalue()
            name, kind = re.findall(r"^ {18}(\S*) (\w+)$", text, re.MULTILINE)[-1]
            seen = ", ".join(dict.fromkeys(re.findall(r"^\S+ has \w+$", text, re.MULTILINE)))
            which = "nan" if "nan" in seen and "inf" not in seen else "overflow"
            return Answer(
                (Finding(which, (), f"{name or 'the model'} ({kind}): {seen}", module=name),)
            )
        return Answer()

    return _in_16_bits(program, args, check)
