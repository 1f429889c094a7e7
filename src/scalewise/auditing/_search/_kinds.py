"""The kinds of findings: what identifies each, how its evidence reads, how a report shows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ...formats import Format, Saturation
from ...primitives import PRIMITIVES, having
from .._run._equation_statistics import EquationStatistics
from .._thresholds import EXACT, FLUSHED, OPERANDS_FLUSHED, OPERANDS_SATURATED, OUTGROWN, SWAMPED
from ._groups import Group


@dataclasses.dataclass(frozen=True)
class FindingKind:
    """One way in which an operation goes wrong."""

    name: str  # ``Finding.kind``
    # returns True if there is evidence, given a group, the ``saturate`` argument and the format
    found: Callable[[Group, Saturation, Format], bool]
    evidence: Callable[[Group, Format], str]  # returns what happened, in one phrase with numbers
    # whether numbers leave the format's range: formats with more range are tried
    out_of_range: bool = False
    # whether the finding is listed, without a fix too, if much of the error is left
    event: bool = False
    carried_in: bool = False  # whether earlier operations make the error
    style: str = "bold"  # how a terminal shows the name, in rich's notation
    severe: bool = False  # whether the HTML page marks it as severe


INDICES = having("indexes")
FINDING_KINDS: dict[str, FindingKind] = {}  # by name; a finding is of the first kind with evidence


def register(
    name: str, found: Callable[[Group, Saturation, Format], bool], **fields: bool | str
) -> Callable[[Callable[[Group, Format], str]], Callable[[Group, Format], str]]:
    def add(evidence: Callable[[Group, Format], str]) -> Callable[[Group, Format], str]:
        FINDING_KINDS[name] = FindingKind(name, found, evidence, **fields)  # pyright: ignore[reportArgumentType]
        return evidence

    return add


def kind_of(group: Group, fmt: Format, saturate: Saturation, refuted: str = "") -> FindingKind:
    kinds = (kind for name, kind in FINDING_KINDS.items() if name != refuted)
    return next(kind for kind in kinds if kind.found(group, saturate, fmt))


def exceeds(amax: float, fmt: Format) -> str:
    """``exceeds FP16's maximum by 2^3.1 (largest value 2^19.1)``; numbers where it is less than
    a twentieth of a binade."""
    name, largest = fmt.name.upper(), float(fmt.max)
    value, ratio = math.log2(amax), math.log2(amax / largest)
    if ratio < 0.05:
        return f"exceeds {name}'s maximum, {largest:.6g} (largest value {amax:.6g})"
    return f"exceeds {name}'s maximum by 2^{ratio:.1f} (largest value 2^{value:.1f})"


@register(
    "nan", lambda g, *_: g.total("nan") > 0,
    out_of_range=True, event=True, style="bold red", severe=True,
)  # fmt: skip
def _nan(group: Group, fmt: Format) -> str:
    return _told(group, "nan", "is NaN, though no input is", "are NaN, though no input is")


def _told(group: Group, name: str, one: str, many: str, of: str = "elements", what: str = "number"):
    """Returns ``3 of 7 numbers are NaN``, ``1 of 7 numbers is NaN`` or ``the only number is NaN``,
    from the words for one and for many."""
    count, every = int(group.total(name)), int(group.total(of))
    plural = "indices" if what == "index" else f"{what}s"
    some = f"the only {what}" if every == 1 else f"{count:,} of {every:,} {plural}"
    return f"{some} {one if count == 1 else many}".rstrip()


def _too_large(group: Group, fmt: Format) -> str:
    fmt = group.own_format(fmt)
    amax = max(e["amax"] for e in group.equations)
    if amax > float(fmt.max):
        return f"{exceeds(amax, fmt)} in {_told(group, 'overflowed', '', '')}"
    if any(e.exact_sum < math.inf for e in group.equations):
        where = "the range of the device's accumulator"
        return _told(group, "overflowed", f"leaves {where}", f"leave {where}")
    row = PRIMITIVES.get(group.first.primitive)
    why = f"infinite, though no input is: {(row and row.pole) or 'a division by 0'}"
    return _told(group, "overflowed", f"is {why}", f"are {why}")


register(
    "overflow", lambda g, saturate, _: g.total("overflowed") > 0 and saturate is False,
    out_of_range=True, event=True, style="bold red", severe=True,
)(_too_large)  # fmt: skip


def _saturates(group: Group, saturate: Saturation, _: Format) -> bool:
    clipped = group.total("overflowed") > 0 and saturate is not False
    if clipped or group.share("operands_saturated") >= OPERANDS_SATURATED:
        return True
    saturated = group.total("operands_saturated") > 0 and not _operands_flushed(group)
    return saturated and group.worst("introduced") > OUTGROWN


@register(
    "saturation", _saturates,
    out_of_range=True, event=True, style="red", severe=True,
)  # fmt: skip
def _saturation(group: Group, fmt: Format) -> str:
    if group.total("overflowed"):
        return _too_large(group, fmt)
    rest = "of its operands exceed{} the largest with their scale"
    return _told(group, "operands_saturated", rest.format("s"), rest.format(""), of="operands")


@register(
    "accumulation",
    lambda g, *_: any(e.accumulated for e in g.equations),
    event=True,
    style="yellow",
)
def _accumulation(group: Group, fmt: Format) -> str:
    worst = max(group.equations, key=lambda e: e.accumulated)
    made, exact = worst.introduced, worst.exact_sum
    return f"error made here {made:.2g}, by the device's accumulator: {exact:.2g} with exact sums"


def _operands_flushed(group: Group) -> bool:
    return group.share("operands_flushed") >= OPERANDS_FLUSHED


def _underflows(group: Group, saturate: Saturation, fmt: Format) -> bool:
    if group.share("flushed") >= FLUSHED or _operands_flushed(group):
        return True
    return _subnormals_lose(group, fmt) and group.worst("introduced") > group.noticeable


def _subnormals_lose(group: Group, fmt: Format) -> bool:  # more than normal numbers can
    return group.total("subnormal") > 0 and group.worst("introduced") > 2 * half_unit(group, fmt)


def half_unit(group: Group, fmt: Format) -> float:
    return float(group.own_format(fmt).eps) / 2


@register("underflow", _underflows, out_of_range=True, event=True, style="yellow")
def _underflow(group: Group, fmt: Format) -> str:
    if _operands_flushed(group):  # then the products flushed are those of such operands
        text = "of its operands flushed to zero with their scale"
        return _told(group, "operands_flushed", text, text, of="operands")
    if group.share("flushed") >= FLUSHED:
        return numbers_lost(group, "flushed")
    return numbers_lost(group, "subnormal")


def numbers_lost(group: Group, name: str) -> str:
    inverses = [e["reference_min_inverse"] for e in group.equations]
    smallest = min((1 / x for x in inverses if x), default=0.0)
    down = f" (smallest value 2^{math.log2(smallest):.1f})" if smallest else ""
    if name == "flushed":
        return _told(group, name, f"flushed to zero{down}", f"flushed to zero{down}")
    return _told(group, name, f"is subnormal{down}", f"are subnormal{down}")


@register(
    "decision", lambda g, *_: g.total("differ") > 0, event=True, carried_in=True, style="yellow"
)
def _decision(group: Group, fmt: Format) -> str:
    is_index = group.first.primitive in INDICES
    what = "comparison" if group.first.dtype == "bool" else "index" if is_index else "integer"
    rest = "from the reference run's"
    return _told(group, "differ", f"differs {rest}", f"differ {rest}", "decided", what)


def _swamps(group: Group, *_: object) -> bool:
    """Returns True if additions change nothing; outside of loops, if they don't cancel instead."""
    accumulates = any(e.looped for e in group.equations)
    several = group.swamped >= SWAMPED and (accumulates or not group.cancels)
    return group.loses_sums or several or group.drifts


@register("swamping", _swamps, event=True)
def _swamping(group: Group, fmt: Format) -> str:
    drift = max((e.drift for e in group.equations), key=abs)
    if group.loses_sums:
        lost = "lost additions"
        some = _told(group, "swamped", f"has {lost}", f"have {lost}", of="added", what="sum")
    elif group.drifts and group.swamped < SWAMPED:
        visits, error = max(e["visits"] for e in group.equations), group.worst("inherited")
        some = f"the rounding errors of {visits:,.0f} additions to a sum grow to {error:.2g}"
    else:
        some = f"{group.swamped:.0%} of additions change nothing"
    return f"{some}; bias of the errors {drift:+.2f}"


@register("cancellation", lambda g, *_: g.cancels, carried_in=True)
def _cancellation(group: Group, fmt: Format) -> str:
    bits = max(e["bits"] for e in group.equations if e["cancelled"] or not group.cancels)
    error = group.worst("inherited")
    return f"{bits:.0f} of {fmt.precision} bits cancel; relative error left {error:.2g}"


@register("amplified", lambda g, *_: g.amplifies, carried_in=True)
def _amplified(group: Group, fmt: Format) -> str:
    error = group.worst("inherited")
    return f"the error carried in is amplified {group.factor:.0f} times; relative error {error:.2g}"


@register("precision", lambda *_: True)  # the last: what is left
def _precision(group: Group, fmt: Format) -> str:
    made, unit = group.worst("introduced"), half_unit(group, fmt)
    if made < EXACT * unit:
        return made_here(max(group.equations, key=lambda e: e.inherited))
    if _subnormals_lose(group, fmt):
        return f"{numbers_lost(group, 'subnormal')}; error made here {made:.2g}"
    return f"error made here {made:.2g}, {made / unit:.2g} times half a unit in the last place"


def made_here(equation: EquationStatistics) -> str:
    if equation.introduced > 0:
        return f"error made here {equation.introduced:.2g}"
    return f"no error made here, {equation.inherited:.2g} carried in"
