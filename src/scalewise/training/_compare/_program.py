"""Loads a user's training program: three functions, and two optional names, of a Python file."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import optax

from ..._check import Count, checked, near
from ..._types import PyTree
from ..._user_file import InputError, call_user, load_module

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
PROTOCOL = {
    "init": "init(seed) -> state",
    "train_step": "train_step(state, batch) -> (state, loss)",
    "batches": "batches(data, seed) -> iterator of batches",
}
PACKAGE = Path(__file__).parents[2]
# The examples are in the package if it was installed from a wheel, else beside src/.
EXAMPLES = (PACKAGE / "examples", PACKAGE.parents[1] / "examples")


@checked
@dataclass(frozen=True)
class Program:
    """A training program, written without regard to precision."""

    name: str  # in reports
    init: Callable[[int], PyTree]  # from a seed to the state, a pytree with ``params``
    train_step: Step  # ``(state, batch)`` to ``(state, loss)``; pure, made of JAX operations
    batches: Callable[[bytes, int], Iterable[PyTree]]  # ``(bytes, seed)`` to NumPy pytrees
    loss_of: Callable[[PyTree, PyTree], PyTree] | None = None  # ``(params, batch)`` to the loss
    optimizer: optax.GradientTransformation | None = None  # that of ``train_step``


@checked
def load_program(program: str | Path | Program) -> Program:
    """Returns the program that a Python file defines by ``init``, ``train_step`` and ``batches``.

    ``loss_of(params, batch)`` and ``OPTIMIZER`` are used too if the file defines them. A name is
    that of one of scalewise's examples, ``"gpt"`` say.
    """
    if isinstance(program, Program):
        return program
    file = _program_file(program)
    module = load_module(file)
    missing = [p for name, p in PROTOCOL.items() if not callable(getattr(module, name, None))]
    if missing:
        raise InputError(f"{file} defines no {' and no '.join(missing)}")
    parts = [getattr(module, name) for name in PROTOCOL]
    others = {"loss_of": getattr(module, "loss_of", None)}
    try:
        return Program(file.stem, *parts, **others, optimizer=getattr(module, "OPTIMIZER", None))
    except TypeError as error:
        why = str(error).replace("Program: optimizer", "OPTIMIZER").replace("Program: ", "")
        raise InputError(f"{file}: {why}") from None


def _program_file(program: str | Path) -> Path:
    file = Path(program)
    if file.is_file():
        return file
    examples = find_examples(EXAMPLES)
    if str(program) in examples:
        return examples[str(program)]
    raise InputError(
        f"no program {str(program)!r}; {near(str(program), examples)}expected a Python file, or "
        f"the name of an example: {', '.join(examples)}"
    )


def find_examples(folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the example programs in the first of these folders that has any, by name."""
    for folder in folders:
        files = sorted(folder.glob("*.py"))
        found = {f.stem: f for f in files if "def train_step(" in f.read_text(encoding="utf-8")}
        if found:
            return found
    return {}


def endless_batches(program: Program, data: bytes, seed: int) -> Iterator[PyTree]:
    """Yields the program's batches; when they end, they start again under the next seed."""
    what = f"{program.name}.batches"
    while True:
        epoch = call_user(lambda d, s: iter(program.batches(d, s)), what, data, seed)
        batch = call_user(next, what, epoch, None)
        if batch is None:
            raise InputError(f"{what}: not one batch from {len(data)} bytes of data")
        while batch is not None:
            yield batch
            batch = call_user(next, what, epoch, None)
        seed += 1


def params_of(state: PyTree) -> PyTree:
    return state.get("params") if isinstance(state, dict) else getattr(state, "params", None)


def parameter_count(state: PyTree, program: Program) -> int:
    params = params_of(state)
    if params is None:
        kind = type(state).__name__
        raise InputError(
            f"{program.name}.init returned a {kind} without params: the state is a pytree with its "
            'parameters under the key (or attribute) "params"'
        )
    count = sum(getattr(x, "size", 1) for x in jax.tree.leaves(params))
    if not count:
        raise InputError(f"{program.name}.init returned params that hold no number")
    return count


def check_step(program: Program, state: PyTree, batch: PyTree) -> None:
    """Checks that ``train_step`` returns a state like the one it gets, and a scalar float loss."""
    what = f"{program.name}.train_step"
    out = call_user(lambda s, b: jax.eval_shape(program.train_step, s, b), what, state, batch)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise InputError(f"{what} returned {_kind(out)}; expected (state, loss)")
    after, loss = out
    scalar = getattr(loss, "shape", None) == ()
    if not (scalar and jax.numpy.issubdtype(loss.dtype, jax.numpy.floating)):
        raise InputError(f"{what} returned a loss of {_kind(loss)}; expected a scalar float")
    check_same_types(jax.eval_shape(lambda s: s, state), after, what)


def check_same_types(before: PyTree, after: PyTree, what: str) -> None:
    """Checks that a step keeps the structure of its state and each leaf's shape and dtype."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise InputError(f"{what} returned a state of another structure than it got")
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise InputError(
                f"{what} returned state{jax.tree_util.keystr(path)} as {_kind(new)}: "
                f"it got {_kind(old)}"
            )


def _kind(x: PyTree) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple) else "")


LIMIT = 2_000_000  # bytes: enough for some thousand steps


@checked
def corpus(path: str | Path | None = None, limit: Count = LIMIT) -> bytes:
    """Returns the first `limit` bytes of a file, or of a folder's files in sorted order.

    Hidden files are left out; None stands for the modules of Python's standard library.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        found = sorted(root.glob("*.py") if path is None else root.rglob("*"))
        parts = ((p, p.relative_to(root).parts) for p in found if p.is_file())
        files = [p for p, names in parts if not any(name.startswith(".") for name in names)]
    else:
        raise InputError(f"no data at {str(root)!r}; expected a text file or a folder")
    text = b""
    for file in files:
        try:
            with file.open("rb") as stream:
                text += stream.read(limit - len(text))
        except OSError as error:
            raise InputError(f"can't read data file {str(file)!r}: {error.strerror}") from None
        if len(text) >= limit:
            break
    if not text:
        raise InputError(f"no data in {str(root)!r}: it is empty, some text is needed")
    return text
