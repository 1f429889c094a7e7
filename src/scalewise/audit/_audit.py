"""``audit``: a low-precision run beside a high-precision shadow, and what it shows."""

from __future__ import annotations

import inspect
import itertools
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..autocast import Autocast, Policy, policy
from ..autoscale import Boundaries, EveryOp, Recipe, interpretation
from ..autoscale.recipes import CATALOGUE
from ..emulate import Emulation
from ..formats import FP32, FP64, Format
from ..formats import format as format_
from ..interpret import Interpretation, Program, is_float, trace
from ._report._report import SEMANTICS, Report
from ._run._lane import nominal
from ._run._lanes import Rounded, Wide
from ._run._rounding import as_row
from ._run._session import Outcome, Session
from ._run._statistics import BINS, LOWEST
from ._search._literals import literals
from ._search._search import Search

UNSEEN = {"rng_uniform": "draws other numbers at each call: use jax.random with a key"}


def audit(
    f: Callable,
    low: Any = "float16",
    *,
    shadow: Any = None,
    saturate: bool | str = False,
    trials: int = 24,
    steps: int = 1,
    batches: Iterable[Any] | Callable[[int], Any] | None = None,
) -> Callable:
    """A function of ``f``'s arguments that returns a :class:`Report` instead of ``f``'s results.

    ``f`` is run twice in lockstep, in ``low`` and in a wide shadow; the low lane is bit for bit
    what :func:`scalewise.emulate` gives. Then changes are tried where something went wrong: each
    is applied, the program run again, and the outputs' error measured.

    Args:
        f: any function of pytrees made of JAX primitives: a loss, a gradient, a training step.
        low: a format, or a name or dtype of one; a policy of :func:`scalewise.autocast` (also
            ``"p=f32,c=bf16,o=f32"``); a recipe of :func:`scalewise.autoscale`; or an
            interpretation. Changes are tried for all but the last: where it is a format, without
            compiling anything anew; exceptions to a policy or recipe compile the program again.
        shadow: ``"float32"`` or ``"float64"``; None for float32, or float64 if ``f`` has any.
        saturate: as for :func:`scalewise.round_to`.
        trials: how many runs may be spent on trying changes; 0 for none.
        steps: how often ``f`` is called, its first result put in place of its first argument (a
            training step's state); each lane goes on from its own. ``Finding.iteration`` is then
            the step, from 0.
        batches: what ``f`` gets as its second argument at each step, all of the same shapes: an
            iterable, or a function of the step's number. None: what it is called with, each time.

    Returns:
        A function; call it with arrays, not under ``jit``, and with ``batches`` without the second
        argument.

    Raises:
        TypeError: ``f`` isn't callable, or returns what isn't an array; a tracer as an argument.
        ValueError: an unknown format; no float among the outputs; NaN in the shadow too.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> report = sw.audit(norm, "fp16")(jnp.full(4096, 16.0))
        >>> worst = report.findings[0]
        >>> worst.kind, worst.primitive, worst.error_before
        ('overflow', 'reduce_sum', inf)
    """
    if not callable(f):
        raise TypeError(f"audit(f, ...) takes a function, not a {type(f).__name__}: {f!r}")
    lane = lane_of(low, saturate)

    def audited(*args: Any, **kwargs: Any) -> Report:
        fed = _fed(batches, steps)
        args = _with_batch(f, fed[0], args, kwargs) if fed else args
        program = trace(f, lane, args, kwargs, name="audit", as_jit=True)
        _check(program, f)
        wide = Wide(_shadow(shadow, program))
        session = Session(program, lane, wide, steps, _arrays_of(fed))
        _check_steps(session, f)
        outcome = session.run()
        _check_shadow(outcome, f)
        _check_repeatable(session, outcome, f)
        return _report(f, args, kwargs, session, outcome, trials)

    return audited


def _with_batch(f: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
    """The arguments with the first batch as the second one."""
    args = (*args[:1], batch, *args[1:])
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(f, "__name__", repr(f))
        raise TypeError(
            f"audit: {name} with a batch as its second argument: {error}; leave the second out of "
            "the call where batches= gives it"
        ) from None
    return args


def _fed(batches: Any, steps: int) -> list[Any]:
    """The batch of each step; none if it is the argument's."""
    if batches is None:
        return []
    if callable(batches):
        return [batches(step) for step in range(steps)]
    found = list(itertools.islice(batches, steps))
    if len(found) < steps:
        raise ValueError(f"audit: steps={steps}, but batches has {len(found)}")
    return found


def _arrays_of(fed: Sequence[Any]) -> list[list[Any]]:
    """The arrays of each batch, which have to be alike."""
    found = [jax.tree.leaves(batch) for batch in fed]
    types = [[(np.shape(x), jnp.result_type(x)) for x in leaves] for leaves in found]
    for step, batch in enumerate(fed):
        if jax.tree.structure(batch) != jax.tree.structure(fed[0]) or types[step] != types[0]:
            raise ValueError(f"audit: batch {step} isn't like batch 0: other shapes or dtypes")
    arrays = jax.Array | np.ndarray | np.generic
    return [[x for x in leaves if isinstance(x, arrays)] for leaves in found]


def lane_of(low: Any, saturate: bool | str = False) -> Interpretation:
    """The interpretation that a user's ``low`` names."""
    if isinstance(low, str) and "=" in low:
        return Autocast(policy(low))
    if isinstance(low, Policy):
        return Autocast(low)
    if isinstance(low, Recipe):
        return interpretation(low)
    if isinstance(low, Emulation):
        low, saturate = low.fmt, low.saturate
    if isinstance(low, Interpretation):
        return low
    if low is None:
        raise ValueError("audit: low is None; accepted: a format, a policy, a recipe, an emulation")
    if isinstance(low, str) and low in CATALOGUE and low not in ("fp16", "bf16"):
        raise ValueError(f"audit: {low!r} is a recipe of autoscale: pass scalewise.recipes.{low}")
    fmt = format_(low)
    as_row(fmt, saturate)
    return Rounded(fmt, saturate)


def _shadow(shadow: Any, program: Program) -> np.dtype:
    if shadow is None:
        avals = [a for a in [*program.in_avals, *program.out_avals] if is_float(a)]
        wide = any(a.dtype == jnp.float64 for a in avals)
        return np.dtype(np.float64 if wide else np.float32)
    fmt = format_(shadow)
    if fmt not in (FP32, FP64):
        raise ValueError(f"audit: shadow={shadow!r}; accepted: 'float32' or 'float64'")
    return np.dtype(np.float64 if fmt == FP64 else np.float32)


def _check(program: Program, f: Any) -> None:
    name = getattr(f, "__name__", repr(f))
    if any(isinstance(x, Tracer) for x in program.arrays):
        raise TypeError(
            f"audit({name}, ...) was called under jit, grad or vmap; call it with arrays, and put "
            "the transformation inside: audit(jax.grad(f), ...)"
        )
    if not any(map(is_float, program.out_avals)):
        raise ValueError(
            f"audit: {name} returns no float, so that there is no error to measure; return a loss, "
            "or what it is computed from"
        )
    for primitive, why in UNSEEN.items():
        if f" {primitive}" in str(program.jaxpr):
            raise ValueError(f"audit: {name} calls {primitive}, which {why}")


def _check_steps(session: Session, f: Any) -> None:
    if session.steps < 1:
        raise ValueError(f"audit: steps is {session.steps}; accepted: 1 or more")
    if session.steps > 1:
        n, program = session.carried, session.program
        before = [(a.shape, a.dtype) for a in program.in_avals[:n]]
        after = [(a.shape, a.dtype) for a in program.out_avals[:n]]
        if not n or before != after:
            raise ValueError(
                f"audit: steps={session.steps}, but the first result of "
                f"{getattr(f, '__name__', f)} isn't like its first argument; accepted: "
                "f(state, ...) -> state, or (state, ...)"
            )


def _check_shadow(outcome: Outcome, f: Any) -> None:
    if not outcome.shadow_broken:
        return
    name = getattr(f, "__name__", repr(f))
    first = next((r for r in outcome.rows if r["bad"]), None)
    where = f"; first not finite: {first.primitive} at {first.file}:{first.line}" if first else ""
    raise ValueError(
        f"audit: {name} gives NaN in the shadow too (output{outcome.shadow_broken[0]}){where}; "
        "mend that first, or try shadow='float64'"
    )


def _check_repeatable(session: Session, outcome: Outcome, f: Any) -> None:
    """A callback to the host may be called as often as there are lanes and runs."""
    if not session.program.calls_back:
        return
    again = session.run().shadow
    if not all(map(partial(np.array_equal, equal_nan=True), outcome.shadow, again)):
        raise ValueError(
            f"audit: {getattr(f, '__name__', f)} calls back to the host, and gets other numbers at "
            "each call: draw them before, or with jax.random and a key"
        )


def _report(f, args, kwargs, session: Session, outcome: Outcome, trials: int) -> Report:
    fmt = nominal(session.low)
    saturate = getattr(session.low, "saturate", False)
    known = literals(f, fmt, saturate=saturate)(*args, **kwargs) if session.adjustable else ()
    search = Search(session, fmt, known, trials, saturate)
    fixed = search.run(outcome)
    return Report(
        function=getattr(f, "__name__", repr(f)),
        low=_name(session.low),
        shadow=str(session.shadow.dtype),
        semantics=SEMANTICS,
        findings=tuple(search.found),
        idle=tuple(search.idle),
        literals=known,
        arguments=_arguments(session.program, fmt) if session.adjustable else (),
        ranges=_ranges(session.program),
        benign=_benign(outcome, known),
        error=outcome.error,
        error_fixed=fixed,
        error_wide=search.floor,
        outputs=outcome.outputs,
        rows=tuple(outcome.rows),
        largest=float(fmt.max),
        smallest_normal=float(fmt.smallest_normal),
        smallest=float(fmt.smallest),
        precision=fmt.precision,
        runs=session.runs,
        environment=_environment(),
    )


def _arguments(program: Program, fmt: Format) -> tuple[str, ...]:
    """Arguments with numbers that the format can't hold."""
    lines = []
    for path, x, aval in zip(program.arguments, program.arrays, program.in_avals, strict=True):
        if not is_float(aval):
            continue
        size = np.abs(np.asarray(x).astype(np.float64))
        over = int(((size > float(fmt.max)) & np.isfinite(size)).sum())
        gone = int(((size < float(fmt.smallest) / 2) & (size > 0)).sum())
        if over or gone:
            lines.append(f"{path}: {over:,} overflow, {gone:,} vanish, of {size.size:,}")
    return tuple(lines)


def _ranges(program: Program) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Exponents of the arguments' numbers, by the first two keys of their paths."""
    found: dict[str, np.ndarray] = {}
    for path, x, aval in zip(program.arguments, program.arrays, program.in_avals, strict=True):
        if is_float(aval):
            keys = re.match(r"(\[[^]]*\](?:\[[^]]*\]|\.\w+)?)", path)
            size = np.abs(np.asarray(x).astype(np.float64))
            exponents = np.frexp(size[(size > 0) & np.isfinite(size)])[1] - 1
            bins = np.clip(exponents - LOWEST, 0, BINS - 1)
            name = keys[1] if keys else path
            found[name] = found.get(name, 0) + np.bincount(bins, minlength=BINS)
    return tuple((name, tuple(counts.tolist())) for name, counts in found.items())


def _name(low: Interpretation) -> str:
    match low:
        case Rounded():
            return low.fmt.name + ("" if low.saturate is False else ", saturating")
        case Autocast():
            return f"autocast {low.policy}"
        case Boundaries() | EveryOp():
            names = [name for name, known in CATALOGUE.items() if known == low.recipe]
            return f"autoscale {names[0] if names else '(own recipe)'}"
    return type(low).__name__


def _benign(outcome: Outcome, known) -> tuple[str, ...]:
    """What isn't finite by design: in the shadow as well, or only chosen by a select."""
    lines = [f"{x.where}: the mask {x} is only chosen from" for x in known if x.masks]
    for row in outcome.rows:
        if row["bad"] and not outcome.shadow_broken:
            where = f"{row.file}:{row.line}" if row.file else "unknown line"
            share = row["bad"] / max(row["sampled"], 1.0)
            lines.append(f"{where}: {row.primitive}, {share:.0%} not finite in the shadow too")
    return tuple(lines)


def _environment() -> tuple[tuple[str, str], ...]:
    device = jax.devices()[0]
    return (
        ("device", f"{device.device_kind} ({device.platform})"),
        ("Python", platform.python_version()),
        ("JAX", version("jax")),
    )
