"""Precomputes float-independent values of a program in one jitted call.

Indices, masks and random bits are the same under every interpretation. In a program that is
interpreted outside of ``jit``, each of their equations would otherwise be compiled and run alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Jaxpr, ShapedArray, jex
from ._equation import CALLBACKS, Equation
from ._interpret import Argument, Interpretation, State, interpret_jaxpr
from ._wide import Value, with_items

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Integers:
    """The equations of a program whose operands and results depend on no float, as one compiled
    function.

    Equations in loops and branches aren't among them, since their operands may change in each
    iteration. Nor are equations with effects, callbacks, those of another mesh than the program's
    (of ``jax.sharding.auto_axes``), and complex numbers, whose last bits depend on the other
    equations of a compiled program.

    Attributes:
        results: for each equation's path, the index of each of its results among ``compute``'s;
            None for a result that no other equation reads.
        compute: a compiled function of ``consts`` and the arguments at ``reads``.
        reads: indices of the program's arguments.
        consts: arrays that the program has captured.
    """

    results: Mapping[Path, Sequence[int | None]]
    compute: Callable
    reads: Sequence[int]
    consts: Sequence[jax.Array]

    def known(
        self, values: Sequence[Value], call: Callable = lambda f, *arguments: f(*arguments)
    ) -> dict[Path, list[jax.Array | None]]:
        """Returns by each equation's path its results; None for a result that no other equation
        reads.

        ``call`` calls the compiled function, under ``jax.enable_x64``.
        """
        found: list[jax.Array] = []
        if any(i is not None for places in self.results.values() for i in places):
            found = call(self.compute, self.consts, [values[i] for i in self.reads])
        return {
            path: [None if i is None else found[i] for i in places]
            for path, places in self.results.items()
        }


def integers(jaxpr: Jaxpr) -> Integers:
    body, consts = _jax.open_jaxpr(jaxpr)
    finder = _IntegerFinder()
    captured = [i for i, v in enumerate(body.constvars) if _is_exact(v.aval)]
    reads = [i for i, v in enumerate(body.invars) if _is_exact(v.aval)]

    def found(some: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> list[jax.Array]:
        closed = jex.ClosedJaxpr(body, with_items(consts, captured, some))
        values = with_items([None] * len(body.invars), reads, map(_Known, arguments))
        _, outs = interpret_jaxpr(finder, closed, (), values)
        finder.read(outs)
        return list(finder.wanted.values())

    def types(variables: Sequence[jex.Var], which: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        avals = _jax.avals_of(variables[i] for i in which)
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]

    with jax.enable_x64(True):  # keeps 64-bit integers; others are unaffected
        closed = jax.make_jaxpr(found)(types(body.constvars, captured), types(body.invars, reads))
    numbers = {place: i for i, place in enumerate(finder.wanted)}
    results = {
        path: [numbers.get((path, k)) for k in range(count)] for path, count in finder.met.items()
    }

    def without_floats(
        consts: Sequence[jax.Array], arguments: Sequence[jax.Array]
    ) -> list[jax.Array]:
        return jex.jaxpr_as_fun(closed)(*consts, *arguments)

    return Integers(results, jax.jit(without_floats), reads, [consts[i] for i in captured])


def _is_exact(aval: object) -> bool:
    kinds = jnp.integer, jnp.bool_, jax.dtypes.prng_key
    return isinstance(aval, ShapedArray) and any(jnp.issubdtype(aval.dtype, k) for k in kinds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """An array that depends on no float, and its place: its equation's path, its index there."""

    array: jax.Array
    place: tuple[Path, int] | None = dataclasses.field(default=None, metadata={"static": True})


class _IntegerFinder(Interpretation):
    """Computes what depends on no float; represents everything else by None.

    Attributes:
        met: the number of results of each such equation, by path.
        wanted: the results that other equations read, by path and index.
    """

    inline = True

    def __init__(self):
        self.mesh = jax.sharding.get_abstract_mesh()
        self.met: dict[Path, int] = {}
        self.wanted: dict[tuple[Path, int], jax.Array] = {}

    def lift(self, x: Argument, aval: ShapedArray) -> None:
        return None

    def read(self, inputs: Sequence[Value]) -> None:
        for x in inputs:
            if isinstance(x, _Known) and x.place is not None:
                self.wanted[x.place] = x.array

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]):
        self.read(inputs)
        return state, [None] * len(equation.out_avals)

    def control(self, equation: Equation, run: Callable) -> Callable:
        return lambda state, inputs: self.apply(state, equation, inputs)

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]):
        pure = not equation.eqn.effects and equation.name not in CALLBACKS
        avals = equation.in_avals + equation.out_avals
        exact = all(_is_exact(a) and a.sharding.mesh in (self.mesh, None) for a in avals)
        if not (pure and exact) or any(x is None for x in inputs):
            return self.apply(state, equation, inputs)
        arrays = [x.array if isinstance(x, _Known) else x for x in inputs]
        outs = equation.bind(*arrays)
        self.met[equation.path] = len(outs)
        return state, [_Known(y, (equation.path, k)) for k, y in enumerate(outs)]
