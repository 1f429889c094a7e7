"""A state threaded through a program: every equation is met as often as it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from programs import PROGRAMS
from scalewise.interpret import Interpretation, run, trace


class Tally(Interpretation):
    """How often each primitive ran, in a vector of fixed length; bodies' turns beside it."""

    inline = True

    def __init__(self):
        self.rows: dict[tuple[int, ...], int] = {}
        self.kept: dict[tuple[int, ...], object] = {}

    def apply(self, state, equation, inputs):
        row = self.rows.setdefault(equation.path, len(self.rows))
        counts, turns = state
        return (counts.at[row].add(1), turns), equation.bind(*inputs)

    def turn(self, state, equation):
        return state[0], state[1] + 1

    def control(self, equation, run):
        return self.kept.setdefault(equation.path, jax.jit(run))


def tally(f, *args):
    interpretation = Tally()
    program = trace(f, interpretation, args, {}, name="tally")
    state = (jnp.zeros(program.equations, jnp.int32), jnp.int32(0))
    return interpretation, program, run(program, interpretation, state)


def test_equations_in_loops_calls_and_branches_are_counted_apart():
    def f(x):
        double = jax.jit(lambda y: y * 2.0)
        x = double(double(x))  # one jaxpr, called twice: two places

        def body(c, _):
            c = jax.lax.cond(c > 100, lambda a: a - 1.0, lambda a: a + 1.0, c)
            return jax.lax.fori_loop(0, 3, lambda i, a: jnp.sin(a), c), None

        return jax.lax.scan(body, x, None, length=5)[0]

    interpretation, _, ((counts, turns), _) = tally(f, jnp.float32(1))
    met = [int(counts[row]) for row in interpretation.rows.values()]
    assert sorted(n for n in met if n) == [1, 1, 5, 5, 15]  # mul, mul, gt, one branch, sin
    assert met.count(0) == 1  # the branch that wasn't taken
    assert turns == 5 * 3 + 5


def test_the_predicate_of_a_while_loop_is_noted_nowhere():
    _, _, ((_, turns), _) = tally(
        lambda x: jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, x), jnp.float32(1)
    )
    assert turns == 4


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_the_program_computes_what_it_did(f):
    x = jax.random.normal(jax.random.key(0), (4, 4))
    _, program, (_, outs) = tally(f, x)
    for got, want in zip(outs, jax.tree.leaves(f(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert len(program.paths) == len(outs)


def test_a_second_run_takes_other_arguments_and_what_was_compiled():
    interpretation, program, _ = tally(
        lambda x: jax.lax.scan(lambda c, v: (c + v, None), jnp.float32(0), x)[0], jnp.ones(8)
    )
    kept = dict(interpretation.kept)
    state = (jnp.zeros(program.equations, jnp.int32), jnp.int32(0))
    _, (total,) = run(program, interpretation, state, [jnp.full(8, 2.0)])
    assert total == 16
    assert interpretation.kept == kept
    assert program.arguments == ["[0]"]
