"""Lists the dtype in which a policy runs each operation of a program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from .._check import checked
from .._types import PyTree
from ..interpret import Equation, transform
from ._autocast import Autocast, converted
from ._policy import PolicyLike
from ._policy import policy as policy_


@dataclasses.dataclass(frozen=True)
class Placement:
    """Operations of one kind from one source line, and the dtype they run in.

    Attributes:
        primitive: of the operations.
        dtype: they run in.
        direction: ``"forward"``, ``"backward"``, or ``"update"`` for a training step's optimizer.
        where: file, line and function.
        count: how many there are.
    """

    primitive: str
    dtype: str
    direction: str
    where: str
    count: int


@checked
def placements(f: Callable, policy: PolicyLike = "float16") -> Callable:
    """Returns a function of ``f``'s arguments that lists the dtype of each operation.

    Returns:
        A function that returns Placements, in program order; nothing is computed.

    Example:
        >>> import jax.numpy as jnp
        >>> show = placements(lambda x: jnp.exp(jnp.tanh(x @ x)), "bf16")
        >>> [(p.primitive, p.dtype) for p in show(jnp.ones((2, 2)))]
        [('dot_general', 'bfloat16'), ('tanh', 'bfloat16'), ('exp', 'float32')]
    """

    chosen = policy_(policy)

    def show(*args: PyTree, **kwargs: PyTree) -> tuple[Placement, ...]:
        counts: dict[tuple[str, str, str, str], int] = {}

        def record(equation: Equation, dtype: np.dtype) -> None:
            key = (equation.name, str(dtype), equation.direction, equation.where())
            counts[key] = counts.get(key, 0) + 1

        prepare = functools.partial(converted, policy=chosen)
        program = transform(f, Autocast(chosen, record), name="autocast", prepare=prepare)
        jax.eval_shape(program, *args, **kwargs)
        found = [Placement(*key, count=n) for key, n in counts.items()]
        if any(p.direction == "backward" for p in found):
            return tuple(found)
        # a program without a backward pass has no optimizer
        return tuple(dataclasses.replace(p, direction="forward") for p in found)

    return show
