"""The report of an audit: printed in a terminal, saved as HTML, JSON or CSV."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, overload

from rich.console import Console

from ..._decorator import Target
from ..._output import Saved, as_csv, counted, one_output, plain
from ..._types import Json
from ...autocasting import Policy
from ...autoscaling import Recipe
from ...scalifying import Scalify
from .._run._outcome import OutputError
from .._search._apply import AuditedArithmetic
from .._sheet._sheet import Sheet
from ._edited import as_predicted
from ._edits import Edit, edits
from ._page import page
from ._summary import Summary
from ._terminal import fixed_with, show
from ._trace import TraceRow, trace
from ._verdict import verdict

SEMANTICS = (
    "the source's operations one by one, each result rounded once; sums and contractions "
    "accumulate exactly and are rounded at their end, but additions to indexed elements round one "
    "by one; fusions and rewrites of a backend aren't modelled"
)
AS_WRITTEN = (
    "; as written: arguments are cast to the format, and what the program or JAX itself computes "
    "in float32 stays there (dtypes='all' rounds every result)"
)
COMPLEX = "; complex numbers stay in the program's own dtype, which no narrow format has"
FIRST_STEP = (
    "; delayed scaling at its first step, where each operand's own numbers determine its scale "
    "(steps= and batches= audit more steps)"
)
ON_DEVICE = "; products of rounded operands are added up as the device's matrix units do"
WITH_HISTORY = "; delayed scaling with the magnitudes of the steps before"


HOLDS_PROGRAM = ("origin", "make_sheet", "run_again")
COUNTS = (
    "elements", "overflowed", "flushed", "subnormal", "nan", "swamped", "added", "cancelled",
    "operands", "operands_saturated", "operands_flushed",
)  # fmt: skip
COLUMNS = (
    "index", "primitive", "shape", "file", "line", "function", "caller", "scope", "direction",
    *COUNTS, "amax", "introduced", "inherited", "sqnr", "ulps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report(Summary, Saved):
    """The result of an audit, with the fields of :class:`Summary`.

    Attributes:
        origin: the audit's arithmetic, in which ``apply_fixes`` computes functions.
        make_sheet: makes the balance sheet; it holds the program too. None of a copy.
        run_again: returns the error of the function as it is now, against the first reference run;
            None of a copy.
    """

    origin: AuditedArithmetic | None = dataclasses.field(default=None, repr=False)
    make_sheet: Callable[[], Sheet] | None = dataclasses.field(default=None, repr=False)
    run_again: Callable[[], OutputError] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def sheet(self) -> Sheet:
        """The balance sheet of the low-precision run: each line's share of the outputs' error.

        It is made when it is first read, by one more run on the host; the JSON file has it from
        then on.

        Raises:
            ValueError: this report is a copy, which has no program.
        """
        if self.make_sheet is None:
            raise ValueError(
                "sheet: this report is a copy, which has no program; read the sheet of the report "
                "that the audit returned"
            )
        return self.make_sheet()

    @functools.cached_property
    def edits(self) -> tuple[Edit, ...]:
        """The changes of the source that make the fixes; those with which the program was run again
        and has the error that the fixes have.

        The program is run when they are first read, also by :meth:`show` and :meth:`save`, with
        the code of its functions exchanged meanwhile; JAX's caches are cleared. Of a copy, which
        has no program, and under ``trials=0`` there are none.
        """
        some = [(x, edits(self, x)) for x in self.findings if fixed_with(self, x) is None]
        some = [(finding, own) for finding, own in some if own]
        if self.run_again is None or not some:
            return ()
        run, precision = self.run_again, self.precision

        def more() -> list[Edit]:
            return [edit for x, _ in some for edit in edits(self, x, sources=True)]

        return as_predicted(some, more, run, self.error, self.error_fixed, precision)

    @property
    def verdict(self) -> str:
        """One sentence: whether the function works in this arithmetic, the cause if it doesn't,
        the change to make, and the error that remains with it."""
        return verdict(self)

    @property
    def fails(self) -> bool:
        """Whether the verdict is "No"; ``scalewise audit`` exits with 1 then."""
        return self.verdict.startswith("No:")

    def show(self, console: Console | None = None, *, everything: bool = False) -> None:
        """Prints verdict, findings and literals; with ``everything`` also those without a fix."""
        with one_output(console) as one:
            show(self, self.verdict, self.edits, one, everything=everything)

    def trace(self) -> tuple[TraceRow, ...]:
        """Returns the modules (name scopes) in the order in which they ran, each with its smallest
        and largest magnitude, up to the first number that overflows or is NaN."""
        return trace(self.equations)

    def __repr__(self) -> str:
        found = f"{counted(len(self.findings), 'finding')}, error {self.error}"
        return f"<Report of {self.function} in {self.low}: {found}; show(), save('report.html')>"

    def _page(self) -> str:
        return page(self, self.verdict, self.edits)

    def _csv(self) -> str:
        rows = (
            (
                e.index, e.primitive, "x".join(map(str, e.shape)), e.file or "", e.line,
                e.function, e.caller, e.scope, e.part, *(int(e[name]) for name in COUNTS),
                e["amax"], e.introduced, e.inherited, e.sqnr, e["ulps"],
            )
            for e in self.equations
        )  # fmt: skip
        return as_csv(COLUMNS, rows)

    def as_dict(self) -> dict[str, Json]:
        derived = {
            "verdict": self.verdict,
            "trace": [dataclasses.asdict(row) for row in self.trace()],
            "updates_lost": self.updates_lost,
            "loss_scales": self.loss_scales(),
        }
        found, unfixed = (
            [dataclasses.replace(x, fix=x.fix and str(x.fix)) for x in some]
            for some in (self.findings, self.unfixed)
        )
        report: Any = dataclasses.replace(
            self, findings=tuple(found), unfixed=tuple(unfixed), equations=(),
            **dict.fromkeys(HOLDS_PROGRAM),
        )  # fmt: skip
        fields = dataclasses.asdict(report)
        fields = {name: x for name, x in fields.items() if name not in HOLDS_PROGRAM}
        fields["equations"] = [e.as_dict() for e in self.equations]
        fields["edits"] = [dataclasses.asdict(edit) for edit in self.edits]
        if "sheet" in self.__dict__:
            fields["sheet"] = self.sheet.as_dict()
        return plain(fields | derived)

    def __getstate__(self) -> dict[str, Any]:
        fields = {"edits": self.edits, "make_sheet": None, "run_again": None}
        return self.__dict__ | fields  # the program can't be pickled

    @overload
    def apply_fixes(self, target: str) -> Policy | Recipe | Scalify: ...
    @overload
    def apply_fixes(self, target: Target) -> Target: ...
    def apply_fixes(self, target: Any) -> Any:
        """Returns a policy, recipe or function with the fixes of all findings, in their order.

        Its outputs have ``error_fixed``. Without fixes, a policy or recipe is returned as it is,
        and a function in the audited arithmetic. See :meth:`Fix.apply`.

        Args:
            target: what was audited: the policy, the recipe, the name of one, or the function.
        """
        fixes = {x.order: x.fix for x in self.findings if x.fix is not None}
        if not fixes and self.origin is not None and callable(target):
            return self.origin.function(target)
        for order in sorted(fixes):
            target = fixes[order].apply(target)
        return target
