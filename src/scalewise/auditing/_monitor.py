"""Monitors a training run: every n steps, how much of its state is outside a format's range."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import jax

from .._check import Count, checked
from .._resolve import as_format
from ..formats import FormatLike
from ._log import Log
from ._readings import (
    Groups,
    Reading,
    floats_only,
    readings,
)
from ._report._trace import is_latent, near_maximum


@checked
class Monitor:
    """Measures every so many steps how much of a training state is outside a format's range.

    The numbers are those of :func:`scalewise.auditing.readings`: for each group of arrays the
    largest magnitude, and the shares that a cast to the format would saturate or flush to zero.
    ``monitor(step, tree)`` writes a line of ``metrics.jsonl`` at every ``every``-th step, and does
    nothing at other steps; :meth:`numbers` returns it for any other log. It doesn't wait for the
    device: a reading is written when the next one is taken, or at the end.

    Args:
        fmt: the format whose range counts.
        every: steps between two readings.
        groups: how many keys of an array's path name its group (``1``: ``params``; ``2``:
            ``params/blocks``), or a dict from names of groups to regular expressions.
        out: the folder to write to. Its lines of earlier steps than the first reading's are kept;
            later ones, which a resumed run makes again, are removed. None: nothing is written.

    Raises:
        ValueError: an unknown format; ``every`` below 1.

    Example:
        >>> import jax.numpy as jnp, pathlib, scalewise as sw, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sw.Monitor("fp16", every=2, out=folder) as monitor:
        ...         for step in range(1, 6):
        ...             monitor(step, {"params": jnp.ones(3) * 10.0**step})
        ...     print(pathlib.Path(folder, "metrics.jsonl").read_text())
        {"step": 2, "params/amax": 100.0, ..., "params/nonfinite": 0.0}
        {"step": 4, "params/amax": 10000.0, ..., "params/nonfinite": 0.0}
    """

    def __init__(
        self,
        fmt: FormatLike = "float16",
        *,
        every: Count = 10,
        groups: Groups = 1,
        out: str | os.PathLike[str] | None = None,
    ):
        self.every = every
        self._fmt = as_format(fmt, "Monitor")
        self._options = {"fmt": self._fmt, "groups": groups}
        self._largest: dict[str, tuple[float, int]] = {}  # with the step, by group
        self._out = None if out is None else Path(out)
        self._log: Log | None = None
        self._pending: tuple[int, dict[str, Reading]] | None = None

    def __repr__(self) -> str:
        out = "" if self._out is None else f", out={str(self._out)!r}"
        return f"Monitor({self._fmt.name!r}, every={self.every}{out})"

    @functools.cached_property
    def _read(self) -> Callable:
        return jax.jit(functools.partial(readings, **self._options))

    def __getstate__(self) -> dict[str, Any]:  # without the compiled function and the open file
        return {k: v for k, v in self.__dict__.items() if k != "_read"} | {"_log": None}

    def __call__(self, step: SupportsIndex, tree: Any) -> None:
        """Reads ``tree`` if ``step``, also an integer scalar array, is a multiple of ``every``."""
        step = operator.index(step)
        if step % self.every == 0:
            found = self._read(floats_only(tree))
            self._write()
            self._pending = step, found

    def numbers(self, step: SupportsIndex, tree: Any) -> dict[str, float | None]:
        """Returns the reading by ``group/name``; {} unless ``every`` divides ``step``."""
        step = operator.index(step)
        return self._noted(step, self._read(floats_only(tree))) if step % self.every == 0 else {}

    @property
    def latent(self) -> tuple[str, ...]:
        """A sentence for each group whose largest value so far was within a factor of 4 of
        overflowing; waits for the last reading."""
        self._write()
        return tuple(
            f"{group}: {near_maximum(amax, self._fmt)} (step {step})"
            for group, (amax, step) in self._largest.items()
            if is_latent(amax, self._fmt) and amax <= float(self._fmt.max)
        )

    def close(self) -> None:
        """Writes the last reading."""
        self._write()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self) -> None:
        if self._pending is None:
            return
        step, found = self._pending
        self._pending, numbers = None, self._noted(step, found)
        if self._out is None:
            return
        if self._log is None:
            self._log = Log(self._out, after=step - 1)
        self._log.step({"step": step, **numbers})

    def _noted(self, step: int, found: Mapping[str, Reading]) -> dict[str, float | None]:
        for group, reading in found.items():
            self._largest[group] = max(
                self._largest.get(group, (0.0, step)), (float(reading.amax), step)
            )
        rows = {
            f"{group}/{name}": float(x)
            for group, reading in found.items()
            for name, x in vars(reading).items()
        }
        return {name: x if math.isfinite(x) else None for name, x in rows.items()}
