"""The comparison itself: one step of each method in turn, in one process."""

import copy
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from ..._output import rescue_folder, sentence, tolerant
from .._interrupt import held_interrupts, signal_of
from .._loss_scale import has_loss_scale, loss_scale_of
from ._corpus import corpus
from ._diagnose import diagnose, finite_leaves
from ._files import Folder
from ._input import InputError
from ._methods import DEMO, METHODS, Method, method
from ._page import page
from ._program import (
    Program,
    check_step,
    endless,
    guarded,
    load_program,
    parameter_count,
    same_types,
)
from ._results import Comparison, Divergence, Record, finite_or_none, last_mean
from ._terminal import Progress, announce, show


class _Run:
    """One method under way: its compiled step, its state, what was measured."""

    def __init__(self, method: Method, program: Program, state: Any, batch: Any, parameters: int):
        self.method, self.parameters = method, parameters
        prepare, self.step = method.build(program)
        self._prepare = jax.jit(prepare)
        self.state = jax.block_until_ready(self._prepare(state, batch))
        jax.clear_caches()  # each method pays for its own tracing
        start = time.perf_counter()
        lowered = guarded(jax.jit(self.step).lower, f"{method.name}: step", self.state, batch)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        self.trace_seconds = traced - start
        self.compile_seconds = time.perf_counter() - traced
        after = jax.eval_shape(self.step, self.state, batch)[0]
        same_types(jax.eval_shape(lambda s: s, self.state), after, f"{method.name}: step")
        self.finite = jax.jit(finite_leaves)
        self._begin()

    def again(self, state: Any, batch: Any) -> "_Run":
        """The same method, compiled already, from the state and first batch of another seed."""
        other = copy.copy(self)
        other.state = self._prepare(state, batch)
        other._begin()
        return other

    def _begin(self) -> None:
        self.finite_at_start = self.finite(self.state)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bad: list[bool] = []
        self.scales: list[float] = []
        self.divergence: Divergence | None = None
        self.dead = False
        self.scaled = has_loss_scale(self.state)

    def advance(self, batch: Any) -> None:
        """One step, timed; nothing for a method that can't come back."""
        if self.dead:
            self.losses.append(math.nan)
            self.bad.append(True)
            return
        before = self.state
        if self.scaled:
            self.scales.append(float(loss_scale_of(before).scale))
        start = time.perf_counter()
        after, loss = jax.block_until_ready(self.compiled(before, batch))
        self.seconds.append(time.perf_counter() - start)
        number = float(jnp.asarray(loss))
        whole = bool((self.finite(after) | ~self.finite_at_start).all())
        good = whole and math.isfinite(number)
        if not good:
            if self.divergence is None:
                why = diagnose(self.step, before, batch, after, number)
                self.divergence = Divergence(len(self.losses) + 1, why)
            # what makes a non-finite loss and leaves a non-finite state can't come back
            self.dead = not whole and not math.isfinite(number)
        self.bad.append(not good)
        self.losses.append(number if math.isfinite(number) else math.nan)
        self.state = after

    @property
    def skipped(self) -> int:
        return int(loss_scale_of(self.state).skipped) if self.scaled else 0

    def record(self, steps: int, finals: Sequence[float]) -> Record:
        leaves = jax.tree.leaves(self.state)
        memory = self.compiled.memory_analysis()
        return Record(
            name=self.method.name,
            what=self.method.what,
            losses=tuple(self.losses[:steps]),
            seconds=tuple(self.seconds[:steps]),
            trace_seconds=self.trace_seconds,
            compile_seconds=self.compile_seconds,
            state_bytes=sum(int(x.nbytes) for x in leaves if isinstance(x, jax.Array)),
            parameters=self.parameters,
            non_finite=sum(self.bad[:steps]),
            divergence=self.divergence
            if self.divergence and self.divergence.step <= steps
            else None,
            scales=tuple(self.scales[:steps]),
            skipped=self.skipped,
            temporary_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
            finals=tuple(finals),
        )


def compare(
    program: str | Path | Program,
    recipes: Sequence[str | Method] = DEMO,
    *,
    data: str | Path | bytes | None = None,
    steps: int = 300,
    seed: int = 0,
    seeds: int = 1,
    out: str | Path | None = None,
    console: Console | None = None,
) -> Comparison:
    """Trains one program under several methods side by side, and writes a report.

    Every method starts from the same state and sees the same batches; one step of each is made in
    turn, so that what disturbs the machine disturbs them alike. Steps are compiled ahead of time.
    An interrupt (Ctrl-C, SIGTERM), a full disk and a failure of the program's batches end the
    training; what was measured so far is shown and written.

    Args:
        program: a Python file with ``init``, ``train_step`` and ``batches``, or a `Program`.
        recipes: names out of `METHODS`, or methods.
        data: a text file or a folder, the bytes themselves, or None for the sources of Python's
            standard library.
        steps: how many of each, at least 1.
        seed: of the parameters and the batches.
        seeds: how many, beginning with that one; their mean and spread are shown.
        out: folder for ``metrics.jsonl``, ``summary.json``, ``report.html`` and ``curves.svg``,
            new or empty; None for ``runs/<time>``.
        console: where progress, table and curves are printed.

    Returns:
        All that was measured; ``failure`` is not empty if an error ended the training early.

    Raises:
        InputError: something given can't be used, or another process works in the folder; nothing
            was written.
        OSError: the folder can't be created or written to.
        KeyboardInterrupt: before the first step was done; nothing was written.
    """
    console = console or Console()
    if steps < 1:
        raise InputError(f"steps is {steps}; expected 1, 2, ...")
    if seeds < 1:
        raise InputError(f"seeds is {seeds}; expected 1, 2, ...")
    methods = [method(name) for name in recipes]
    names = [m.name for m in methods]
    if not names:
        raise InputError(f"no recipe given; expected some of {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise InputError(f"a recipe is given twice: {', '.join(names)}")
    if not isinstance(program, Program):
        program = load_program(program)
    text = data if isinstance(data, bytes) else corpus(data)
    folder = Folder.at(out)
    streams = [endless(program, text, seed + i) for i in range(seeds)]
    first = [next(stream) for stream in streams]
    states = [guarded(program.init, f"{program.name}.init", seed + i) for i in range(seeds)]
    parameters = parameter_count(states[0], program)
    check_step(program, states[0], first[0])
    for each in methods:
        each.build(program)  # refuses what the program can't serve, before anything is written
    with tolerant(console), folder.claimed() as folder:
        announce(console, program.name, parameters, len(text), steps)
        warm_up()
        runs = []
        for each in methods:
            with console.status(f"compiling {each.name}"):
                one = _Run(each, program, states[0], first[0], parameters)
                others = zip(states[1:], first[1:], strict=True)
                runs.append([one, *(one.again(*other) for other in others)])
        with held_interrupts() as check_interrupt:
            ended = _train(runs, first, streams, steps, folder, console, check_interrupt)
            if not ended.steps:
                raise ended.cause or KeyboardInterrupt()
            comparison = Comparison(
                program=program.name,
                steps=steps,
                seed=seed,
                records=tuple(
                    same[0].record(
                        ended.steps, [last_mean(run.losses[: ended.steps]) for run in same]
                    )
                    for same in runs
                ),
                interrupted=isinstance(ended.cause, KeyboardInterrupt),
                folder=str(folder.path),
                environment=environment(),
                failure=ended.failure,
                signal=ended.signal,
            )
            comparison = write(comparison, folder)
            show(comparison, console)
    return comparison


@dataclasses.dataclass(frozen=True)
class _Ended:
    """How many steps were made, and what ended them early."""

    steps: int
    cause: KeyboardInterrupt | Exception | None = None

    @property
    def signal(self) -> int:
        return signal_of(self.cause) if isinstance(self.cause, KeyboardInterrupt) else 0

    @property
    def failure(self) -> str:
        if isinstance(self.cause, OSError):
            return f"metrics.jsonl can't be written after step {self.steps}: {sentence(self.cause)}"
        return str(self.cause) if isinstance(self.cause, InputError) else ""


def _train(
    runs: list[list[_Run]],
    batches: list[Any],
    streams: list[Iterator[Any]],
    steps: int,
    folder: Folder,
    console: Console,
    check_interrupt: Callable[[], None],
) -> _Ended:
    """Makes the steps, of each method from each seed, until an interrupt or a full disk."""
    made = 0
    try:
        names = [same[0].method.name for same in runs]
        with Progress(console, names, steps) as progress:
            for step in range(1, steps + 1):
                for same in runs:
                    for run, batch in zip(same, batches, strict=True):
                        guarded(run.advance, f"{run.method.name}: step", batch)
                    bad = sum(sum(run.bad) for run in same)
                    progress.update(same[0].method.name, same[0].losses, same[0].seconds, bad)
                rows = [_line(step, i, run) for same in runs for i, run in enumerate(same)]
                folder.append("metrics.jsonl", rows)
                made = step
                if step < steps:
                    check_interrupt()
                    batches = [next(stream) for stream in streams]
    except (KeyboardInterrupt, OSError, InputError) as error:
        return _Ended(made, error)
    return _Ended(made)


def _line(step: int, index: int, run: _Run) -> dict[str, Any]:
    line = {
        "step": step,
        "method": run.method.name,
        "loss": finite_or_none(run.losses[-1]),
        "ms": None if run.dead else round(run.seconds[-1] * 1e3, 3),
        "non_finite_steps": sum(run.bad),
    }
    if index:
        line["seed"] = index  # counted from the first
    if run.scaled:
        line |= {"scale": run.scales[-1] if run.scales else None, "skipped_steps": run.skipped}
    return line


def write(comparison: Comparison, folder: Folder) -> Comparison:
    """Writes summary, page and picture into the run folder, each all or nothing.

    Where the folder can't be written any more (a full disk), they go to a new folder of the
    system's temporary files instead: what was measured isn't lost.

    Returns:
        The comparison, with the folder that was written to; ``failure`` says what went wrong.
    """
    try:
        _write(comparison, folder)
        return comparison
    except OSError as error:
        why = comparison.failure or f"the report can't be written: {sentence(error)}"
    try:
        with rescue_folder() as path:
            comparison = dataclasses.replace(comparison, failure=why, folder=str(path))
            _write(comparison, Folder(path))
    except OSError:
        comparison = dataclasses.replace(comparison, failure=why, folder="")
    return comparison


def _write(comparison: Comparison, folder: Folder) -> None:
    html, svg = page(comparison)
    folder.write_json("summary.json", comparison.summary())
    folder.write("report.html", html)
    folder.write("curves.svg", svg)


def warm_up() -> None:
    """Loads what JAX loads when it first traces, differentiates and compiles."""
    example: Callable[..., Any] = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())
    jax.jit(example).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile()


def environment() -> tuple[tuple[str, str], ...]:
    """Versions and device, for the report."""
    device = jax.devices()[0]
    return (
        ("date", time.strftime("%Y-%m-%d %H:%M")),
        ("device", f"{device.device_kind} ({device.platform})"),
        ("Python", platform.python_version()),
        ("JAX", version("jax")),
    )
