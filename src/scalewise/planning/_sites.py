"""The contractions of a program, grouped by the places that a recipe can name."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np

from .._jax import avals_of, jex
from ..auditing._run._dataflow import Origins, Walk
from ..autoscaling import Boundaries, Products, Recipe
from ..autoscaling._operand_settings import Role
from ..autoscaling._overrides import FormatOverrides, Place, Places
from ..autoscaling._predict import between_activations
from ..autoscaling._value import ScaledValue
from ..formats import FP32
from ..interpret import CONTRACTIONS, Equation, Program, Value, is_float, run
from ..interpret._interpret import Body
from ..primitives import having, params

# rounds nothing, on any device
WIDE = Recipe(Products.short(None, None), residuals=None, narrow="always")
# Results that jump where an operand crosses a threshold: first order can't see that.
DISCRETE = having("whole") | having("indexes") | {"approx_top_k", "sign"}


@dataclasses.dataclass(frozen=True)
class Product:
    """A contraction: what it costs."""

    roles: tuple[Role, Role]  # of its two operands
    sizes: tuple[int, int, int]  # the numbers of the operands and of the result
    bits: tuple[int, int, int]  # of a number of each, as the program has it
    terms: int  # that each number of the result adds up
    times: int  # how often a run computes it


@dataclasses.dataclass(frozen=True)
class Site:
    """The contractions at one place of a program, whose operands get their formats together."""

    place: Place  # the scope and the line; without a number it stands for all contractions there
    primitives: tuple[str, ...]  # their names
    roles: tuple[Role, ...]  # of their operands, each once
    weights: tuple[str, ...]  # the paths of these arguments, as ``keystr`` prints them
    elements: int  # the numbers of these weights
    bits: int  # of such a number, as the program has it
    swapped: bool  # whether what ``Products`` calls the weight, of two arguments, is the activation
    products: tuple[Product, ...]  # the contractions
    function: str  # the name of the user's function
    discrete: tuple[str, ...] = ()  # where a result jumps: ``"moe.py:80 (top_k)"``

    @property
    def name(self) -> str:
        """The name by which ``Recipe.keep`` finds the place."""
        number = f"#{self.place.number}" if self.place.number else ""
        return " ".join(filter(None, (self.place.scope, f"{self.place.line}{number}")))


@dataclasses.dataclass
class _Found:
    equation: Equation
    place: Place
    roles: tuple[Role, Role]


@dataclasses.dataclass(frozen=True)
class _Discovery(Boundaries):
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
    discovery = _Discovery(WIDE, overrides=FormatOverrides(()))
    jax.eval_shape(lambda arrays: run(program, discovery, (), arrays)[1], list(program.arrays))
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
    made, index = [], {}
    for place, own in groups.items():
        swapped = all(_is_swapped(x, origins) for x in own)
        if swapped:
            own = [dataclasses.replace(x, roles=x.roles[::-1]) for x in own]
        if lines[place.scope, place.line] == 1:
            place = dataclasses.replace(place, number=0)
        index |= {x.equation.path: len(made) for x in own}
        made.append(_site(place, own, origins, swapped))
    return made, index


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


def _site(place: Place, own: Sequence[_Found], origins: _Origins, swapped: bool) -> Site:
    weights: dict[int, int] = {}
    for x in own:
        for i, role in enumerate(x.roles):
            held = origins.arguments(x.equation, i)
            if role == "weight" and len(held) == 1:
                size = x.equation.in_avals[i].size * _times(x.equation)
                weights[held[0]] = max(weights.get(held[0], 0), size)
    sizes = {i: min(n, origins.avals[i].size) for i, n in weights.items()}
    source = own[0].equation.caller or own[0].equation.source
    return Site(
        place=place, primitives=tuple(dict.fromkeys(x.equation.name for x in own)),
        roles=tuple(dict.fromkeys(role for x in own for role in x.roles)),
        weights=tuple(origins.names[i] for i in sizes), elements=sum(sizes.values()),
        bits=max((_bits(origins.avals[i]) for i in sizes), default=FP32.bits), swapped=swapped,
        products=tuple(_product(x) for x in own), function=source[2] if source else "",
        discrete=tuple(origins.behind({x.equation.path for x in own})),
    )  # fmt: skip


def _product(x: _Found) -> Product:
    avals = (*x.equation.in_avals[:2], x.equation.out_avals[0])
    right = avals[1].shape
    return Product(
        roles=x.roles,
        sizes=(avals[0].size, avals[1].size, avals[2].size),
        bits=(_bits(avals[0]), _bits(avals[1]), _bits(avals[2])),
        terms=math.prod(right[a] for a in params.contracted_axes(x.equation)[1]),
        times=_times(x.equation),
    )


def _bits(aval) -> int:
    return 8 * np.dtype(aval.dtype).itemsize


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
        if equation.name in DISCRETE or to_integers:
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


def float_results(program: Program, by: Boundaries, values: Sequence[Value]) -> list[jax.Array]:
    pairs = zip(values, program.out_avals, strict=True)
    return [by.lower(v, a) for v, a in pairs if is_float(a)]
