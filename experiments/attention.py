"""Trains a GPT and a ViT with attention in FP8, beside float32 and ``fp8`` without it.

    python -m experiments.attention          # continues where it stopped
    python -m experiments.attention --page   # the table of docs/results/training.md

Each run is a line of ``docs/attention.jsonl``, as ``experiments.recipe_training`` has them. The GPT
is examples/gpt.py; the ViT has two layers, the digits of scikit-learn in 16 patches, and labels
smoothed by 0.1.
"""

import argparse
import dataclasses
import json
import statistics

import jax
import jax.numpy as jnp
import optax

import scalewise as sw
from scalewise.autoscaling.recipes import FP8_BLOCKS
from scalewise.cli._program import TrainingProgram

from . import models, parity, recipe_training
from .recipe_variants import CHANCE, VARIANTS

FILE = recipe_training.FILE.with_name("attention.jsonl")
LATE = sw.Delayed()
ROTATED = sw.Operand(FP8_BLOCKS, tile=128, hadamard=32)
ATTENTION = {
    "fp8, attention": ("fp8", sw.Attention()),
    "fp8, attention, E4M3 gradients": ("fp8", sw.Attention(gradients="e4m3fn")),
    "fp8_delayed, attention": (
        "fp8_delayed",
        sw.Attention(sw.Operand("e4m3fn", LATE), gradients=sw.Operand("e5m2", LATE)),
    ),
    "fp8, attention, rotated blocks": ("fp8", sw.Attention(ROTATED)),
}
VARIANTS |= {
    name: dataclasses.replace(sw.recipes.CATALOGUE[recipe], attention=own)
    for name, (recipe, own) in ATTENTION.items()
}
RECIPES = ("float32", CHANCE, "fp8", *ATTENTION)
STEPS, SEEDS, WIDTH, HEADS, LAYERS = 300, (0, 1, 2), 64, 2, 2
OPTIMIZER = optax.adamw(1e-3)


def init(seed):
    random, width = jax.random.key(seed), WIDTH
    shapes = {
        "patch": (4, width), "places": (16, width), "head": (width, 10),
        **{f"{n}{i}": (a * width, b * width) for i in range(LAYERS)
           for n, a, b in (("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1))},
    }  # fmt: skip
    keys = dict(zip(shapes, jax.random.split(random, len(shapes)), strict=True))
    params = {n: jax.random.normal(keys[n], s) * s[0] ** -0.5 for n, s in shapes.items()}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(p, batch):
    images = batch["images"].reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4)
    x = images.reshape(len(images), 16, 4) @ p["patch"] + p["places"]
    for i in range(LAYERS):
        y = jax.nn.standardize(x) @ p[f"qkv{i}"]
        q, k, v = jnp.split(y.reshape(len(x), 16, 3 * HEADS, -1), 3, axis=2)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p[f"out{i}"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p[f"up{i}"]) @ p[f"down{i}"]
    logits = jax.nn.standardize(x).mean(1) @ p["head"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


def train_step(state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss


def vit():
    digits = models.model("digits_equinox")
    return TrainingProgram("vit", init, train_step, digits.batches, loss_of, OPTIMIZER)


def page():
    """Returns the table of each recipe's loss, and the ratio to float32's on the same seeds."""
    rows = parity.rows(FILE)
    lines = ["| recipe | GPT | of float32's | ViT | of float32's |", "|---|---:|---:|---:|---:|"]
    for recipe in RECIPES:
        cells = [recipe]
        for model in ("gpt", "vit"):
            losses = {(r["recipe"], r["seed"]): r["loss"] for r in rows if r["model"] == model}
            own = statistics.fmean(losses[recipe, seed] for seed in SEEDS)
            plain = statistics.fmean(losses["float32", seed] for seed in SEEDS)
            cells += [f"{own:.4f}", f"{own / plain:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page", action="store_true", help="print the table of the runs made")
    if parser.parse_args().page:
        print(page())
        return
    for name, program in (("vit", vit()), ("gpt", models.model("gpt"))):
        for recipe in RECIPES:
            about = {"model": name, "recipe": recipe, "steps": STEPS}
            there = {parity.key(row) for row in parity.rows(FILE)}
            seeds = [s for s in SEEDS if parity.key(about | {"seed": s}) not in there]
            for found in recipe_training.train(program, recipe, STEPS, seeds):
                line = json.dumps(about | found | parity.versions())
                with FILE.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                print(line, flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
