"""A user's training program: three functions in any Python file."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import optax

from ._input import InputError

Tree = Any
Step = Callable[[Tree, Any], tuple[Tree, Any]]
PROTOCOL = {
    "init": "init(seed) -> state",
    "train_step": "train_step(state, batch) -> (state, loss)",
    "batches": "batches(data, seed) -> iterator of batches",
}


@dataclass(frozen=True)
class Program:
    """A training program that knows nothing of precision.

    Attributes:
        name: what to call it in a report.
        init: seed to state, a pytree with the parameters under the key or attribute ``params``.
        train_step: (state, batch) to (state, loss); pure, made of JAX operations.
        batches: (bytes, seed) to an iterable of batches, pytrees of NumPy arrays.
        loss_of: (params, batch) to the loss, for methods that scale it; None where there is none.
        optimizer: the optax optimizer that ``train_step`` uses, likewise.
    """

    name: str
    init: Callable[[int], Tree]
    train_step: Step
    batches: Callable[[bytes, int], Iterable[Any]]
    loss_of: Callable[[Tree, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None


def load_program(path: str | Path) -> Program:
    """The program that a Python file defines by its ``init``, ``train_step`` and ``batches``.

    ``loss_of(params, batch)`` and ``OPTIMIZER`` are taken along where they are there.

    Raises:
        InputError: no such file, it doesn't run, or one of the three isn't there.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"no program at {str(file)!r}; expected a Python file")
    module = _run(file)
    missing = [p for name, p in PROTOCOL.items() if not callable(getattr(module, name, None))]
    if missing:
        raise InputError(f"{file} defines no {' and no '.join(missing)}")
    return Program(
        file.stem,
        *(getattr(module, name) for name in PROTOCOL),
        loss_of=getattr(module, "loss_of", None),
        optimizer=getattr(module, "OPTIMIZER", None),
    )


def _run(file: Path) -> ModuleType:
    name = f"scalewise_program_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"no program at {str(file)!r}; expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's file raises
        del sys.modules[name]
        raise InputError(f"{file} doesn't run: {described(error)}") from error
    return module


def described(error: BaseException) -> str:
    """The error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1] if frames else None
    place = f" ({Path(inner.filename).name}:{inner.lineno})" if inner else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({Path(error.filename).name}:{error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}{place}"


def guarded(call: Callable[..., Any], what: str, *args: Any) -> Any:
    """What a user's function returns; its exception in one sentence."""
    try:
        return call(*args)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:  # SystemExit, or a class of the user's own
        if isinstance(error, ValueError) and what.endswith(".batches"):  # refuses its data: quoted
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{what}: {first}") from error
        raise InputError(f"{what} failed: {described(error)}") from error


def endless(program: Program, data: bytes, seed: int) -> Iterator[Any]:
    """The program's batches; when they end they start again, under the next seed.

    Raises:
        InputError: the data is too little for one batch.
    """
    what = f"{program.name}.batches"
    while True:
        epoch = guarded(lambda d, s: iter(program.batches(d, s)), what, data, seed)
        batch = guarded(next, what, epoch, None)
        if batch is None:
            raise InputError(f"{what}: not one batch from {len(data)} bytes of data")
        while batch is not None:
            yield batch
            batch = guarded(next, what, epoch, None)
        seed += 1


def parameter_count(state: Tree, program: Program) -> int:
    """How many numbers the state's ``params`` hold."""
    params = state.get("params") if isinstance(state, dict) else getattr(state, "params", None)
    if params is None:
        raise InputError(
            f"{program.name}.init returned a {type(state).__name__} without params: the state is "
            'a pytree with its parameters under the key (or attribute) "params"'
        )
    count = sum(getattr(x, "size", 1) for x in jax.tree.leaves(params))
    if not count:
        raise InputError(f"{program.name}.init returned params that hold no number")
    return count


def check_step(program: Program, state: Tree, batch: Any) -> None:
    """Refuses a train_step that doesn't return (state like it got, scalar float loss)."""
    what = f"{program.name}.train_step"
    out = guarded(lambda s, b: jax.eval_shape(program.train_step, s, b), what, state, batch)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise InputError(f"{what} returned {_kind(out)}; expected (state, loss)")
    after, loss = out
    if getattr(loss, "shape", None) != () or not jax.numpy.issubdtype(
        loss.dtype, jax.numpy.floating
    ):
        raise InputError(f"{what} returned a loss of {_kind(loss)}; expected a scalar float")
    same_types(jax.eval_shape(lambda s: s, state), after, what)


def same_types(before: Tree, after: Tree, what: str) -> None:
    """Refuses a step whose state comes out with another structure, shape or dtype."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise InputError(f"{what} returned a state of another structure than it got")
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise InputError(
                f"{what} returned state{jax.tree_util.keystr(path)} as {_kind(new)}: "
                f"it got {_kind(old)}"
            )


def _kind(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple) else "")
