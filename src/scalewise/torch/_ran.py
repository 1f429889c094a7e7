"""Runs a model in a narrow dtype by torch on a CPU, and compares it with the prediction."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from ..auditing import Edit, Report
from ._export import ExportError, first_line, use_as_forward, without_validation
from ._place import line_of_error
from ._torch import Module, Tensor, torch

# Errors that aren't about the model: kernels that a device doesn't have.
NO_KERNEL = "not implemented for", "could not create a primitive"
HARMLESS = "does not require grad", "stateless API"  # torch.export says what to do
OVERFLOW = "without overflow"  # a constant beyond the format
NEAR = 1.5  # times the predicted error


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run of a model by torch.

    Attributes:
        results: tensors that it returned.
        raised: the error that it raised since a number is beyond the dtype, with its line.
        missing: the operation that torch's CPU has no kernel for.
    """

    results: tuple[Any, ...] = ()
    raised: str = ""
    missing: str = ""


def ran(model: Module, args: Any, kwargs: Any, method: str, dtype: Any) -> Ran:
    """Runs a :func:`held` model; raises where torch refuses to, for example since dtypes differ:
    exporting doesn't look at the dtypes of all operands."""
    try:
        with torch.no_grad():
            outs = called(model, (args, kwargs), method)
    except torch.linalg.LinAlgError:
        return Ran()  # a matrix may be singular in 16 bits, which the audit is to find
    except Exception as error:
        text, where = first_line(error), line_of_error(error)
        kind = str(dtype).removeprefix("torch.")
        if isinstance(error, NotImplementedError) or any(x in text for x in NO_KERNEL):
            return Ran(missing=f"{text}{where}")
        if any(x in text for x in HARMLESS):
            return Ran()
        if OVERFLOW in text:
            return Ran(raised=f"torch raises in {kind}{where}: {type(error).__name__}: {text}")
        name = type(model).__name__
        message = f"torch can't run {name} in {kind}{where}: {type(error).__name__}: {text}"
        raise ExportError(message) from error
    leaves = torch.utils._pytree.tree_leaves(outs)
    return Ran(tuple(x for x in leaves if isinstance(x, torch.Tensor)))


def called(model: Module, given: Any, method: str) -> Any:
    """Returns what a method of a :func:`held` model returns; buffers and arguments stay as they
    are."""
    use_as_forward(model, method)
    buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, given)
    with torch.random.fork_rng(devices=[]), without_validation():
        return torch.func.functional_call(model, buffers, tuple(args), dict(kwargs))


def measured(low: Sequence[Tensor], wide: Sequence[Tensor]) -> tuple[float, int] | None:
    """Returns the error of results as :class:`OutputError` has it, and how many numbers are not
    finite; None if there is nothing to compare."""
    pairs = [(a.double(), b.double()) for a, b in zip(low, wide, strict=False)
             if b.is_floating_point() and a.shape == b.shape]  # fmt: skip
    if not pairs or len(low) != len(wide):
        return None
    squares, beyond = [], 0
    for a, b in pairs:
        finite = a.isfinite() & b.isfinite()
        beyond += int((b.isfinite() & ~a.isfinite()).sum())
        a, b = a[finite], b[finite]
        scale = float(b.norm())
        squares.append((float((a - b).norm()) / scale) ** 2 if scale else 0.0)
    return math.sqrt(sum(squares) / len(squares)), beyond


@dataclasses.dataclass(frozen=True, repr=False)
class TorchReport(Report):
    """A report of a torch model.

    Attributes:
        raised: the error that torch raises in the narrow dtype, with its line, since a number of
            the program is beyond it; "" if it runs.
        ran: a sentence on the model's own run in the narrow dtype, on a CPU, where its error isn't
            within 1.5 of the predicted one, or torch has no kernel there; "" otherwise.
    """

    raised: str = ""
    ran: str = ""

    @functools.cached_property
    def edits(self) -> tuple[Edit, ...]:
        """The changes of the source that make the fixes; those with which torch ran the model, and
        had the error that the fixes have."""
        again: Any = self.run_again
        if again is None or not any(x.fix is not None for x in self.findings):
            return ()
        again = again.with_references()  # before the source is edited
        return Report.edits.func(dataclasses.replace(self, run_again=again))

    @property
    def verdict(self) -> str:
        own = super().verdict
        if self.raised:
            return f"No: {self.raised}; but for that: {own}"
        return f"{own} {self.ran}".rstrip()


def told(report: Report, low: Ran, wide: Ran | None) -> Report:
    """Returns a report with what torch's own run says; ``wide`` is the float32 model's run, None if
    the audited results aren't the model's."""
    text, found = "", None if wide is None else measured(low.results, wide.results)
    if low.missing:
        text = f"torch's CPU has no kernel to run it: {low.missing}."
    elif found is not None:
        error, beyond = found
        predicted = report.error
        same = bool(beyond) == bool(predicted.non_finite)
        near = error <= NEAR * predicted.relative and predicted.relative <= NEAR * error
        tiny = max(error, predicted.relative) < 2.0**-report.precision / 2
        if not same:
            text = f"torch itself on a CPU returns {beyond:,} numbers that are not finite."
        elif not (beyond or near or tiny):
            text = f"torch itself on a CPU has error {error:.2g}, where {predicted} is predicted."
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(Report)}
    return TorchReport(**fields, raised=low.raised, ran=text)
