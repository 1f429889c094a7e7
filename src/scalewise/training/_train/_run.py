"""A training run in progress: makes its steps, writes metrics and checkpoints, and ends early."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import jax
import numpy as np
from rich.console import Console

from ..._output import Folder, sentence
from ..._types import Json, PyTree
from .._compare._program import Program, call_user, endless_batches
from .._compare._results import finite_or_none
from .._console import Progress, held_interrupts
from .._model import TrainState
from .._step import Step
from ._folder import CheckpointError, RunFolder
from ._metrics import Log
from ._sharding import Sharding, call_on_first, checked_everywhere, is_first

Watch = Callable[[int, TrainState], Mapping[str, float | None]]
PATIENCE = 100  # steps left out in a row after which the run ends with an error


class TrainingError(RuntimeError):
    """Raised if a run can't continue; its last checkpoint is kept."""


@dataclasses.dataclass
class Run:
    program: Program
    method: str
    step: Step
    state: TrainState
    console: Console
    watch: Watch | None
    sharding: Sharding | None
    checkpoints: RunFolder | None = None
    done: int = 0  # the last step that was made
    saved: int = 0
    left_out: int = 0  # in a row, up to the last step
    losses: list[float] = dataclasses.field(default_factory=list)

    def trace(self, batch: PyTree) -> jax.stages.Traced:
        what = f"{self.program.name}.loss_of"
        return call_user(self._jitted().trace, what, self.state, self._placed(batch))

    def restore(self, folder: RunFolder, program: str) -> None:
        """Continues from the newest good checkpoint of the run, if there is any."""
        self.checkpoints = folder
        found = folder.restore(self.state, program)
        if found is None:
            return
        self.done, self.state, damaged = found
        self.saved = self.done
        for text in damaged:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.console.print(f"resumed after step {self.done}", highlight=False)

    def train(
        self,
        traced: jax.stages.Traced,
        folder: Folder | None,
        text: bytes,
        seed: int,
        steps: int,
        every: int,
    ) -> KeyboardInterrupt | None:
        batches = itertools.islice(endless_batches(self.program, text, seed), self.done, None)
        interrupt: KeyboardInterrupt | None = None
        log = Log(folder, after=self.done) if folder is not None and is_first() else None
        if folder is not None:
            self.losses = call_on_first(lambda: [] if log is None else log.losses)
        with held_interrupts() as check_interrupt:
            try:
                if self.done < steps:
                    self._train(
                        traced, batches, steps, every, log, checked_everywhere(check_interrupt)
                    )
            except KeyboardInterrupt as error:
                interrupt = error
            except OSError as error:
                self._save()
                raise TrainingError(
                    f"the metrics of step {self.done + 1} can't be written: {sentence(error)}; "
                    f"{self._last_checkpoint}"
                ) from error
            except (CheckpointError, TrainingError):
                raise
            except Exception:  # of the user's program, say: the steps before it are saved
                if jax.process_count() == 1:  # other processes may wait for this one in a step
                    with suppress(CheckpointError):
                        self._save()
                raise
            finally:
                if log is not None:
                    log.close()
            self._save()
        return interrupt

    def _train(
        self,
        traced: jax.stages.Traced,
        batches: Iterator[PyTree],
        steps: int,
        every: int,
        log: Log | None,
        check_interrupt: Callable[[], None],
    ) -> None:
        batch = next(batches)
        with self.console.status(f"compiling {self.program.name} by {self.method}"):
            compiled = traced.lower().compile()
        name = self.program.name
        with Progress(self.console, [name], steps, self.done) as progress:
            while True:
                check_interrupt()
                row = self._advance(compiled, batch, log)
                loss = "  –   " if row["loss"] is None else f"{row['loss']:6.3f}"
                figures = f"loss {loss}  scale {row['scale']:g}  {row['skipped']} skipped"
                progress.update(name, self.done, figures, f"{figures}  {row['ms']:.1f} ms")
                if self.done % every == 0:
                    self._save()
                if self.done >= steps:
                    return
                batch = next(batches)

    def _jitted(self) -> jax.stages.Wrapped:
        if self.sharding is None:
            return jax.jit(self.step)
        same = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(self.step, out_shardings=(same, self.sharding.replicated))

    def _placed(self, batch: PyTree) -> PyTree:
        return batch if self.sharding is None else self.sharding.place(batch)

    def _advance(
        self, compiled: jax.stages.Compiled, batch: PyTree, log: Log | None
    ) -> dict[str, Json]:
        start = time.perf_counter()
        state, metrics = call_user(
            lambda *given: jax.block_until_ready(compiled(*given)),
            f"{self.program.name}: step",
            self.state,
            self._placed(batch),
        )
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
        call_on_first(lambda: None if log is None else log.step(row), OSError)
        self.state, self.done = state, self.done + 1
        self.losses.append(loss)
        self._report_left_out(batch, row, bool(metrics.finite))
        return row

    def _report_left_out(self, batch: PyTree, row: dict[str, Json], finite: bool) -> None:
        """Prints why a step was left out."""
        if finite:
            self.left_out = 0
            return
        self.left_out += 1
        wrong = non_finite(batch)
        if wrong:
            why = f"the batch holds {wrong}"
        elif row["loss"] is None:
            why = "the loss isn't finite, before it is scaled"
        else:
            why = f"a gradient isn't finite at a loss scale of {row['scale']:g}"
        if wrong or row["loss"] is None or self.left_out == PATIENCE:
            self.console.print(f"step {self.done} left out: {why}", highlight=False, soft_wrap=True)
        if self.left_out >= PATIENCE:
            raise TrainingError(
                f"{PATIENCE} steps in a row were left out, the last because {why}; weights and "
                f"moments are as after step {self.done - PATIENCE}, {self._last_checkpoint}"
            )

    def _save(self) -> None:
        if self.checkpoints is not None and self.done > self.saved:
            self.checkpoints.save(self.done, self.state)
            self.saved = self.done

    @property
    def _last_checkpoint(self) -> str:
        if self.checkpoints is None:
            return "there is no checkpoint, since the run has no folder"
        return f"the last checkpoint is of step {self.saved}"


def non_finite(batch: PyTree) -> str | None:
    """Returns how many numbers of a batch aren't finite and in which array; None if all are."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        x = np.asarray(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            count = int((~np.isfinite(x)).sum())
            where = jax.tree_util.keystr(path)
            return f"{count} NaN or infinite numbers" + (f" in {where}" if where else "")
    return None
