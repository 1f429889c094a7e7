"""Ctrl-C between steps: it tears none in two, and isn't lost where Python can't raise it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until it can be heeded.

    Python raises ``KeyboardInterrupt`` wherever it happens to be: between two assignments that
    belong together, or in a callback of the garbage collector, which may not raise, so that it is
    printed and forgotten (JAX has such a callback). A second Ctrl-C isn't held back.

    Yields:
        What is to be called between steps: it raises ``KeyboardInterrupt`` if one came. In a
        thread, and where somebody else handles the signal, nothing is held back.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield lambda: None
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = True

    def heed() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, before)
