"""Measures how long JAX takes to trace, lower and compile a training step under each recipe.

    python -m benchmarks.compile_time                     # a VAE under several recipes
    python -m benchmarks.compile_time --program gpt --recipes fp16 fp8
    python -m benchmarks.compile_time --program mlp --recipes fp8 mxfp8 nvfp4

Each round traces, lowers and compiles each step anew, in turn, with JAX's caches cleared. Times are
CPU seconds of this process, all threads together, so that other work on the machine hardly counts;
medians of the rounds, and for each recipe the median of its ratios to float32 in the same round.
Equations are those of the traced jaxpr with all that it calls, operations the lines of the lowered
module.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scalewise as sw
from scalewise._jax import open_jaxpr
from scalewise.cli._program import load_program
from scalewise.interpret._equation import nested_jaxprs

Tree = Any
PARTS: tuple[str, ...] = ("trace", "lower", "compile")
RECIPES = ("fp16", "fp8", "mxfp8", "mxfp4_forward", "fp16_every_op")
OPTIMIZER = optax.adam(1e-3)


# -- programs ------------------------------------------------------------------------------------


def vae(inputs: int = 784, hidden: int = 256, latent: int = 32, batch: int = 64) -> Any:
    """Adam step of a variational autoencoder (arXiv 1312.6114), and its arguments."""
    sizes = {"hidden": (inputs, hidden), "mean": (hidden, latent), "spread": (hidden, latent)}
    sizes |= {"wider": (latent, hidden), "output": (hidden, inputs)}

    def layer(params: Tree, name: str, x: jax.Array) -> jax.Array:
        return x @ params[name]["weight"] + params[name]["bias"]

    def loss(params: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.nn.gelu(layer(params, "hidden", x))
        mean, spread = layer(params, "mean", h), layer(params, "spread", h)
        z = mean + jnp.exp(spread / 2) * jax.random.normal(key, mean.shape)
        logits = layer(params, "output", jax.nn.gelu(layer(params, "wider", z)))
        unlike = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), axis=-1)
        divergence = jnp.sum(jnp.exp(spread) + mean**2 - 1 - spread, axis=-1) / 2
        return jnp.mean(unlike + divergence)

    def step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        params, optimizer, key = state
        key, own = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, x, own)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer, key), value

    keys = iter(jax.random.split(jax.random.key(0), len(sizes)))
    params = {
        name: {"weight": jax.random.normal(next(keys), s) * s[0] ** -0.5, "bias": jnp.zeros(s[1])}
        for name, s in sizes.items()
    }
    x = jax.random.uniform(jax.random.key(1), (batch, inputs))
    return step, ((params, OPTIMIZER.init(params), jax.random.key(2)), x)


def gpt() -> Any:
    """The training step of examples/gpt.py and its arguments."""
    file = Path(__file__).parents[1] / "examples" / "gpt.py"
    program = load_program(file)
    return program.train_step, (program.init(0), next(iter(program.batches(file.read_bytes(), 0))))


def mlp(width: int = 256, classes: int = 10, layers: int = 5, batch: int = 64) -> Any:
    """AdamW step of a classifier of five layers, and its arguments."""
    optimizer, key = optax.adamw(1e-3), jax.random.key(0)
    sizes = [width] * layers + [classes]

    def loss(params: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.gelu(x @ layer["weight"] + layer["bias"])
        logits = x @ params[-1]["weight"] + params[-1]["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(state: Tree, x: jax.Array, labels: jax.Array) -> tuple[Tree, jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = [
        {"weight": jax.random.normal(k, (n, m)) * n**-0.5, "bias": jnp.zeros(m)}
        for k, n, m in zip(jax.random.split(key, layers), sizes[:-1], sizes[1:], strict=True)
    ]
    x = jax.random.normal(key, (batch, width))
    return step, ((params, optimizer.init(params)), x, jnp.zeros(batch, jnp.int32))


PROGRAMS: dict[str, Callable[[], Any]] = {"vae": vae, "gpt": gpt, "mlp": mlp}


# -- measurement ---------------------------------------------------------------------------------


def parts(step: Callable[..., Any], arguments: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns CPU seconds to trace, lower and compile a step, and figures on the program."""
    jax.clear_caches()
    times = [time.process_time()]
    traced = jax.jit(step).trace(*arguments)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    seconds = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
    memory = compiled.memory_analysis()
    assert memory is not None
    found = {
        "equations": equations(traced.jaxpr),
        "operations": lowered.as_text().count(" = "),
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    return seconds, found


def equations(jaxpr: Any) -> int:
    """Returns the number of equations of a jaxpr, including those of inner jaxprs."""
    body = open_jaxpr(jaxpr)[0]
    return len(body.eqns) + sum(
        equations(inner) for eqn in body.eqns for inner in nested_jaxprs(eqn)
    )


def measured(program: str, recipes: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row for float32 and one for each recipe; a round that loads JAX isn't counted."""
    step, arguments = PROGRAMS[program]()
    steps = {"float32": step} | {name: sw.autoscale(step, name) for name in recipes}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    found: dict[str, Any] = {}
    parts(step, arguments)
    for _ in range(rounds):
        for name, f in steps.items():
            own, found[name] = parts(f, arguments)
            seconds[name].append(own | {"total": sum(own.values())})
    rows = []
    for name, own in seconds.items():
        row: dict[str, Any] = {"program": program, "recipe": name}
        for part in (*PARTS, "total"):
            plain = [s[part] for s in seconds["float32"]]
            row[f"{part}, s"] = round(statistics.median(s[part] for s in own), 3)
            ratios = np.divide([s[part] for s in own], plain)
            row[f"{part}, of float32's"] = round(float(np.median(ratios)), 2)
        rows.append(row | found[name])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--program", choices=PROGRAMS, default="vae")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for row in measured(given.program, given.recipes, given.rounds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
