"""A loop that is compiled as a whole gives the numbers of one that runs iteration by iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from scalewise.auditing._run import _lockstep
from scalewise.auditing._run._interpretations import Reference, TableEmulation
from scalewise.auditing._run._session import Session
from scalewise.interpret import trace
from scalewise.rounding import FP32_PARAMS

X = jnp.linspace(0.1, 3.0, 12).reshape(6, 2)


def scanned(x):
    def step(carry, row):
        carry = jax.lax.cond(row[0] > 1.3, jnp.exp, jnp.sin, carry * 1.7 + row) + 1e-8
        return carry, carry @ carry

    return jax.lax.scan(step, jnp.ones(2), x)


def halved(x):
    return jax.lax.while_loop(lambda v: v.sum() > 1e-3, lambda v: v * 0.7 + 1e-9, x[0])


PROGRAMS = {"scan": scanned, "gradient": jax.grad(lambda x: scanned(x)[1].sum()), "while": halved}


def session(f) -> Session:
    low = TableEmulation(sw.format("fp16"))
    return Session(
        trace(f, low, (X,), {}, name="audit"), low, Reference(np.dtype(np.float32)), steps=1
    )


def flow(outcome):
    """Where the operands of each equation come from, and the outputs, by paths."""
    at = [equation.path for equation in outcome.recorded]
    found = outcome.dataflow
    operands = {at[i]: [{at[j] for j in x} for x in own] for i, own in found.flow.items()}
    return operands, [{at[j] for j in x} for x in found.outputs]


def test_the_origin_of_a_carry_is_its_value_of_the_iteration_before():
    outcome = session(scanned).run()
    name = [equation.name for equation in outcome.recorded]
    carried = {(name[i], name[j]) for i, own in outcome.dataflow.flow.items()
               for operand in own for j in operand}  # fmt: skip
    first = {(name[i], name[j]) for i, own in outcome.dataflow.operands.items()
             for operand in own for j in operand}  # fmt: skip
    assert carried - first == {("mul", "add")}
    assert [{name[j] for j in x} for x in outcome.dataflow.outputs] == [{"add"}, {"dot_general"}]


@pytest.mark.parametrize("name", nightly(PROGRAMS, but=[*PROGRAMS][:1]))
def test_compiled_and_eager_loops_agree(name, monkeypatch):
    runs = []
    for eager in (100_000, 0):
        monkeypatch.setattr(_lockstep, "MAX_EAGER", eager)
        audited = session(PROGRAMS[name])
        first, wide = audited.run(), audited.formats()
        products = [i for i, e in enumerate(audited.lockstep.recorded) if e.name in ("mul", "exp")]
        wide[products] = FP32_PARAMS
        runs.append((first, audited.run(wide), audited.run(constants={1e-8: 1.0})))
    for eager, compiled in zip(*runs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, eager.low, compiled.low)
        jax.tree.map(np.testing.assert_array_equal, eager.reference, compiled.reference)
        ran = {e.path: i for i, e in enumerate(compiled.recorded)}
        assert flow(eager) == flow(compiled)
        for i, equation in enumerate(eager.recorded):
            if name == "while" and equation.path[1] == 0:
                continue  # a compiled loop doesn't count its condition's last evaluation
            for field in ("counts", "sums", "maxima", "histogram"):
                own, other = (getattr(o.statistics, field) for o in (eager, compiled))
                # outside of compiled loops the largest magnitude is a float32
                np.testing.assert_allclose(own[i], other[ran[equation.path]], rtol=1e-7)


def test_trials_reuse_a_compiled_loop(monkeypatch):
    monkeypatch.setattr(_lockstep, "MAX_EAGER", 0)
    audited = session(scanned)
    audited.run()
    wide = np.tile(FP32_PARAMS, (len(audited.formats()), 1))
    audited.run(wide, {1e-8: 1.0})
    sizes = {loop._cache_size() for loop in audited.lockstep.loops.values()}
    assert sizes - {0} == {1}  # 0: a branch inside of another loop's code


def test_a_compiled_loop_tells_the_iteration_of_an_overflow():
    def grow(x):
        return jax.lax.fori_loop(0, 2000, lambda i, v: v * 1.01, x)

    (found,) = sw.audit(grow, "fp16", trials=0)(jnp.ones(3)).unfixed[:1]
    assert found.kind == "overflow"
    value, steps = np.float64(1), 0  # each product is rounded once
    while value < 65520:  # half a unit above the largest number
        value = np.float64(sw.round_to(np.float32(value * np.float16(1.01)), "fp16"))
        steps += 1
    assert found.iteration == steps - 1


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(_lockstep, "LARGE_LOOP", 10)
    monkeypatch.setattr(_lockstep, "MAX_EAGER", 20)
    monkeypatch.setattr(_lockstep, "MAX_UNCOMPILED", 10)


def two_loops(turns):
    """Two loops of over ten operations, the second of which takes the first one's result."""

    def body(c):
        for i in range(6):
            c = jnp.sin(c * (1 + i / 8))
        return c

    def f(x):
        for _ in range(2):
            x = jax.lax.while_loop(
                lambda c: c[0] < turns, lambda c: (c[0] + 1, body(c[1])), (0, x)
            )[1]
        return x

    return f


def compiled_loops(audited):
    return [loop._cache_size() for loop in audited.lockstep.loops.values()]


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.slow
def test_large_loops_are_compiled_once_and_only_after_some_runs():
    audited = session(two_loops(4))
    first = last = audited.run()
    assert not compiled_loops(audited)
    while not compiled_loops(audited):
        last = audited.run()
        assert audited.runs < 10
    last = audited.run()
    assert compiled_loops(audited) == [1, 1]
    np.testing.assert_allclose(last.low[0], first.low[0], rtol=2e-3)
    np.testing.assert_allclose(last.reference[0], first.reference[0], rtol=1e-6)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.slow
def test_a_large_loop_of_many_iterations_is_compiled_in_the_first_run():
    audited = session(two_loops(_lockstep.MAX_VISIT + 1))
    audited.run()
    assert compiled_loops(audited) == [1, 1]


@pytest.mark.slow
def test_a_compiled_loop_takes_the_values_of_a_policy():
    """Their low-precision arrays are pytrees."""
    report = sw.audit(two_loops(_lockstep.MAX_EAGER), "p=f32,c=f16,o=f32", trials=0)(X)
    assert report.error.non_finite == 0
    assert report.error.relative < 1e-2
