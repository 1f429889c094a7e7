"""Shows a run's progress in a terminal: a bar with loss, loss scale and skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

EVERY = 50  # steps between two lines if the output is no terminal


class Progress:
    """A progress bar; if the output is no terminal, one line every fifty steps."""

    def __init__(self, console: Console, name: str, done: int, steps: int):
        self._console, self._steps = console, steps
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[figures]}"),
            bars.TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(escape(name), total=steps, completed=done, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows the metrics of a step that was made."""
        loss = "  –   " if row["loss"] is None else f"{row['loss']:6.3f}"
        figures = f"loss {loss}  scale {row['scale']:g}  {row['skipped']} skipped"
        self._bar.update(self._task, completed=row["step"], figures=figures)
        if not self._console.is_terminal and row["step"] % EVERY == 0:
            line = f"step {row['step']:4}/{self._steps}  {figures}  {row['ms']:.1f} ms"
            self._console.print(line, highlight=False)
