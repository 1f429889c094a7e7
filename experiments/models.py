"""The models of the proofs: the examples, with text for training and for evaluation."""

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scalewise.cli._program import TrainingProgram, corpus, load_program

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = (
    "mlp", "cnn", "resnet", "lstm", "gpt", "moe", "unet", "graph", "logistic", "wave",
)  # fmt: skip
TRAINED_ON = 2_000_000  # bytes; those that follow are held out
HELD_OUT_SEED, HELD_OUT_BATCHES = 1_000_003, 8


@functools.cache
def text() -> bytes:
    return corpus(limit=TRAINED_ON + 100_000)


def model(name: str) -> TrainingProgram:
    """Returns an example by name."""
    return load_program(EXAMPLES / f"{name}.py")


def batches(program: TrainingProgram, seed: int) -> Iterable[Any]:
    """Returns the training batches of a model."""
    return program.batches(text()[:TRAINED_ON], seed)


def held_out(program: TrainingProgram) -> list[Any]:
    """What it doesn't train on: its own ``held_out``, or text that follows; none for some."""
    own = getattr(module_of(program), "held_out", None)
    if own is not None:
        return [own()]
    if not hasattr(module_of(program).CONFIG, "vocabulary"):
        return []
    stream = iter(program.batches(text()[TRAINED_ON:], HELD_OUT_SEED))
    return [next(stream) for _ in range(HELD_OUT_BATCHES)]


def evaluation(program: TrainingProgram) -> Callable[[Any, Any], Any]:
    """Returns a trained state's loss on a batch, by the model's ``evaluate`` if it has one."""

    def loss(state, batch):
        assert program.loss_of is not None
        return program.loss_of(state["params"], batch)

    return getattr(module_of(program), "evaluate", loss)


def module_of(program: TrainingProgram) -> Any:
    return sys.modules[program.train_step.__module__]
