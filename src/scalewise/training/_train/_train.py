"""``train``: trains one program by one method; a killed run resumes to the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from ..._check import Count, checked
from ..._output import Folder, sentence, tolerant
from ..._types import Json, PyTree
from ..._user_file import InputError
from .._compare import _program as programs
from .._compare._methods import METHODS
from .._compare._methods import method as named_method
from .._compare._results import finite_or_none
from .._console import Progress, held_interrupts, signal_of
from .._loss_scale import loss_scale_of
from .._model import TrainState
from .._step import Step, step
from ._checkpoint import state_digest
from ._folder import CheckpointError, RunFolder, program_text, run_folder
from ._log import Log
from ._sharding import Sharding, call_on_first, check_processes, checked_everywhere, is_first

Watch = Callable[[int, TrainState], Mapping[str, float | None]]
PATIENCE = 100  # steps left out in a row after which the run ends with an error


class TrainingError(RuntimeError):
    """Raised if a run can't continue; its last checkpoint is kept."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training run."""

    program: str
    method: str
    steps: int  # also those before the run was resumed
    loss: float  # the mean over the last 50 steps; NaN if one wasn't finite
    scale: float  # the loss scale at the end
    skipped: int  # steps left out
    interrupted: bool  # the state was saved all the same
    digest: str  # SHA-256 over those of the bytes of each array of the state
    folder: str  # of metrics and checkpoints; "" for none
    state: TrainState
    signal: int = 0  # that ended the run (SIGINT, SIGTERM, SIGHUP); 0 if none did


@checked
def train(
    program: str | Path | programs.Program,
    method: str = "float32",
    *,
    data: str | Path | bytes | None = None,
    steps: Count = 300,
    seed: int = 0,
    out: str | Path | Folder | None = None,
    resume: bool = False,
    every: Count = 100,
    keep: Count = 3,
    console: Console | None = None,
    watch: Watch | None = None,
    sharding: Sharding | None = None,
    allow_changes: bool = False,
    **options: Any,
) -> Trained:
    """Trains a program by a method, with metrics and checkpoints in a folder.

    The batch of a step depends only on the seed and the step's number, and a checkpoint holds the
    whole training state. A run that was killed and resumed, however often, therefore ends with the
    same bits as one that was not.

    With ``sharding`` a run is split over the devices of a mesh. They may belong to several
    processes joined by ``jax.distributed.initialize``, each of which calls this function with the
    same arguments and a folder that all of them see. The first process writes metrics and
    ``run.json``, and each process its part of the checkpoints. A signal to one of them ends the run
    of all after the same step. If one is killed, JAX ends the others; when they are started again
    with ``resume=True``, they continue from the last checkpoint.

    Args:
        program: a file with ``init``, ``loss_of``, ``OPTIMIZER``, ``train_step`` and ``batches``;
            the name of one of scalewise's examples (gpt, cnn, lstm, ...); or a :class:`Program`.
        method: the name of one in :data:`METHODS` that ``training.step`` can apply, such as a
            recipe's; or a policy, ``"p=f32,c=bf16,o=f32"``.
        data, seed, console: as for :func:`compare`.
        steps: the number of steps in all, at least 1.
        out: the run's folder, new or empty; ``Folder.timestamped("runs")`` for one named after the
            time. None writes no metrics and no checkpoints.
        resume: whether to continue the run in ``out``, or to begin it if the folder is empty.
        every: the number of steps between two checkpoints. The last step always has one.
        keep: how many checkpoints are kept.
        watch: called with step and state after each step; the numbers that it returns, by name,
            join that step's line of metrics (see ``scalewise.auditing.Monitor.numbers``).
        sharding: how state and batches are split over devices; None for JAX's default device.
            With it ``program.init`` is traced, so that no device ever has the whole state.
        allow_changes: whether a run may be resumed with other settings or another step than it was
            begun with: an edited learning rate, loss or ``batches``, another version of JAX.
        options: further arguments of :func:`step` (``clip``, ``accumulate``, ``weights``, ...).

    Raises:
        InputError: an argument can't be used or doesn't fit the run to resume, or another run uses
            the folder.
        CheckpointError: a checkpoint couldn't be written; the last good one is named.
        TrainingError: a hundred steps in a row were left out, or the metrics can't be written; the
            steps made before are saved.
        OSError: the folder can't be created or read.
    """
    check_processes(sharding)
    console = (console or Console()) if is_first() else Console(quiet=True)
    program = programs.load_program(program)
    text = data if isinstance(data, bytes) else programs.corpus(data)
    train_step = step_for(program, method, **options)
    settings = {
        "model": program.name,
        "method": method,
        "seed": seed,
        "options": {k: repr(v) for k, v in sorted(options.items()) if v is not None},
        "data": hashlib.sha256(text).hexdigest()[:16],
        **({} if sharding is None else {"mesh": sharding.mesh_shape}),
    }
    with tolerant(console), run_folder(out, resume, settings, keep, allow_changes) as folder:
        batch = next(programs.endless_batches(program, text, seed))
        state = _initial(program, train_step, batch, seed, sharding)
        run = Run(program, train_step, state, console, watch, sharding, folder)
        traced = run.trace(batch)
        if folder is not None:
            run.restore(folder, program_text(traced.jaxpr, batch))
        interrupt = run.train(traced, text, seed, steps, every)
        scale, last = loss_scale_of(run.state.optimizer), run.losses[-50:]
        return Trained(
            program.name, method, run.done, statistics.fmean(last) if last else math.nan,
            float(scale.scale), int(scale.skipped), interrupt is not None, state_digest(run.state),
            "" if folder is None else str(folder.files.path), run.state,
            0 if interrupt is None else signal_of(interrupt),
        )  # fmt: skip


def step_for(program: programs.Program, name: str, **options: Any) -> Step:
    known = list(inspect.signature(step).parameters)[2:]  # behind the loss and the optimizer
    for unknown in sorted(options.keys() - known):
        raise InputError(
            f"train() has no argument {unknown!r}; a recipe is a method, method='fp8', and "
            f"training.step has the options {', '.join(known)}"
        )
    if program.loss_of is None or program.optimizer is None:
        raise InputError(
            f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER: scalewise train "
            "needs both; scalewise compare does without"
        )
    chosen = {"policy": name} if "=" in name else named_method(name).step_options
    if chosen is None:
        usable = (known for known, each in METHODS.items() if each.step_options is not None)
        raise InputError(
            f"{name} changes the whole program and its state: run it with scalewise compare; "
            f"scalewise train expects one of {', '.join(usable)}, or a policy such as "
            "'p=f32,c=bf16,o=f32'"
        )
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return step(program.loss_of, program.optimizer, **(dict(chosen) | given))
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def _initial(
    program: programs.Program, train_step: Step, batch: PyTree, seed: int, sharding: Sharding | None
) -> TrainState:
    def params() -> PyTree:
        initial = programs.call_user(program.init, f"{program.name}.init", seed)
        programs.parameter_count(initial, program)  # fails if there are no parameters
        return programs.params_of(initial)

    def init() -> TrainState:
        try:
            if sharding is None:
                return jax.jit(train_step.init)(params(), batch)
            placed = sharding.place(batch)
            make = lambda batch: train_step.init(params(), batch)  # noqa: E731
            shardings = sharding.of_state(jax.eval_shape(make, placed))
            return jax.jit(make, out_shardings=shardings)(placed)
        except InputError:
            raise
        except (TypeError, ValueError) as error:  # the message names params or optimizer
            raise InputError(str(error)) from error

    return programs.call_user(init, f"{program.name}.loss_of")


@dataclasses.dataclass
class Run:
    program: programs.Program
    step: Step
    state: TrainState
    console: Console
    watch: Watch | None
    sharding: Sharding | None
    checkpoints: RunFolder | None
    log: Log | None = None  # of the first process
    done: int = 0  # the last step that was made
    left_out: int = 0  # in a row, up to the last step
    losses: list[float] = dataclasses.field(default_factory=list)

    def trace(self, batch: PyTree) -> jax.stages.Traced:
        jitted = jax.jit(self.step)
        if self.sharding is not None:
            same = jax.tree.map(lambda x: x.sharding, self.state)
            replicated = NamedSharding(self.sharding.mesh, PartitionSpec())
            jitted = jax.jit(self.step, out_shardings=(same, replicated))
        what = f"{self.program.name}.loss_of"
        return programs.call_user(jitted.trace, what, self.state, self._placed(batch))

    def restore(self, folder: RunFolder, program: str) -> None:
        """Continues from the newest good checkpoint of the run, if there is any."""
        self.state, damaged = folder.restore(self.state, program)
        self.done = folder.last
        for text in damaged:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        if self.done:
            self.console.print(f"resumed after step {self.done}", highlight=False)
        self.log = log = Log(folder.files, after=self.done) if is_first() else None
        self.losses = call_on_first(lambda: log and log.losses)

    def train(
        self, traced: jax.stages.Traced, text: bytes, seed: int, steps: int, every: int
    ) -> KeyboardInterrupt | None:
        batches = itertools.islice(
            programs.endless_batches(self.program, text, seed), self.done, None
        )
        interrupt: KeyboardInterrupt | None = None
        with held_interrupts() as check_interrupt:
            try:
                if self.done < steps:
                    self._train(traced, batches, steps, every, checked_everywhere(check_interrupt))
            except KeyboardInterrupt as error:
                interrupt = error
            except (CheckpointError, TrainingError):
                raise
            except Exception:  # of the user's program, say: the steps before it are saved
                if jax.process_count() == 1:  # other processes may wait for this one in a step
                    with suppress(CheckpointError):
                        self._save()
                raise
            finally:
                if self.log is not None:
                    self.log.close()
            self._save()
        return interrupt

    def _train(
        self,
        traced: jax.stages.Traced,
        batches: Iterator[PyTree],
        steps: int,
        every: int,
        check_interrupt: Callable[[], None],
    ) -> None:
        batch = next(batches)
        with self.console.status(f"compiling {self.program.name}"):
            compiled = traced.lower().compile()
        name = self.program.name
        with Progress(self.console, [name], steps, self.done) as progress:
            while True:
                check_interrupt()
                row = self._advance(compiled, batch)
                loss = "  –   " if row["loss"] is None else f"{row['loss']:6.3f}"
                figures = f"loss {loss}  scale {row['scale']:g}  {row['skipped']} skipped"
                progress.made(name, self.done, figures, f"{figures}  {row['ms']:.1f} ms")
                if self.done % every == 0:
                    self._save()
                if self.done >= steps:
                    return
                batch = next(batches)

    def _placed(self, batch: PyTree) -> PyTree:
        return batch if self.sharding is None else self.sharding.place(batch)

    def _advance(self, compiled: jax.stages.Compiled, batch: PyTree) -> dict[str, Json]:
        start = time.perf_counter()
        state, metrics = programs.call_user(
            lambda *given: jax.block_until_ready(compiled(*given)), f"{self.program.name}: step",
            self.state, self._placed(batch),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        loss = float(metrics.loss)
        row = {
            "step": self.done + 1,
            "loss": finite_or_none(loss),
            "scale": float(metrics.scale),
            "skipped": int(metrics.skipped),
            "ms": round(seconds * 1e3, 3),
            **(self.watch(self.done + 1, state) if self.watch else {}),
        }
        try:
            call_on_first(lambda: None if self.log is None else self.log.step(row), OSError)
        except OSError as error:
            why = f"the metrics of step {self.done + 1} can't be written: {sentence(error)}"
            raise self._failed(why) from error
        self.state, self.done = state, self.done + 1
        self.losses.append(loss)
        self.left_out = 0 if metrics.finite else self.left_out + 1
        if self.left_out:
            self._report_left_out(batch, row)
        return row

    def _report_left_out(self, batch: PyTree, row: dict[str, Json]) -> None:
        why = non_finite(batch)
        if why is None and row["loss"] is None:
            why = "the loss isn't finite, before it is scaled"
        known = why is not None
        why = why or f"a gradient isn't finite at a loss scale of {row['scale']:g}"
        if known or self.left_out == PATIENCE:
            self.console.print(f"step {self.done} left out: {why}", highlight=False, soft_wrap=True)
        if self.left_out == PATIENCE:
            raise self._failed(
                f"{PATIENCE} steps in a row were left out, the last because {why}; weights and "
                f"moments are as after step {self.done - PATIENCE}"
            )

    def _save(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(self.done, self.state)

    def _failed(self, why: str) -> TrainingError:
        """Saves the steps made, and returns the error to raise."""
        self._save()
        if self.checkpoints is None:
            return TrainingError(f"{why}; there is no checkpoint, since the run has no folder")
        return TrainingError(f"{why}; the last checkpoint is of step {self.checkpoints.last}")


def non_finite(batch: PyTree) -> str | None:
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        x = np.asarray(x)
        if x.dtype.kind == "f" and (count := int((~np.isfinite(x)).sum())):
            where = f" in {jax.tree_util.keystr(path)}" if path else ""
            return f"the batch holds {count} NaN or infinite numbers{where}"
    return None
