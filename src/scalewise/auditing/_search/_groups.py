"""Groups of equations of one source line, primitive and part of a step."""

from __future__ import annotations

import dataclasses

from ...formats import Format, format
from ...primitives import having
from .._run._causes import Causes
from .._run._equation_statistics import ADDITIONS, TOTALS, Equations, EquationStatistics
from .._thresholds import AMPLIFIED, OUT_OF_RANGE

ACCUMULATES = having("accumulates")


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations of one source line, primitive and part of a step."""

    equations: tuple[EquationStatistics, ...]
    factor: float = 0.0  # by how much they amplify the error of their operands, at most
    noticeable: float = 0.01  # the relative error from which error carried in may be a finding

    @property
    def first(self) -> EquationStatistics:
        return self.equations[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(e.index for e in self.equations)

    def total(self, name: str) -> float:
        return sum(e[name] for e in self.equations)

    def share(self, name: str) -> float:
        size = self.total(TOTALS.get(name, "elements"))
        return self.total(name) / size if size else 0.0

    @property
    def swamped(self) -> float:
        """An epsilon is there for other numbers than those that it doesn't change."""
        counted = [e for e in self.equations if not e.adds_constant]
        size = sum(e["added"] for e in counted)
        return sum(e["swamped"] for e in counted) / size if size else 0.0

    @property
    def loses_sums(self) -> bool:
        """Whether additions to elements that indices choose change nothing: see ``SUM_LOST``."""
        return any(
            e["swamped"] > 0 and e.introduced > self.noticeable
            for e in self.equations if e.primitive in ACCUMULATES
        )  # fmt: skip

    def worst(self, name: str) -> float:
        return max(getattr(e, name) for e in self.equations)

    def own_format(self, fmt: Format) -> Format:
        """Returns the format that results are rounded to: of the program's own cast to fewer bits
        or less range than the audited format has, its dtype."""
        cast = self.first.primitive == "convert_element_type"
        narrower = cast and self.total("overflowed") > 0 and self._fits(fmt)
        return format(self.first.dtype) if self.first.quantizes or narrower else fmt

    def _fits(self, fmt: Format) -> bool:
        return max(e["amax"] for e in self.equations) <= float(fmt.max)

    @property
    def cancels(self) -> bool:
        return any(e["cancelled"] > 0 and self._carries(e) for e in self.equations)

    @property
    def amplifies(self) -> bool:
        return self.factor >= AMPLIFIED and any(map(self._carries, self.equations))

    @property
    def drifts(self) -> bool:
        """Whether a loop's rounding errors of a running sum add up, without a cancellation."""
        sums = [e for e in self.equations if e.looped and e.primitive in ADDITIONS]
        grown = self.factor >= AMPLIFIED and any(map(self._carries, sums))
        return grown and not any(e["cancelled"] for e in sums)

    def _carries(self, equation: EquationStatistics) -> bool:
        """Returns True if much of a result is wrong, and hardly any of that was made here."""
        error, made = equation.inherited, max(equation.introduced, 1e-12)
        return error > 30 * made and error > self.noticeable

    def worst_equation(self, fmt: Format) -> EquationStatistics:
        """Returns the equation that harms most; of several that overflow, the earliest."""
        return max(self.equations, key=lambda e: self.harm(e, fmt))

    def harm(self, equation: EquationStatistics, fmt: Format) -> float:
        """Additions that change nothing count by the error they make; inside a loop, or one by one
        to the same number, they count fully."""
        e = equation
        if is_out_of_range(e):
            return OUT_OF_RANGE - e.index  # the earliest usually causes the others
        lost = 1.0 if e.looped else min(16 * e.introduced / float(fmt.eps), 1.0)
        lost *= 0.0 if e.adds_constant else e.share("swamped")
        lost = 1.0 if self.loses_sums else lost
        made = min(e.introduced, 10.0) + e.share("flushed") + lost
        amplifies = self._carries(e) and (e["cancelled"] > 0 or self.factor >= AMPLIFIED)
        made += min(e.inherited, 10.0) if amplifies else 0.0
        return made + min(10 * e.share("differ"), 1.0) + e.share("operands_saturated")


def is_out_of_range(equation: EquationStatistics) -> bool:
    return bool(equation["nan"] or equation["overflowed"])


def groups(equations: Equations, fmt: Format, causes: Causes) -> list[Group]:
    found: dict[tuple, list[EquationStatistics]] = {}
    for e in equations:
        place = (e.file, e.line, e.primitive, e.part, e.quantizes)
        key = (e.index,) if e.file is None else place
        found.setdefault(key, []).append(e)
    noticeable = min(0.01, 16 * float(fmt.eps))
    return [Group(tuple(x), max(map(causes.amplification, x)), noticeable) for x in found.values()]
