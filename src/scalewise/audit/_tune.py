"""``tune``: the cheapest formats that keep a function's outputs within a tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..autocast import Autocast, Policy, Rule
from ..formats import BF16, FP16, FP32, Format
from ..formats import format as format_
from ..interpret import trace
from ._run._lanes import Rounded, Wide
from ._run._rounding import as_row
from ._run._rows import Row
from ._run._session import Error, Outcome, Session

Part = tuple[str, str]  # a user's function, a primitive: what a rule of autocast can name


@dataclasses.dataclass(frozen=True)
class Tuning:
    """An assignment of formats to operations.

    Attributes:
        formats: the format of each (function, primitive), by name; what isn't there is float32.
        error: of the outputs under it, measured.
        cost: bits written by all results, as a share of what float32 writes.
        runs: how many runs were made.
        policy: the same for :func:`scalewise.autocast`, where the narrow format is FP16 or BF16
            and one alone, and a run under it kept the tolerance; else None (autocast rounds an
            operation's operands as well, here only results are).
    """

    formats: dict[Part, str]
    error: Error
    cost: float
    runs: int
    policy: Policy | None


def tune(
    f: Callable,
    args: Sequence[Any],
    tolerance: float,
    formats: Sequence[Format | str | Any] = (BF16,),
) -> Tuning:
    """The cheapest formats found for ``f``'s operations, its outputs within a tolerance.

    Operations are taken together by the user's function and the primitive. For each format, the
    narrowest first, all parts that are still float32 are tried at once; a set that leaves the
    tolerance is halved, so that a run of k parts with b bad ones takes about ``2 b log2(k)`` runs
    and not 2^k. Cost model: the bits that all results take, no credit for faster arithmetic.

    Args:
        f: any function of pytrees made of JAX primitives.
        args: its positional arguments; they decide.
        tolerance: for the outputs' relative error (root mean square) against float32.
        formats: to choose from, besides float32.

    Raises:
        ValueError: the tolerance isn't positive, or an unknown format.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def f(x):
        ...     return jnp.exp(jnp.sum(x * x)) * 1e-9
        >>> found = sw.tune(f, (jnp.full(16, 1.0),), 1e-2, ["fp16"])
        >>> sorted(p for _, p in found.formats)
        ['convert_element_type', 'mul', 'reduce_sum']
    """
    if not tolerance > 0:
        raise ValueError(f"tune: tolerance is {tolerance!r}; accepted: a positive number")
    narrow = sorted((format_(x) for x in formats), key=lambda fmt: fmt.bits)
    program = trace(f, Rounded(FP32), args, {}, name="tune")
    session = Session(program, Rounded(FP32), Wide(np.dtype(np.float32)))
    start = session.run()
    search = _Search(session, start, tolerance, session.formats())
    for fmt in narrow:
        free = [part for part in search.parts if part not in search.chosen]
        search.lower(free, fmt)
    return Tuning(
        formats={part: fmt.name for part, fmt in search.chosen.items()},
        error=search.error,
        cost=search.cost(),
        runs=session.runs,
        policy=_checked(_policy(search.chosen, list(search.parts)), session, tolerance),
    )


class _Search:
    """The parts of a program, and the formats given to them so far."""

    def __init__(self, session: Session, start: Outcome, tolerance: float, table: np.ndarray):
        self.session, self.tolerance, self.table = session, tolerance, table
        self.error = start.error
        self.chosen: dict[Part, Format] = {}
        self.parts: dict[Part, list[Row]] = {}
        for row in start.rows:
            self.parts.setdefault((row.function, row.primitive), []).append(row)

    def lower(self, parts: Sequence[Part], fmt: Format) -> None:
        """Gives ``fmt`` to all of these parts that can take it."""
        if not parts:
            return
        table = self.table.copy()
        for part in parts:
            table[[row.index for row in self.parts[part]]] = as_row(fmt)
        error = self.session.run(table).error
        if float(error) <= self.tolerance:
            self.table, self.error = table, error
            self.chosen |= dict.fromkeys(parts, fmt)
        elif len(parts) > 1:
            half = len(parts) // 2
            self.lower(parts[:half], fmt)
            self.lower(parts[half:], fmt)

    def cost(self) -> float:
        """Bits of all results, to those of float32."""
        sizes = {p: sum(r["elements"] for r in rows) for p, rows in self.parts.items()}
        bits = sum(n * self.chosen.get(p, FP32).bits for p, n in sizes.items())
        return bits / max(32 * sum(sizes.values()), 1)


def _policy(chosen: dict[Part, Format], parts: Sequence[Part]) -> Policy | None:
    """Rules that say the same to autocast: what was lowered is low, all else is float32."""
    formats = set(chosen.values())
    if len(formats) != 1 or not formats <= {FP16, BF16}:
        return None
    rules = [
        Rule("low" if part in chosen else "full", primitive=part[1], function=part[0] or None)
        for part in parts
    ]
    return Policy(compute=formats.pop().dtype, rules=tuple(rules))


def _checked(policy: Policy | None, session: Session, tolerance: float) -> Policy | None:
    """The policy, if autocast under it keeps the tolerance."""
    if policy is None:
        return None
    error = Session(session.program, Autocast(policy), session.shadow).run().error
    return policy if float(error) <= tolerance else None
