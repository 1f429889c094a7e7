"""``compare``: trains one program under several methods, one step of each in turn."""

from __future__ import annotations

import dataclasses
import functools
import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from ..._check import Count, checked
from ..._output import Folder, rescue_folder, sentence, tolerant
from ..._types import PyTree
from ..._user_file import InputError
from .._console import Progress, held_interrupts, signal_of
from . import _program as programs
from ._methods import DEMO, METHODS, Method, method
from ._results import Comparison
from ._run import Run, finite_leaves


@checked
def compare(
    program: str | Path | programs.Program,
    methods: Sequence[str | Method] = DEMO,
    *,
    data: str | Path | bytes | None = None,
    steps: Count = 300,
    seed: int = 0,
    seeds: Count = 1,
    out: str | Path | Folder | None = None,
    console: Console | None = None,
) -> Comparison:
    """Trains one program under several methods, and returns what was measured of each.

    Every method starts from the same state and sees the same batches. The methods make their steps
    in turn, so that other work on the machine slows all of them alike. Steps are compiled ahead of
    time. An interrupt (Ctrl-C, SIGTERM), a full disk or an exception in the program's batches ends
    the training early; what was measured until then is shown, returned and written.

    Args:
        program: a Python file with ``init``, ``train_step`` and ``batches``; the name of one of
            scalewise's examples, ``"gpt"`` say; or a :class:`Program`.
        methods: names in :data:`METHODS`, or methods.
        data: a text file or folder; the bytes themselves; or None for the sources of Python's
            standard library.
        steps: the number of steps of each method, at least 1.
        seed: of the parameters and the batches.
        seeds: the number of seeds, counted up from ``seed``; with several, mean and standard
            deviation of the final loss are shown.
        out: a new or empty folder for ``metrics.jsonl``, ``summary.json``, ``report.html`` and
            ``curves.svg``; ``Folder.timestamped("runs")`` for one named after the time. None
            writes no files.
        console: where progress, table and curves are printed.

    Raises:
        InputError: an argument can't be used, or another process uses the folder; nothing was
            written.
        OSError: the folder can't be created or written to.
        KeyboardInterrupt: interrupted before the first step was made; nothing was written.
    """
    console = console or Console()
    chosen = _checked_methods(methods)
    program = programs.load_program(program)
    text = data if isinstance(data, bytes) else programs.corpus(data)
    folder = None if out is None else Folder.at(out)
    streams = [programs.endless_batches(program, text, seed + i) for i in range(seeds)]
    first = [next(stream) for stream in streams]
    states = [
        programs.call_user(program.init, f"{program.name}.init", seed + i) for i in range(seeds)
    ]
    parameters = programs.parameter_count(states[0], program)
    programs.check_step(program, states[0], first[0])
    for each in chosen:
        each.build(program)  # fails if the program lacks what the method needs
    with tolerant(console), nullcontext() if folder is None else folder.claimed() as folder:
        console.print(
            f"{program.name}: {parameters:,} parameters, {len(text):,} bytes of text, "
            f"{steps} steps of each",
            highlight=False,
        )
        # makes JAX load what it loads on its first trace, derivative and compilation
        example = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())
        jax.jit(example).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile()
        runs, finite = [], jax.jit(functools.partial(finite_leaves))
        for each in chosen:
            with console.status(f"compiling {each.name}"):
                one = Run(each, program, states[0], first[0], parameters, finite)
                others = zip(states[1:], first[1:], strict=True)
                runs.append([one, *(one.restarted(*other) for other in others)])
                gc.collect()  # of traces, which contain reference cycles: some 100 MB for the GPT
        with held_interrupts() as check_interrupt:
            made, cause = _train(runs, first, streams, steps, folder, console, check_interrupt)
            if not made:
                raise cause or KeyboardInterrupt()
            interrupted = isinstance(cause, KeyboardInterrupt)
            failure = str(cause) if isinstance(cause, InputError) else ""
            if isinstance(cause, OSError):
                failure = f"metrics.jsonl can't be written after step {made}: {sentence(cause)}"
            comparison = Comparison(
                program=program.name, steps=steps, seed=seed,
                records=tuple(by_seed[0].record(made, by_seed) for by_seed in runs),
                interrupted=interrupted, folder="" if folder is None else str(folder.path),
                environment=environment(), failure=failure,
                signal=signal_of(cause) if interrupted else 0,
            )  # fmt: skip
            if folder is not None:
                comparison = write(comparison, folder)
            comparison.show(console)
    return comparison


def _checked_methods(given: Sequence[str | Method]) -> list[Method]:
    methods = [method(name) for name in given]
    names = [m.name for m in methods]
    if not names:
        raise InputError(f"methods: none given; expected some of {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise InputError(f"methods: one is given twice: {', '.join(names)}")
    return methods


def _train(
    runs: list[list[Run]],
    batches: list[PyTree],
    streams: list[Iterator[PyTree]],
    steps: int,
    folder: Folder | None,
    console: Console,
    check_interrupt: Callable[[], None],
) -> tuple[int, KeyboardInterrupt | Exception | None]:
    """Returns how many steps all methods made, and what ended the training early, if anything."""
    made = 0
    try:
        names = [by_seed[0].method.name for by_seed in runs]
        with Progress(console, names, steps) as progress:
            for step in range(1, steps + 1):
                for by_seed in runs:
                    for run, batch in zip(by_seed, batches, strict=True):
                        programs.call_user(run.advance, f"{run.method.name}: step", batch)
                    bad, first = sum(sum(run.bad) for run in by_seed), by_seed[0]
                    loss, ms, name = first.losses[-1], first.seconds[-1] * 1e3, first.method.name
                    figures = f"loss {loss:6.3f}  {ms:6.1f} ms  {bad} non-finite"
                    progress.made(name, step, figures, f"{name:18}  {figures}")
                if folder is not None:
                    rows = (r.metrics(step, i) for by_seed in runs for i, r in enumerate(by_seed))
                    folder.append("metrics.jsonl", rows)
                made = step
                if step < steps:
                    check_interrupt()
                    batches = [next(stream) for stream in streams]
    except (KeyboardInterrupt, OSError, InputError) as error:
        return made, error
    return made, None


def write(comparison: Comparison, folder: Folder) -> Comparison:
    """Writes summary, page and picture into the run's folder, or else into a temporary one.

    Returns the comparison with the folder that was written to; ``failure`` says what went wrong.
    """

    def written(found: Comparison, folder: Folder) -> Comparison:
        folder.write_json("summary.json", found.summary())
        found.save(folder.path / "report.html")
        folder.write("curves.svg", found.curves_svg())
        return found

    try:
        return written(comparison, folder)
    except OSError as error:
        why = comparison.failure or f"the report can't be written: {sentence(error)}"
    changed = functools.partial(dataclasses.replace, comparison, failure=why)
    try:
        with rescue_folder() as path:
            return written(changed(folder=str(path)), Folder(path))
    except OSError:
        return changed(folder="")


def environment() -> tuple[tuple[str, str], ...]:
    device = jax.devices()[0]
    return (
        ("date", time.strftime("%Y-%m-%d %H:%M")),
        ("device", f"{device.device_kind} ({device.platform})"),
        ("Python", platform.python_version()),
        ("JAX", version("jax")),
    )
