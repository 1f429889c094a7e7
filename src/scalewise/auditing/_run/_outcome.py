"""The result of one run of an audited program, in both arithmetics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping

import numpy as np
from jax.typing import ArrayLike

from ...interpret import Equation
from .._tape._both import TapedRun
from ._causes import Causes
from ._dataflow import Dataflow
from ._equation_statistics import EquationStatistics, equation_statistics

Numbers = np.ndarray  # of floats


@dataclasses.dataclass(frozen=True, order=True)
class OutputError:
    """The error of the low-precision run's outputs against the reference run's; larger is worse.

    Attributes:
        non_finite: how many numbers are non-finite where the reference run's are finite.
        relative: root mean square over the outputs of floats and complex numbers of
            ``||low - reference|| / ||reference||`` over the numbers that are finite in both runs.
            Of an output that a training step changes and returns (a weight), the error of that
            change instead if it arrives wrong.
        spoiled: how many outputs have such non-finite numbers; errors compare without it.
        decided: whether it is of integers and predicates: ``relative`` is the share of elements
            that differ, root mean square over the outputs.
        regained: of an edited program, whether the change of its state that was the most wrong
            has at most half of that error.
    """

    non_finite: int
    relative: float
    spoiled: int = dataclasses.field(default=0, compare=False, repr=False)
    decided: bool = dataclasses.field(default=False, compare=False, repr=False)
    regained: bool = dataclasses.field(default=False, compare=False, repr=False)

    @staticmethod
    def of(errors: Collection[OutputError]) -> OutputError:
        """Returns the error of several outputs."""
        counts = [e.non_finite for e in errors]
        squares = sum(min(e.relative, 1e150) ** 2 for e in errors)
        relative = math.sqrt(squares / max(len(counts), 1))
        decided = any(e.decided for e in errors)
        return OutputError(sum(counts), relative, sum(map(bool, counts)), decided)

    def __float__(self) -> float:
        return math.inf if self.non_finite else self.relative

    def __str__(self) -> str:
        if self.non_finite:
            return f"{self.non_finite:,} not finite"
        if math.isnan(self.relative):
            return "?"
        return f"{100 * self.relative:.3g}%" if self.decided else f"{self.relative:.2g}"


NO_ERROR = OutputError(0, 0.0)


@dataclasses.dataclass(frozen=True)
class ExactSums:
    """A run whose products are added exactly, beside one of a device's matrix units."""

    error: float  # of the outputs, relative
    made: Mapping[int, float]  # the error that each equation makes, by index


@dataclasses.dataclass(frozen=True)
class Floors:
    """What of the outputs has no digits in the reference run: its own roundings make it.

    Attributes:
        norms: the least norm that each float output's error is relative to; () without floors.
        numbers: by a float output's position, which of its numbers aren't compared.
        changes: the paths of outputs whose change, from the argument that they replace, isn't.
        undecided: by the path of an output of integers or predicates, which of its elements the
            reference run's roundings decide, and aren't compared.
    """

    norms: tuple[float, ...] = ()
    numbers: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    changes: frozenset[str] = frozenset()
    undecided: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def compared(self, output: int, x: ArrayLike) -> np.ndarray:
        """Returns the numbers of an output, or of the argument that it replaces, flat."""
        flat = np.asarray(x).ravel()
        return flat if output not in self.numbers else flat[~self.numbers[output].ravel()]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    recorded: tuple[Equation, ...]  # the equations that round or decide
    made: TapedRun  # both runs on one tape
    dataflow: Dataflow  # the equations that operands and outputs come from
    origins: tuple[tuple[int, ...], ...]  # the equations that each float output comes from
    error: OutputError  # error, outputs: of all outputs, and of each by its path
    outputs: tuple[tuple[str, OutputError], ...]
    reference_nans: tuple[str, ...]  # the paths of outputs with NaN in the reference run
    # low, reference: the outputs of floats of both runs, and of complex numbers by their parts
    low: tuple[Numbers, ...]
    reference: tuple[Numbers, ...]
    # the outputs of integers or predicates: the path, and the array of both runs
    decisions: tuple[tuple[str, np.ndarray, np.ndarray], ...] = ()
    # of each of them: the path, how many elements differ, and how many are compared; of sums, how
    # many of what they count
    decided: tuple[tuple[str, int, int], ...] = ()
    exact_sums: ExactSums | None = None  # see :class:`Session`

    @property
    def decision_errors(self) -> list[OutputError]:
        return [OutputError(0, n / max(size, 1), decided=True) for _, n, size in self.decided]

    @functools.cached_property
    def equations(self) -> list[EquationStatistics]:
        """The statistics by equation; computed on demand, since few trials need them."""
        made = self.exact_sums.made if self.exact_sums else {}
        return equation_statistics(self.recorded, self.made.statistics, self.dataflow, made)

    @functools.cached_property
    def causes(self) -> Causes:
        return Causes(self.dataflow.flow, self.equations)


def in_parts(x: ArrayLike) -> np.ndarray:
    """Returns complex numbers as their real and imaginary parts, along a last axis; else ``x``."""
    array = np.asarray(x)
    return np.stack([np.real(array), np.imag(array)], -1) if np.iscomplexobj(array) else array


def output_name(path: str) -> str:
    """Returns ``output['w']``, or ``argument[0]['w']`` of what is updated in place."""
    return path if path.startswith("argument") else f"output{path}"


def norm(x: ArrayLike) -> float:
    """Returns the Euclidean norm in float64, also of numbers whose squares are out of range."""
    flat = np.abs(np.asarray(x)).ravel().astype(np.float64)
    largest = float(np.max(flat, initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    scale = 2.0 ** math.frexp(largest)[1]
    return scale * math.sqrt(float(np.sum(np.square(flat / scale))))
