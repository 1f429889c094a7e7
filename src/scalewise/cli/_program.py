"""Loads a user's training program: three functions, and two optional names, of a Python file."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from .._check import near
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
        while True:
            epoch = call_user(lambda d, s: iter(self.batches(d, s)), what, data, seed)
            batch = call_user(next, what, epoch, None)
            if batch is None:
                raise InputError(f"{what}: not one batch from {len(data)} bytes of data")
            while batch is not None:
                yield batch
                batch = call_user(next, what, epoch, None)
            seed += 1


def load_program(program: str | Path) -> TrainingProgram:
    """Returns the program that a Python file defines by ``init``, ``train_step`` and ``batches``.

    ``loss_of(params, batch)`` and ``OPTIMIZER`` are used too if the file defines them. A name is
    that of one of scalewise's examples, ``"gpt"`` say.
    """
    file = Path(program)
    if not file.is_file():
        examples = find_examples(EXAMPLES)
        if str(program) not in examples:
            raise InputError(
                f"no program {str(program)!r}; {near(str(program), examples)}expected a Python "
                f"file, or the name of an example: {', '.join(examples)}"
            )
        file = examples[str(program)]
    module = load_module(file)
    missing = [p for name, p in PROTOCOL.items() if not callable(getattr(module, name, None))]
    if missing:
        raise InputError(f"{file} defines no {' and no '.join(missing)}")
    parts: Any = [getattr(module, name) for name in PROTOCOL]
    optimizer = getattr(module, "OPTIMIZER", None)
    if optimizer is not None and not hasattr(optimizer, "update"):
        raise InputError(f"{file}: OPTIMIZER is {optimizer!r}; expected a transformation of optax")
    others: Any = {"loss_of": getattr(module, "loss_of", None), "optimizer": optimizer}
    return TrainingProgram(file.stem, *parts, **others)


def find_examples(folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the example programs in the first of these folders that has any, by name."""
    for folder in folders:
        files = sorted(folder.glob("*.py"))
        found = {f.stem: f for f in files if "def train_step(" in f.read_text(encoding="utf-8")}
        if found:
            return found
    return {}


def params_of(state: PyTree) -> PyTree:
    return state.get("params") if isinstance(state, dict) else getattr(state, "params", None)


def check_types(program: TrainingProgram, state: PyTree, batch: PyTree) -> int:
    """Returns the number of parameters, after a check of what the program's functions return."""
    params, what = params_of(state), f"{program.name}.train_step"
    if not (count := sum(getattr(x, "size", 1) for x in jax.tree.leaves(params))):
        raise InputError(
            f"{program.name}.init returned a {type(state).__name__} without params: the state is "
            'a pytree with its parameters under the key (or attribute) "params"'
        )
    out = call_user(lambda s, b: jax.eval_shape(program.train_step, s, b), what, state, batch)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise InputError(f"{what} returned {_kind(out)}; expected (state, loss)")
    after, loss = out
    is_float = jax.numpy.issubdtype(getattr(loss, "dtype", bool), jax.numpy.floating)
    if getattr(loss, "shape", None) != () or not is_float:
        raise InputError(f"{what} returned a loss of {_kind(loss)}; expected a scalar float")
    check_same_types(jax.eval_shape(lambda s: s, state), after, what)
    return count


def check_same_types(before: PyTree, after: PyTree, what: str) -> None:
    """Checks that a step keeps the structure of its state and each leaf's shape and dtype."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise InputError(f"{what} returned a state of another structure than it got")
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            at = jax.tree_util.keystr(path)
            raise InputError(f"{what} returned state{at} as {_kind(new)}: it got {_kind(old)}")


def _kind(x: PyTree) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple) else "")


def corpus(path: str | Path | None = None, limit: int = 2_000_000) -> bytes:
    """Returns the first `limit` bytes of a file, or of a folder's files in sorted order.

    Hidden files are left out; None stands for the modules of Python's standard library.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        raise InputError(f"no data at {str(root)!r}; expected a text file or a folder")
    found = [root] if root.is_file() else root.glob("*.py") if path is None else root.rglob("*")
    text = b""
    for file in sorted(found):
        hidden = any(name.startswith(".") for name in file.relative_to(root).parts)
        if file.is_file() and not hidden and len(text) < limit:
            with file.open("rb") as stream:
                text += stream.read(limit - len(text))
    if not text:
        raise InputError(f"no data in {str(root)!r}: it is empty, some text is needed")
    return text
