"""``tune``: finds cheap formats that keep a function's outputs within a tolerance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._check import Positive, checked
from .._output import Rows, Tabular, counted, plain
from .._resolve import as_format
from .._types import Json, PyTree
from ..autocasting import Autocast, Policy, Rule
from ..formats import BF16, FP16, FP32, Format, FormatLike
from ..interpret import trace
from ._bisect import fewest
from ._file import name_of
from ._run._equation_statistics import EquationStatistics
from ._run._interpretations import Reference, TableEmulation
from ._run._rounding import format_params
from ._run._session import Outcome, OutputError, Session

Part = tuple[str, str]  # (user's function, primitive), which a rule of autocast can name


@dataclasses.dataclass(frozen=True)
class TunedPart:
    """The operations of one primitive in one function.

    Attributes:
        format: the name of the format of their results.
        function, primitive: their names.
        operations: how many they are.
        numbers: how many numbers their results have.
    """

    format: str
    function: str
    primitive: str
    operations: int
    numbers: int


@dataclasses.dataclass(frozen=True)
class Tuning(Tabular):
    """An assignment of formats to operations; :meth:`show` prints it, :meth:`save` writes it.

    Attributes:
        formats: the name of the format of each (function, primitive); all others are float32.
        error: of the outputs under it, measured.
        cost: bits that all results take, as a share of float32's.
        runs: how many runs were made.
        policy: the same assignment for :func:`scalewise.autocast`, if its only narrow format is
            FP16 or BF16 and a run under it kept the tolerance; else None (autocast also rounds an
            operation's operands, ``tune`` only results).
        function: the name of the function.
        tol: the tolerance.
        tried: the names of the formats to choose from.
        parts: all operations by function and primitive, float32 first, then by their size.
    """

    formats: dict[Part, str]
    error: OutputError
    cost: float
    runs: int
    policy: Policy | None
    function: str = ""
    tol: float = math.nan
    tried: tuple[str, ...] = ()
    parts: tuple[TunedPart, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence: the error, and which share of float32's bits it takes."""
        low = sum(part.format != "fp32" for part in self.parts)
        if not low:
            return (
                f"{self.function} needs float32 for all operations: with any of them in "
                f"{' or '.join(self.tried)} the error exceeds {self.tol:.2g}."
            )
        autocast = "autocast with .policy keeps it too" if self.policy else "no policy for autocast"
        return (
            f"{self.function} keeps an error of {self.error} (tolerance {self.tol:.2g}) with "
            f"{self.cost:.0%} of float32's bits: {low} of {counted(len(self.parts), 'part')} in "
            f"{' and '.join(dict.fromkeys(self.formats.values()))}; {autocast}."
        )

    @property
    def title(self) -> str:
        return f"Formats for {self.function}"

    @property
    def heading(self) -> str:
        return f"tune  {self.function}   {counted(self.runs, 'run')}"

    def __repr__(self) -> str:
        return f"<Tuning of {self.function}: {self.verdict} show(), save('tuning.html')>"

    def as_dict(self) -> dict[str, Json]:
        policy = None if self.policy is None else str(self.policy)
        same = ("verdict", "function", "tol", "cost", "runs")
        return plain(
            {name: getattr(self, name) for name in same}
            | {"error": dataclasses.asdict(self.error), "policy": policy}
            | {"parts": [dataclasses.asdict(part) for part in self.parts]}
        )

    def sentences(self) -> list[str]:
        return [self.verdict]

    def tables(self, *, everything: bool = True) -> list[Rows]:
        heads = [field.name for field in dataclasses.fields(TunedPart)]
        rows = [[str(x) for x in dataclasses.astuple(part)] for part in self.parts]
        return [Rows("Parts, and the format of their results", heads, rows)]


@checked
def tune(
    f: Callable[..., Any], *, tol: Positive, formats: Sequence[FormatLike] = (BF16,)
) -> Callable[..., Tuning]:
    """Returns a function of ``f``'s arguments that searches for the cheapest formats that keep the
    outputs of ``f`` within a tolerance.

    Operations are grouped by the user's function and the primitive. For each format, the narrowest
    first, all groups that are still float32 are tried at once. A set that exceeds the tolerance is
    halved, so that k groups of which b need float32 take about ``2 b log2(k)`` runs instead of 2^k.
    The cost is the number of bits of all results; faster arithmetic isn't counted.

    Args:
        f: any function of pytrees made of JAX primitives.
        tol: for the outputs' relative error (root mean square) against float32.
        formats: the formats to choose from, besides float32.

    Returns:
        A function to be called with arrays, that returns a :class:`Tuning`; it holds for them.

    Raises:
        ValueError: the tolerance isn't positive, or an unknown format.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def f(x):
        ...     return jnp.exp(jnp.sum(x * x)) * 1e-9
        >>> found = sw.tune(f, tol=1e-2, formats=["fp16"])(jnp.full(16, 1.0))
        >>> sorted(p for _, p in found.formats)
        ['convert_element_type', 'mul', 'reduce_sum']
    """
    narrow = sorted((as_format(x, "tune") for x in formats), key=lambda fmt: fmt.bits)

    def tuned(*args: PyTree, **kwargs: PyTree) -> Tuning:
        program = trace(f, TableEmulation(FP32), args, kwargs, name="tune")
        session = Session(program, TableEmulation(FP32), Reference(np.dtype(np.float32)))
        start = session.run()
        search = _Search(session, start, tol, session.formats())
        for fmt in narrow:
            free = [part for part in search.parts if part not in search.chosen]
            search.lower(free, fmt)
        policy = _policy(search.chosen, list(search.parts))
        run = policy and Session(program, Autocast(policy), session.reference).run()
        error = float(run.error) if run else math.inf
        return Tuning(
            formats={part: fmt.name for part, fmt in search.chosen.items()},
            error=search.error,
            cost=search.cost(),
            runs=session.runs,
            policy=policy if policy and error <= tol else None,
            function=name_of(f),
            tol=tol,
            tried=tuple(fmt.name for fmt in narrow),
            parts=search.summary(),
        )

    return tuned


class _Search:
    """The formats that parts of a program have got so far."""

    def __init__(self, session: Session, start: Outcome, tolerance: float, table: np.ndarray):
        self.session, self.tolerance, self.table = session, tolerance, table
        self.error = start.error
        self.chosen: dict[Part, Format] = {}
        self.parts: dict[Part, list[EquationStatistics]] = {}
        for e in start.equations:
            self.parts.setdefault((e.function, e.primitive), []).append(e)

    def lower(self, parts: Sequence[Part], fmt: Format) -> None:
        before = self.table

        def suffices(wide: list[Part]) -> bool:
            table = before.copy()
            for part in set(parts) - set(wide):
                table[[e.index for e in self.parts[part]]] = format_params(fmt)
            error = self.session.run(table).error
            if float(error) <= self.tolerance:
                self.table, self.error = table, error
            return float(error) <= self.tolerance

        wide = fewest(parts, suffices)
        self.chosen |= {part: fmt for part in parts if part not in wide}

    def summary(self) -> tuple[TunedPart, ...]:
        found = [
            TunedPart(
                format=self.chosen.get(part, FP32).name,
                function=equations[0].name,
                primitive=part[1],
                operations=len(equations),
                numbers=int(sum(e["elements"] for e in equations)),
            )
            for part, equations in self.parts.items()
        ]
        return tuple(sorted(found, key=lambda x: (x.format != FP32.name, -x.numbers)))

    def cost(self) -> float:
        sizes = {p: sum(e["elements"] for e in found) for p, found in self.parts.items()}
        bits = sum(n * self.chosen.get(p, FP32).bits for p, n in sizes.items())
        return bits / max(32 * sum(sizes.values()), 1)


def _policy(chosen: dict[Part, Format], parts: Sequence[Part]) -> Policy | None:
    """Returns autocast rules with the same assignment; None if it has no one 16-bit format."""
    formats = set(chosen.values())
    if len(formats) != 1 or not formats <= {FP16, BF16}:
        return None
    rules = [
        Rule("low" if part in chosen else "full", primitive=part[1], function=part[0] or None)
        for part in parts
    ]
    return Policy(compute=formats.pop().dtype, rules=tuple(rules))
