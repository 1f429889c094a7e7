"""Chains and loops of operations with constants: scales that only propagate must not drift.

A chain is 1 to 1,000 operations that multiply by known factors, one after the other or as a loop's
body, whose product keeps float32 finite. A scale that is wrong by a constant in each operation is
wrong by a power of it at the end. What has to hold, of the result and (in some chains) of its
gradient: it differs from float32's no more than random roundings to FP16
(:mod:`.disturbed`), or FP16's own without scales, explain.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw
from proofs.fuzz.disturbed import Model, Rounding, disturbed, traced, wide
from proofs.fuzz.programs import EVERY_OP, SAMPLES, UNIT_SIZE, forget, unlike
from proofs.fuzz.programs import prepare as prepare

SIZE = 4
LONGEST = 1000
UNROLLED = 40  # a longer chain is a loop, so that it is compiled soon
Function = Callable[[Any, Any], Any]


def _swapped(x: Any, y: Any) -> Any:
    return jnp.concatenate([x[2:], x[:2]])


# Operations that change no magnitude: the scales of `never` follow those of the first group.
MOVES: dict[str, Function] = {
    "neg": lambda x, y: -x, "rev": lambda x, y: lax.rev(x, (0,)),
    "reshape": lambda x, y: x.reshape(2, 2).T.reshape(SIZE), "swapped": _swapped,
}  # fmt: skip
KEEPS: dict[str, Function] = {
    **MOVES,
    "parts": lambda x, y: jnp.maximum(x, 0) + jnp.minimum(x, 0),
    "halves": lambda x, y: 0.5 * x + 0.5 * x, "other": lambda x, y: x * y / y,
    "root": lambda x, y: jnp.sign(x) * jnp.sqrt(x * x), "there and back": lambda x, y: x + y - y,
    "selected": lambda x, y: jnp.where(x > 1e9, y, x),
    "elements": lambda x, y: jnp.stack([x[0], x[1], x[2], x[3]]),
}  # fmt: skip
# Operations that multiply by a constant.
FACTORS: dict[str, Callable[[float], Function]] = {
    "times": lambda c: lambda x, y: x * c, "over": lambda c: lambda x, y: x / (1 / c),
}  # fmt: skip
SUMS: dict[str, Callable[[float], Function]] = {
    "plus": lambda c: lambda x, y: x + x * (c - 1), "minus": lambda c: lambda x, y: x - x * (1 - c),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chain:
    """``turns`` times the operations of ``body``: names and, of some, a constant factor."""

    body: tuple[tuple[str, float | None], ...]
    turns: int
    loop: str
    gradient: bool

    def __call__(self, x: Any, y: Any) -> Any:
        """The chain's value; with ``gradient``, the derivative of a weighted sum as well."""
        steps = [KEEPS[name] if c is None else (FACTORS | SUMS)[name](c) for name, c in self.body]

        def body(x: Any) -> Any:
            for step in steps:
                x = step(x, y)
            return x

        def value(x: Any) -> Any:
            match self.loop:
                case "unrolled":
                    for _ in range(self.turns):
                        x = body(x)
                    return x
                case "scan":
                    return lax.scan(lambda x, _: (body(x), None), x, None, length=self.turns)[0]
                case "while":
                    return lax.while_loop(
                        lambda s: s[1] < self.turns, lambda s: (body(s[0]), s[1] + 1), (x, 0)
                    )[0]
            half = self.turns // 2  # a loop in a loop
            inner = lambda x: lax.fori_loop(0, half, lambda i, x: body(x), x)  # noqa: E731
            return lax.scan(lambda x, _: (inner(x), None), x, None, length=2)[0]

        if not self.gradient:
            return [value(x)]
        return [value(x), jax.grad(lambda x: jnp.sum(value(x) * jnp.arange(1.0, 5.0)))(x)]


def chain(rng: random.Random, *, sums: bool) -> Chain:
    """A random chain; without ``sums`` its operations are products and moved elements alone."""
    operations = round(2 ** rng.uniform(0, math.log2(LONGEST)))
    length = min(operations, rng.randint(1, 6))
    turns = max(1, operations // length)
    keeps, factors = (KEEPS, FACTORS | SUMS) if sums else (MOVES, FACTORS)
    names = [rng.choice([*keeps, *factors, *factors, *factors]) for _ in range(length)]
    if not set(names) & set(factors):
        names[0] = rng.choice([*factors])
    # the constants' product is that of the result's magnitude, over all turns
    logs = {i: rng.uniform(-3, 3) for i, name in enumerate(names) if name in factors}
    last = max(logs)
    logs[last] = rng.choice([0, 0, rng.uniform(-40, 40)]) / turns - sum(logs.values()) + logs[last]
    body = tuple((n, 2.0 ** logs[i] if i in logs else None) for i, n in enumerate(names))
    gradient = rng.random() < 0.4
    loops = ["scan", "nested"] + ["while"] * (not gradient)
    loop = "unrolled" if operations <= UNROLLED else rng.choice(loops)
    return Chain(body, turns, loop, gradient)


L2 = Rounding(10, 2.0**-24, nonzero=True)
RECIPES: dict[str, tuple[sw.Recipe, Model]] = {
    "fp16_every_op": (sw.recipes.fp16_every_op, Model(EVERY_OP)),
    "scalify": (sw.recipes.scalify, Model(UNIT_SIZE, propagated=True)),
    "l2": (sw.Scalify(rescale="l2"), Model(L2)),
    "never": (sw.Scalify(rescale="never"), Model(L2)),
}


def plain(f: Function, given: list[Any], want: list[np.ndarray]) -> list[np.ndarray]:
    """Returns what FP16 without scales makes of a chain, whose roundings aren't independent:
    ``x + y - y`` rounds to the same numbers in each turn. Results that aren't finite explain
    nothing."""
    outs = sw.emulate(f, "fp16")(*map(jnp.asarray, given))
    return [np.where(np.isfinite(wide(y)), wide(y), w) for y, w in zip(outs, want, strict=True)]


def check(seed: int, index: int) -> list[str]:
    """How the chain's results under a recipe differ by more than roundings explain."""
    forget()
    rng = random.Random(f"chains {seed}/{index}")
    name = rng.choice([*RECIPES])
    recipe, model = RECIPES[name]
    made = chain(rng, sums=name != "never" and rng.random() < 0.5)
    scale = 2.0 ** rng.choice([0, 0, -12, 8])
    x, y = (np.asarray([rng.gauss(0, 1) for _ in range(SIZE)], np.float32) for _ in range(2))
    given = [x * np.float32(scale), y + np.copysign(np.float32(0.25), y)]
    text = f"{name}: {made}"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        want = [wide(v) for v in made(*map(jnp.asarray, given))]
        try:
            got = [wide(v) for v in sw.autoscale(made, recipe)(*map(jnp.asarray, given))]
        except Exception as error:
            return [f"{type(error).__name__}: {str(error).splitlines()[0][:200]} in {text}"]
        jaxpr = traced(made, given)
        noise = np.random.default_rng(rng.randrange(1 << 30))
        runs: list[list[np.ndarray]] = []
        found = [""]
        most = SAMPLES if made.loop == "unrolled" else 32  # a run of a loop takes a second
        while found and len(runs) <= most:
            last = len(runs) == most
            runs.append(plain(made, given, want) if last else disturbed(jaxpr, model, noise))
            pairs = enumerate(zip(got, want, strict=True))
            found = [s for s in (unlike(i, a, b, runs) for i, (a, b) in pairs) if s]
    return [f"{sentence} in {text}" for sentence in found]
