"""``train``: trains one program by one method; a killed run resumes to the same bits."""

from __future__ import annotations

import hashlib
import inspect
import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from ..._check import Count, checked
from ..._output import Folder, tolerant
from ..._types import PyTree
from ..._user_file import InputError
from .._compare._methods import METHODS
from .._compare._methods import method as named_method
from .._compare._program import (
    Program,
    call_user,
    corpus,
    endless_batches,
    load_program,
    parameter_count,
    params_of,
)
from .._console import signal_of
from .._loss_scale import loss_scale_of
from .._model import TrainState
from .._step import Step, step
from ._checkpoint import state_digest
from ._folder import RunFolder, claimed_by_first, program_text, run_folder
from ._run import Run, Watch
from ._sharding import Sharding, call_on_first, check_processes, is_first


@dataclass(frozen=True)
class Trained:
    """The result of a training run."""

    program: str
    method: str
    steps: int  # also those before the run was resumed
    loss: float  # the mean over the last 50 steps; NaN if one wasn't finite
    scale: float  # the loss scale at the end
    skipped: int  # steps left out
    interrupted: bool  # the state was saved all the same
    digest: str  # SHA-256 over the state's bytes; of a sharded one, over its parts' digests
    folder: str  # of metrics and checkpoints; "" for none
    state: TrainState
    signal: int = 0  # that ended the run (SIGINT, SIGTERM, SIGHUP); 0 if none did


@checked
def train(
    program: str | Path | Program,
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
        data: as for :func:`compare`.
        steps: the number of steps in all, at least 1.
        seed: of the parameters and the batches.
        out: the run's folder, new or empty; ``Folder.timestamped("runs")`` for one named after the
            time. None writes no metrics and no checkpoints.
        resume: whether to continue the run in ``out``, or to begin it if the folder is empty.
        every: the number of steps between two checkpoints. The last step always has one.
        keep: how many checkpoints are kept.
        console: where progress is shown.
        watch: called with step and state after each step; the numbers that it returns, by name,
            join that step's line of metrics (see ``scalewise.auditing.Monitor.numbers``).
        sharding: how state and batches are split over devices; None for JAX's default device.
            With it ``program.init`` is traced, so that no device ever has the whole state.
        allow_changes: whether a run may be resumed with other settings or another step than it was
            begun with: an edited learning rate, loss or batch size, another version of JAX.
        options: further arguments of :func:`step` (``clip``, ``accumulate``, ``weights``, ...).

    Returns:
        The state at the end, and how the run ended.

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
    program = load_program(program)
    text = data if isinstance(data, bytes) else corpus(data)
    train_step = step_for(program, method, **options)
    settings = {
        "model": program.name,
        "method": method,
        "seed": seed,
        "options": {k: repr(v) for k, v in sorted(options.items()) if v is not None},
        "data": hashlib.sha256(text).hexdigest()[:16],
        **({} if sharding is None else {"mesh": sharding.mesh_shape}),
    }
    folders: list[Folder | None] = []  # of the first process
    expected = {} if allow_changes else settings
    call_on_first(lambda: folders.append(run_folder(out, resume, expected)))
    batch = next(endless_batches(program, text, seed))
    state = _initial(program, train_step, batch, seed, sharding)
    with ExitStack() as stack:
        stack.enter_context(tolerant(console))
        folder = stack.enter_context(claimed_by_first(folders[0] if folders else None))
        run = Run(program, method, train_step, state, console, watch, sharding)
        traced = run.trace(batch)
        if folder is not None:
            kept = RunFolder(folder, settings, keep, allow_changes)
            run.restore(stack.enter_context(closing(kept)), program_text(traced.jaxpr))
        interrupt = run.train(traced, folder, text, seed, steps, every)
        return _result(run, interrupt, folder)


def step_for(program: Program, name: str, **options: Any) -> Step:
    """Returns the training step of a program by a method."""
    known = list(inspect.signature(step).parameters)[2:]  # behind the loss and the optimizer
    for unknown in sorted(options.keys() - known):
        raise InputError(
            f"train() has no argument {unknown!r}; a recipe is a method, method='fp8', and "
            f"training.step has the options {', '.join(known)}"
        )
    if program.loss_of is None or program.optimizer is None:
        raise InputError(
            f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER: training under a "
            "loss scale needs both (scalewise compare does without)"
        )
    chosen: Mapping[str, Any] | None = {"policy": name}
    if "=" not in name:
        chosen = named_method(name).step_options
    if chosen is None:
        usable = (known for known, each in METHODS.items() if each.step_options is not None)
        raise InputError(
            f"{name} changes the whole program and its state: run it with scalewise compare; "
            f"scalewise train expects one of {', '.join(usable)}, or a policy such as "
            "'p=f32,c=bf16,o=f32'"
        )
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return step(program.loss_of, program.optimizer, **{**chosen, **given})
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def _initial(
    program: Program, train_step: Step, batch: PyTree, seed: int, sharding: Sharding | None
) -> TrainState:
    def params() -> PyTree:
        initial = call_user(program.init, f"{program.name}.init", seed)
        parameter_count(initial, program)  # fails if there are no parameters
        return params_of(initial)

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

    return call_user(init, f"{program.name}.loss_of")


def _result(run: Run, interrupt: KeyboardInterrupt | None, folder: Folder | None) -> Trained:
    scale = loss_scale_of(run.state.optimizer)
    last = run.losses[-50:]
    return Trained(
        program=run.program.name,
        method=run.method,
        steps=run.done,
        loss=statistics.fmean(last) if last else math.nan,
        scale=float(scale.scale),
        skipped=int(scale.skipped),
        interrupted=interrupt is not None,
        digest=state_digest(run.state),
        folder="" if folder is None else str(folder.path),
        state=run.state,
        signal=0 if interrupt is None else signal_of(interrupt),
    )
