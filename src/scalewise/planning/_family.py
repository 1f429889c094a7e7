"""All plans of a program as one function of a vector, which JAX differentiates.

An operand ``x`` is replaced by ``x + sum(theta[c] * (rounded_c(x) - x))`` over its possible
settings ``c``. At zero that is the program itself, where one element for each operand is 1 it is
the program under a plan. The derivative with respect to ``theta[c]`` is the gradient times the
rounding's own error, summed over all elements, uses and iterations of loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..autoscaling import Boundaries, Operand
from ..autoscaling._operand_settings import Role
from ..autoscaling._overrides import FormatOverrides
from ..autoscaling._roles import between_activations
from ..autoscaling._value import Memo, ScaledValue
from ..interpret import Argument, Equation, Program, run
from ..primitives import params
from ._sites import WIDE, float_results

EXCHANGED: Mapping[Role, Role] = {
    "weight": "activation", "activation": "weight", "gradient": "gradient",
}  # fmt: skip
Columns = Mapping[tuple[int, Role], Mapping[Operand, int]]
"""By site and role of an operand, its possible settings and their indices in the vector."""


@dataclasses.dataclass(frozen=True)
class _Perturbed(Boundaries):
    """Adds a share of each possible rounding's error to each operand; see :class:`Family`."""

    index: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    columns: Columns = dataclasses.field(default_factory=dict)
    swapped: frozenset[int] = frozenset()
    theta: jax.Array | None = None

    def operands(self, equation: Equation, values: Sequence[ScaledValue]):
        attention = between_activations(equation, values)
        axes = params.contracted_axes(equation)
        site = self.index[equation.path]
        changed = []
        for value, (_, role), own in zip(
            values, self.uses(equation, values, attention), axes, strict=True
        ):
            role = EXCHANGED[role] if site in self.swapped else role
            settings = self.columns.get((site, role), {})
            if settings and not value.integers and value.constant_value is None:
                value = self._perturbed(value, settings, own)
            changed.append(value)
        return super().operands(equation, changed)

    def _perturbed(
        self, value: ScaledValue, settings: Mapping[Operand, int], axes: tuple[int, ...]
    ) -> ScaledValue:
        assert self.theta is not None
        x = value.data
        still = dataclasses.replace(value, data=lax.stop_gradient(x), memo=Memo())
        moved = x
        for setting, column in settings.items():
            error = self.numbers(still, setting, axes) - still.data
            moved = moved + self.theta[column].astype(x.dtype) * lax.stop_gradient(error)
        return dataclasses.replace(value, data=moved, memo=Memo())


@dataclasses.dataclass(frozen=True)
class Family:
    """A program under each possible plan."""

    program: Program
    index: Mapping[tuple[int, ...], int]  # the site of each contraction by its path
    columns: Columns
    swapped: frozenset[int]  # the sites whose roles are exchanged; see :class:`Site`
    size: int  # of the vector

    def outputs(self, theta: jax.Array, arrays: Sequence[Argument]) -> list[jax.Array]:
        """Returns the outputs that are floats, for shares of each rounding's error."""
        by = _Perturbed(
            WIDE, overrides=FormatOverrides(()), index=self.index, columns=self.columns,
            swapped=self.swapped, theta=theta,
        )  # fmt: skip
        return float_results(self.program, by, run(self.program, by, (), arrays)[1])

    @property
    def zero(self) -> jax.Array:
        return jnp.zeros(self.size, jnp.float32)

    def chosen(self, columns: Sequence[int]) -> np.ndarray:
        """Returns the vector of a plan that rounds as these columns say."""
        theta = np.zeros(self.size, np.float32)
        theta[list(columns)] = 1
        return theta
