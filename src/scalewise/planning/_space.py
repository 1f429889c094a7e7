"""All plans of a program: what they cost, and what they change as predicted and as measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._output import Tell
from ..autoscaling import Operand, Role
from ..interpret import Program
from ._predict import WORST, ObjectiveName, Plans, Prediction, objective, prediction
from ._sites import Site, sites

# how a site's operands are rounded, None where they aren't
Option: TypeAlias = Mapping[Role, Operand | None]
Choice = tuple[int, ...]  # by site, the index of its option
APART = 1.25  # plans whose predictions differ by less can't be told apart
TRIED = 12  # neighbours that are run in each round
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Lists:
    """The settings to choose from, by what they round."""

    weight: Sequence[Operand | None]
    activation: Sequence[Operand | None] | Literal["weights"] = (None,)

    def options(self, site: Site) -> list[Option]:
        tied = self.activation == "weights"
        activations = (None,) if isinstance(self.activation, str) else self.activation
        own: dict[Role, Sequence[Operand | None]] = {
            r: x
            for r, x in (("weight", self.weight), ("activation", activations))
            if r in site.roles and list(x) != [None]
        }
        found: list[Option] = []
        for chosen in itertools.product(*own.values()):
            option = dict(zip(own, chosen, strict=True))
            if tied and "weight" in option and "activation" in site.roles:
                option["activation"] = option["weight"]
            found.append(option)
        return found


def bits_of(operand: Operand | None, own: float) -> float:
    """Returns the bits of a number, with its share of scales of blocks; ``own`` if unrounded."""
    return own if operand is None else min(operand.format.bits_per_element, own)


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was run: its choice, its cost, and its objective as predicted and measured."""

    choice: Choice
    cost: float
    predicted: float
    measured: float


class Space:
    """The plans of a program, each a choice of an option at each of its sites.

    ``columns`` are each option's roundings' places in the vector that :class:`Plans` takes.
    """

    def __init__(
        self, program: Program, lists: Lists, name: ObjectiveName, seed: int, function: str,
        tell: Tell = lambda text: None,
    ):  # fmt: skip
        self.program, self.seed, self.function, self.tell = program, seed, function, tell
        self.sites, index = sites(program)
        self.options = [lists.options(site) for site in self.sites]
        if not any(len(some) > 1 for some in self.options):
            raise ValueError(
                f"plan: {function} has no product whose operands have several formats to "
                "choose from; expected weights among them, and two formats or more"
            )
        roundings: dict[tuple[int, Role], dict[Operand, int]] = {}
        numbers = itertools.count()
        for i, some in enumerate(self.options):
            for role, operand in (item for option in some for item in option.items()):
                own = roundings.setdefault((i, role), {})
                if operand is not None and operand not in own:
                    own[operand] = next(numbers)
        swapped = frozenset(path for site in self.sites for path in site.swapped)
        count = sum(map(len, roundings.values()))
        self.family = Plans(program, index, roundings, swapped, count)
        self.columns = [
            [[roundings[i, r][x] for r, x in o.items() if x is not None] for o in some]
            for i, some in enumerate(self.options)
        ]
        outputs = jax.eval_shape(self.family.outputs, self.family.chosen([]), list(program.arrays))
        self.aim = objective(name, outputs)
        weights = max(1, sum(site.elements for site in self.sites))
        # what each option adds to the mean bits of a weight
        self.costs = [
            np.array([s.elements * bits_of(o.get("weight"), s.bits) / weights for o in some])
            for s, some in zip(self.sites, self.options, strict=True)
        ]
        # the same compiled function for all plans: XLA fuses another one in another way
        self._outputs, self._measure = jax.jit(self.family.outputs), jax.jit(self.aim.measure)
        self.tried: dict[Choice, Tried] = {}
        self.measured: dict[bytes, float] = {}

    @property
    def runs(self) -> int:
        return 1 + len(self.measured)  # with that of the reference

    @functools.cached_property
    def reference(self) -> list[jax.Array]:
        outputs = self._outputs(self.family.chosen([]), list(self.program.arrays))
        empty = not all(y.size for y in outputs)
        if empty or any(bool(jnp.isnan(y).any()) for y in outputs):
            what = "no numbers" if empty else "NaN"
            raise ValueError(
                f"plan: {self.function} returns {what} for these arguments without any rounding: "
                "there is nothing to compare formats by; plan with a batch of real data"
            )
        return outputs

    @functools.cached_property
    def predict(self) -> Prediction:
        draw = np.random.default_rng(self.seed)
        count = self.aim.plans * self.family.size
        choices = ([int(draw.integers(len(o))) for o in self.options] for _ in range(count))
        plans = np.stack([self.theta(choice) for choice in choices])
        single = np.eye(self.family.size, dtype=bool)
        alone, among = (np.array([*map(self.emulate, some)]) for some in (single, plans))
        return prediction(alone, plans, among)

    def emulate(self, theta: np.ndarray) -> float:
        """Returns the measured objective of a vector; formats are data to one compiled program."""
        key = theta.tobytes()
        if key not in self.measured:
            self.tell(f"run {self.runs + 1:,}")
            outputs = self._outputs(theta, list(self.program.arrays))
            found = float(self._measure(self.reference, outputs))
            self.measured[key] = min(max(found, -WORST), WORST) if found == found else WORST
        return self.measured[key]

    def theta(self, choice: Sequence[int]) -> np.ndarray:
        chosen = zip(self.columns, choice, strict=True)
        return self.family.chosen([c for options, i in chosen for c in options[i]])

    def cost(self, choice: Sequence[int]) -> float:
        return float(sum(own[i] for own, i in zip(self.costs, choice, strict=True)))

    def predicted(self, choices: Sequence[Choice]) -> np.ndarray:
        return np.asarray(self.predict(np.stack([self.theta(x) for x in choices])))

    def run(self, choice: Sequence[int]) -> Tried:
        """Returns a plan with its measured objective, from an earlier run if there was one."""
        choice = tuple(int(i) for i in choice)
        if choice not in self.tried:
            (predicted,) = self.predicted([choice])
            measured = self.emulate(self.theta(choice))
            self.tried[choice] = Tried(choice, self.cost(choice), float(predicted), measured)
        return self.tried[choice]

    def neighbours(self, choice: Choice, limit: float) -> list[Choice]:
        """Returns the plans within the limit with other options at one site or two."""
        found: set[Choice] = set()
        more = {
            (i, j): float(own[j] - own[choice[i]])
            for i, own in enumerate(self.costs)
            for j in range(len(own))
            if j != choice[i]
        }
        spare = limit * (1 + 1e-9) - self.cost(choice)
        for a, b in itertools.combinations_with_replacement(more, 2):
            extra = more[a] if a == b else more[a] + more[b]
            if (a == b or a[0] != b[0]) and extra <= spare:
                changed = list(choice)
                changed[a[0]], changed[b[0]] = a[1], b[1]
                found.add(tuple(changed))
        return sorted(found)

    def confirmed(self, choice: Sequence[int], limit: float) -> Tried:
        """Returns the best measured plan among a choice and those that look as good."""
        best = self.run(choice)
        for _ in range(ROUNDS):
            near = self.neighbours(best.choice, limit)
            if not near:
                return best
            predicted = np.abs(self.predicted(near))
            alike = np.flatnonzero(predicted <= APART * abs(best.predicted))
            order = alike[np.argsort(predicted[alike], kind="stable")][:TRIED]
            runs = [self.run(near[i]) for i in order]
            better = min(runs, key=lambda x: abs(x.measured), default=best)
            if abs(better.measured) >= abs(best.measured):
                return best
            best = better
        return best
