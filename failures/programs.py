"""The programs of the benchmark: what is true of each, and which of them are only scored."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MARK = "# <- here"  # ends a line at fault, where no text of it is given
WRITTEN = "written for this corpus"  # the source of a program after no report of a failure
SYNONYMS = {  # kinds of finding that say the same
    "overflow": ("overflow",),
    "saturation": ("saturation", "overflow"),
    "underflow": ("underflow",),
    "nan": ("nan",),
    "swamping": ("swamping",),
    "cancellation": ("cancellation", "amplified"),
    "precision": ("precision", "amplified"),
    "amplified": ("amplified",),
    "decision": ("decision",),
    "accumulation": ("accumulation",),
}
PARTS = ("seen", "scored", "clean")
SETS = {  # modules with the programs of each set
    "gallery": ("gallery", "gallery.clean"),
    "corpus": tuple(
        f"corpus.{area}"
        for area in (
            "norms", "attention", "losses", "optimizers", "states", "statistics", "physics",
            "algebra", "geometry", "likelihoods", "sums", "masks", "recipes", "policies",
            "indices", "learning", "signals", "graphs", "modules", "densities", "solvers", "stacks",
            "trainers", "rollouts", "samplers", "contrasts", "filters", "routing", "updates",
            "mixtures", "generators", "estimators", "sciences", "machines", "counts",
            "clean_arrays", "clean_equinox", "clean_flax", "clean_haiku", "clean_keras",
            "clean_losses", "clean_models", "clean_numpyro", "clean_optax", "clean_steps",
            "clean_flows", "clean_layers",
        )
    ),
    "torch": ("torch.lines", "torch.classics", "torch.reports", "torch.more_reports",
              "torch.first_contact", "torch.scored"),
    "steps": ("torch.steps",),
    "paddle": ("paddle",),
    "trainings": ("trainings.transformers", "trainings.classifiers", "trainings.healthy"),
    "contact": ("contact.functions", "contact.trainings", "contact.healthy"),
}  # fmt: skip
SCORED = {"corpus": 2, "trainings": 3}  # one program in so many is only scored, by a hash
OPTIONAL = ("keras", "numpyro")  # without them their programs are left out

Place = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that fails in low precision, or one that doesn't, and what is true of it.

    Attributes:
        call: a function; of torch also a module's class, or a function that makes the module.
        args: returns the arguments.
        low: the arithmetic: a format ("fp16", "bf16", "float32", ...), or for programs of JAX a
            policy of mixed precision, a recipe of scaled training, or the name of one.
        kinds: the kinds of failure that are right to name; none for a healthy program.
        source: the thread or paper that reports the failure.
        at: texts, each contained in one line at fault; without, lines at fault end with ``MARK``.
        inside: the functions with these lines.
        fixed: the program with an expert's fix; None if that is a wider format for the lines, or
            ``better``.
        better: for a policy or recipe, the one with an expert's fix.
        fixes: regular expressions; the words for a good fix match one of them.
        reference: the format in which the program's results are right.
        native: whether the program runs in its own dtypes, after a cast of its arguments.
        steps: how often the program is applied to its first argument to show the failure.
        change: whether the failure is in the difference between first result and first argument.
        limit: the error from which the program has failed; None for that of the format.
        faults: how many failures there are, each at another line.
        share: the largest share of operations that a good fix moves to a wider format; it may move
            twice as many as the lines at fault have.
        device: whose matrix units add the products of a recipe; None for exact sums.
        options: further arguments of :func:`scalewise.audit`.
        autocast, grad: of torch, whether the program runs under ``torch.autocast``, and whether
            its gradients fail rather than its result.
        step: of torch, runs a model and an optimizer on the arguments, in place of a backward pass.
        modules: of torch, the names of modules that compute a line at fault.
        name, set, part: where the program is found.
    """

    call: Callable
    args: Callable[[], Any]
    low: Any
    kinds: tuple[str, ...] = ()
    source: str = ""
    at: tuple[str, ...] = ()
    inside: tuple[Callable, ...] = ()
    fixed: Callable | None = None
    better: Any = None
    fixes: tuple[str, ...] = ()
    reference: str = "float64"
    native: bool = False
    steps: int = 1
    change: bool = False
    limit: float | None = None
    faults: int = 1
    share: float = 0.25
    device: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    autocast: bool = False
    grad: bool = False
    step: Callable | None = None
    modules: tuple[str, ...] = ()
    name: str = ""
    set: str = ""
    part: str = "seen"

    @property
    def accepted(self) -> frozenset[str]:
        """The accepted kinds and their synonyms."""
        return frozenset(x for kind in self.kinds for x in SYNONYMS[kind])

    @property
    def blind(self) -> bool:
        """Whether only totals are printed of it."""
        return self.part == "scored" or (self.part == "clean" and self.set in SCORED)

    def lines(self) -> frozenset[Place]:
        """Returns file and number of the lines at fault.

        Raises:
            ValueError: a text isn't in exactly one line; a program that fails has no line.
        """
        found = {place for text in self.at for place in self._lines(text, once=True)}
        if self.kinds and not self.at:
            found = set(self._lines(MARK, once=False))
        return frozenset(found)

    def _lines(self, text: str, once: bool) -> list[Place]:
        found = []
        for function in map(inspect.unwrap, self.inside or (self.call,)):
            source, start = inspect.getsourcelines(function)
            body = next(
                i for i, x in enumerate(source) if x.lstrip().startswith(("def ", "class "))
            )
            body -= not once  # a mark may stand behind the definition
            file = str(Path(inspect.getsourcefile(function) or "").resolve())
            found += [(file, start + i) for i, x in enumerate(source) if text in x and i > body]
        if not found or (once and len(found) != 1):
            raise ValueError(f"{self.name}: {text!r} is in {len(found)} lines; expected one")
        return found


class Finding(NamedTuple):
    """A failure that a tool reports.

    Attributes:
        kind: one of ``SYNONYMS``; "" if the tool names none.
        places: files and line numbers; of a line in a library, also the user's that calls it.
        message: the tool's words.
        fix: its words for a fix that it proposes; "" without one.
        module: the module of torch that it names in place of a line.
    """

    kind: str = ""
    places: Sequence[Place] = ()
    message: str = ""
    fix: str = ""
    module: str | None = None


class Widened(NamedTuple):
    """How many operations fixes move to a wider format, of how many, and how many are at fault."""

    moved: int
    operations: int
    at_fault: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """The findings of a tool on a program.

    Attributes:
        findings: the most important one first; none if the tool is silent.
        fixed: the program with the tool's fixes in its low precision, called as ``Program.call``;
            of torch a module.
        widened: what the fixes move to a wider format, if the tool knows.
        failed: why the tool itself failed, if it did.
        details: further entries of the record.
    """

    findings: tuple[Finding, ...] = ()
    fixed: Callable | None = None
    widened: Widened | None = None
    failed: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_FOUND: dict[str, dict[str, Program]] = {name: {} for name in SETS}


def register(set: str, name: str, program: Program) -> Program:
    """Adds a program to a set."""
    if name in _FOUND[set]:
        raise ValueError(f"two programs of {set} are named {name}")
    part = program.part if program.kinds else "clean"
    if set in SCORED and program.kinds:
        part = drawn(name, SCORED[set])
    program = dataclasses.replace(program, name=name, set=set, part=part)
    _FOUND[set][name] = program
    return program


def failing(
    source: str, low: Any, kinds: str, *at: str, args: Callable, set: str = "corpus", **fields: Any
) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a failing program to a set."""

    def add(call: Callable) -> Callable:
        inside = (call, *fields.pop("inside", ()))
        program = Program(call, args, low, tuple(kinds.split()), source, at, inside, **fields)
        register(set, call.__name__, program)
        return call

    return add


def clean(
    source: str,
    low: Any,
    args: Callable,
    set: str = "corpus",
    native: bool = False,
    **options: Any,
) -> Callable[[Callable], Callable]:
    """Returns a decorator that adds a healthy program to a set."""

    def add(call: Callable) -> Callable:
        program = Program(call, args, low, source=source, native=native, options=options)
        register(set, call.__name__, program)
        return call

    return add


def drawn(name: str, one_in: int) -> str:
    """Returns ``"scored"`` for one name in so many, by its SHA-256, and else ``"seen"``."""
    return PARTS[hashlib.sha256(name.encode()).digest()[-1] % one_in == 1]


def load(set: str, modules: Sequence[str] = ()) -> dict[str, Program]:
    """Returns the programs of a set by name, those of some of its modules at least.

    An expert's version of a program is the function of the same name and ``_fixed``, or the class
    of the same name and ``Fixed``.
    """
    for module in modules or SETS[set]:
        try:
            importlib.import_module(f"failures.{module}")
        except ModuleNotFoundError as missing:
            if missing.name not in OPTIONAL:
                raise
    for name, program in _FOUND[set].items():
        module, own = sys.modules[program.call.__module__], program.call.__name__
        fixed = getattr(module, f"{own}_fixed", None) or getattr(module, f"{own}Fixed", None)
        if program.kinds and program.fixed is None and fixed:
            _FOUND[set][name] = dataclasses.replace(program, fixed=fixed)
    return _FOUND[set]


def module_of(program: Program) -> str:
    """Returns the name of the module that adds a program to its set, as ``SETS`` has it."""
    own = program.call.__module__.removeprefix("failures.")
    return own if own in SETS[program.set] else SETS[program.set][0]


def normal(*shape: int, seed: int = 0, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Returns normally distributed float32 numbers."""
    return np.asarray(mean + scale * np.random.default_rng(seed).standard_normal(shape), np.float32)


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Returns uniformly distributed float32 numbers."""
    return np.asarray(np.random.default_rng(seed).uniform(low, high, shape), np.float32)


def integers(*shape: int, seed: int = 0, high: int = 10) -> np.ndarray:
    """Returns int32 numbers from 0 to ``high - 1``."""
    return np.asarray(np.random.default_rng(seed).integers(0, high, shape), np.int32)
