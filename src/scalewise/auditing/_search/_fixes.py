"""Fixes: changes that might help a finding, and the kinds of them that a search tries."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, overload

from ..._decorator import Target
from ..._output import place, place_of
from ...autocasting import Policy
from ...autoscaling import Recipe
from ...formats import Format
from ...scalifying import Scalify
from .._run._causes import Causes
from .._run._equation_statistics import Equations, EquationStatistics
from .._tape._interpretations import TableEmulation
from ._apply import AuditedArithmetic, FormatChoice, apply_fix
from ._groups import Group
from ._kinds import FindingKind
from ._literals import Literal
from ._rewrites import Rewrite


@dataclasses.dataclass(frozen=True)
class FixKind:
    """One kind of change that a search tries."""

    name: str
    # "policy", "recipe", "every_op"; in one format's run "constant", "format" or "lost_updates"
    runs: tuple[str, ...]
    propose: Callable[[Context], Iterator[Fix]]  # yields a finding's, the smallest change first


FIXES: dict[str, FixKind] = {}  # by name, in the order in which a search tries them


@dataclasses.dataclass(frozen=True)
class Edit:
    """A statement of a file, before and after; without one before, lines to insert."""

    file: str
    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        lines = textwrap.dedent("\n".join([*self.before, *self.after])).split("\n")
        marked = [f"{'-' if i < len(self.before) else '+'} {x}" for i, x in enumerate(lines)]
        return "\n".join([place(self.file, self.line), *marked])


@dataclasses.dataclass(frozen=True, eq=False)
class Fix:
    """A change under which an audit measured the outputs' error; ``str(fix)`` describes it.

    Attributes:
        text: the description.
        change: returns a setting, or the interpretation of a policy or recipe, with the change.
        size: how many operations get a wider format, to order fixes of one finding; 0 if the
            change is of another kind.
        indices: the operations that become float32.
        limits: literals of the program's own narrow dtype that become float32's.
        word: the dtype that operations or a constant are widened to; "" of other changes.
        power: of a loss scale ``2**power``; 0 of other changes.
        better: what takes the place of expressions: keys of ``PATTERNS``.
        everywhere: whether all such expressions of a function are replaced.
        rewrites: the operations that these expressions are made of.
        all_lines: the description of lines that are widened together, of which ``text`` names one
            first.
        replaces: a constant and the number that takes its place, itself if it is kept in float32.
        undoes: whether nothing of a policy or recipe is left.
        edits: changes of the source for programs that JAX doesn't compute from it; else None.
        kind: its entry in ``FIXES``.
        origin: the arithmetic of the audit that tried it.
    """

    text: str
    change: Callable[[Any], Any] = dataclasses.field(repr=False)
    size: int = dataclasses.field(default=0, repr=False)
    indices: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    limits: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    word: str = dataclasses.field(default="", repr=False)
    power: int = dataclasses.field(default=0, repr=False)
    better: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    everywhere: bool = dataclasses.field(default=False, repr=False)
    all_lines: str = dataclasses.field(default="", repr=False)
    rewrites: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    replaces: tuple[float, float] | None = dataclasses.field(default=None, repr=False)
    undoes: bool = dataclasses.field(default=False, repr=False)
    edits: tuple[Edit, ...] | None = dataclasses.field(default=None, repr=False)
    kind: FixKind | None = dataclasses.field(default=None, repr=False)
    origin: AuditedArithmetic | None = dataclasses.field(default=None, repr=False)

    @overload
    def apply(self, target: str) -> Policy | Recipe | Scalify: ...
    @overload
    def apply(self, target: Target) -> Target: ...
    def apply(self, target: Any) -> Any:
        """Returns ``target`` with this fix.

        Fixes were tried on top of each other: ``Finding.error_after`` is the error with the fixes
        of smaller ``Finding.order`` too (:meth:`Report.apply_fixes` applies all of them).

        Args:
            target: what was audited: a policy or a recipe, or the name of one; or a function. The
                function that was audited, or the result of an earlier ``apply`` on it.

        Returns:
            A policy or recipe for a policy or recipe. For a function, a function that computes it
            in the audited arithmetic with the fix. It composes with ``jit``. After an audit in one
            format it takes arguments of the audited shapes, and can't be differentiated from
            outside: audit ``jax.grad(f)``.

        Raises:
            TypeError: the audit ran under no policy or recipe, or the fix, a loss scale, changes
                the program.
            ValueError: the function isn't the one that was audited.

        Example:
            >>> import jax.numpy as jnp, scalewise as sw
            >>> def norm(x):
            ...     return jnp.sqrt(jnp.sum(x * x))
            >>> x = jnp.full(4096, 16.0)
            >>> worst = sw.audit(norm, "fp16", trials=3)(x).findings[0]
            >>> str(worst.fix)
            'ops.l2_norm in place of the root of a sum of squares'
            >>> float(sw.emulate(norm, "fp16")(x)), float(worst.fix.apply(norm)(x))
            (inf, 1024.0)
        """
        return apply_fix(self, target)

    @property
    def headline(self) -> str:
        """The change in a phrase, without edited lines."""
        return self.all_lines or self.text

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """The facts on which the fixes for a finding depend."""

    group: Group  # the finding's equations
    kind: FindingKind
    fmt: Format  # see :func:`nominal_format`
    now: Any  # the setting, or the interpretation of the policy or recipe, with earlier fixes
    low: Any  # the emulation of the format, or that interpretation
    equations: Equations
    gradients: Equations = ()  # the equations that a loss scale multiplies
    norms: Sequence[tuple[int, ...]] = ()  # see :func:`norms`
    rewrites: Sequence[Rewrite] = ()
    masks: Sequence[float] = ()  # constants of which the format holds no sum of two
    limits: Sequence[float] = ()  # see :class:`Lockstep`
    literal: Literal | None = None  # the constant that the finding is about
    places: Collection[tuple[str | None, int]] = ()  # files and lines of constants of that value
    causes: Causes | None = None

    @property
    def word(self) -> str:
        return getattr(self.now, "word", "float32")

    @property
    def emulation(self) -> TableEmulation:
        assert isinstance(self.low, TableEmulation)
        return self.low


def register(name: str, *runs: str) -> Callable[[Any], Any]:
    def add(propose: Callable[[Context], Iterator[Fix]]) -> Callable[[Context], Iterator[Fix]]:
        FIXES[name] = FixKind(name, runs, propose)
        return propose

    return add


def proposals(run: str, context: Context) -> Iterator[Fix]:
    for name, kind in FIXES.items():
        if run in kind.runs and name not in getattr(context.low, "unwanted_fixes", ()):
            for fix in kind.propose(context):
                yield dataclasses.replace(fix, kind=kind)


def widened(
    word: str,
    what: str,
    equations: Equations,
    *,
    limits: Sequence[float] = (),
) -> Fix:
    indices, limits = tuple(e.index for e in equations), tuple(limits)
    text = f"{word} for {what}"
    if limits:
        text += f", with {word}'s limit in place of {max(map(abs, limits)):g}"
    change = partial(_in_float32, indices=indices, limits=limits)
    return Fix(text, change, len(indices), indices=indices, limits=limits, word=word)


def _in_float32(now: FormatChoice, indices: Sequence[int], limits: Sequence[float]) -> FormatChoice:
    return now.widened(indices).without_limits(limits)


def both(a: Fix, b: Fix) -> Fix:
    known = a.indices and b.indices  # a constant's change is no operation's
    indices = tuple(dict.fromkeys((*a.indices, *b.indices))) if known else ()
    change = partial(_one_after_another, a.change, b.change)
    return Fix(f"{a}; {b}", change, indices=indices, word=a.word)


def _one_after_another(first: Callable, second: Callable, now: Any) -> Any:
    return second(first(now))


def _place(equation: EquationStatistics) -> tuple[str | None, int, str]:
    return equation.file, equation.line, equation.direction


def library_calls(some: Equations, every: Equations) -> dict[str, list[EquationStatistics]]:
    """Returns all operations of a library's call, by the user's line that makes it.

    Calls of which ``some`` has operations on several of the library's lines count: a user can
    change the call, but not those lines.
    """
    lines: dict[str, set[object]] = {}
    for e in some:
        if e.caller:
            lines.setdefault(e.caller, set()).add((e.file, e.line))
    several = {caller for caller, own in lines.items() if len(own) > 1}
    return {x: [e for e in every if e.caller == x] for x in several}


def whole_calls(some: Equations, every: Equations) -> set[str]:
    """Returns the lines of the user's whose library calls have no operation besides ``some``."""
    chosen = {e.index for e in some}
    calls = library_calls(some, every)
    return {x for x, own in calls.items() if all(e.index in chosen for e in own)}


def described(some: Equations, every: Equations) -> str:
    """Returns ``lines 3 and 7``, ``the mul and sub at lines 3 and 7`` if they have others,
    ``_update.py:9`` for a library's line, or ``the call at model.py:5`` for all of its call."""
    chosen = {e.index for e in some}
    whole = whole_calls(some, every)
    calls = [f"the call at {place_of(caller)}" for caller in sorted(whole)]
    some = [e for e in some if e.caller not in whole]
    if calls and not some:
        return joined(calls)
    there = {_place(e) for e in some}
    rest = [e for e in every if _place(e) in there and e.index not in chosen]
    places = sorted({(e.file, e.line) for e in some if e.file and e.line})
    if not places:
        return joined([*calls, f"{len(some)} operations"])
    if len({file for file, _ in places}) > 1 or any(e.caller for e in some):
        where = joined(itertools.starmap(place, places))
    else:
        where = f"line{'s' * (len(places) > 1)} {joined(str(line) for _, line in places)}"
    if rest:
        where = f"the {joined(dict.fromkeys(e.operation or e.primitive for e in some))} at {where}"
    return joined([*calls, where])


def joined(words: Iterable[str]) -> str:
    """Returns ``a``, ``a and b`` or ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
