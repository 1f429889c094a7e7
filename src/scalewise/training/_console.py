"""The console of a run: bars of progress, and signals that wait until a step is finished."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

EVERY = 50  # steps between two lines if the output is no terminal


class Progress(bars.Progress):
    """A progress bar for each name; if the output is no terminal, a line every fifty steps."""

    def __init__(self, console: Console, names: Sequence[str], steps: int, done: int = 0):
        self._steps = steps
        super().__init__(
            bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(), bars.TextColumn("{task.fields[figures]}"),
            bars.TimeRemainingColumn(compact=True), console=console,
            disable=not console.is_terminal, expand=True,
        )  # fmt: skip
        self._named = {
            name: self.add_task(escape(name), total=steps, completed=done, figures="")
            for name in names
        }

    def made(self, name: str, step: int, figures: str, line: str) -> None:
        """Shows the figures of a step that was made; ``line`` if the output is no terminal."""
        self.update(self._named[name], completed=step, figures=figures)
        if not self.console.is_terminal and step % EVERY == 0:
            text = f"step {step:4}/{self._steps}  {line}"
            self.console.print(text, highlight=False, markup=False)


# Sent by Ctrl-C; by a scheduler or `kill`; by a terminal that is closed.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(KeyboardInterrupt):
    """Raised after a signal that asks the process to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = number


def signal_of(error: KeyboardInterrupt) -> int:
    return int(getattr(error, "signal", signal.SIGINT))


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Delays SIGINT (Ctrl-C), SIGTERM and SIGHUP while the block runs.

    Python may raise ``KeyboardInterrupt`` between two assignments that belong together, or in a
    callback of the garbage collector, where exceptions are dropped. A second Ctrl-C isn't delayed.

    Yields a function to call between steps, which raises :class:`Interrupted` if a signal came.
    Signals aren't delayed in other threads than the main one, nor are signals that are ignored or
    have a handler already. A forked child restores the previous handlers at the first signal.
    """
    came: list[int] = []
    process = os.getpid()

    def hold(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child, such as a data loader
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        if number == signal.SIGINT and number in came:
            signal.default_int_handler(number, frame)
        came.append(number)

    def check_interrupt() -> None:
        if came:
            raise Interrupted(came[0])

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.default_int_handler, signal.SIG_DFL):
                before[number] = signal.signal(number, hold)
    try:
        yield check_interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
