"""``audit``: a low-precision run compared with a reference run, and fixes that were tried."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Count, Natural, checked
from .._decorator import Params, Pending
from .._jax import avals_of, unchecked
from .._output import Tell, progress
from .._resolve import as_format, resolve
from .._types import PyTree
from ..autocasting import Autocast, Policy, PolicyLike
from ..autoscaling import Boundaries, Recipe, RecipeLike
from ..devices import MatrixUnitsLike
from ..emulating import Emulation
from ..formats import FP32, FP64, Format, FormatLike, Saturation
from ..formats import format as format_
from ..interpret import (
    Interpretation,
    Program,
    all_equations,
    check_callable,
    is_float,
    is_inexact,
    trace,
    with_state,
)
from ..rounding import format_params, saturation
from ..scalifying import Scalify
from ._checks import (
    check_program,
    check_reference,
    check_repeatable,
    check_rounds,
    check_steps,
)
from ._file import name_of
from ._report._report import (
    AS_WRITTEN,
    COMPLEX,
    FIRST_STEP,
    ON_DEVICE,
    SEMANTICS,
    WITH_HISTORY,
    Report,
)
from ._report._trace import latent
from ._run._changes import carried, regained
from ._run._compared import float_arguments, incomparable, without_digits
from ._run._floors import with_floors
from ._run._outcome import ExactSums, Outcome, OutputError, output_name
from ._run._session import Session, state_of
from ._search._literals import Constants, constants_of
from ._search._lost_updates import search_lost_updates
from ._search._search import Search, find_fixes, largest_share
from ._sheet._make import SheetSource, gradients_of, make_sheet
from ._tape._interpretations import Dtypes, TableEmulation, traced_as_written
from ._tape._kernels import forget
from ._tape._specialize import history_of, kind_of_run, nominal_format, of_recipe
from ._tape._statistics import BINS, LOWEST
from ._thresholds import FLOORS_FROM


@overload
def audit(
    f: Callable[Params, Any],
    low: FormatLike | PolicyLike | RecipeLike | Interpretation = "float16",
    *,
    reference: FormatLike | None = None,
    saturate: Saturation = False,
    trials: int = 40,
    steps: int = 1,
    batches: None = None,
    dtypes: Dtypes | None = None,
    device: MatrixUnitsLike | None = None,
) -> Callable[Params, Report]: ...


@overload  # the function is called without its second argument
def audit(
    f: Callable[..., Any],
    low: FormatLike | PolicyLike | RecipeLike | Interpretation = "float16",
    *,
    reference: FormatLike | None = None,
    saturate: Saturation = False,
    trials: int = 40,
    steps: int = 1,
    batches: Iterable[PyTree] | Callable[[int], PyTree],
    dtypes: Dtypes | None = None,
    device: MatrixUnitsLike | None = None,
) -> Callable[..., Report]: ...


@checked
def audit(
    f: Callable[..., Any],
    low: FormatLike | PolicyLike | RecipeLike | Interpretation = "float16",
    *,
    reference: FormatLike | None = None,
    saturate: Saturation = False,
    trials: Natural = 40,
    steps: Count = 1,
    batches: Iterable[PyTree] | Callable[[int], PyTree] | None = None,
    dtypes: Dtypes | None = None,
    device: MatrixUnitsLike | None = None,
) -> Callable[..., Report]:
    """Returns a function of ``f``'s arguments that returns a :class:`Report` of running ``f`` in
    low precision.

    ``f`` is run twice on the host: in ``low``, with the bits that :func:`scalewise.emulate` gives,
    and in float64. Then fixes are tried where something went wrong: each is applied, the
    program run again, and the outputs' error measured.

    Args:
        f: any function of pytrees made of JAX primitives: a loss, a gradient, a training step.
        low: a format, or a name or dtype of one; a policy of :func:`scalewise.autocast` (also
            ``"p=f32,c=bf16,o=f32"``); a recipe of :func:`scalewise.autoscale` or the
            name of one (``"fp16"`` and ``"bf16"`` name the formats: pass ``recipes.fp16``); or an
            interpretation. Fixes are tried for all but the last. Under a format they need no
            compilation; an exception to a policy or recipe compiles what it changes.
        reference: ``"float32"`` or ``"float64"``, wider than ``low``: numbers that have
            no correct digit in this format either aren't compared. None for float64 if ``f`` has
            any or ``low`` is float32, else float32.
        saturate: as for :func:`scalewise.round_to`.
        trials: how many runs may be spent on fixes; 0 for none.
        steps: how often ``f`` is called, its first result as its next first argument (a training
            step's state); each run continues from its own. ``Finding.iteration`` is then the step,
            from 0. Flax NNX objects that are the first arguments are such a state.
        batches: the second argument of ``f`` (the first after NNX objects) at each step, all of the
            same shapes: an iterable, or a function of the step's number. None: the one that it is
            called with, at every step.
        dtypes: under a format, ``"as_written"`` for what the program computes in the format's
            dtype: arguments are cast to it, and what the program or JAX itself computes in float32
            (a conversion, a mean) stays there; ``"all"`` to round each operation's result to the
            format. None for "as_written", unless the function takes float32 alone or calls back to
            the host.
        device: under a recipe, the device whose matrix units add up the products, bit for bit, as
            for :func:`scalewise.autoscale`'s ``emulate``. Products that lose accuracy by these
            sums, and not by their operands, are findings of kind "accumulation".

    Returns:
        A function to be called with arrays, not under ``jit``; with ``batches``, without the second
        argument.

    Raises:
        TypeError: ``f`` isn't callable, or returns something that isn't an array; an argument is a
            tracer.
        ValueError: an unknown format or device; a device without a recipe; a reference that isn't
            wider than ``low``; negative ``trials``; no output that depends on floats; NaN in the
            reference run's outputs; more than 400,000 operations, loops unrolled, or more
            results than memory holds.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> report = sw.audit(norm, "fp16")(jnp.full(4096, 16.0))
        >>> worst = report.findings[0]
        >>> worst.kind, worst.primitive, worst.error_before
        ('overflow', 'reduce_sum', inf)
    """
    check_callable(f, "audit")
    low_run = low_interpretation(low, saturate)
    low_run = low_run if device is None else on_device(low_run, device)
    wide_format = _reference_format(reference, low_run)

    def audited(*args: PyTree, **kwargs: PyTree) -> Report:
        with _judging(), progress(f"audit {name_of(f)}") as tell:
            if steps > 1:
                return run(*with_state(f, args), kwargs, tell)
            return run(f, args, kwargs, tell)

    def run(f: Callable, args: Sequence[PyTree], kwargs: dict[str, PyTree], tell: Tell) -> Report:
        tell(f"runs in {kind_of_run(low_run).name(low_run)} and in float64")
        per_step = _batches(batches, steps)
        args = _with_batch(f, per_step[0], args, kwargs) if per_step else args
        arrays = _batch_arrays(per_step)
        session = traced(f, args, kwargs, low_run, wide_format, steps, arrays, dtypes)
        outcome = with_exact_sums(session, session.run())
        check_rounds(session, outcome, f)
        check_reference(session, outcome, f)
        check_repeatable(session, outcome, f)
        limit = FLOORS_FROM * float(nominal_format(low_run).eps)
        outcome = with_floors(session, outcome, limit)

        def run_again() -> OutputError:
            with _judging():
                edited = traced(f, args, kwargs, low_run, wide_format, steps, arrays)
                own = edited.run()
                pairs = zip(outcome.decisions, own.decisions, strict=True)
                decisions = tuple((path, low, wide) for (path, _, wide), (_, low, _) in pairs)
                again = dataclasses.replace(outcome, low=own.low, decisions=decisions)
                changes = session.updates(outcome), edited.updates(own)
                error = session.with_errors(again).error
                return dataclasses.replace(error, regained=regained(*changes))

        again = run_again if trials else None
        return _report(f, args, kwargs, session, outcome, trials, again, tell)

    return Pending(audited, "audit")


@contextlib.contextmanager
def _judging() -> Iterator[None]:
    quiet = np.errstate(all="ignore")  # 16 bits may not hold the program's numbers
    with jax.disable_jit(False), unchecked(), quiet:  # it compiles and judges what it runs
        yield
    forget()


def traced(
    f: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    low: Interpretation,
    reference: Format | None = None,
    steps: int = 1,
    batches: Sequence[Sequence[Any]] = (),
    dtypes: Dtypes | None = None,
) -> Session:
    """Returns the program that an audit runs, with the interpretations of its two runs."""
    program = trace(f, low, args, kwargs, name="audit", as_jit=True)
    check_program(program, f)
    program, own = traced_as_written(f, low, args, kwargs, program, dtypes)
    session = Session(program, own, reference or _widest(program), steps, batches)
    check_steps(session, f)
    return session


def _with_batch(f: Any, batch: Any, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> tuple:
    args = (*args[:1], batch, *args[1:])
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"audit: {name_of(f)} with a batch as its second argument: {error}; leave the second "
            "argument out of the call if batches= is given"
        ) from None
    return args


def _batches(batches: Any, steps: int) -> list[Any]:
    if batches is None:
        return []
    if callable(batches):
        return [batches(step) for step in range(steps)]
    found = list(itertools.islice(batches, steps))
    if len(found) < steps:
        raise ValueError(f"audit: steps={steps}, but batches has {len(found)}")
    return found


def _batch_arrays(per_step: Sequence[Any]) -> list[list[Any]]:
    found = [jax.tree.leaves(batch) for batch in per_step]
    types = [[(np.shape(x), jnp.result_type(x)) for x in leaves] for leaves in found]
    structures = [jax.tree.structure(batch) for batch in per_step]
    for step, structure in enumerate(structures):
        if structure != structures[0] or types[step] != types[0]:
            raise ValueError(f"audit: batch {step} has other shapes or dtypes than batch 0")
    arrays = jax.Array | np.ndarray | np.generic
    return [[x for x in leaves if isinstance(x, arrays)] for leaves in found]


def low_interpretation(low: Any, saturate: Saturation = False) -> Interpretation:
    if isinstance(low, str):
        low = resolve(low, "policy", "format", "recipe", where="audit")
    if isinstance(low, Policy):
        return Autocast(low)
    if isinstance(low, Recipe | Scalify):
        return of_recipe(low)
    if isinstance(low, Emulation) and not isinstance(low, TableEmulation):
        low, saturate = low.fmt, low.saturate
    if isinstance(low, Interpretation):
        return low
    if low is None:
        raise ValueError("audit: low is None; expected a format, a policy, a recipe, an emulation")
    fmt = format_(low)
    saturate = saturation(saturate, fmt)
    try:
        format_params(fmt, saturate)
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
    return TableEmulation(fmt, saturate)


def _reference_format(reference: Any, low: Interpretation) -> Format | None:
    """Returns the reference run's format; None if the program decides."""
    own = low.fmt if isinstance(low, TableEmulation) else None
    digits = own.precision if own is not None else 0
    if reference is None and digits < FP32.precision:
        return None
    fmt = FP64 if reference is None else as_format(reference, "audit: reference")
    if fmt not in (FP32, FP64):
        raise ValueError(f"audit: reference={reference!r}; expected 'float32' or 'float64'")
    if own is not None and fmt.precision <= digits:
        raise ValueError(
            f"audit: a reference in {fmt.name} has the errors of {own.name} itself; expected "
            f"{'float64' if digits < FP64.precision else 'a narrower low-precision format'}"
        )
    return fmt


def _widest(program: Program) -> Format:
    avals = [*program.in_avals, *program.out_avals]
    return FP64 if any(a.dtype in (jnp.float64, jnp.complex128) for a in avals) else FP32


def _report(
    f, args, kwargs, session: Session, outcome: Outcome, trials: int,
    run_again: Callable[[], OutputError] | None, tell: Tell,
) -> Report:  # fmt: skip
    kind, fmt = session.kind, nominal_format(session.low)
    saturate = getattr(session.low, "saturate", False)
    constants = Constants()
    semantics = SEMANTICS
    if isinstance(session.low, TableEmulation):
        semantics += "" if session.low.low_dtype is None else AS_WRITTEN
        constants = constants_of(session.program, fmt, saturate, session.low.is_low)
    own_complex, wide_complex = _complex_dtypes(session)
    semantics += COMPLEX if own_complex else ""
    if history_of(session.low):
        semantics += FIRST_STEP if session.steps == 1 else WITH_HISTORY
    if session.exact_sums is not None:
        semantics += ON_DEVICE
    search = Search(session, fmt, constants, trials, saturate, tell)
    find_fixes(search, outcome)
    if trials and kind.run is not None and not search.interrupted:
        search_lost_updates(search)
    error_fixed = search.outcome.error
    for e in outcome.equations:
        _ = e.numbers  # counted now: the report keeps no arrays of a run
    after, wide = search.outcome, session.stays_wide
    narrow = [e for e in after.equations if not wide(after.recorded[e.index])]
    return Report(
        function=name_of(f),
        low=kind.name(session.low),
        reference=str(session.wide.dtype),
        semantics=semantics,
        findings=tuple(search.found),
        unfixed=tuple(search.unfixed),
        literals=constants.changed,
        arguments=_arguments(session.program, fmt) if session.adjustable else (),
        ranges=_ranges(session.program),
        benign=_benign(session, outcome, constants.changed),
        error=outcome.error,
        error_fixed=error_fixed,
        error_float32=search.float32_error,
        gradients=gradients_of(outcome.made),
        gradients_fixed=gradients_of(after.made),
        wide="float64" if search.double else "float32",
        interrupted=search.interrupted,
        outputs=outcome.outputs or _decision_outputs(outcome),
        equations=tuple(outcome.equations),
        largest=float(fmt.max),
        smallest_normal=float(fmt.smallest_normal),
        smallest=float(fmt.smallest),
        precision=fmt.precision,
        runs=session.runs,
        environment=_environment(),
        scaled=kind.run in ("recipe", "every_op"),
        trials=trials - search.trials,
        untried=int(search.trials <= 0 < trials and any(x.fails for x in search.now.stages)),
        latent=latent(narrow, fmt),
        lost_changes=tuple(search.lost_changes),
        wrong_changes=tuple(map(str, session.wrong_changes(outcome))),
        infinite=sum(int(np.isinf(np.asarray(x)).sum()) for x in outcome.reference),
        incomparable=tuple(incomparable(session.program, outcome)),
        noise=tuple(without_digits(session.floors, outcome)),
        decided=tuple(x for x in outcome.decided if x[1]),
        decided_fixed=tuple(x for x in after.decided if x[1]),
        sums=session.sums,
        started_at_zero=tuple(_started_at_zero(session, outcome)),
        largest_share=largest_share(search),
        complex_dtype=wide_complex,
        make_sheet=partial(make_sheet, sheet_source(f, session, outcome)),
        run_again=run_again,
        origin=search.origin,
    )


def _decision_outputs(outcome: Outcome) -> tuple[tuple[str, OutputError], ...]:
    paths = [path for path, *_ in outcome.decided]
    return tuple(zip(paths, outcome.decision_errors, strict=True))


def _started_at_zero(session: Session, outcome: Outcome) -> Iterator[str]:
    _, arguments = state_of(session.program, outcome)
    for output, argument, _ in carried(session.program) if session.trained else ():
        if not np.any(arguments[argument]):
            yield outcome.outputs[output][0]


def _complex_dtypes(session: Session) -> tuple[str, str]:
    """Returns a dtype of the program's complex numbers, and one that is narrower than the reference
    run's complex128; "" where there is none."""
    results = (a for e in all_equations(session.program.jaxpr) for a in avals_of(e.outvars))
    arrays = (a for a in results if hasattr(a, "dtype"))
    own = {str(a.dtype) for a in arrays if is_inexact(a) and not is_float(a)}
    return next(iter(own), ""), next(iter(own - {"complex128"}), "")


def sheet_source(f: Callable[..., Any], session: Session, outcome: Outcome) -> SheetSource:
    return SheetSource(
        function=name_of(f),
        arithmetic=session.kind.name(session.low),
        program=dataclasses.replace(session.program),  # without what it has cached
        low=session.low,
        steps=session.steps,
        batches=session.batches,
        floors=session.floors,
        least=session.started_at_zero(outcome),
    )


def _arguments(program: Program, fmt: Format) -> tuple[str, ...]:
    lines = []
    for path, size in float_arguments(program):
        over = int(((size > float(fmt.max)) & np.isfinite(size)).sum())
        flushed = int(((size < float(fmt.smallest) / 2) & (size > 0)).sum())
        if over or flushed:
            counts = f"{over:,} overflow, {flushed:,} flushed to zero, of {size.size:,}"
            lines.append(f"{path}: {counts}")
    return tuple(lines)


def _ranges(program: Program) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, np.ndarray] = {}
    for path, size in float_arguments(program):
        keys = re.match(r"(\[[^]]*\](?:\[[^]]*\]|\.\w+)?)", path)
        exponents = np.frexp(size[(size > 0) & np.isfinite(size)])[1] - 1
        bins = np.clip(exponents - LOWEST, 0, BINS - 1)
        name = keys[1] if keys else path
        found[name] = found.get(name, 0) + np.bincount(bins, minlength=BINS)
    return tuple((name, tuple(counts.tolist())) for name, counts in found.items())


def _benign(session: Session, outcome: Outcome, changed) -> tuple[str, ...]:
    floors, paths = session.floors, [path for path, _ in outcome.outputs]
    lines = [
        f"{output_name(path)}: 0 but for rounding errors, in the reference run too; its error is "
        "relative to the numbers that it is made of"
        for path, floor in zip(paths, floors.norms, strict=bool(floors.norms)) if floor
    ]  # fmt: skip
    masks = {paths[i]: mask for i, mask in floors.numbers.items()} | {**floors.undecided}
    for path, mask in masks.items():
        some = f"{np.sum(mask):,} of {mask.size:,} numbers"
        text = "rounding errors in the reference run too, and not compared"
        lines.append(f"{output_name(path)}: {some} {'is' if mask.sum() == 1 else 'are'} {text}")
    lines += [f"{x.where}: {x}, as a mask" for x in changed if x.masks]
    for e in outcome.equations:
        if e["reference_non_finite"] and not outcome.reference_nans:
            where = f"{e.file}:{e.line}" if e.file else "unknown line"
            share = e["reference_non_finite"] / max(e["sampled"], 1.0)
            lines.append(f"{where}: {e.primitive}, {share:.0%} not finite in the reference run too")
    return tuple(lines)


def _environment() -> tuple[tuple[str, str], ...]:
    device = jax.devices()[0]
    return (
        ("device", f"{device.device_kind} ({device.platform})"),
        ("Python", platform.python_version()),
        ("JAX", version("jax")),
    )


def on_device(low: Interpretation, device: MatrixUnitsLike) -> Interpretation:
    if not isinstance(low, Boundaries):
        raise ValueError(
            f"audit: device={device!r} needs a recipe as low, such as 'fp8' or recipes.bf16; got "
            f"{kind_of_run(low).name(low)}"
        )
    return of_recipe(dataclasses.replace(low.recipe, emulate=device))


def with_exact_sums(session: Session, outcome: Outcome) -> Outcome:
    low = session.low
    if not isinstance(low, Boundaries) or low.recipe.emulate is None:
        return outcome
    plain = session.with_low(of_recipe(dataclasses.replace(low.recipe, emulate=None))).run()
    made = {e.index: e.introduced for e in plain.equations if e["operands"]}
    session.exact_sums = ExactSums(plain.error.relative, made)
    return dataclasses.replace(outcome, exact_sums=session.exact_sums)
