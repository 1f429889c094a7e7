"""``Reduction``: a program of a few operations that shows a finding, as a Python file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ..._output import Printed, check_writable, replacing
from ..._output._text import Text
from ._arithmetic import LOADED, ReducedArithmetic, run, source
from ._render import Slice

LOADING = 'inputs = dict(np.load(Path(__file__).with_suffix(".npz")))'
EMBEDDED = 256  # numbers up to which inputs are written into the file


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction(Printed):
    """The smallest program found that shows a finding.

    Attributes:
        finding: a sentence: kind, place and evidence.
        arithmetic: the format, or the policy or recipe.
        piece: the operations.
        inputs: their inputs, by name; floats as the reference run has them.
        operations: how many operations the audited program ran up to there.
        low, wide: the result in the format, and in float32 (or float64).
    """

    finding: str
    arithmetic: ReducedArithmetic
    piece: Slice
    inputs: dict[str, np.ndarray]
    operations: int
    low: np.ndarray
    wide: np.ndarray

    @property
    def code(self) -> str:
        """The program; it reads inputs of more than 256 numbers from a file beside it."""
        return _code(self, embed=self.is_small)

    @property
    def is_small(self) -> bool:
        """Whether the inputs are written into the program."""
        sizes = (x.size for x in self.inputs.values() if not (x == x.flat[:1]).all())
        return sum(sizes) <= EMBEDDED

    def show(self, console: Console | None = None) -> None:
        """Prints the program."""
        (console or Console()).print(Text(self.code))

    def __repr__(self) -> str:
        count = f"{len(self.piece.lines)} of {self.operations} operations"
        return f"<Reduction to {count}: {self.finding}; show(), save('case.py')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the program and, unless they are small, its inputs as ``.npz`` beside it.

        Raises:
            ValueError: the name doesn't end with ``.py``; no such folder, or not a regular file.
            OSError: a file can't be written.
        """
        path = Path(path)
        if path.suffix != ".py":
            raise ValueError(f"save({str(path)!r}): expected a name that ends with .py")
        check_writable(path)
        if not self.is_small:
            with replacing(path.with_suffix(".npz")) as file:
                np.savez(file, **self.inputs)  # pyright: ignore[reportArgumentType]
        with replacing(path) as file:
            file.write(self.code.encode())
        return path


def run_code(reduction: Reduction) -> tuple[np.ndarray, np.ndarray]:
    code = _code(reduction, embed=reduction.is_small).replace(LOADING, LOADED)
    with jax.enable_x64(reduction.arithmetic.dtype == np.float64):
        return run(code, reduction.inputs)


def _code(reduction: Reduction, *, embed: bool) -> str:
    inputs = "\n".join(_embedded(reduction.inputs)) if embed else LOADING
    finding, operations = _sentence(reduction.finding), reduction.operations
    return source(reduction.arithmetic, reduction.piece, inputs, finding, operations)


def _sentence(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''") + "."


def _embedded(inputs: dict[str, np.ndarray]) -> list[str]:
    lines = ["inputs = {"]
    for name, x in inputs.items():
        if x.size > 1 and (x == x.flat[0]).all():
            text = f"np.full({x.shape}, {_nested(x.flat[0].item(), x.dtype)}, np.{x.dtype.name})"
        else:
            text = f"np.array({_nested(x.tolist(), x.dtype)}, np.{x.dtype.name})"
        lines.append(f'    "{name}": {text},')
    return [*lines, "}"]


def _nested(x: Any, dtype: np.dtype) -> str:
    if isinstance(x, list):
        return f"[{', '.join(_nested(y, dtype) for y in x)}]"
    if not isinstance(x, float):
        return repr(x)
    if not np.isfinite(x):
        return f"np.{x!r}" if x != -np.inf else "-np.inf"
    return repr(float(str(dtype.type(x))))
