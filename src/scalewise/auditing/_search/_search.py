"""The search for fixes that help: each is applied, the program run again, its error measured."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from .._run._compared import decides
from .._run._outcome import Outcome, OutputError
from .._thresholds import (
    ACCUMULATED,
    BEFORE_WIDEST,
    CLEAR,
    ENOUGH,
    EVENT,
    EXACT,
    FEW_OPERATIONS,
    FEW_ROUNDINGS,
    FEW_TOGETHER,
    GAIN,
    MANY_ROUNDINGS,
    MANY_SWAMPED,
    RESERVE,
    unusable,
)
from . import _fix_kinds, _recipe_fix_kinds  # noqa: F401  # they register fixes, in this order
from ._cause import (
    amplified_after,
    at_cause,
    constant_is_harmless,
    decided_after,
    of_constants,
    unless_refuted,
)
from ._findings import Finding, constant_finding
from ._fixes import Context, Fix, described, proposals, widened
from ._groups import Group
from ._joint import faults, try_lines, try_pairs
from ._kinds import FINDING_KINDS
from ._literals import Literal
from ._lost_updates import search_lost_updates
from ._measure import better, enough, fixed, gain, key_of, near, same
from ._rewrites import norms
from ._trials import Failed, Search

UNTRIED_SHOWN = 12  # findings listed if no fix may be tried
UNFIXED_SHOWN = 6  # findings listed if none of the fixes tried helped


def find_fixes(search: Search, start: Outcome) -> OutputError:
    """Searches until no fix helps or no trials are left; returns the error with all fixes."""
    search.outcome, search.decisions = start, decides(search.session.program)
    by_table, low = search.session.adjustable, search.session.low
    search.current = search.start() if by_table else low
    search.tried[key_of(search.current)] = start.error
    if search.trials <= 0 or search.session.kind.run is None:
        shown = search.groups_in(start)[:UNTRIED_SHOWN]
        search.unfixed += [search.finding_of(g) for g in shown]
        return start.error
    if by_table:
        float32 = search.current.widened(range(len(search.current.formats)))
        for literal in search.literals:
            float32 = float32.with_constant(literal.number, literal.number)
        float32 = float32.without_limits(search.limits)
        search.results[key_of(float32)] = outcome = search.run(float32)
        search.float32, search.float32_error = outcome, outcome.error
        search.beyond = _beyond(search, outcome)
    _search_all(search)
    while by_table and search.done and search.trials > 0 and search.leave_out():
        _search_all(search)
    search_lost_updates(search)
    if search.trials > 0 and search.look_at_decisions():
        _search_all(search)
    first: dict[int, int] = {}
    for x in search.found:
        if _leaves_range(x):
            first[x.order] = min(*x.equations, first.get(x.order, x.equations[0]))
    search.found.sort(key=lambda x: _order(x, first), reverse=True)
    if not search.done and not search.is_small:
        _list_unfixed(search)
    search.unfixed.sort(key=lambda x: not x.tried)
    search.look_at_all()
    return search.outcome.error


def _search_all(search: Search) -> None:
    search.reserve, search.final, paired = min(RESERVE, search.trials // 3), False, True
    _search_findings(search)
    while paired and search.trials > 0 and not search.done and not search.is_small:
        paired = try_pairs(search) or try_lines(search)
        search.reserve, search.final = 0, not paired
        _search_findings(search)


def _beyond(search: Search, wide: Outcome) -> set[int]:
    half = 2.0 ** (search.fmt.max_exponent - search.fmt.mantissa_bits - 1)
    stays_wide = search.session.lockstep.stays_wide
    return {
        e.index for e in wide.equations
        if e["amax"] > float(search.fmt.max) + half and not stays_wide(wide.recorded[e.index])
    }  # fmt: skip


def _is_worth_trying(search: Search, group: Group, what: Finding) -> bool:
    error = search.outcome.error
    if what.kind == "accumulation" and search.session.exact_sums is not None:
        least = max(ACCUMULATED * search.session.exact_sums.error, EXACT * search.rounding)
        return float(error) > least
    if search.is_small and search.session.kind.run != "format":
        return group.weight(search.fmt) >= EVENT
    if what.kind == "swamping" and search.is_small and group.swamped < MANY_SWAMPED:
        return False
    if FINDING_KINDS[what.kind].event or error.non_finite:
        least = search.is_least(error) or search.is_harmless
        return group.weight(search.fmt) >= EVENT or not least
    few = MANY_ROUNDINGS if search.found else FEW_ROUNDINGS
    return error.relative > few * search.rounding


def _search_findings(search: Search) -> None:
    """Tries fixes for constants, then for one finding after another, the heaviest first, until
    the error is near that of float32; starts over after each fix that is accepted."""
    _search_constants(search)
    tried: set[tuple[int, ...]] = set()
    failures: collections.Counter[str] = collections.Counter()  # so that directions alternate
    ruled_out = _ruled_out(search)
    while search.trials > search.reserve and not search.is_near(search.outcome.error):
        found = search.groups_in(search.outcome)
        fresh = [g for g in found if g.indices not in tried]
        if not fresh:
            break
        group = min(fresh, key=lambda g: failures[g.first.direction])
        what = search.finding_of(group)
        tried.add(group.indices)
        if not _is_worth_trying(search, group, what):
            continue
        failures[what.direction] += 1
        changes = _fixes(search, group, what)
        if group.indices in ruled_out:
            changes = (fix for fix in changes if not fix.size)
            what = dataclasses.replace(what, tried=True)
        if _try_fixes(search, what, changes):
            tried.clear()
            ruled_out = _ruled_out(search)
            failures.clear()
            _search_constants(search)


def _ruled_out(search: Search) -> set[tuple[int, ...]]:
    """Returns the groups whose wider formats can't be at fault for an error that may be the sum of
    many roundings: all of theirs together leave more of it than one of them would have to."""
    if not search.is_small or not search.session.adjustable:
        return set()
    fresh = ((g, search.finding_of(g)) for g in search.groups_in(search.outcome))
    pending = [[x for x in fresh if _is_worth_trying(search, *x)]]
    equations, found = {e.index: e for e in search.outcome.equations}, set()
    while pending:
        some = pending.pop()
        if len(some) <= FEW_TOGETHER or search.trials <= search.reserve:
            continue
        wide = {i for g, what in some for fix in _fixes(search, g, what) for i in fix.indices}
        setting = search.untried(widened(search.word, "all", [equations[i] for i in sorted(wide)]))
        if setting is None:
            continue
        outcome = search.results[key_of(setting)] = search.run(setting)
        if search.better(outcome.error, search.outcome.error, CLEAR):
            pending += [some[: len(some) // 2], some[len(some) // 2 :]]
        else:
            found |= {g.indices for g, _ in some}
    return found


def _search_constants(search: Search) -> None:
    """Tries fixes for constants, and once more for those that have one: see
    :func:`_reconsider_constants`."""
    _new_constants(search)
    _reconsider_constants(search)


def _new_constants(search: Search) -> None:
    done = {(x.file, x.line, x.evidence) for x in search.found}
    for literal in search.literals if search.session.adjustable else ():
        what = constant_finding(literal)
        if literal.slight and not (search.final or _explains_error(search, literal)):
            continue
        if search.is_near(search.outcome.error):
            return
        if literal.masks and math.isinf(literal.rounded) and not search.outcome.error.non_finite:
            continue  # a mask is meant to be
        if literal.masks and _is_unread(search, literal):
            continue
        if literal in search.harmless and not search.final:
            continue
        if (what.file, what.line, what.evidence) not in done:
            clear = ENOUGH if literal.slight else CLEAR  # its error is known not to be others'
            _try_fixes(search, what, _constant_fixes(search, literal, what), clear, literal)


def _constant_fixes(search: Search, literal: Literal, what: Finding) -> Iterator[Fix]:
    alike = (x for x in search.literals if x.number == literal.number)
    places = {(x.file, x.line) for x in alike}
    context = _context(search, Group(()), what)
    return proposals("constant", dataclasses.replace(context, literal=literal, places=places))


def _reconsider_constants(search: Search) -> None:
    """Computes in float32 what a replaced constant is part of, where that is much better: another
    number in its place changes results that need the constant itself."""
    for what in [x for x in search.found if x.fix and len({*(x.fix.replaces or ())}) == 2]:
        shared = any(x.order == what.order for x in search.found if x is not what)
        if shared or search.done or search.is_slight or search.trials <= 0:
            continue
        constants = [x for x in search.literals if same(constant_finding(x), what)]
        wide = (fix for x in constants for fix in _in_float32(search, x, what))
        any(_exchange(search, what, search.accepted(fix)) for fix in wide)


def _in_float32(search: Search, constant: Literal, what: Finding) -> Iterator[Fix]:
    """Yields a wider format for a constant's line, its function, and the library's call."""
    yield from (fix for fix in _constant_fixes(search, constant, what) if fix.indices)
    equations = search.outcome.equations
    call = [e for e in equations if e.caller and e.caller in constant.callers]
    if call:
        yield widened(search.word, described(call, equations), call)


def _exchange(search: Search, what: Finding, fix: Fix) -> bool:
    """Replaces a finding's fix if that at least halves the error with all fixes; returns True if it
    did."""
    found = [dataclasses.replace(x, fix=fix) if x is what else x for x in search.found]
    fixes = {x.order: x.fix for x in found if x.fix}
    settings = [search.start()]
    for order in sorted(fixes):
        settings.append(fixes[order].change(settings[-1]))
    if search.trials <= 0 or key_of(settings[-1]) in search.tried:
        return False
    after = search.run(settings[-1])
    if not search.better(after.error, search.outcome.error, ENOUGH):
        return False
    errors = [search.tried.get(key_of(x)) or search.run(x).error for x in settings]
    steps = dict(zip(sorted(fixes), itertools.pairwise(errors), strict=True))
    search.found = [fixed(x, x.order, *steps[x.order]) if x.fix else x for x in found]
    search.current, search.outcome = settings[-1], after
    return True


def _is_unread(search: Search, literal: Literal) -> bool:
    """Returns True if no result has a constant that is an operand of max, clamp and so on."""
    place = literal.file, literal.line, literal.primitive
    here = [e for e in search.outcome.equations if (e.file, e.line, e.primitive) == place]
    events = ("flushed", "overflowed", "nan")
    return bool(here) and not any(e.introduced or any(e[x] for x in events) for e in here)


def _explains_error(search: Search, literal: Literal) -> bool:
    error = search.outcome.error
    small = search.is_harmless or error.non_finite
    return not small and error.relative <= 2 * literal.error


def _fixes(search: Search, group: Group, what: Finding) -> Iterator[Fix]:
    gradients = [e for e in search.outcome.equations if e.index in search.session.loss_scaled]
    written = (
        norms(search.session.lockstep.recorded, search.operands)
        if search.session.adjustable
        else ()
    )
    context = _context(search, group, what)
    replaced = dict(search.current.constants) if search.session.adjustable else {}
    masks = [number for number in search.constants.masks if number not in replaced]
    context = dataclasses.replace(
        context, gradients=gradients, norms=written, rewrites=search.rewrites, masks=masks,
        beyond=[e for e in search.outcome.equations if e.index in search.beyond],
        limits=search.limits,
        slight=search.is_slight,
    )  # fmt: skip
    return proposals(search.kind.run or "", context)


def _context(search: Search, group: Group, what: Finding) -> Context:
    low, equations = search.session.low, search.outcome.equations
    kind, causes, now = FINDING_KINDS[what.kind], search.causes, search.current
    return Context(group, kind, search.fmt, now, low, equations, final=search.final, causes=causes)


def _list_unfixed(search: Search) -> None:
    left: list[Finding] = []
    for group in search.groups_in(search.outcome)[:UNFIXED_SHOWN]:
        what = search.finding_of(group)
        if FINDING_KINDS[what.kind].event and (
            not search.is_slight or group.weight(search.fmt) >= EVENT
        ):
            error = search.outcome.error
            tried = any(x.equations == what.equations for x in search.unfixed)
            what = dataclasses.replace(
                what, error_before=float(error), non_finite_before=error.non_finite,
                decided=error.decided, tried=tried,
            )  # fmt: skip
            left.append(what)
            search.unfixed = [x for x in search.unfixed if x.equations != what.equations]
    search.found += sorted(left, key=lambda x: not x.tried)


def _trials(
    search: Search, options: Sequence[Fix]
) -> tuple[list[tuple[Fix, OutputError]], list[tuple[Fix, Outcome]]]:
    """Returns the fixes that were tried with their errors, and the runs of those that helped.

    They are tried in their order until one helps enough. If the first ones don't help, the one that
    changes most is tried before the others: without its help, its parts don't help either.
    """
    before = search.outcome.error
    tried: list[tuple[Fix, OutputError]] = []
    helped: list[tuple[Fix, Outcome]] = []
    pending, probe = list(options), None
    before_widest = 0 if search.failed else BEFORE_WIDEST
    while pending:
        if len(tried) >= before_widest and not helped and probe is None:
            probe = max(pending, key=lambda fix: fix.size)
            if probe.size:
                pending = [probe, *(fix for fix in pending if fix is not probe)]
        fix = pending.pop(0)
        setting = fix.change(search.current)
        after = search.results.get(key_of(setting))
        if after is None:
            if search.trials <= 0 or key_of(setting) in search.tried:
                continue
            after = search.run(setting)
        tried.append((fix, after.error))
        helps = search.better(after.error, before, GAIN)
        if helps:
            helped.append((fix, after))
        if fix is probe and not helps:  # what is part of it won't help either
            pending = [x for x in pending if not x.size or not _is_part_of(x, fix)]
        if helps and fix is not probe and _is_enough(search, helped, before):
            break
    return tried, helped


def _try_fixes(
    search: Search,
    what: Finding,
    changes: Iterator[Fix],
    clear: float = CLEAR,
    constant: Literal | None = None,
) -> bool:
    """Accepts the fix that helps most for its cost; returns False if none helps enough.

    Of an error that many roundings may add up to it must leave at most the share ``clear``. With
    ``constant``, what the format makes of it is the cause.
    """
    before, options = search.outcome.error, list(changes)
    tried, helped = _trials(search, options)
    what = dataclasses.replace(what, tried=what.tried or bool(tried))
    last = search.final and not search.found
    required = clear if search.is_small else GAIN if last else ENOUGH
    sufficient = [x for x in helped if search.better(x[1].error, before, required)]
    best = _best(search, sufficient or helped)
    if best and not search.better(best[1].error, before, required):
        # it helps a little: kept for the final pass, since a pair may do more
        search.results[key_of(best[0].change(search.current))] = best[1]
        best = None
    if best:
        best = search.fewer_lines(*best)
        if _is_like_any_rounding(search, at_cause(search, what, best[0]), best[0]):
            best = None
        elif constant and constant_is_harmless(search, constant, *best):
            search.results[key_of(best[0].change(search.current))] = best[1]
            search.harmless.append(constant)
            return False
    if best is None:
        if tried:
            search.failed.append(Failed(what, tuple(options), tuple(tried), search.current, before))
        if tried or not any(same(what, x) for x in search.unfixed):
            search.unfixed = [x for x in search.unfixed if not same(what, x)] + [what]
        return False
    fix, after = best
    what = unless_refuted(search, what, at_cause(search, what, fix), fix)
    found = faults(search, what, fix) or [dataclasses.replace(what, fix=search.accepted(fix))]
    if len(found) == 1:
        (one,) = found
        cause = of_constants(search, one, fix, after) or decided_after(search, one, fix, after)
        cause = cause or amplified_after(search, one, fix)
        found = [dataclasses.replace(cause, fix=found[0].fix)]
    search.accept(fix, after, found)
    return True


def _is_enough(search: Search, helped: Sequence[tuple[Fix, Outcome]], before: OutputError) -> bool:
    """A format with more range and fewer digits makes numbers finite too, but leaves an error of
    more than a rounding. It is the last to be tried only if another fix leaves as much."""
    *others, last = (after.error for _, after in helped)
    if search.is_least(last):
        return True
    fix = helped[-1][0]
    coarse = before.non_finite or (fix.kind is not None and fix.kind.name == "wider_result")
    rounds = not coarse or last.relative <= FEW_ROUNDINGS * search.rounding
    return enough(last, before) and (rounds or any(near(x, last) for x in others))


def _is_like_any_rounding(search: Search, what: Finding, fix: Fix) -> bool:
    """Returns True if the error is that of any program, and a fix says nothing about its cause.

    That is any fix of an error within one rounding, one which rounds the outputs less, which
    leaves nothing that rounds, or which, of errors that aren't amplified, needs those of several
    lines or removes more than was made there: wider formats for enough operations remove any error.
    """
    if not fix.indices or not search.is_small or FINDING_KINDS[what.kind].event:
        return False
    slight = float(search.fmt.eps) * 2.0**-10
    rounded = {e.index for e in search.outcome.equations if e.introduced > slight}
    outputs = {e.index for e in search.outcome.equations if e.is_output}
    made = [e.introduced for e in search.outcome.equations if e.index in fix.indices]
    by_chance = max(made, default=0.0) < ENOUGH * search.outcome.error.relative
    return (
        search.is_harmless
        or rounded <= {*fix.indices}
        or not outputs.isdisjoint(fix.indices)
        or (what.kind == "precision" and (by_chance or len(search.by_line(fix)) > 1))
    )


def _best(search: Search, helped: Sequence[tuple[Fix, Outcome]]) -> tuple[Fix, Outcome] | None:
    """Returns the cheapest of the fixes that help almost as much as the best one; of those that
    make numbers finite, all that leave an error of a rounding or less do.

    One that leaves nothing of the format, policy or recipe is chosen only if no other makes the
    outputs usable, and one that widens most operations if no other leaves an error that may be
    the sum of many roundings.
    """
    if not helped:
        return None
    before = search.outcome.error
    limit, every = unusable(search.fmt.precision), {e.index for e in search.outcome.equations}
    parts = [
        (fix, after)
        for fix, after in helped
        if not (fix.undoes or every <= {*fix.indices})
        and search.better(after.error, before, ENOUGH)
        if float(after.error) < limit
    ]
    helped = parts or helped
    most = max(FEW_OPERATIONS, len(search.outcome.equations) / 2)
    few = [x for x in helped if x[0].size <= most or len(search.by_line(x[0])) == 1]
    few = [x for x in few if search.may_be_roundings(x[1].error)]
    helped = few or helped
    least = min(after.error for _, after in helped)
    rounding = FEW_ROUNDINGS * search.rounding if search.outcome.error.non_finite else 0.0
    close = [
        (fix, after)
        for fix, after in helped
        if after.error.non_finite <= least.non_finite
        and (
            after.error.relative <= max(2 * least.relative, rounding)
            or search.is_least(after.error)
        )
    ]
    return min(close, key=lambda x: x[0].size)


def _is_part_of(fix: Fix, other: Fix) -> bool:
    return {*fix.indices} <= {*other.indices} and {*fix.limits} <= {*other.limits}


def _order(what: Finding, first: Mapping[int, int]) -> tuple[int, bool, float, float]:
    """Findings that one fix helps keep the order of the search; those whose own part doesn't help
    alone follow, in the order of the program, and so do numbers that leave the range behind the
    ``first`` ones of a fix that do."""
    made_finite, removed = gain(what)
    regains = what.kind == "swamping" and what.fix is not None and removed <= 0
    alone = OutputError(what.non_finite_alone, what.error_alone)
    helps = better(alone, OutputError(what.non_finite_before, what.error_before), GAIN)
    place = min(what.equations, default=math.inf)
    if _leaves_range(what) and place != first[what.order]:
        helps = False
    return made_finite, regains, removed, 0.0 if helps else -1.0 - place


def _leaves_range(what: Finding) -> bool:
    return FINDING_KINDS[what.kind].severe and bool(what.equations)
