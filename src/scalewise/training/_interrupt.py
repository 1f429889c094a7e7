"""Ctrl-C and SIGTERM between steps: none is torn in two, and none is lost."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# What asks a process to end: Ctrl-C, a scheduler or `kill`, a terminal that is closed.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(KeyboardInterrupt):
    """A signal that asked the process to end.

    Attributes:
        signal: its number; a shell expects the exit code 128 plus this number.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = number


def signal_of(error: KeyboardInterrupt) -> int:
    """The signal behind a ``KeyboardInterrupt``: SIGINT, unless it says something else."""
    return int(getattr(error, "signal", signal.SIGINT))


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Holds SIGINT (Ctrl-C), SIGTERM and SIGHUP back until a step is finished.

    Python raises ``KeyboardInterrupt`` wherever it happens to be: between two assignments that
    belong together, or in a callback of the garbage collector, which may not raise, so that it is
    printed and forgotten (JAX has such a callback). SIGTERM and SIGHUP would end the process at
    once. A second Ctrl-C isn't held back.

    A child process that is forked meanwhile has the handlers from before: it can be terminated.

    Yields:
        A function to call between steps: it raises :class:`Interrupted`, a ``KeyboardInterrupt``,
        if a signal came. In a thread, and where somebody else handles a signal or ignores it,
        that signal isn't held back.
    """
    came: list[int] = []
    process = os.getpid()

    def hold(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a child that was forked meanwhile, a loader of data, say
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
