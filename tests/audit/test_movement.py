"""Operations that only move numbers: NumPy returns what the compiled code does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.auditing._run import _lockstep
from scalewise.auditing._run._interpretations import Reference, TableEmulation
from scalewise.auditing._run._movement import LARGEST, MOVES, only_moves
from scalewise.auditing._run._session import Session
from scalewise.autocasting import Autocast, Policy
from scalewise.interpret import all_equations, trace

PROGRAMS = {
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, :, None], (2, 3, 4, 5)) * 2,
    "rev": lambda x: jnp.flip(x, (0, 2)) * x,
    "slice": lambda x: jax.lax.slice(x, (0, 1, 1), (2, 3, 5), (1, 2, 2)) + 1,
    "transpose": lambda x: jnp.transpose(x, (2, 0, 1)) * 2,
}
LOWS = (TableEmulation(sw.format("fp16")), Autocast(Policy(compute="bf16")))


def run(f, low, *args):
    s = Session(trace(f, low, args, {}, name="audit"), low, Reference(np.dtype(np.float32)))
    return s.run()


@pytest.mark.parametrize("low", nightly(LOWS, but=[*LOWS][:2]), ids=("format", "policy"))
@pytest.mark.parametrize("name", nightly(MOVES, but=[*MOVES][:1]))
def test_the_run_is_that_of_compiled_code(name, low, monkeypatch):
    @jax.value_and_grad
    def f(x):  # the overflow at the first number is moved, and may be cut off
        return jnp.sum(PROGRAMS[name](jnp.exp(x * 30)))

    x = normal(0, (2, 3, 5)).at[0, 0, 0].set(3.0)
    assert name in {e.primitive.name for e in all_equations(jax.make_jaxpr(f)(x).jaxpr)}
    moved = []
    monkeypatch.setattr(_lockstep, "only_moves", lambda e, xs: only_moves(e, xs) and (
        moved.append(e.name) or True))  # fmt: skip
    with_numpy = run(f, low, x)
    assert name in moved
    monkeypatch.setattr(_lockstep, "only_moves", lambda equation, inputs: False)
    compiled = run(f, low, x)
    outputs = ((*r.low, *r.reference) for r in (with_numpy, compiled))
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    for a, b in zip(*(jax.tree.leaves(r.statistics) for r in (with_numpy, compiled)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_arrays_are_moved_by_compiled_code(monkeypatch):
    seen = []
    monkeypatch.setattr(_lockstep, "only_moves", lambda e, xs: seen.append(
        (e.in_avals[0].size, only_moves(e, xs))) or seen[-1][1])  # fmt: skip
    for size in (16, 4 * LARGEST):
        run(lambda x: x.T * 2, LOWS[0], jnp.ones((size // 8, 8)))
    assert {(16, True), (4 * LARGEST, False)} <= set(seen)
