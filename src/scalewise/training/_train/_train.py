"""``train``: one program under one recipe, to be killed and resumed at any moment."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ..._output import sentence, tolerant
from .._compare import (
    Folder,
    InputError,
    Program,
    corpus,
    endless,
    guarded,
    load_program,
    parameter_count,
)
from .._interrupt import held_interrupts, signal_of
from .._step import Step, TrainState
from ._checkpoint import CheckpointError, Checkpoints, plain
from ._identity import FILE, identify, run_folder, write_identity
from ._metrics import Log
from ._processes import claimed, exchange, from_first, is_first, together
from ._progress import Progress
from ._recipes import step_for
from ._sharding import Sharding, check_processes, digests, is_whole

Watch = Callable[[int, TrainState], Mapping[str, float | None]]
PATIENCE = 100  # steps left out in a row before a run is given up


class TrainingError(RuntimeError):
    """The run can't go on; what it had saved is there."""


@dataclass(frozen=True)
class Trained:
    """How a run ended.

    Attributes:
        program, recipe: their names.
        steps: made in all, those before a resumption included.
        loss: mean over the last 50 steps that this process made; NaN if one wasn't finite.
        scale: the loss scale at the end.
        skipped: steps left out.
        interrupted: whether an interrupt ended it; it was saved all the same.
        digest: SHA-256 over the bytes of the whole training state; of a sharded one, over the
            digests of its parts.
        folder: where metrics and checkpoints are.
        state: the state itself.
        signal: the signal that ended it (SIGINT, SIGTERM, SIGHUP); 0 if none did.
    """

    program: str
    recipe: str
    steps: int
    loss: float
    scale: float
    skipped: int
    interrupted: bool
    digest: str
    folder: str
    state: TrainState
    signal: int = 0


def train(
    program: str | Path | Program,
    recipe: str = "float32",
    *,
    data: str | Path | bytes | None = None,
    steps: int = 300,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    every: int = 100,
    keep: int = 3,
    console: Console | None = None,
    watch: Watch | None = None,
    sharding: Sharding | None = None,
    **options: Any,
) -> Trained:
    """Trains a program under a recipe, with metrics and checkpoints.

    The batches of a step depend on the seed and the step alone, and a checkpoint holds the whole
    state, so that a run that was killed and resumed, however often, ends with the bits that it
    would have had anyway.

    With ``sharding`` a run is split over the devices of a mesh. They may belong to several
    processes joined by ``jax.distributed.initialize``, each of which calls this function with the
    same arguments and a folder that all of them see. The first process writes metrics and
    ``run.json``, each one its part of the checkpoints. A signal to one ends the run of all after
    the same step. If one is killed, JAX ends the others; started again with ``resume=True`` they
    continue from the last checkpoint.

    Args:
        program: a file with ``init``, ``loss_of``, ``OPTIMIZER``, ``train_step``, ``batches``; the
            name of one under ``examples/`` (gpt, cnn, lstm, ...); or a `Program`.
        recipe: a name in `RECIPES`, or a policy, ``"p=f32,c=bf16,o=f32"``.
        data: as for :func:`compare`.
        steps: how many in all, at least 1.
        seed: of the parameters and the batches.
        out: folder of the run, new or empty; None for ``runs/<time>``.
        resume: go on with what is in ``out``; begin if there is nothing yet.
        every: steps between two checkpoints. The last step always has one.
        keep: how many checkpoints stay.
        console: where progress is shown.
        watch: called with step and state after each step; the numbers that it returns, by name,
            join that step's line of metrics (see ``scalewise.audit.Monitor.numbers``).
        sharding: how state and batches are split over devices; None for JAX's default device.
            ``program.init`` is then traced, so that no device ever has the whole state.
        options: further arguments of :func:`step` (``clip``, ``accumulate``, ``weights``, ...).

    Returns:
        How it ended.

    Raises:
        InputError: something given can't be used, doesn't fit what is to be resumed, or another
            run works in the folder.
        CheckpointError: a checkpoint couldn't be written; the last good one is named.
        TrainingError: a hundred steps in a row had to be left out, or the metrics can't be written
            any more; what was computed is saved.
        OSError: the folder can't be created or read.
    """
    check_processes(sharding)
    console = (console or Console()) if is_first() else Console(quiet=True)
    for name, number in (("steps", steps), ("every", every), ("keep", keep)):
        if number < 1:
            raise InputError(f"{name} is {number}; expected 1, 2, ...")
    if not isinstance(program, Program):
        program = load_program(example(program))
    text = data if isinstance(data, bytes) else corpus(data)
    train_step = step_for(program, recipe, **options)
    about = {
        "model": program.name,
        "recipe": recipe,
        "seed": seed,
        "options": {k: repr(v) for k, v in sorted(options.items()) if v is not None},
        "data": hashlib.sha256(text).hexdigest()[:16],
        **({} if sharding is None else {"mesh": sharding.about}),
    }
    places: list[Folder] = []  # in the first process
    from_first(lambda: places.append(run_folder(out, resume, about)))
    state = _initial(program, train_step, text, seed, sharding)
    with tolerant(console), claimed(places) as folder:
        identity = from_first(lambda: identify(folder, about))
        checkpoints = Checkpoints(folder.path / "checkpoints", keep=keep)
        try:
            run = _Run(
                program, recipe, train_step, state, checkpoints, console, about, watch, sharding
            )
            run.restore(identity)
            if identity is None:
                from_first(lambda: write_identity(folder, about, run.identity))
            return run.train(folder, text, seed, steps, every)
        finally:
            checkpoints.close()


def _initial(
    program: Program, train_step: Step, text: bytes, seed: int, sharding: Sharding | None
) -> TrainState:
    """The training state before the first step."""
    batch = next(endless(program, text, seed))

    def params() -> Any:
        initial = guarded(program.init, f"{program.name}.init", seed)
        parameter_count(initial, program)  # refuses what has no params
        return initial["params"] if isinstance(initial, dict) else initial.params

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
        except (TypeError, ValueError) as error:  # what it says of params and optimizer is whole
            raise InputError(str(error)) from error

    return guarded(init, f"{program.name}.loss_of")


class _Run:
    """A run under way."""

    def __init__(
        self,
        program: Program,
        recipe: str,
        step: Step,
        state: TrainState,
        checkpoints: Checkpoints,
        console: Console,
        about: dict[str, Any],
        watch: Watch | None,
        sharding: Sharding | None,
    ):
        self.program, self.recipe, self.step, self.state = program, recipe, step, state
        self.checkpoints, self.console = checkpoints, console
        self.about, self.watch, self.sharding = about, watch, sharding
        self.identity = ""
        self.done, self.saved, self.out_in_a_row = 0, 0, 0
        self.losses: list[float] = []

    def restore(self, identity: str | None) -> None:
        """Continues from the newest whole checkpoint of the run; None for a run of any identity."""
        found = self.checkpoints.restore(self.state, self.about, identity)
        self.identity = identity or ""
        if found is None:
            if identity is None:
                raise InputError(
                    f"{FILE} isn't what scalewise train wrote there, and there is no checkpoint to "
                    "tell which run it was: begin another folder with --out"
                )
            return
        self.done, self.state, self.identity = found.step, found.state, found.run
        self.saved = self.done
        for text in found.damaged:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"resumed after step {self.done}", highlight=False)

    def train(self, folder: Folder, text: bytes, seed: int, steps: int, every: int) -> Trained:
        stream = itertools.islice(endless(self.program, text, seed), self.done, None)
        interrupted: KeyboardInterrupt | None = None
        log = Log(folder, after=self.done) if is_first() else None
        with held_interrupts() as check_interrupt:
            try:
                if self.done < steps:
                    self._all(stream, steps, every, log, together(check_interrupt))
            except KeyboardInterrupt as error:
                interrupted = error
            except OSError as error:
                self._save()
                raise TrainingError(
                    f"the metrics of step {self.done + 1} can't be written: {sentence(error)}; "
                    f"the last checkpoint is of step {self.saved}"
                ) from error
            except (CheckpointError, TrainingError):
                raise
            except Exception:  # the program's failure, say: what was computed is kept
                if jax.process_count() == 1:  # the others may wait for this one in a step
                    with suppress(CheckpointError):
                        self._save()
                raise
            finally:
                if log is not None:
                    log.close()
            self._save()
        return self._ended(interrupted, folder)

    def _all(
        self,
        stream: Iterator[Any],
        steps: int,
        every: int,
        log: Log | None,
        check_interrupt: Callable[[], None],
    ) -> None:
        batch = next(stream)
        jitted, what = self._jitted(), f"{self.program.name}.loss_of"
        with self.console.status(f"compiling {self.program.name} under {self.recipe}"):
            compiled = guarded(jitted.lower, what, self.state, self._placed(batch)).compile()
        with Progress(self.console, self.program.name, self.done, steps) as progress:
            while True:
                check_interrupt()
                row = self._one(compiled, batch, log)
                progress.update(row)
                if self.done % every == 0:
                    self._save()
                if self.done >= steps:
                    return
                batch = next(stream)

    def _jitted(self) -> Any:
        """The step, to be compiled: what comes out of it lies as what goes in."""
        if self.sharding is None:
            return jax.jit(self.step)
        same = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(self.step, out_shardings=(same, self.sharding.replicated))

    def _placed(self, batch: Any) -> Any:
        return batch if self.sharding is None else self.sharding.place(batch)

    def _one(self, compiled: Any, batch: Any, log: Log | None) -> dict[str, Any]:
        """Makes a step; the state changes once the step's line of metrics is written."""
        start = time.perf_counter()
        state, metrics = guarded(
            _finished, f"{self.program.name}: step", compiled, self.state, self._placed(batch)
        )
        seconds = time.perf_counter() - start
        loss = float(metrics.loss)
        row = {
            "step": self.done + 1,
            "loss": loss if math.isfinite(loss) else None,
            "scale": float(metrics.scale),
            "skipped": int(metrics.skipped),
            "ms": round(seconds * 1e3, 3),
            **(self.watch(self.done + 1, state) if self.watch else {}),
        }
        _written(log, row)
        self.state, self.done = state, self.done + 1
        self.losses.append(loss)
        self._patience(batch, row, bool(metrics.finite))
        return row

    def _patience(self, batch: Any, row: dict[str, Any], finite: bool) -> None:
        """Says why a step was left out; gives up where nothing else happens any more."""
        if finite:
            self.out_in_a_row = 0
            return
        self.out_in_a_row += 1
        wrong = non_finite(batch)
        if wrong:
            why = f"the batch holds {wrong}"
        elif row["loss"] is None:
            why = "the loss isn't finite, before it is scaled"
        else:
            why = f"a gradient isn't finite at a loss scale of {row['scale']:g}"
        if wrong or row["loss"] is None or self.out_in_a_row == PATIENCE:
            self.console.print(f"step {self.done} left out: {why}", highlight=False, soft_wrap=True)
        if self.out_in_a_row >= PATIENCE:
            raise TrainingError(
                f"{PATIENCE} steps in a row were left out, the last because {why}; weights and "
                f"moments are as after step {self.done - PATIENCE}, the last checkpoint is of "
                f"step {self.saved}"
            )

    def _save(self) -> None:
        if self.done > self.saved:
            self.checkpoints.save(self.done, self.state, self.about, self.identity)
            self.saved = self.done

    def _ended(self, interrupted: KeyboardInterrupt | None, folder: Folder) -> Trained:
        from .._loss_scale import loss_scale_of

        scale = loss_scale_of(self.state.optimizer)
        last = self.losses[-50:]
        return Trained(
            program=self.program.name,
            recipe=self.recipe,
            steps=self.done,
            loss=statistics.fmean(last) if last else math.nan,
            scale=float(scale.scale),
            skipped=int(scale.skipped),
            interrupted=interrupted is not None,
            digest=digest(self.state),
            folder=str(folder.path),
            state=self.state,
            signal=0 if interrupted is None else signal_of(interrupted),
        )


def _finished(compiled: Any, state: TrainState, batch: Any) -> Any:
    return jax.block_until_ready(compiled(state, batch))


def _written(log: Log | None, row: Mapping[str, Any]) -> None:
    """Writes a line of metrics, in the first process.

    Raises:
        OSError: the first process can't write it; in all processes.
    """
    failed: OSError | None = None
    try:
        if log is not None:
            log.step(row)
    except OSError as error:
        failed = error
    why = exchange(failed and sentence(failed))[0]
    if failed is not None:
        raise failed
    if why is not None:
        raise OSError(why)


def example(program: str | Path) -> Path:
    """The file of a program: a path, or the name of one of the examples."""
    path = Path(program)
    if path.suffix or path.exists():
        return path
    package = Path(__file__).parents[2]
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / f"{program}.py").is_file():
            return folder / f"{program}.py"
    found = {
        file.stem
        for folder in (package / "examples", package.parents[1] / "examples")
        for file in folder.glob("*.py")
    }
    raise InputError(
        f"no program called {str(program)!r}; expected a Python file"
        + (f", or one of the examples {', '.join(sorted(found))}" if found else "")
    )


def non_finite(batch: Any) -> str | None:
    """How many numbers of a batch aren't finite, and where the first of them is."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        x = np.asarray(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            count = int((~np.isfinite(x)).sum())
            where = jax.tree_util.keystr(path)
            return f"{count} NaN or infinite numbers" + (f" in {where}" if where else "")
    return None


def digest(tree: Any) -> str:
    """SHA-256 over the bytes of every array in a pytree, in order.

    Where arrays are split over devices it is that over the digests of all arrays.
    """
    arrays = plain(jax.tree.leaves(tree))
    total = hashlib.sha256()
    if all(map(is_whole, arrays)):
        for x in arrays:
            total.update(np.ascontiguousarray(x).tobytes())
    else:
        total.update("\n".join(digests(arrays)).encode())
    return total.hexdigest()
