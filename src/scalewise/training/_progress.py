"""Shows the progress of training in a terminal: a bar for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

EVERY = 50  # steps between two lines if the output is no terminal


class Progress:
    """A progress bar for each name; if the output is no terminal, a line every fifty steps."""

    def __init__(self, console: Console, names: Sequence[str], steps: int, done: int = 0):
        self._console, self._steps = console, steps
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[figures]}"),
            bars.TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._tasks = {
            name: self._bars.add_task(escape(name), total=steps, completed=done, figures="")
            for name in names
        }

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, name: str, step: int, figures: str, line: str) -> None:
        """Shows the figures of a step that was made; ``line`` if the output is no terminal."""
        self._bars.update(self._tasks[name], completed=step, figures=figures)
        if not self._console.is_terminal and step % EVERY == 0:
            text = f"step {step:4}/{self._steps}  {line}"
            self._console.print(text, highlight=False, markup=False)
