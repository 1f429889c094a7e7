"""The result of an audit as plain data."""

from __future__ import annotations

import dataclasses

from .._run._equation_statistics import EquationStatistics
from .._run._histograms import shares
from .._run._outcome import NO_ERROR, OutputError
from .._search._findings import Finding
from .._search._literals import Literal
from .._search._measure import lost_updates


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of an audit.

    Attributes:
        function: its name.
        low: the arithmetic of the low-precision run.
        reference: the format whose own roundings are no errors; the reference run is in float64.
        semantics: what is modelled, in a sentence.
        findings: in the order in which they were explained; those with a fix that helped, on top of
            the fixes before (see ``Finding.order``), and those that no fix helped.
        unfixed: other findings with evidence: no fix helped, or none was tried.
        literals: constants that the format changes.
        arguments: which arguments have numbers that overflow or vanish in the format, a sentence
            each.
        ranges: for each group of arguments (the first two keys of their paths), how many of their
            numbers have each exponent from ``LOWEST`` up.
        benign: non-finite values that are intended, a sentence each.
        error: of the outputs, against the reference run.
        error_fixed: the same with the fixes of all findings.
        error_float32: the same with float32 for every operation (float64, of a float32 run): the
            error that is left comes in with the arguments and complex numbers, which stay as they
            are. 0 if that wasn't run.
        gradients: of a training step, the error of the gradients that the optimizer reads, as one
            vector; 0 without a backward pass, or where it returns the gradients.
        gradients_fixed: the same with the fixes of all findings.
        outputs: each output's path and error.
        equations: the statistics of each equation that rounds.
        largest, smallest_normal, smallest, precision: of the low format.
        runs: how many runs of the program were made.
        environment: versions and device.
        wide: the dtype that fixes compute in: float64 where the program fails in float32 too.
        interrupted: whether the search for fixes was ended by Ctrl-C.
        scaled: whether each tensor has a scale of its own (under a recipe).
        trials: how many of the runs tried fixes.
        untried: how many more findings no fix was tried for, because no trials were left.
        latent: operations whose largest value is within a factor of 4 of overflowing the format of
            its result, or of being cut off as an operand whose scale isn't found from its numbers,
            a sentence each.
        lost_changes: changes of what the next call gets (weights, averages) that the rounding
            loses, a sentence each.
        wrong_changes: changes of what a training step returns that are wrong, a sentence each.
        infinite: how many numbers of the outputs are infinite in the reference run.
        incomparable: the outputs of which the reference run computes no finite number, zeros aside.
        noise: the outputs without a correct digit in the reference run: rounding errors, or zeros
            where numbers are flushed.
        decided: of outputs of integers or predicates in which the runs differ, the path, how many
            elements differ, and how many are compared; of sums, how many of what they count.
        decided_fixed: the same with the fixes of all findings.
        sums: the outputs of integers that are sums: counts, histograms.
        started_at_zero: the outputs of a training step, by path, whose arguments are zeros. They
            are this call's changes alone, moments and averages, of which much may be wrong.
        largest_share: which line makes most of an error that needs no fix; "" if none does.
        complex_dtype: the dtype of complex numbers, if the reference run has a wider one; else "".
    """

    function: str
    low: str
    reference: str
    semantics: str
    findings: tuple[Finding, ...]
    unfixed: tuple[Finding, ...]
    literals: tuple[Literal, ...]
    arguments: tuple[str, ...]
    ranges: tuple[tuple[str, tuple[int, ...]], ...]
    benign: tuple[str, ...]
    error: OutputError
    error_fixed: OutputError
    error_float32: OutputError
    outputs: tuple[tuple[str, OutputError], ...]
    equations: tuple[EquationStatistics, ...]
    largest: float
    smallest_normal: float
    smallest: float
    precision: int
    runs: int
    environment: tuple[tuple[str, str], ...]
    gradients: OutputError = NO_ERROR
    gradients_fixed: OutputError = NO_ERROR
    wide: str = "float32"
    interrupted: bool = False
    scaled: bool = False
    trials: int = 0
    untried: int = 0
    latent: tuple[str, ...] = ()
    lost_changes: tuple[str, ...] = ()
    wrong_changes: tuple[str, ...] = ()
    infinite: int = 0
    incomparable: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    decided: tuple[tuple[str, int, int], ...] = ()
    decided_fixed: tuple[tuple[str, int, int], ...] = ()
    sums: tuple[str, ...] = ()
    started_at_zero: tuple[str, ...] = ()
    largest_share: str = ""
    complex_dtype: str = ""

    @property
    def unfixable(self) -> str:
        """What no fix changes, from which the rest of the error comes: operands, and what the wide
        dtype itself rounds if the reference is wider."""
        operands = "the arguments and complex numbers" if self.complex_dtype else "the arguments"
        return operands if self.wide == self.reference else f"{operands}, or with {self.wide}"

    @property
    def updates_lost(self) -> float:
        """The share of the optimizer's additions that changed nothing, over a sample.

        An update below 2^-p of the weight is lost, where p is the format's precision: 2^-11 for
        FP16, 2^-8 for BF16.
        """
        return lost_updates(self.equations)

    def loss_scales(self, powers: range = range(25)) -> dict[int, tuple[float, float]]:
        """Returns for each ``k`` which shares of the backward pass's nonzero numbers a loss scale
        of ``2**k`` would leave flushed, and make overflow.

        From the reference run's histograms, in whole binades; empty without a backward pass.
        """
        found = [e for e in self.equations if e.direction == "backward"]
        return shares(found, self.smallest / 2, self.largest, powers) if found else {}
