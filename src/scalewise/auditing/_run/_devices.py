"""Products that a device's matrix units add up, beside the same products added exactly."""

from __future__ import annotations

import dataclasses

from ...autoscaling import Boundaries
from ...devices import MatrixUnitsLike
from ...interpret import Interpretation
from ._session import ExactSums, Outcome, Session
from ._specialize import of_recipe


def on_device(low: Interpretation, device: MatrixUnitsLike) -> Interpretation:
    if not isinstance(low, Boundaries):
        raise ValueError(
            f"audit: device={device!r}; expected low to be a recipe then, such as 'fp8' or "
            "recipes.bf16"
        )
    return of_recipe(dataclasses.replace(low.recipe, emulate=device))


def with_exact_sums(session: Session, outcome: Outcome) -> Outcome:
    low = session.low
    if not isinstance(low, Boundaries) or low.recipe.emulate is None:
        return outcome
    plain = session.with_low(of_recipe(dataclasses.replace(low.recipe, emulate=None))).run()
    made = {e.index: e.introduced for e in plain.equations if e["operands"]}
    session.exact_sums = ExactSums(plain.error.relative, made)
    return dataclasses.replace(outcome, exact_sums=session.exact_sums)
