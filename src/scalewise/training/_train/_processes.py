"""What the processes of one run tell each other: values, signals, the first one's errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._compare import Folder, InputError
from .._interrupt import Interrupted, signal_of

FIRST = 256  # bytes that are sent at once: most values need no second message


def is_first() -> bool:
    """Whether this process is the one that writes metrics and ``run.json``."""
    return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
    """The values of all processes, in their order; every process has to call it.

    Args:
        value: what JSON can hold.
    """
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    heads = _gathered(f"{len(text)} ".encode() + text, FIRST)
    sizes = [int(head.split(b" ")[0]) for head in heads]
    rest = len(f"{max(sizes)} ") + max(sizes) > FIRST
    rows = _gathered(text, max(sizes)) if rest else [head.split(b" ", 1)[1] for head in heads]
    return [json.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _gathered(text: bytes, size: int) -> list[bytes]:
    """The first ``size`` bytes of each process' text, zeros behind shorter ones."""
    from jax.experimental.multihost_utils import process_allgather

    row = np.zeros(size, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)[:size]
    rows = np.asarray(process_allgather(row), np.uint8)
    return [row.tobytes() for row in rows.reshape(-1, size)]


def from_first(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in the first process, the only one that calls it, in every process.

    Raises:
        InputError: in all other processes, whatever the first one raised; there, that exception.
    """
    if jax.process_count() == 1:
        return call()
    value, failed = None, None
    if is_first():
        try:
            value = call()
        except Exception as error:
            failed = error
    found, sentence = exchange([value, None if failed is None else str(failed)])[0]
    if failed is not None:
        raise failed
    if sentence is not None:
        raise InputError(sentence)
    return found


@contextmanager
def claimed(places: Sequence[Folder]) -> Iterator[Folder]:
    """The run's folder, whose lock the first process holds for all.

    Args:
        places: in the first process the folder, as it is yet to be created.
    """
    with ExitStack() as stack:
        if jax.process_count() == 1:
            yield stack.enter_context(places[0].claimed())
            return
        claim = lambda: str(stack.enter_context(places[0].claimed()).path.absolute())  # noqa: E731
        yield Folder(Path(from_first(claim)), new=False)


def together(check_interrupt: Callable[[], None]) -> Callable[[], None]:
    """A function that raises the interrupt of any process in all of them, after the same step."""
    if jax.process_count() == 1:
        return check_interrupt

    def check() -> None:
        own: KeyboardInterrupt | None = None
        try:
            check_interrupt()
        except KeyboardInterrupt as error:
            own = error
        signals = exchange(0 if own is None else signal_of(own))
        if own is not None:
            raise own
        if any(signals):
            raise Interrupted(max(signals))

    return check
