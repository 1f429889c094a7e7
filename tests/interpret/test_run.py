"""A state threaded through a program: every equation is met as often as it runs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import normal
from programs import PROGRAMS, together
from scalewise.interpret import Interpretation, run, trace, transform


class Tally(Interpretation):
    """How often each primitive ran, in a vector of fixed length."""

    inline = True

    def __init__(self, turns=0):
        self.turns = turns
        self.rows: dict[tuple[int, ...], int] = {}
        self.kept: dict[tuple[int, ...], object] = {}

    def apply(self, state, equation, inputs):
        row = self.rows.setdefault(equation.path, len(self.rows))
        return state.at[row].add(1), equation.bind(*inputs)

    def eager_iterations(self, state, equation):
        return 0 if isinstance(state, jax.core.Tracer) else self.turns // equation.inner

    def control(self, equation, run):
        return self.kept.setdefault(equation.path, jax.jit(run))


def tally(f, *args, turns=0):
    interpretation = Tally(turns)
    program = trace(f, interpretation, args, {}, name="tally")
    state = jnp.zeros(program.equations, jnp.int32)
    return interpretation, program, run(program, interpretation, state)


@pytest.mark.parametrize("turns", [0, 1000])
def test_equations_in_loops_calls_and_branches_are_counted_apart(turns):
    def f(x):
        double = jax.jit(lambda y: y * 2.0)
        x = double(double(x))  # one jaxpr, called twice: two places

        def body(c, _):
            c = jax.lax.cond(c > 100, lambda a: a - 1.0, lambda a: a + 1.0, c)
            return jax.lax.fori_loop(0, 3, lambda i, a: jnp.sin(a), c), None

        return jax.lax.scan(body, x, None, length=5)[0]

    interpretation, _, (counts, _) = tally(f, jnp.float32(1), turns=turns)
    met = [int(counts[row]) for row in interpretation.rows.values()]
    assert sorted(n for n in met if n) == [1, 1, 5, 5, 15]  # mul, mul, gt, one branch, sin
    assert met.count(0) == (0 if turns else 1)  # the branch that wasn't taken
    assert bool(interpretation.kept) == (not turns)


@pytest.mark.parametrize(("turns", "conditions"), [(0, 0), (4, 2), (1000, 5)])
def test_a_while_loop_is_compiled_after_its_eager_iterations(turns, conditions):
    """Two equations an iteration; a compiled condition can't change the state."""
    interpretation, _, (counts, (out,)) = tally(
        lambda x: jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, x),
        jnp.float32(1),
        turns=turns,
    )
    met = {path[1:]: int(counts[row]) for path, row in interpretation.rows.items()}
    assert met == {(0, 0): conditions, (1, 0): 4}
    assert out == 16


@pytest.mark.parametrize("turns", [0, 1000])
def test_programs_compute_the_same_results(turns):
    f, x = together(PROGRAMS), normal(0, (4, 4))
    _, program, (_, outs) = tally(f, x, turns=turns)
    rtol = 1e-5 if turns else 0  # XLA contracts products and sums in loops that it compiles
    for got, want in zip(outs, jax.tree.leaves(f(x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol)
    assert len(program.paths) == len(outs)


def test_a_second_run_reuses_compiled_code_for_other_arguments():
    interpretation, program, _ = tally(
        lambda x: jax.lax.scan(lambda c, v: (c + v, None), jnp.float32(0), x)[0], jnp.ones(8)
    )
    kept = dict(interpretation.kept)
    state = jnp.zeros(program.equations, jnp.int32)
    _, (total,) = run(program, interpretation, state, [jnp.full(8, 2.0)])
    assert total == 16
    assert interpretation.kept == kept
    assert program.arguments == ["[0]"]


class Met(Tally):
    """The equations in the order in which they ran."""

    def __init__(self):
        super().__init__(turns=1000)
        self.met = []

    def apply(self, state, equation, inputs):
        self.met.append(equation)
        return state, equation.bind(*inputs)


def test_equations_are_made_once_for_each_place_and_freed_with_their_program():
    double = jax.jit(lambda y: y * 2.0)  # one jaxpr, at three places

    def body(c, v):
        return double(c), v * 3.0

    def f(x, vs):
        y = double(x)
        z = double(y)
        return jax.lax.scan(body, z, vs)

    met = Met()
    program = trace(f, met, (jnp.float32(1), jnp.ones(3)), {}, name="met")
    run(program, met, ())
    first, met.met = met.met, []
    run(program, met, (), [jnp.float32(5), jnp.zeros(3)])
    assert len(first) == 2 + 3 * 2
    assert list(map(id, met.met)) == list(map(id, first))
    paths = [e.path for e in dict.fromkeys(first)]
    assert [len(path) for path in paths] == [2, 2, 3, 2]
    assert len(set(paths)) == len(paths)
    calls = [e.within.source[1] for e in dict.fromkeys(first)]
    assert len(set(calls)) == 4  # the scan, and each of the calls
    kept = weakref.ref(program.body)
    del program, first, met
    gc.collect()
    assert kept() is None


def test_bodies_of_a_transformed_function_are_not_kept():
    met = Met()
    transform(lambda x: jax.jit(jnp.sin)(x), met, name="met")(jnp.ones(3))
    assert met.met[0].within is not None
    assert [met.met[0].bodies, met.met[0].within.bodies] == [None, None]


def test_unread_results_are_freed():
    alive = []

    class Box:
        def __init__(self, x):
            self.x = x

    class Boxed(Interpretation):
        def lift(self, x, aval):
            return Box(x)

        def apply(self, state, equation, inputs):
            alive.append(sum(ref() is not None for ref in state))
            outs = [Box(y) for y in equation.bind(*[b.x for b in inputs])]
            return [*state, *map(weakref.ref, outs)], outs

    def f(x):
        y = x * 2.0
        x + 3.0, y - 1.0
        return y * y * y

    boxed = Boxed()
    run(trace(f, boxed, (jnp.float32(1),), {}, name="boxed"), boxed, [])
    assert alive == [0, 1, 1, 1, 2]  # y alone until its square is there
