"""Loops: where their operands come from, and which iteration an event is in."""

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.auditing._run._session import Session
from scalewise.auditing._tape._interpretations import TableEmulation
from scalewise.interpret import trace

X = jnp.linspace(0.1, 3.0, 12).reshape(6, 2)


def scanned(x):
    def step(carry, row):
        carry = jax.lax.cond(row[0] > 1.3, jnp.exp, jnp.sin, carry * 1.7 + row) + 1e-8
        return carry, carry @ carry

    return jax.lax.scan(step, jnp.ones(2), x)


def session(f) -> Session:
    low = TableEmulation(sw.format("fp16"))
    return Session(trace(f, low, (X,), {}, name="audit"), low)


def test_the_origin_of_a_carry_is_its_value_of_the_iteration_before():
    outcome = session(scanned).run()
    name = [equation.name for equation in outcome.recorded]
    carried = {(name[i], name[j]) for i, own in outcome.dataflow.flow.items()
               for operand in own for j in operand}  # fmt: skip
    first = {(name[i], name[j]) for i, own in outcome.dataflow.operands.items()
             for operand in own for j in operand}  # fmt: skip
    assert carried - first == {("mul", "add")}
    assert [{name[j] for j in x} for x in outcome.dataflow.outputs] == [{"add"}, {"dot_general"}]


def test_the_iteration_of_an_overflow():
    def grow(x):
        return jax.lax.fori_loop(0, 2000, lambda i, v: v * 1.01, x)

    (found,) = sw.audit(grow, "fp16", trials=0)(jnp.ones(3)).unfixed[:1]
    assert found.kind == "overflow"
    value, steps = np.float64(1), 0  # each product is rounded once
    while value < 65520:  # half a unit above the largest number
        value = np.float64(sw.round_to(np.float32(value * np.float16(1.01)), "fp16"))
        steps += 1
    assert found.iteration == steps - 1


def test_a_loop_of_thousands_of_iterations_has_shares():
    """Its results stay in memory, and its statistics are counted together."""

    def total(x):
        return jax.lax.fori_loop(0, 2500, lambda i, v: v + x, x * 0)

    report = sw.audit(total, "bf16", trials=0)(jnp.full(4, 1e-3))
    (added,) = [e for e in report.equations if e.primitive == "add" and e["added"]]
    assert added["visits"] == 2500
    assert report.sheet.residual < 1e-6
