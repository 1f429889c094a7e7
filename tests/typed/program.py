# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false
# (JAX's own functions have parts of unknown types)
"""A user's program under strict type checkers: errors are expected on marked lines alone.

``tests/test_types.py`` reads it; nothing runs it.
"""

import dataclasses
from functools import partial
from typing import assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import scalewise as sw

Params = dict[str, jax.Array]


def loss_of(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2)


def train_step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    return {"w": params["w"] - 0.1 * gradients["w"]}, loss


@partial(sw.autoscale, recipe="fp8")
def decorated(params: Params, x: jax.Array) -> jax.Array:
    return loss_of(params, x)


@sw.autocast
def cast_down(params: Params, x: jax.Array) -> jax.Array:
    return loss_of(params, x)


params: Params = {"w": jnp.ones((4, 4))}
x = jnp.ones((2, 4))
step = sw.autoscale(train_step, "fp8")
assert_type(step(params, x), tuple[Params, jax.Array])
# mypy loses the types of an overloaded function in partial
assert_type(decorated(params, x=x), jax.Array)  # type: ignore[assert-type]
assert_type(cast_down(params, x), jax.Array)
assert_type(sw.emulate(loss_of, "e4m3fn")(params, x), jax.Array)
assert_type(sw.autocast(loss_of, "bf16")(params, x), jax.Array)
step(params)  # error
step(params, "x")  # error
sw.emulate(loss_of, "e4m3fn")(x, x)  # error
sw.autoscale(train_step, "fp9")  # error
sw.emulate(loss_of, "e4m3n")  # error

keyed = sw.autoscale(train_step, "nvfp4", keyed=True)
assert_type(keyed(jax.random.key(0), params, x), tuple[Params, jax.Array])
delayed = sw.autoscale(train_step, "fp8_delayed")
history = delayed.init(params, x)
(params, loss), history = delayed.step(history, params, x)
assert_type(loss, jax.Array)

audited = sw.audit(train_step, "fp16")
report = audited(params, x)
assert_type(report, sw.Report)
assert_type(report.apply_fixes(train_step)(params, x), tuple[Params, jax.Array])
assert_type(report.apply_fixes(sw.recipes.fp8), sw.Recipe)
audited(params)  # error
audited.show()  # error
sw.audit(train_step, "fp16", steps=2, batches=[x, x])(params).show()
sw.explain(train_step, "fp8")(params, x).show()
assert_type(sw.plan(loss_of, 6.0)(params, x), sw.Plan)

wide = dataclasses.replace(sw.recipes.fp8, keep={"head": "bf16"}, residuals="bf16")
assert_type(wide, sw.Recipe)
own = sw.Recipe(sw.Products.short("e4m3fn", "e5m2"), keep={"head": None})
assert_type(own.residuals, sw.Format | None)
sw.Recipe(keep=3)  # error
storage = sw.Storage("e4m3fn")
operand = sw.Operand("mxfp8_e4m3", rounding="stochastic")
sw.Operand("mxfp8_e4m3", rounding="random")  # error
e6m9 = sw.Format("e6m9", exponent_bits=6, mantissa_bits=9)
assert_type(e6m9.bias, int)

train = sw.training.step(loss_of, optax.adam(1e-3), "fp8")
state, metrics = train(train.init(params), x)
