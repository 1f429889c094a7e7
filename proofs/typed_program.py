"""A user's typed program, which ``python -m proofs.wheels`` has pyright --strict read."""

from typing import TypedDict

import jax
import jax.numpy as jnp

import scalewise as sw


class Params(TypedDict):
    up: jax.Array
    down: jax.Array


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jnp.maximum(jnp.matmul(x, params["up"]), 0)
    return jnp.mean((jnp.matmul(h, params["down"]) - y) ** 2)


def update(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    new = Params(
        up=params["up"] - 0.01 * gradients["up"], down=params["down"] - 0.01 * gradients["down"]
    )
    return new, loss


def main() -> None:
    params = Params(up=jnp.ones((8, 16)), down=jnp.ones((16, 1)))
    x, y = jnp.ones((4, 8)), jnp.ones((4, 1))
    params, loss = sw.autoscale(update, "fp8")(params, x, y)
    params, loss = sw.emulate(update, "bf16")(params, x, y)
    params, loss = sw.autocast(update, "p=f32,c=bf16,o=f32")(params, x, y)
    report = sw.audit(update, "fp16")(params, x, y)
    findings: tuple[sw.Finding, ...] = report.findings
    rounded: jax.Array = sw.round_to(jnp.ones(3), "e4m3fn", saturate=True)
    half = sw.Format("e6m9", exponent_bits=6, mantissa_bits=9)
    plan = sw.plan(loss_of, 6.5)(params, x, y)
    print(loss, [x.line for x in findings], rounded.sum(), half.max, plan)


if __name__ == "__main__":
    main()
