"""Agreement among the processes of one run: on values, signals and the first one's errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np

from ..._jax import process_allgather
from ..._output import sentence
from ..._types import Json
from ..._user_file import InputError
from .._compare import Folder
from .._interrupt import Interrupted, signal_of


def is_first() -> bool:
    return jax.process_index() == 0


def all_gather_json(value: Json) -> list[Json]:
    """Returns the values of all processes, in the order of the processes; all have to call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.int32(len(text))).ravel()
    rows = process_allgather(np.pad(text, (0, max(sizes) - len(text)))).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def call_on_first(call: Callable[[], Json], kind: type[Exception] = InputError) -> Json:
    """Calls ``call`` in the first process only, and returns its result in every process.

    Its exception is raised in the first process as it is, in all others as one of this kind.
    """
    value, failed, told = None, None, None
    if is_first():
        try:
            value = call()
        except Exception as error:
            failed, told = error, sentence(error) if isinstance(error, OSError) else str(error)
    found, told = all_gather_json([value, told])[0]
    if failed is not None:
        raise failed
    if told is not None:
        raise kind(told)
    return found


@contextmanager
def claimed_by_first(folder: Folder | None) -> Iterator[Folder | None]:
    """Creates and locks the run's folder in the first process, for all of them.

    Args:
        folder: as it is in the first process; others may have None. None in all: no folder.

    Yields:
        The folder under the name that it got.
    """
    with ExitStack() as stack:

        def claim() -> str | None:
            return folder and str(stack.enter_context(folder.claimed()).path.absolute())

        path = call_on_first(claim)
        yield None if path is None else Folder(Path(path), new=False)


def checked_everywhere(check_interrupt: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that raises an interrupt of any process in all of them, at one step."""

    def check() -> None:
        own: KeyboardInterrupt | None = None
        try:
            check_interrupt()
        except KeyboardInterrupt as error:
            own = error
        signals = all_gather_json(0 if own is None else signal_of(own))
        if any(signals):
            raise own or Interrupted(max(signals))

    return check
