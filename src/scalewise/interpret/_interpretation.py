"""What an interpretation has to say: how values look, and what an equation does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from ._equation import Equation

Boundary = Literal["carry", "branch", "stacked", "mapped"]


class Interpretation:
    """Identity, and the base of all others: floats are lifted, equations are bound as they are.

    A *value* is any pytree that stands for one float array; integers, booleans, complex numbers
    and keys stay plain arrays. Which arrays are lifted is decided by the abstract type alone, so
    that loop carries and branches agree by construction.

    A rule may thread a state (statistics, say) through the program: a pytree of fixed shape, handed
    from equation to equation in program order, also through loops and branches.

    Attributes:
        inline: nested jits are no more than their bodies (but for those with compiler options).
    """

    inline: ClassVar[bool] = False

    def context(self) -> AbstractContextManager[Any]:
        """The configuration (``jax.enable_x64``, say) in which the program is walked."""
        return nullcontext()

    def is_argument(self, leaf: Any) -> bool:
        """Whether a node of an argument's pytree stands for one array (a ScaledArray, say)."""
        return False

    def abstract(self, leaf: Any) -> Any:
        """What the user's function is traced with in place of an argument."""
        return leaf

    def lift(self, x: Any, aval: Any) -> Any:
        """The value that stands for a plain float array (or argument) ``x``."""
        return x

    def constant(self, x: Any, aval: Any) -> Any:
        """The value of a float literal, whose number is known now."""
        return self.lift(x, aval)

    def lower(self, value: Any, aval: Any) -> jax.Array:
        """The plain array, of the dtype of ``aval``, that ``value`` stands for."""
        return value

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        """What the caller gets for the output at ``path`` (as ``jax.tree_util.keystr`` has it)."""
        return self.lower(value, aval)

    def residual(self, value: Any, aval: Any) -> Any:
        """``value`` as it waits for the backward pass, where that runs as a program of its own."""
        return value

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        """The gradient in the form of the argument that it belongs to."""
        return gradient

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """One equation on values. Inputs and outputs that aren't floats are plain arrays."""
        return state, equation.bind(*inputs)

    def unlifted(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """One equation that has no float among its operands and results: plain arrays all."""
        return state, equation.bind(*inputs)

    def control(self, equation: Equation, run: Callable) -> Callable:
        """What is called in place of ``run``, ``(state, inputs) -> (state, outputs)``, which
        re-issues a loop or a branch: ``run`` itself, or a compiled one kept from the last time."""
        return run

    def eager_iterations(self, state: Any, equation: Equation) -> int:
        """How many turns of a loop are walked one by one, at most, rather than one traced for all.

        A loop of more turns is re-issued (a while loop after these); a branch is walked alone if
        this isn't 0. Only for a walk outside of ``jit``, where numbers are known.
        """
        return 0

    def merge(self, state: Any, axes: Any) -> Any:
        """One state from those that devices along the mesh's ``axes`` came to; the first one's."""
        return state

    def canonical(self, value: Any, aval: Any, boundary: Boundary, equation: Equation) -> Any:
        """``value`` in the one form that depends only on ``aval``, ``boundary`` and ``equation``.

        Called where control flow meets: on what enters and leaves a loop's carry, leaves a branch,
        or is stacked by a scan; and on what enters and leaves a map over a mesh of devices.
        """
        return value

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> Any:
        """Elementwise choice between two canonical carries of one type (a vmapped while loop)."""
        return jnp.where(predicate, on_true, on_false)

    def invariant(self, value: Any, readers: Set[str], equation: Equation) -> Any:
        """A constant of the loop ``equation``, before it; ``readers`` name primitives in its body.

        What each turn would do to it alike can be done here, once.
        """
        return value

    def inside(self, value: Any) -> Any:
        """A value of one trace as a loop's body within it sees it; what it remembers from there
        must not come back out."""
        return jax.tree.map(lambda leaf: leaf, value)

    def unstack(self, value: Any, aval: Any) -> Any:
        """A value that a scan walks along its first axis: every leaf has that axis."""
        return value

    def stack(self, value: Any, aval: Any) -> Any:
        """A stacked value as it came out of a scan: each leaf of the canonical form got an axis."""
        return value
