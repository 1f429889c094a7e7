"""Rules for ATen's operations, by subject."""

import importlib

SUBJECTS = (
    "_elementwise", "_activations", "_reductions", "_shapes", "_indexing", "_creation",
    "_contractions", "_attention", "_norms", "_pooling", "_losses", "_transforms", "_linalg",
    "_control",
)  # fmt: skip


def load() -> None:
    for name in SUBJECTS:
        importlib.import_module(f".{name}", __name__)
