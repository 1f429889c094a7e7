"""What a plan gives formats to: the contractions of a program, by place."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from .._jax import avals_of, jex
from ..auditing import Origins, Walk
from ..autoscaling import (
    Boundaries,
    Operands,
    Products,
    Recipe,
    Role,
    Setup,
    between_activations,
)
from ..formats import FP32
from ..interpret import (
    CONTRACTIONS,
    Body,
    Equation,
    Interpretation,
    Program,
    Value,
    is_float,
    run,
)
from ..primitives import Family, having, names, params
from ..scalifying import Place, Places, ScaledValue

# rounds nothing, on any device
WIDE = Recipe(Products.short(None, None), residuals=None, narrow="always")
# Results that jump where an operand crosses a threshold.
COMPARISONS = names(lambda row: row.family is Family.COMPARISON)  # the mask of a relu's gradient
DISCRETE = having("whole") | having("indexes") | {"approx_top_k", "sign"}


@dataclasses.dataclass(frozen=True)
class Site:
    """Contractions whose operands get their formats together: those at one place of a program."""

    # The scopes and lines, several for a shared weight; without a number one stands for all
    # contractions there. True where what ``Products`` calls the weight, of two arguments, is the
    # activation.
    places: Mapping[Place, bool]
    primitives: tuple[str, ...]  # their names
    roles: tuple[Role, ...]  # of their operands, each once
    weights: tuple[str, ...]  # the paths of these arguments, as ``keystr`` prints them
    elements: int  # the numbers of these weights
    bits: int  # of such a number, as the program has it
    swapped: frozenset[tuple[int, ...]]  # the paths of the contractions at such places
    function: str  # the name of the user's function
    discrete: tuple[str, ...] = ()  # where a result jumps: ``"moe.py:80 (top_k)"``

    @property
    def name(self) -> str:
        """The name by which ``Recipe.keep`` finds the place."""
        return ", ".join(map(name_of, self.places))


def name_of(place: Place) -> str:
    number = f"#{place.number}" if place.number else ""
    return " ".join(filter(None, (place.scope, f"{place.line}{number}")))


class _Found(NamedTuple):
    equation: Equation
    place: Place
    roles: tuple[Role, Role]


@dataclasses.dataclass(frozen=True)
class _Discovery(Operands):
    """Records the contractions that are met, and the roles of their operands."""

    found: dict[tuple[int, ...], _Found] = dataclasses.field(default_factory=dict)
    places: Places = dataclasses.field(default_factory=Places)

    def operands(self, equation: Equation, values: Sequence[ScaledValue]):
        attention = between_activations(equation, values)
        (_, first), (_, second) = self.uses(equation, values, attention)
        place = self.places.of(equation)
        self.found.setdefault(equation.path, _Found(equation, place, (first, second)))
        return super().operands(equation, values)


def sites(program: Program) -> tuple[list[Site], dict[tuple[int, ...], int]]:
    """Returns a program's sites in its order, and the site of each contraction by its path."""
    discovery = _Discovery(Setup(WIDE))
    by = Boundaries(discovery)
    jax.eval_shape(lambda arrays: run(program, by, (), arrays)[1], list(program.arrays))
    origins = _Origins(program)
    # a place in whose line the backward pass has contractions, too, can't be told by numbers
    mixed = {
        (x.place.scope, x.place.line)
        for x in discovery.found.values()
        if x.equation.direction == "backward" or not x.place.line
    }
    groups: dict[Place, list[_Found]] = collections.defaultdict(list)
    for x in discovery.found.values():
        alone = (x.place.scope, x.place.line) not in mixed
        groups[x.place if alone else dataclasses.replace(x.place, number=0)].append(x)
    lines = collections.Counter((p.scope, p.line) for p in groups)
    joined: list[_Group] = []
    for place, own in groups.items():
        swapped = all(_is_swapped(x, origins) for x in own)
        if swapped:
            own = [x._replace(roles=x.roles[::-1]) for x in own]
        if lines[place.scope, place.line] == 1:
            place = dataclasses.replace(place, number=0)
        paths = {x.equation.path for x in own if swapped}
        reads = [read for x in own for read in _reads(x, origins)]
        whole = {i for i, size in reads if size >= origins.avals[i].size > 1}
        group = _Group({place: swapped}, own, whole, paths)
        # a weight that several places read is stored once, in one format
        first, *more = [g for g in joined if g.weights & group.weights] or [group]
        for other in more if first is group else [*more, group]:
            first.places |= other.places
            first.found += other.found
            first.weights |= other.weights
            first.swapped |= other.swapped
        joined = [g for g in joined if g not in more] + ([group] if first is group else [])
    index = {x.equation.path: i for i, g in enumerate(joined) for x in g.found}
    return [_site(g, origins) for g in joined], index


@dataclasses.dataclass(eq=False)
class _Group:
    places: dict[Place, bool]  # as :class:`Site` has them
    found: list[_Found]
    weights: set[int]  # the arguments that are read as a whole
    swapped: set[tuple[int, ...]]


def _reads(x: _Found, origins: _Origins) -> Iterator[tuple[int, int]]:
    """Yields the arguments of a product's weights, and how many numbers of each it reads."""
    for i, role in enumerate(x.roles):
        held = origins.arguments(x.equation, i)
        if role == "weight" and len(held) == 1:
            yield held[0], x.equation.in_avals[i].size * _times(x.equation)


def _is_swapped(x: _Found, origins: _Origins) -> bool:
    """Returns whether a product's weight is the operand that ``Products`` takes for the activation.

    Of two arguments it takes the right one for the weight. By the convention of ``jax.grad`` the
    first positional argument holds the weights; a closed-over array is one, too.
    """
    if x.roles not in (("activation", "weight"), ("weight", "activation")):
        return False
    held = [origins.arguments(x.equation, i) for i in range(2)]
    if any(len(own) != 1 for own in held):
        return False
    first, second = (origins.position(own[0]) for own in held)
    weight = x.roles.index("weight")
    return (first, second)[weight] > (first, second)[1 - weight]


def _site(group: _Group, origins: _Origins) -> Site:
    own = group.found
    weights: dict[int, int] = {}
    for i, size in (read for x in own for read in _reads(x, origins)):
        weights[i] = max(weights.get(i, 0), size)
    sizes = {i: min(n, origins.avals[i].size) for i, n in weights.items()}
    bits = [8 * np.dtype(origins.avals[i].dtype).itemsize for i in sizes]
    source = own[0].equation.caller or own[0].equation.source
    return Site(
        places=group.places, primitives=tuple(dict.fromkeys(x.equation.name for x in own)),
        roles=tuple(dict.fromkeys(role for x in own for role in x.roles)),
        weights=tuple(origins.names[i] for i in sizes), elements=sum(sizes.values()),
        bits=max(bits, default=FP32.bits),
        swapped=frozenset(group.swapped),
        function=source[2] if source else "",
        discrete=tuple(origins.behind({x.equation.path for x in own})),
    )  # fmt: skip


def _times(equation: Equation) -> int:
    """Returns how often an equation runs: the product of the lengths of the scans around it."""
    around = equation.within
    if around is None:
        return 1
    own = params.scan(around).length if around.name == "scan" else 1
    return own * _times(around)


class _Origins(Walk):
    """The arguments and the contractions from which each equation's operands are computed.

    Origins are the indices of contractions from 0 on, and -1, -2, ... for arguments and constants.
    """

    def __init__(self, program: Program):
        super().__init__({})
        self.paths: dict[tuple[int, ...], int] = {}
        self.discrete: list[tuple[str, Origins]] = []
        self.before: dict[int, Origins] = {}
        self.avals = dict(enumerate(program.in_avals))
        self.names = dict(enumerate(program.arguments))
        self.constants: dict[jex.Var, int] = {}
        self.body(program.body, [(-1 - i,) for i in range(len(program.in_avals))])

    def body(
        self,
        body: Body,
        values: Sequence[Origins],
        constants: Mapping[jex.Var, Origins] = MappingProxyType({}),
    ) -> list[Origins]:
        for var, aval in zip(body.constants, avals_of(body.constants), strict=True):
            if var not in self.constants:
                i = self.constants[var] = len(self.avals)
                self.avals[i], self.names[i] = aval, f"a constant {tuple(aval.shape)}"
        own = {var: (-1 - self.constants[var],) for var in body.constants}
        return super().body(body, values, {**constants, **own})

    def equation(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        if equation.name in CONTRACTIONS:
            index = self.paths.setdefault(equation.path, len(self.paths))
            self.operands.setdefault(index, tuple(inputs))
            self.before[index] = tuple(i for x in inputs for i in x if i >= 0)
            return [(index,)] * len(equation.out_avals)
        floats = [is_float(a) for a in (*equation.in_avals[:1], *equation.out_avals[:1])]
        to_integers = equation.name == "convert_element_type" and floats == [True, False]
        compares = equation.name in COMPARISONS and floats[0]
        if equation.name in DISCRETE or compares or to_integers:
            line = equation.caller or equation.source
            where = f"{line[0].rsplit('/', 1)[-1]}:{line[1]}" if line else "an unknown line"
            given = tuple(i for x in inputs for i in x if i >= 0)
            self.discrete.append((f"{where} ({equation.name})", given))
        return super().equation(equation, inputs)

    def arguments(self, equation: Equation, operand: int) -> list[int]:
        """Returns the arguments of which alone an operand is made; none if it is computed."""
        given = self.operands.get(self.paths.get(equation.path, -1), ((), ()))[operand]
        return [-1 - i for i in given] if all(i < 0 for i in given) else []

    def position(self, argument: int) -> int:
        """Returns the number of the positional argument that has an array; -1 for a constant."""
        found = re.match(r"\[(\d+)\]", self.names[argument])
        if argument in self.constants.values():
            return -1
        return int(found[1]) if found else 0

    def behind(self, paths: set[tuple[int, ...]]) -> list[str]:
        """Returns the lines of discrete decisions that depend on these contractions."""
        reached = {self.paths[p] for p in paths if p in self.paths}
        for index, before in sorted(self.before.items()):
            if reached & set(before):
                reached.add(index)
        return list(dict.fromkeys(line for line, given in self.discrete if reached & set(given)))


def float_results(program: Program, by: Interpretation, values: Sequence[Value]) -> list[jax.Array]:
    pairs = zip(values, program.out_avals, strict=True)
    return [by.lower(v, a) for v, a in pairs if is_float(a)]
