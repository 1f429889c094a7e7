"""Loads a user's training program: three functions, and two optional names, of a Python file."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._resolve import near
from .._types import PyTree
from .._user_file import InputError, call_user, load_module

StepFunction = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
PROTOCOL = {
    "init": "init(seed) -> state",
    "train_step": "train_step(state, batch) -> (state, loss)",
    "batches": "batches(data, seed) -> iterator of batches",
}
PACKAGE = Path(__file__).parents[1]
# The examples are in the package if it was installed from a wheel, else beside src/.
EXAMPLES = (PACKAGE / "examples", PACKAGE.parents[1] / "examples")


@dataclass(frozen=True)
class TrainingProgram:
    """A training program, written without regard to precision."""

    name: str  # in reports
    init: Callable[[int], PyTree]  # from a seed to the state, a pytree with ``params``
    train_step: StepFunction  # ``(state, batch)`` to ``(state, loss)``; pure, of JAX operations
    batches: Callable[[bytes, int], Iterable[PyTree]]  # ``(bytes, seed)`` to NumPy pytrees
    loss_of: Callable[[PyTree, PyTree], PyTree] | None = None  # ``(params, batch)`` to the loss
    optimizer: Any = None  # of optax, that of ``train_step``

    def endless_batches(self, data: bytes, seed: int) -> Iterator[PyTree]:
        """Yields batches; when they end, they start again under the next seed."""
        what = f"{self.name}.batches"
        for epoch in itertools.count(seed):
            stream = call_user(lambda d, s: iter(self.batches(d, s)), what, data, epoch)
            batch = call_user(next, what, stream, None)
            if batch is None:
                raise InputError(f"{what}: not one batch from {len(data)} bytes of data")
            while batch is not None:
                yield batch
                batch = call_user(next, what, stream, None)


def find_examples(folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the example programs in the first of these folders that has any, by name."""
    for folder in folders:
        files = [(file, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.py"))]
        if found := {file.stem: file for file, text in files if "def train_step(" in text}:
            return found
    return {}


def find_program(program: str) -> Path:
    """Returns the file of a program; a name is that of one of scalewise's examples, ``gpt`` say."""
    examples = {} if Path(program).is_file() else find_examples(EXAMPLES)
    if examples and program not in examples:
        raise InputError(
            f"no program {program!r}; {near(program, examples)}expected a Python file, or the name "
            f"of an example: {', '.join(examples)}"
        )
    return examples.get(program, Path(program))


def load_program(program: str | Path) -> TrainingProgram:
    """Returns what a Python file defines: ``init``, ``train_step``, ``batches``; and, if there are,
    ``loss_of(params, batch)`` and ``OPTIMIZER``."""
    file = find_program(str(program))
    module = load_module(file)
    missing = [p for name, p in PROTOCOL.items() if not callable(getattr(module, name, None))]
    if missing:
        raise InputError(f"{file} defines no {' and no '.join(missing)}")
    parts: Any = [getattr(module, name, None) for name in (*PROTOCOL, "loss_of", "OPTIMIZER")]
    if parts[-1] is not None and not hasattr(parts[-1], "update"):
        raise InputError(f"{file}: OPTIMIZER is {parts[-1]!r}; expected a transformation of optax")
    return TrainingProgram(file.stem, *parts)


def corpus(path: Path | None = None, limit: int = 2_000_000) -> bytes:
    """Returns the first `limit` bytes of a file, or of a folder's files in sorted order.

    Hidden files are left out; None stands for the modules of Python's standard library.
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise InputError(f"no data at {str(root)!r}; expected a text file or a folder")
    text = b""
    for file in [root] if root.is_file() else sorted(root.glob("**/*" if path else "*.py")):
        hidden = any(name.startswith(".") for name in file.relative_to(root).parts)
        if file.is_file() and not hidden and len(text) < limit:
            with file.open("rb") as stream:
                text += stream.read(limit - len(text))
    if not text:
        raise InputError(f"no data in {str(root)!r}: it is empty, some text is needed")
    return text
