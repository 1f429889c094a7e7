"""Histories of operands' largest magnitudes, from which delayed scaling finds scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..formats import Format
from ..rounding import exportable
from ..scaled import Amax, Axes, Scales, Scaling, to_top


def foreign_history(why: str) -> ValueError:
    return ValueError(
        f"autoscale: the history {why}: it was made for another program; "
        "make one by init(...) with arguments like these"
    )


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AmaxHistory:
    """Largest magnitudes of each operand in the last steps.

    Attributes:
        amaxes: float32, ``[operands, steps]``, the newest first; 0 for steps before the first.
        operand_ids: of each operand, the number of its contraction among the program's (after the
            numbers of the loops and calls around it), ``/`` and its own position.
    """

    amaxes: jax.Array
    operand_ids: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def after(self, newest: jax.Array) -> AmaxHistory:
        """Returns the history after one more step.

        Args:
            newest: that step's largest magnitudes, float32, ``[operands]``, as
                :meth:`WithHistory.observe` returns them; those that aren't finite don't count.
        """
        newest = jnp.where(jnp.isfinite(newest), newest, 0)[:, None]
        amaxes = jnp.concatenate([newest, self.amaxes[:, :-1]], -1)
        return AmaxHistory(amaxes, self.operand_ids)


@dataclasses.dataclass(frozen=True)
class FixedAmax(Scaling):
    """Scales by a given largest magnitude; by 1 if that is 0."""

    magnitude: jax.Array
    power_of_two: bool

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        scales = to_top(self.magnitude.astype(x.dtype), fmt, self.power_of_two)
        shape = (1,) * x.ndim if keepdims else ()
        scales = (jnp.where(self.magnitude > 0, s, jnp.ones_like(s)) for s in scales)
        scale, inverse = (s.reshape(shape) for s in scales)
        return scale, inverse


@dataclasses.dataclass(frozen=True, eq=False)
class OperandAmaxes:
    """The magnitudes that delayed scaling gets and those that it records, while a program runs.

    Attributes:
        earlier: each operand's largest magnitude in earlier steps, by operand id; None if each
            array determines its own scale.
        past: for one contraction at a time, in place of ``earlier``: float, ``[2]``, of each
            operand; 0 if it determines its own scale.
        newest: receives this step's magnitudes by operand id, while a contraction is computed.
        seen: the ids of the operands that the program has had so far.
    """

    earlier: Mapping[str, jax.Array] | None = None
    past: jax.Array | None = None
    newest: dict[str, jax.Array] | None = None
    seen: set[str] = dataclasses.field(default_factory=set)

    def strategy(self, operand_id: str, largest: jax.Array, scaling: Scaling) -> Scaling:
        """Returns how the scale of an operand is chosen whose largest magnitude is ``largest``."""
        if self.past is not None:
            past = self.past[int(operand_id.rpartition("/")[2])].astype(jnp.float32)
            return FixedAmax(jnp.where(past > 0, past, largest), scaling.power_of_two)
        if self.earlier is None:
            return Amax(scaling.power_of_two)
        return FixedAmax(self.largest_before(operand_id), scaling.power_of_two)

    def record(self, operand_id: str, largest: jax.Array) -> None:
        """Records the largest magnitude of an operand, whose copy may be shared by others."""
        if self.newest is not None:
            self.largest_before(operand_id)
            self.seen.add(operand_id)
            self.newest[operand_id] = largest

    def largest_before(self, operand_id: str) -> jax.Array:
        """Returns an operand's largest magnitude in earlier steps; 0 if there were none."""
        if self.earlier is None:
            return jnp.float32(0)
        if operand_id not in self.earlier:
            raise foreign_history(f"knows no operand {operand_id}")
        return self.earlier[operand_id]
