"""Fixes that only help together: pairs, lines whose faults show one by one, several faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from .._run._equation_statistics import EquationStatistics
from .._run._outcome import Outcome, OutputError
from .._thresholds import ENOUGH, FAULTS, FINDINGS, GAIN, LINES, WHOLE
from ._apply import FormatChoice
from ._findings import Finding, constant_finding
from ._fixes import Fix, both, described, joined, widened
from ._groups import Group, is_out_of_range
from ._kinds import FINDING_KINDS
from ._measure import key_of
from ._trials import Failed, Search

Place = tuple[str | None, int]  # file and line


def pairs(failed: Sequence[Failed]) -> Iterator[tuple[Failed, Failed]]:
    different = {key_of(x.best.change(x.base)): x for x in reversed(failed)}
    few = list(different.values())[::-1][:FINDINGS]
    places = [(i, j) for j in range(len(few)) for i in range(j)]
    for i, j in sorted(places, key=sum):
        yield few[i], few[j]


def joint_findings(
    whats: Sequence[Finding], parts: Sequence[Fix], alone: Sequence[OutputError], whole: Fix
) -> list[Finding]:
    found = []
    for what, own, error in zip(whats, parts, alone, strict=True):
        others = [_placed(x, y, what) for x, y in zip(parts, whats, strict=True) if x is not own]
        text = f"{own}, together with {joined(others)}"
        fix = dataclasses.replace(whole, text=text, size=own.size, kind=own.kind or whole.kind)
        joint = dataclasses.replace(
            what, fix=fix, error_alone=float(error), non_finite_alone=error.non_finite
        )
        found.append(joint)
    return found


def _placed(fix: Fix, finding: Finding, other: Finding) -> str:
    """Returns a fix's text with its place, unless it names its line of the other finding's file."""
    told = finding.file == other.file and f"line {finding.line}" in str(fix)
    return str(fix) if told else f"{fix} ({finding.where})"


def try_pairs(search: Search) -> bool:
    before = search.outcome.error
    for a, b in pairs(search.failed):
        fix = both(a.best, b.best)
        setting = search.untried(fix)
        if setting is None or search.trials <= 0:
            continue
        after = search.run(setting)
        if search.better(after.error, before, ENOUGH):
            parts, after = _narrowed(search, (a, b), (a.best, b.best), after)
            search.accept(both(*parts), after, _pair_findings(search, (a, b), parts))
            return True
        if search.better(after.error, before, GAIN):
            search.results[key_of(setting)] = after
    return False


def _narrowed(search: Search, failed: Sequence[Failed], parts: tuple[Fix, Fix], after: Outcome):
    before = search.outcome.error
    for i, one in enumerate(failed):
        for fix in one.narrower(parts[i]):
            tried = (fix, parts[1]) if i == 0 else (parts[0], fix)
            setting = search.untried(both(*tried))
            if search.trials <= 0 or setting is None:
                continue
            outcome = search.run(setting)
            equal = outcome.error.relative <= max(2 * after.error.relative, float(search.fmt.eps))
            if search.better(outcome.error, before, ENOUGH) and equal:
                parts, after = tried, outcome
                break
    return parts, after


def _pair_findings(
    search: Search, failed: Sequence[Failed], parts: tuple[Fix, Fix]
) -> list[Finding]:
    alone = []
    for own, fix in zip(failed, parts, strict=True):
        error = own.error_alone(fix) if own.base is search.current else None
        if error is None and search.trials > 0:
            error = search.run(fix.change(search.current)).error
        alone.append(error or OutputError(0, math.nan))
    whats = [x.what for x in failed]
    return search.accepted_findings(joint_findings(whats, parts, alone, both(*parts)))


def try_lines(search: Search) -> bool:
    """Nothing is counted behind the first infinity: faults show one by one. So the heaviest line of
    a run is added, and the program run again, which shows the next one, until the error is small.
    Then lines that aren't needed are left out, as by delta debugging (Zeller and Hildebrandt,
    2002)."""
    before, outcome = search.outcome.error, search.outcome
    if not isinstance(search.current, FormatChoice) or not search.better(
        search.float32_error, before, ENOUGH
    ):
        return False
    base, constants = search.current, [x for x in search.failed if not x.what.equations]
    for constant in constants:
        search.current = constant.options[0].change(search.current)
    found = _enough_lines(search, before, outcome)
    if found is None:
        search.current = base
        return False
    added, fix, after = found
    search.current = base
    kept = [g for g in added if set(g.indices) & set(fix.indices)]
    what = search.finding_of(kept[0])
    alone = search.run(fix.change(base)) if constants and search.trials > 0 else None
    if not constants or (alone and alone.error <= after.error):
        what = dataclasses.replace(what, fix=search.accepted(fix))
        search.accept(fix, alone or after, [what])
        return True
    parts = [*(x.options[0] for x in constants), fix]
    whole = functools.reduce(both, parts)
    unknown = OutputError(0, math.nan)
    errors = [x.error_alone(x.options[0]) or unknown for x in constants]
    errors.append(alone.error if alone else unknown)
    whats = [*(x.what for x in constants), what]
    search.accept(
        whole, after, search.accepted_findings(joint_findings(whats, parts, errors, whole))
    )
    return True


def _enough_lines(
    search: Search, before: OutputError, outcome: Outcome
) -> tuple[list[Group], Fix, Outcome] | None:
    search.reserve, added = WHOLE, []
    chosen: dict[int, EquationStatistics] = {}
    while search.trials > search.reserve and len(added) < LINES:
        ranked = search.groups_in(outcome)
        group = next((g for g in ranked if not chosen.keys() & set(g.indices)), None)
        if group is None:
            return None
        added.append(group)
        chosen |= {e.index: e for e in _on_line_of(group, outcome.equations)}
        few = list(chosen.values())
        fix = widened(search.word, described(few, search.outcome.equations), few)
        setting = search.untried(fix)
        if setting is None:
            continue
        outcome = search.run(setting)
        if search.better(outcome.error, before, ENOUGH):
            return added, *search.fewer_lines(fix, outcome)
    return None


def faults(search: Search, what: Finding, fix: Fix) -> list[Finding]:
    """Returns a finding for each line of a fix, if each of a few is at fault by itself.

    That is, there is a finding at each, and each line's own fix helps, but leaves more than the
    fix of all; or each has numbers out of range once the others are fixed. Otherwise some
    lines only carry the error, and there is one finding: at the line whose own fix helps most
    if this one's doesn't help, or else none here.
    """
    here, by_line = (what.file, what.line), search.by_line(fix)
    if found := _apart(search, what, fix):
        return found
    places = {(g.first.file, g.first.line): g for g in search.groups_in(search.outcome)[::-1]}
    if not 1 < len(by_line) <= FAULTS or here not in by_line or not by_line.keys() <= {*places}:
        return []
    order = sorted(by_line, key=lambda place: place != here)
    parts, alone = {}, {}
    for place in order:
        parts[place], alone[place] = _alone(search, by_line[place])
    whats = {x: what if x == here else search.finding_of(places[x]) for x in order}
    helps = [search.better(alone[place], search.outcome.error, GAIN) for place in order]
    hidden = {} if all(helps) else _one_after_another(search, by_line)
    whats, order = (hidden, list(hidden)) if hidden else (whats, order)
    if all(helps) or hidden:
        found = [whats[place] for place in order]
        own, errors = [parts[place] for place in order], [alone[place] for place in order]
        return search.accepted_findings(joint_findings(found, own, errors, fix))
    best = min(order, key=alone.__getitem__)
    leads = FINDING_KINDS[what.kind].out_of_range and whats[best].kind == "precision"
    if not helps[0] and not leads and search.better(alone[best], search.outcome.error, ENOUGH):
        return search.accepted_findings([dataclasses.replace(whats[best], fix=fix)])
    return []


def _apart(search: Search, what: Finding, fix: Fix) -> list[Finding]:
    """Returns a finding for each part of a fix that is at fault by itself."""
    parts, several = _parts(search, fix)
    ranked = search.groups_in(search.outcome)
    found = [[g for g in ranked if part & {*g.indices}] for part in parts]
    if not 1 < len(parts) <= FAULTS or [] in found:
        return []
    whats, fixes, errors = [], [], []
    for part, groups in zip(parts, found, strict=True):
        own, error = _alone(search, [e for e in search.operations(fix) if e.index in part])
        fixes.append(own)
        errors.append(error)
        whats.append(what if part & {*what.equations} else search.finding_of(groups[0]))
    if not (several or all(search.better(error, search.outcome.error, GAIN) for error in errors)):
        return []
    return search.accepted_findings(joint_findings(whats, fixes, errors, fix))


def _parts(search: Search, fix: Fix) -> tuple[list[set[int]], bool]:
    """Returns a fix's operations by the line where numbers leave the range first, of operands that
    don't, and True; if that isn't several lines, the lines that don't read each other."""
    some = search.operations(fix)
    leave = {e.index for e in search.outcome.equations if is_out_of_range(e)}
    before = {e.index: {e.index, *search.causes.back((e.index,))} for e in some}
    sources: dict[Place, set[int]] = {}
    lines: dict[Place, set[int]] = {}
    for e in some:
        lines.setdefault((e.file, e.line), set()).add(e.index)
        if before[e.index] & leave == {e.index}:
            sources.setdefault((e.file, e.line), set()).add(e.index)
    parts = list(sources.values()) if len(sources) > 1 else []
    for e in some:
        line = lines[e.file, e.line]
        reads = [part for part in parts if part & (before[e.index] | line)]
        if len(sources) > 1:
            here = [sources[e.file, e.line]] if (e.file, e.line) in sources else []
            read_by = [part for part in parts if any(e.index in before[i] for i in part)]
            (*here, *reads, *read_by, parts[0])[0].add(e.index)
        else:
            parts = [part for part in parts if part not in reads]
            parts.append(line.union(*reads))
    return parts, len(sources) > 1


def _alone(search: Search, part: Sequence[EquationStatistics]) -> tuple[Fix, OutputError]:
    fix = widened(search.word, described(part, search.outcome.equations), part)
    setting = fix.change(search.current)
    if key_of(setting) not in search.tried and search.trials > search.reserve:
        search.run(setting)
    return fix, search.tried.get(key_of(setting), search.outcome.error)


def _one_after_another(
    search: Search, by_line: dict[Place, list[EquationStatistics]]
) -> dict[Place, Finding]:
    found: dict[Place, Finding] = {}
    setting, outcome = search.current, search.outcome
    while len(found) < len(by_line):
        events = (
            g for g in search.groups_in(outcome)
            if (g.first.file, g.first.line) in by_line.keys() - found.keys()
            and (g.total("overflowed") or g.total("nan"))
        )  # fmt: skip
        group = next(events, None)
        if group is None:
            return {}
        place = group.first.file, group.first.line
        lost = (x for x in search.literals if (x.file, x.line) == place and not x.slight)
        # a number that is too large isn't a constant's fault
        undefined = group.is_undefined(search.fmt)
        constant = next((x for x in lost if undefined or x.kind != "underflow"), None)
        found[place] = constant_finding(constant) if constant else search.finding_of(group)
        part = widened(search.word, "", by_line[place])
        setting = part.change(setting)
        if len(found) < len(by_line):
            if search.trials <= search.reserve:
                return {}
            outcome = search.run(setting)
    return found


def _on_line_of(group: Group, equations: Sequence[EquationStatistics]) -> list[EquationStatistics]:
    here = group.first
    if here.file is None:
        return list(group.equations)
    return [e for e in equations if (e.file, e.line) == (here.file, here.line)]
