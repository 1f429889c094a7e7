"""The proofs of parity and torture, and the page with their results."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experiments import models, parity, torture
from experiments.cases import case, dead_units
from experiments.units import Units, program_in_units, scaled

pytestmark = pytest.mark.usefixtures("users_promotion")


def test_every_recorded_run_is_finite_and_within_one_percent_or_twice_chance():
    runs = {(r["model"], r["recipe"], r["seed"]): r for r in parity.rows(parity.FILE)}
    recipes = ("fp16_every_op", "scalify", "fp16", "fp8")
    found = [row for (_, recipe, _), row in runs.items() if recipe in recipes]
    assert len({row["model"] for row in found}) >= 9
    for row in found:
        base = runs[row["model"], "float32", row["seed"]]["loss"]
        chance = runs.get((row["model"], "float32, moved", row["seed"]), {"loss": base})["loss"]
        assert row["non_finite"] == 0
        assert abs(row["loss"] - base) <= max(0.01 * base, 2 * abs(chance - base))


@pytest.mark.slow
def test_a_run_is_recorded_and_reproducible():
    row = parity.train(models.model("wave"), "fp16", 3)
    again = parity.train(models.model("wave"), "float32", 3)
    assert row["non_finite"] == 0
    assert row["held_out"] is None
    assert row["loss"] == pytest.approx(again["loss"], rel=1e-3)
    assert row["loss"] != again["loss"]


@pytest.mark.parametrize("kind", ["inputs", "weights", "loss"])
def test_a_change_of_units_keeps_the_optimisation(kind):
    def loss_of(params, batch):
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - 1))

    program = case(
        "line",
        lambda: {"w": np.ones(3, np.float32)},
        loss_of,
        lambda: {"x": np.eye(4, 3, dtype=np.float32)},
        optax.adam(0.1),
    )
    other, own = program_in_units(program), Units.of(kind, 40)
    plain, state = program.init(0), other.init(0)
    batch = next(iter(program.batches(b"", 0)))
    state = {
        "params": scaled(state["params"], own.weights),
        "optimizer": state["optimizer"]._replace(units=own),
    }
    for _ in range(4):
        plain, want = jax.jit(program.train_step)(plain, batch)
        state, got = jax.jit(other.train_step)(state, (scaled(batch, own.inputs), own))
        assert got == want * own.loss
    np.testing.assert_array_equal(state["params"]["w"] / own.weights, plain["params"]["w"])


def test_pass_and_failure_of_a_case():
    program = dead_units()
    found = torture.run(program, "fp16-plain", torture.VARIANTS[:1])["as it is"]
    true = torture.run(program, "float32", torture.VARIANTS[:1])["as it is"]
    assert torture.verdict(found, true) == {"error": None, "stopped": 2}
    assert torture.verdict(true, true) == {"error": 0, "stopped": None}
