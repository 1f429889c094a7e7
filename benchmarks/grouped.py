"""``python -m benchmarks.grouped``: bytes and operations of grouped products on an H100; no GPU.

compiles `lax.ragged_dot`, forward and with both gradients, and the training step of a mixture of
experts (`benchmarks.models`) ahead of time, as ``make gpu-hlo`` does, and prints the bound of each
(`benchmarks.hlo`): for each kernel the larger of bytes over bandwidth and operations over rate.

- ``bf16, dense``: without a recipe, as XLA expands it;
- ``bf16``: the same by scalewise's kernel in bfloat16, a product without a dense expansion;
- ``fp8``, ``mxfp8``: under a recipe, with all that rounds operands.

A bound is no time: nothing here was run on a GPU.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import gpu_hlo, hlo
from benchmarks.models import MODELS, without_driver
from benchmarks.programs import Program, compiled, under
from scalewise.autoscaling._grouped_kernel import GroupedProduct, grouped_product

ROWS, WIDTH, HIDDEN, EXPERTS = 16384, 4096, 3584, 8  # those of the step at full size
WAYS = ("bf16, dense", "bf16", "fp8", "fp8_delayed", "mxfp8")


def by_kernel(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``lax.ragged_dot`` and its gradients by the kernel, in the operands' dtype."""

    def product(a, b, contracted, groups):
        numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], groups)
        return grouped_product(a, b, sizes, jnp.ones(2), rule=GroupedProduct(numbers, x.dtype))

    f = jax.custom_vjp(lambda x, w: product(x, w, ((1,), (1,)), [0]))

    def backward(kept, g):
        x, w = kept
        return product(g, w, ((1,), (2,)), [0]), product(x, g, ((0,), (0,)), [])

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    return f(x, w)


def forward(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def with_gradients(x, w, sizes, g):
    y, backward = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return y, backward(g)


def of_products(gradients: bool) -> Program:
    def make():
        bf16 = jnp.bfloat16
        x, g = (jnp.zeros((ROWS, n), bf16) for n in (WIDTH, HIDDEN))
        given = x, jnp.zeros((EXPERTS, WIDTH, HIDDEN), bf16), jnp.zeros(EXPERTS, jnp.int32)
        return (*given, g) if gradients else given

    return Program(with_gradients if gradients else forward, make)


def figures(program: Program, way: str) -> tuple[float, float, float]:
    """A program's operations in products, its bytes outside of them, and the bound in seconds."""
    kernel = mock.patch.object(lax, "ragged_dot", by_kernel if way == "bf16" else lax.ragged_dot)
    own = dataclasses.replace(program, step=lambda *given: program.step(*given))  # traced anew
    with kernel:
        run = own if "bf16" in way else under(own, way, "h100", "faster")
        executable = compiled(run, gpu_hlo.gpus("h100"), "cuda", donate=False)
    module, device = hlo.parse(executable.as_text()), gpu_hlo.DEVICES["h100"]
    launched = hlo.kernels(module)
    flops = sum(k.product.flops * k.count for k in launched if k.product)
    outside = sum(k.bytes * k.count for k in launched if not k.product)
    return flops, outside, sum(map(device.seconds, launched))


def main() -> None:
    without_driver()
    steps = {n: Program(*MODELS[n]("full")) for n in ("moe_ragged", "moe_ragged_cudnn")}
    programs = {
        "ragged_dot": of_products(False),
        "ragged_dot and gradients": of_products(True),
        "training step": steps["moe_ragged"],
        "training step, attention by cuDNN": steps["moe_ragged_cudnn"],
    }
    print("| program | way | GFLOP in products | GB outside | bound, ms | of bf16's speed |")
    print("|---|---|---:|---:|---:|---:|")
    for name, program in programs.items():
        rows = {way: figures(program, way) for way in WAYS}
        for way, (flops, outside, seconds) in rows.items():
            cells = f"{flops / 1e9:.0f} | {outside / 1e9:.2f} | {seconds * 1e3:.2f}"
            print(f"| {name} | {way} | {cells} | {rows['bf16'][2] / seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
