"""Which recorded equations each operand and output comes from, read off the program's jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax.numpy as jnp

from ..._jax import Jaxpr, jex, open_jaxpr
from ...interpret import CONTROL, Body, Equation, Number, Program, body_of, operation_body
from ...primitives import Family, having, names, params

Origins: TypeAlias = tuple[int, ...]  # indices of recorded equations
MOST = 64  # equations that a value's origins name at most


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """The recorded equations that numbers of operands and outputs come from, unrounded since."""

    operands: Mapping[int, tuple[Origins, ...]]  # by equation and operand, at the first visit
    # the same at all visits: also through carries of loops, and through the state between steps
    flow: Mapping[int, tuple[Origins, ...]]
    outputs: Sequence[Origins]  # of the program
    loops: Mapping[int, tuple[int, ...]]  # the innermost loop's path around each; () outside

    @property
    def within_loops(self) -> Mapping[int, tuple[Origins, ...]]:
        return {
            i: tuple(tuple(j for j in x if self.loops[j] == self.loops[i]) for x in own)
            for i, own in self.operands.items()
        }


def dataflow(program: Program, indices: Mapping[tuple[int, ...], int], state: int = 0) -> Dataflow:
    walk, count = Walk(indices), len(program.in_avals)
    outs = walk.body(program.body, [()] * count)
    if state:
        outs = walk.body(program.body, [*outs[:state], *[()] * (count - state)])
    return Dataflow(walk.operands, walk.flow, outs, walk.loops)


def _union(some: Iterable[Origins]) -> Origins:
    return tuple(dict.fromkeys(index for origins in some for index in origins))[:MOST]


@dataclasses.dataclass
class Walk:
    indices: Mapping[tuple[int, ...], int]
    operands: dict[int, tuple[Origins, ...]] = dataclasses.field(default_factory=dict)
    flow: dict[int, tuple[Origins, ...]] = dataclasses.field(default_factory=dict)
    loops: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    inside: tuple[int, ...] = ()  # the path of the innermost loop

    def inner(
        self, within: Equation, jaxpr: Jaxpr, values: Sequence[Origins], *part: int
    ) -> list[Origins]:
        return self.body(body_of(open_jaxpr(jaxpr)[0], within, part), values)

    def body(
        self,
        body: Body,
        values: Sequence[Origins],
        constants: Mapping[jex.Var, Origins] = MappingProxyType({}),
    ) -> list[Origins]:
        known = {**constants, **dict(zip(body.inputs, values, strict=True))}

        def read(atom) -> Origins:
            return () if isinstance(atom, Number) else known.get(atom, ())

        for step in body.steps:
            outs = self.equation(step.equation, [read(x) for x in step.reads])
            known.update(zip(step.writes, outs, strict=True))
        return [read(x) for x in body.outputs]

    def equation(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        match equation.name:
            case "scan" | "while":
                around, self.inside = self.inside, equation.path
                loop = self.scan if equation.name == "scan" else self.while_loop
                outs = loop(equation, inputs)
                self.inside = around
                return outs
            case "cond":
                parts = enumerate(params.branches(equation))
                outs = [self.inner(equation, b, inputs[1:], i) for i, b in parts]
                return [_union(some) for some in zip(*outs, strict=True)]
        calls = equation.name in CONTROL or params.is_call(equation)
        called = params.called(equation) if calls else None
        if called is not None:
            return self.inner(equation, called, inputs)
        index = self.indices.get(equation.path)
        steps = operation_body(equation) if index is None else None
        if steps is not None:
            return self.inner(equation, steps, inputs)
        if index is None:
            return [_union(inputs)] * len(equation.out_avals)
        self.operands.setdefault(index, tuple(inputs))
        self.loops[index] = self.inside
        before = self.flow.get(index, inputs)
        self.flow[index] = tuple(_union(some) for some in zip(before, inputs, strict=True))
        return [(index,)] * len(equation.out_avals)

    def scan(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        loop = params.scan(equation)
        first, last = loop.consts, loop.consts + loop.carries
        while True:
            outs = self.inner(equation, loop.body, inputs)
            carry = map(_union, zip(inputs[first:last], outs, strict=False))
            again = [*inputs[:first], *carry, *inputs[last:]]
            if again == list(inputs):
                return outs
            inputs = again

    def while_loop(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        loop = params.while_loop(equation)
        first = loop.condition_consts + loop.body_consts
        conditions, consts = inputs[: loop.condition_consts], inputs[loop.condition_consts : first]
        carry = list(inputs[first:])
        while True:
            self.inner(equation, loop.condition, [*conditions, *carry], 0)
            outs = self.inner(equation, loop.body, [*consts, *carry], 1)
            again = [_union(some) for some in zip(carry, outs, strict=True)]
            if again == carry:
                return carry
            carry = again


SUMS = names(lambda row: row.autocast == "sum" or row.family is Family.CONTRACTION)
KEEP = having("exact") | having("adds") | {"convert_element_type"}  # or add numbers
TAKE = {"dynamic_slice", "gather"}  # at places that their other operands name


class _Sums(Walk):
    """Follows sums of integers: they have an origin, other numbers have none."""

    def equation(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        count = len(equation.out_avals)
        if equation.name in KEEP and count == 1:
            return [_union(inputs[:1] if equation.name in TAKE else inputs)]
        if equation.name in CONTROL or params.is_call(equation):
            return super().equation(equation, inputs)
        integers = all(jnp.issubdtype(a.dtype, jnp.integer) for a in equation.out_avals)
        return [(0,) if integers and equation.name in SUMS else ()] * count


def sums(program: Program) -> tuple[str, ...]:
    """Returns the paths of a program's outputs that are sums of integers: counts, histograms."""
    outs = _Sums({}).body(program.body, [()] * len(program.in_avals))
    found = zip(program.paths, program.out_avals, outs, strict=True)
    return tuple(
        path for path, a, origins in found if origins and jnp.issubdtype(a.dtype, jnp.integer)
    )


class _FromArguments(Walk):
    """Follows what depends on an argument other than by a backward pass."""

    def equation(self, equation: Equation, inputs: Sequence[Origins]) -> list[Origins]:
        if equation.direction == "backward":
            return [()] * len(equation.out_avals)
        return super().equation(equation, inputs)


def gradients(program: Program) -> tuple[bool, ...]:
    """Returns for each output whether a backward pass alone makes it: a gradient, or a constant."""
    outs = _FromArguments({}).body(program.body, [(0,)] * len(program.in_avals))
    return tuple(not origins for origins in outs)
