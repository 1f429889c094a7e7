"""Audits of random programs that overflow, cancel and divide by numbers near zero.

What has to hold: nothing raises, but for a program without a reference; the shares of the balance
sheet add up to the error; and a function with the fixes is finite where the audit says so.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from proofs.fuzz.programs import MATRIX, OPERATIONS, VECTOR, Operation, of

from proofs.fuzz.programs import forget, inputs, prepare, program  # isort: skip

__all__ = ["check", "prepare"]

RISKY: dict[str, Operation] = {
    **of(
        (MATRIX,), MATRIX,
        squared=lambda x: x * x, exp=jnp.exp, log=lambda x: jnp.log(jnp.abs(x)),
        inverse=lambda x: 1 / x, normed=lambda x: x / (jnp.sum(x * x) + 1e-8), cube=lambda x: x**3,
        unit=lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)), larger=lambda x: 300 * x,
        smaller=lambda x: 1e-5 * x, decayed=lambda x: 0.9999 * x, rounded=jnp.round,
        standard=lambda x: (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-5),
        log_of_softmax=lambda x: jnp.log(jax.nn.softmax(x) + 1e-9),
        largest=lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1) * x,
    ),
    **of(
        (MATRIX, MATRIX), MATRIX,
        squares=lambda x, y: x * x - y * y, cancelled=lambda x, y: (x + 1000 * y) - 1000 * y,
        quotient=lambda x, y: x / y, power=lambda x, y: jnp.abs(x) ** y,
        chosen=lambda x, y: jnp.where(x > y, x * 1e3, y),
    ),
    **of(
        (MATRIX,), VECTOR,
        product=lambda x: jnp.prod(x, 0), l2=lambda x: jnp.linalg.norm(x, axis=0),
        sum_of_exp=lambda x: jnp.log(jnp.sum(jnp.exp(x), 1)), total=lambda x: jnp.sum(x * x, 1),
    ),
}  # fmt: skip
LOWS = ("fp16", "bf16", "e4m3fn", "float32", "p=f32,c=f16,o=f32", sw.recipes.fp8, sw.recipes.mxfp8)
NO_REFERENCE = ("NaN in the reference run", "no output", "depends on floats")


def check(seed: int, index: int) -> list[str]:
    """The properties that the audit of a random program fails."""
    forget()
    rng = random.Random(f"audits/{seed}/{index}")
    made, (given, kind) = program(rng, OPERATIONS | RISKY), inputs(rng)
    # cubes and sums of larger numbers differ by less than float64's last digit
    given = [jnp.clip(jnp.nan_to_num(x), -1e3, 1e3) for x in given]
    low, trials = rng.choice(LOWS), rng.choice([40, 40, 5, 0])
    own = rng.choice([None, "all"]) if low in LOWS[:3] else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(_failures(made, given, low, trials=trials, dtypes=own))
        except Exception as error:
            without = isinstance(error, ValueError) and any(x in str(error) for x in NO_REFERENCE)
            found = [] if without else [f"{type(error).__name__}: {error}"]
    return [f"{low}, {own}, inputs {kind}: {x} in {made}" for x in found]


def _failures(f: Callable[..., Any], given: list[jax.Array], low: Any, **options: Any) -> list[str]:
    def audited(*args: jax.Array) -> Any:
        return f(*args)

    report, found = sw.audit(audited, low, **options)(*given), []
    report.json()
    if report.sheet.residual > 1e-4:
        found.append(f"the shares are {report.sheet.residual:.1g} off")
    # a function in float32 can't return what only float64 holds
    if low in LOWS[:3] and report.wide == "float32" and any(x.fix for x in report.findings):
        outs = report.apply_fixes(audited)(*given)
        bad = sum(int(np.sum(~np.isfinite(np.asarray(x, np.float64)))) for x in outs)
        if bad > report.error_fixed.non_finite + report.infinite:
            found.append(f"{bad} numbers aren't finite with the fixes, not {report.error_fixed}")
    return found
