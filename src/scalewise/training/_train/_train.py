"""``train``: one program under one recipe, to be killed and resumed at any moment."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from .._compare import Folder, InputError, Program, corpus, endless, guarded, load_program
from .._interrupt import held_interrupts
from .._step import Metrics, Step, TrainState
from ._checkpoint import Checkpoints
from ._metrics import Log
from ._progress import Progress
from ._recipes import step_for

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
        digest: SHA-256 over the bytes of the whole training state.
        folder: where metrics and checkpoints are.
        state: the state itself.
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
    **options: Any,
) -> Trained:
    """Trains a program under a recipe, with metrics and checkpoints.

    The batches of a step depend on the seed and the step alone, and a checkpoint holds the whole
    state, so that a run that was killed and resumed, however often, ends with the bits that it
    would have had anyway.

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
        options: further arguments of :func:`step` (``clip``, ``accumulate``, ``weights``, ...).

    Returns:
        How it ended.

    Raises:
        InputError: something given can't be used, or doesn't fit what is to be resumed.
        CheckpointError: a checkpoint couldn't be written; the last good one is named.
        TrainingError: a hundred steps in a row had to be left out.
    """
    console = console or Console()
    for name, number in (("steps", steps), ("every", every), ("keep", keep)):
        if number < 1:
            raise InputError(f"{name} is {number}: at least 1 is accepted")
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
    }
    folder = _open(out, resume, about)
    initial = guarded(program.init, f"{program.name}.init", seed)
    params = initial["params"] if isinstance(initial, dict) else initial.params
    try:
        state = jax.jit(train_step.init)(params, next(endless(program, text, seed)))
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    checkpoints = Checkpoints(folder.path / "checkpoints", keep=keep)
    try:
        run = _Run(program, recipe, train_step, state, folder, checkpoints, console, about, watch)
        run.restore()
        return run.train(text, seed, steps, every)
    finally:
        checkpoints.close()


class _Run:
    """A run under way."""

    def __init__(
        self,
        program: Program,
        recipe: str,
        step: Step,
        state: TrainState,
        folder: Folder,
        checkpoints: Checkpoints,
        console: Console,
        about: dict[str, Any],
        watch: Watch | None,
    ):
        self.program, self.recipe, self.step, self.state = program, recipe, step, state
        self.folder, self.checkpoints, self.console = folder, checkpoints, console
        self.about, self.watch = about, watch
        self.done, self.saved, self.out_in_a_row = 0, 0, 0
        self.losses: list[float] = []
        self.metrics: Metrics | None = None

    def restore(self) -> None:
        found = self.checkpoints.restore(self.state, self.about)
        if found is None:
            return
        self.done, self.state, damaged = found
        self.saved = self.done
        for sentence in damaged:
            self.console.print(sentence, highlight=False)
        self.checkpoints.discard_after(self.done)
        self.console.print(f"resumed after step {self.done}", highlight=False)

    def train(self, text: bytes, seed: int, steps: int, every: int) -> Trained:
        stream = itertools.islice(endless(self.program, text, seed), self.done, None)
        interrupted = False
        log = Log(self.folder, after=self.done)
        try:
            if self.done < steps:
                self._all(stream, steps, every, log)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            log.close()
        self._save()
        return self._ended(interrupted)

    def _all(self, stream: Iterator[Any], steps: int, every: int, log: Log) -> None:
        batch = next(stream)
        jitted = jax.jit(self.step)
        with self.console.status(f"compiling {self.program.name} under {self.recipe}"):
            lowered = guarded(jitted.lower, f"{self.program.name}.loss_of", self.state, batch)
            compiled = lowered.compile()
        progress = Progress(self.console, self.program.name, self.done, steps)
        with held_interrupts() as heed, progress:
            while True:
                row = self._one(compiled, batch)
                log.step(row)
                progress.update(row)
                self._patience(batch, row)
                if self.done % every == 0:
                    self._save()
                if self.done >= steps:
                    return
                heed()
                batch = next(stream)

    def _one(self, compiled: Any, batch: Any) -> dict[str, Any]:
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(self.state, batch))
        seconds = time.perf_counter() - start
        loss = float(metrics.loss)
        self.state, self.metrics, self.done = state, metrics, self.done + 1
        self.losses.append(loss)
        return {
            "step": self.done,
            "loss": loss if math.isfinite(loss) else None,
            "scale": float(metrics.scale),
            "skipped": int(metrics.skipped),
            "ms": round(seconds * 1e3, 3),
            **(self.watch(self.done, state) if self.watch else {}),
        }

    def _patience(self, batch: Any, row: dict[str, Any]) -> None:
        """Says why a step was left out; gives up where nothing else happens any more."""
        assert self.metrics is not None
        if bool(self.metrics.finite):
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
            self.console.print(f"step {self.done} left out: {why}", highlight=False)
        if self.out_in_a_row >= PATIENCE:
            raise TrainingError(
                f"{PATIENCE} steps in a row were left out, the last because {why}; weights and "
                f"moments are as after step {self.done - PATIENCE}, the last checkpoint is of "
                f"step {self.saved}"
            )

    def _save(self) -> None:
        if self.done > self.saved:
            self.checkpoints.save(self.done, self.state, self.about)
            self.saved = self.done

    def _ended(self, interrupted: bool) -> Trained:
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
            interrupted=interrupted,
            digest=digest(self.state),
            folder=str(self.folder.path),
            state=self.state,
        )


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
        f"no program called {str(program)!r}: a Python file is accepted"
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
    """SHA-256 over the bytes of every array in a pytree, in order."""
    total = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        total.update(np.ascontiguousarray(jax.random.key_data(x) if key else x).tobytes())
    return total.hexdigest()


def _open(out: str | Path | None, resume: bool, about: dict[str, Any]) -> Folder:
    """The run's folder; what it is about is the first thing written to it."""
    if not resume:
        folder = Folder.at(out)
        folder.write_json("run.json", about)
        return folder
    if out is None:
        raise InputError("resume needs the folder of the run: name it with --out")
    path = Path(out)
    known = path / "run.json"
    if not known.exists():
        visible = [p for p in path.iterdir() if not p.name.startswith(".")] if path.exists() else []
        if visible:
            raise InputError(f"{out} is no folder of scalewise train: it has no run.json")
        folder = Folder(path)
        folder.write_json("run.json", about)
        return folder
    try:
        there = json.loads(known.read_text("utf-8"))
        assert isinstance(there, dict)
    except (ValueError, AssertionError):
        raise InputError(f"{known} isn't what scalewise train wrote there") from None
    for name in about:
        if there.get(name) != about[name]:
            raise InputError(
                f"{out} is a run with {name} {there.get(name)!r}, not {about[name]!r}: resume it "
                "as it was begun, or begin another folder with --out"
            )
    return Folder(path)
