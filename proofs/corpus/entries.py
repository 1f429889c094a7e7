"""The entries of the corpus: programs, what is true of them, and the halves."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

AREAS = (
    "norms", "attention", "losses", "optimizers", "states", "statistics", "physics", "algebra",
    "geometry", "likelihoods", "sums", "masks", "recipes", "policies", "indices", "learning",
    "signals", "graphs", "modules", "densities", "solvers", "stacks",
    "trainers", "rollouts", "samplers", "contrasts", "filters", "routing", "updates", "mixtures",
    "generators", "estimators", "sciences", "machines", "counts",
)  # fmt: skip
CLEAN_AREAS = (
    "clean_arrays", "clean_equinox", "clean_flax", "clean_haiku", "clean_keras", "clean_losses",
    "clean_models", "clean_numpyro", "clean_optax", "clean_steps", "clean_flows", "clean_layers",
)  # fmt: skip
OPTIONAL = ("keras", "numpyro")  # without them their programs are left out
WRITTEN = "written for this corpus"  # the source of a program after no report of a failure
HALVES = ("seen", "scored")
SYNONYMS = {  # kinds of finding that say the same
    "overflow": ("overflow",),
    "saturation": ("saturation", "overflow"),
    "underflow": ("underflow",),
    "nan": ("nan",),
    "swamping": ("swamping",),
    "cancellation": ("cancellation", "amplified"),
    "precision": ("precision", "amplified"),
    "decision": ("decision",),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program that fails in low precision.

    Attributes:
        call: the function to audit.
        source: the thread or paper that reports the failure.
        low: a format, a policy, a recipe, or the name of one.
        kinds: the kinds of finding that are correct.
        at: texts of the lines at fault, each contained in one line of a function in ``inside``.
        args: returns the arguments.
        inside: the functions with these lines.
        fixed: the program with an expert's fix; None if that is a wider format for the lines, or
            ``better``.
        better: for a policy or recipe, the one with an expert's fix.
        native: whether the program runs in its own dtypes, after a cast of its arguments.
        steps: how often the program is applied to its first argument to show the failure.
        change: whether the failure is in the difference between first result and first argument.
        limit: the error from which the program has failed; None for that of the format.
        options: further arguments of :func:`scalewise.audit`.
    """

    call: Callable
    source: str
    low: Any
    kinds: tuple[str, ...]
    at: tuple[str, ...]
    args: Callable[[], tuple[Any, ...]]
    inside: tuple[Callable, ...]
    fixed: Callable | None = None
    better: Any = None
    native: bool = False
    steps: int = 1
    change: bool = False
    limit: float | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.call.__name__

    @property
    def accepted(self) -> frozenset[str]:
        """The accepted kinds and their synonyms."""
        return frozenset(x for kind in self.kinds for x in SYNONYMS[kind])

    def lines(self) -> frozenset[tuple[str, int]]:
        """Returns file and number of the lines at fault.

        Raises:
            ValueError: a text isn't in exactly one line, or in several lines of one function.
        """
        return frozenset(self._line(text) for text in self.at)

    def _line(self, text: str) -> tuple[str, int]:
        found = []
        for function in map(inspect.unwrap, self.inside):
            source, start = inspect.getsourcelines(function)
            body = next(i for i, x in enumerate(source) if x.lstrip().startswith("def "))
            file = inspect.getsourcefile(function) or ""
            found += [(file, start + i) for i, x in enumerate(source) if text in x and i > body]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {text!r} is in {len(found)} lines; expected one")
        return found[0]


@dataclasses.dataclass(frozen=True)
class Clean:
    """A healthy program, after a library's example.

    Attributes:
        call: the function to audit.
        source: the example.
        low: an arithmetic in which the program has no error worth a finding.
        args: returns the arguments.
        options: further arguments of :func:`scalewise.audit`.
    """

    call: Callable
    source: str
    low: Any
    args: Callable[[], tuple[Any, ...]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.call.__name__


ENTRIES: dict[str, Entry] = {}
CLEAN: dict[str, Clean] = {}


def failing(
    source: str, low: Any, kinds: str, *at: str, args: Callable, **fields: Any
) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a failing program to the corpus."""

    def add(call: Callable) -> Callable:
        inside = (call, *fields.pop("inside", ()))
        entry = Entry(call, source, low, tuple(kinds.split()), at, args, inside, **fields)
        if entry.name in ENTRIES:
            raise ValueError(f"two entries are named {entry.name}")
        ENTRIES[entry.name] = entry
        return call

    return add


def clean(source: str, low: Any, args: Callable, **options: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a healthy program to the corpus."""

    def add(call: Callable) -> Callable:
        if call.__name__ in CLEAN:
            raise ValueError(f"two clean programs are named {call.__name__}")
        CLEAN[call.__name__] = Clean(call, source, low, args, options)
        return call

    return add


def half(name: str) -> str:
    """Returns ``"seen"`` or ``"scored"``, by the parity of the SHA-256 of a program's name."""
    return HALVES[hashlib.sha256(name.encode()).digest()[-1] % 2]


def load(areas: tuple[str, ...] = AREAS + CLEAN_AREAS) -> None:
    """Imports the areas, so that their programs are in the registries, with experts' programs."""
    for area in areas:
        try:
            importlib.import_module(f"proofs.corpus.{area}")
        except ModuleNotFoundError as missing:
            if missing.name not in OPTIONAL:
                raise
    for name, entry in ENTRIES.items():
        fixed = getattr(sys.modules[entry.call.__module__], f"{name}_fixed", None)
        ENTRIES[name] = dataclasses.replace(entry, fixed=fixed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Returns normally distributed float32 numbers."""
    return np.asarray(mean + scale * np.random.default_rng(seed).standard_normal(shape), np.float32)


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Returns uniformly distributed float32 numbers."""
    return np.asarray(np.random.default_rng(seed).uniform(low, high, shape), np.float32)


def integers(*shape: int, seed: int = 0, high: int = 10) -> np.ndarray:
    """Returns int32 numbers from 0 to ``high - 1``."""
    return np.asarray(np.random.default_rng(seed).integers(0, high, shape), np.int32)
