"""Bytes that devices send each other in 16 and in 8 bits, and the bits that arrive.

    python -m benchmarks.messages          # the table of docs/guides/sharding.md, checked
    PYTHONPATH=.gpu-plugin python -m benchmarks.messages --device h100   # compiled for 8 GPUs

Counted in the compiled program of 8 virtual CPU devices; or of GPUs, by the compiler that `make
gpu-hlo` installs. XLA's CPU compiler sends bfloat16, the dtype of all large messages here, as
float32: these count as two bytes a number.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

# isort: split
import argparse
import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import scalewise as sw
from benchmarks import hlo

WIDTH, HIDDEN, ROWS = 256, 1024, 512
MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
ROW_MESH = jax.make_mesh((8, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
LARGE = 1 << 12  # bytes; fewer are scales and losses
SENT = dataclasses.replace(sw.recipes.fp8, collective="e4m3fn", min_size=LARGE)


def gathered(w, x):
    """Losses of rows of an MLP whose weights are split over both axes of the mesh."""
    up = lax.all_gather(w["up"], "fsdp", axis=0, tiled=True)
    down = lax.all_gather(w["down"], "fsdp", axis=1, tiled=True)
    return jnp.square(lax.psum(jax.nn.gelu(x @ up) @ down, "tensor") - x)


def exchanged(w, x):
    """Losses of tokens that go to the devices of 8 experts, and back."""
    axes = "fsdp", "tensor"
    there = lax.all_to_all(x.reshape(8, -1, WIDTH), axes, 0, 0, tiled=True).reshape(-1, WIDTH)
    own = jax.nn.gelu(there @ w["up"][0]) @ w["down"][0]
    back = lax.all_to_all(own.reshape(8, -1, WIDTH), axes, 0, 0, tiled=True)
    return jnp.square(back.reshape(x.shape) - x)


def random(*shape):
    x = jax.random.normal(jax.random.key(len(shape)), shape) * shape[-2] ** -0.5
    return x.astype(jnp.bfloat16)


WHOLE = {"up": random(WIDTH, HIDDEN), "down": random(HIDDEN, WIDTH)}
EXPERTS = {"up": random(8, WIDTH, HIDDEN), "down": random(8, HIDDEN, WIDTH)}
BOTH = P(("fsdp", "tensor"))
SPLIT = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}


def programs(mesh):
    def mapped(f, specs, rows):
        return jax.shard_map(f, mesh=mesh, in_specs=(specs, rows), out_specs=rows)

    experts = mapped(exchanged, {"up": BOTH, "down": BOTH}, BOTH)
    return {
        "weights gathered": (mapped(gathered, SPLIT, P("fsdp")), WHOLE),
        "tokens to experts and back": (experts, EXPERTS),
    }


def sent(f, mesh, *arguments):
    """Returns the bytes that a device sends, by opcode and dtype; of large messages alone."""
    everywhere = NamedSharding(mesh, P())
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments
    )
    text = jax.jit(f).lower(*types).compile().as_text()
    found = collections.Counter()
    for each in hlo.collectives(hlo.parse(text)):
        if each.bytes >= LARGE or each.opcode == "all-to-all":  # of which it has 8 operands
            wide = each.dtype == "f32"
            found[each.opcode, "bf16" if wide else each.dtype] += round(each.sent / (1 + wide))
    return found


def moved(found):
    """Returns the bytes of weights, tokens and partial products; gradients are sent as they are."""
    return sum(n for (opcode, _), n in found.items() if opcode != "reduce-scatter")


def rounded(x):
    return sw.quantize(x.astype(jnp.float32), "e4m3fn").value().astype(x.dtype)


def unlike():
    """Returns how many losses of sharded runs differ from those of one device, whose weights and
    tokens are rounded as a whole."""
    wide = dataclasses.replace(SENT, products=sw.Products.short(None, None), residuals=None)
    x = random(ROWS, WIDTH).astype(jnp.float32)  # XLA leaves out some roundings to bfloat16

    def rows(w, x):
        return jnp.square(jax.nn.gelu(x @ rounded(w["up"])) @ rounded(w["down"]) - x)

    def experts(w, x):
        there = rounded(x).reshape(8, 8, -1, WIDTH).swapaxes(0, 1).reshape(8, -1, WIDTH)
        own = [jax.nn.gelu(there[i] @ w["up"][i]) @ w["down"][i] for i in range(8)]
        back = rounded(jnp.stack(own)).reshape(8, 8, -1, WIDTH).swapaxes(0, 1)
        return jnp.square(back.reshape(x.shape) - x)

    whole = jax.shard_map(
        gathered, mesh=ROW_MESH, out_specs=P("fsdp"),
        in_specs=({"up": P("fsdp"), "down": P(None, "fsdp")}, P("fsdp")),
    )  # fmt: skip
    pairs = (
        (whole, rows, WHOLE),
        (programs(MESH)["tokens to experts and back"][0], experts, EXPERTS),
    )
    runs = [
        (jax.jit(sw.autoscale(f, wide))(w, x), jax.jit(reference)(w, x))
        for f, reference, own in pairs
        for w in [jax.tree.map(lambda a: a.astype(jnp.float32), own)]
    ]
    return [int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in runs]


def main(device=None):
    mesh = MESH
    if device:
        from benchmarks.gpu_hlo import gpus

        mesh = Mesh(np.array(gpus(device, 8)).reshape(4, 2), MESH.axis_names)
    x = random(ROWS, WIDTH)
    print("| program | recipe | sent by a device, kB | what moves, of bfloat16's |")
    print("|---|---|---|---:|")
    for name, (f, weights) in programs(mesh).items():

        def training(w, x, f=f):
            return jax.value_and_grad(lambda w: f(w, x).astype(jnp.float32).mean())(w)

        stored = sw.quantize_params(weights, "fp8")
        runs = {
            "bfloat16": (training, weights), "fp8": (sw.autoscale(training, "fp8"), weights),
            'fp8, collective="e4m3fn"': (sw.autoscale(training, SENT), weights),
            "inference, bfloat16": (f, weights),
            "inference, stored weights": (sw.autoscale(f, "fp8"), stored),
        }  # fmt: skip
        for recipe, (g, w) in runs.items():
            found = sent(g, mesh, w, x)
            plain = moved(sent(f if recipe.startswith("inference") else training, mesh, weights, x))
            ratio = moved(found) / plain
            kilobytes = ", ".join(f"{n / 1e3:.0f} {o} {t}" for (o, t), n in sorted(found.items()))
            print(f"| {name} | {recipe} | {kilobytes} | {ratio:.2f} |", flush=True)
            assert ratio < 0.505 or "collective" not in recipe
    if device:
        return
    found = unlike()
    print(f"losses that differ from one device's: {found} of {[x.size] * 2}")
    assert not any(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", help="compile for 8 of it, in place of CPUs")
    main(parser.parse_args().device)
