"""Failures of low-precision programs whose fault is how a device's matrix units add up products.

proofs/gallery.py checks that the audit finds each marked line; docs/gallery.md lists its findings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import scalewise as sw
from scalewise.devices import MatrixUnits


@dataclass(frozen=True)
class Case:
    """A failure: where it was reported, a program that shows it, and the expected finding.

    Attributes:
        reference: a thread or a paper.
        call: the function to audit.
        arguments: returns its arguments.
        low: the recipe.
        kinds: the kinds of finding that are correct.
        device: whose matrix units add the products.
    """

    reference: str
    call: Callable
    arguments: Callable[[], tuple[Any, ...]]
    low: Any
    kinds: tuple[str, ...]
    device: Any


def pooled(x, w):
    return (x @ w) / 4096.0  # <- here


def weight_gradient(w, x, g):
    def loss(w):
        return jnp.sum((x @ w) * g) / 8192.0  # <- here

    return jax.grad(loss)(w)


def split_over_k(x, w):
    return (x @ w) / 4096.0  # <- here


def half_accumulator(x, w):
    return (x @ w) / 4096.0  # <- here


def uniform(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape)


DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, 3.3.2"
# whose products lose accuracy by the sums of a device's matrix units, not by their operands
ACCUMULATORS: dict[str, Case] = {
    "A long sum of positive products": Case(
        f"{DEEPSEEK}: 14 bits are kept by an H100's FP8 products",
        pooled,
        lambda: (uniform(4, 1024), uniform(1024, 4, seed=1)),
        "fp8",
        ("accumulation",),
        device="h100",
    ),
    "The gradient of a weight over many tokens": Case(
        f"{DEEPSEEK}; the sum is over the tokens of a batch",
        weight_gradient,
        lambda: (
            uniform(8, 4) - 0.5,
            uniform(1024, 8, seed=1),
            uniform(1024, 4, seed=2),
        ),
        "fp8",
        ("accumulation",),
        device="h100",
    ),
    "A sum split in four is still too long": Case(
        f"{DEEPSEEK}; split K, as cuBLAS does it for few rows and columns",
        split_over_k,
        lambda: (uniform(4, 4096), uniform(4096, 4, seed=1)),
        "fp8",
        ("accumulation",),
        device=MatrixUnits("h100", splits=4),
    ),
    "An accumulator in FP16": Case(
        "Fasi et al. 2021, doi 10.7717/peerj-cs.330: tensor cores that accumulate in FP16",
        half_accumulator,
        lambda: (uniform(4, 1024), uniform(1024, 4, seed=1)),
        sw.recipes.fp16.with_operands(scaling=sw.Unit()),
        ("accumulation",),
        device=MatrixUnits("h100", result="fp16"),
    ),
}
