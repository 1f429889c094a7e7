"""Groups of equations with the same source line, primitive and direction, ordered by weight."""

from __future__ import annotations

import dataclasses

from ...formats import Format
from .._run._equation_statistics import Equations, EquationStatistics


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations with the same source line, primitive and direction."""

    equations: tuple[EquationStatistics, ...]

    @property
    def first(self) -> EquationStatistics:
        return self.equations[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(e.index for e in self.equations)

    def total(self, name: str) -> float:
        return sum(e[name] for e in self.equations)

    def share(self, name: str) -> float:
        size = self.total("added" if name in ("swamped", "cancelled") else "elements")
        return self.total(name) / size if size else 0.0

    def worst(self, name: str) -> float:
        return max(getattr(e, name) for e in self.equations)

    @property
    def amplifies(self) -> bool:
        """Whether additions here cancelled, so that most of a result is error carried in."""
        return any(map(_amplifies, self.equations))

    def weight(self, fmt: Format) -> float:
        """Returns a guess of how much this group harms the outputs; the search starts at the
        largest.

        Additions that change nothing count by the error they make; inside a loop each counts fully.
        """
        score = 0.0
        for e in self.equations:
            if e["nan"] or e["overflowed"]:
                return 1e6 - e.index  # the earliest usually causes the others
            lost = 1.0 if e.looped else min(16 * e.introduced / float(fmt.eps), 1.0)
            made = min(e.introduced, 10.0) + e.share("flushed") + lost * e.share("swamped")
            score += made + (min(e.inherited, 10.0) if _amplifies(e) else 0.0)
        return score


def _amplifies(equation: EquationStatistics) -> bool:
    error, made = equation.inherited, max(equation.introduced, 1e-12)
    return equation["cancelled"] > 0 and error > 30 * made and error > 0.01


def groups(equations: Equations, fmt: Format) -> list[Group]:
    """Returns equations grouped by source line, primitive and direction, heaviest first."""
    found: dict[tuple, list[EquationStatistics]] = {}
    for e in equations:
        key = (e.index,) if e.file is None else (e.file, e.line, e.primitive, e.direction)
        found.setdefault(key, []).append(e)
    result = [Group(tuple(members)) for members in found.values()]
    weighed = [(g.weight(fmt), g) for g in result]
    return [g for weight, g in sorted(weighed, key=lambda x: -x[0]) if weight > 0]
