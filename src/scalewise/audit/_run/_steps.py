"""One equation in both lanes: its exact result, its rounding, what is noted; compiled, and kept."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...emulate import EXACT
from ...interpret import Equation, Interpretation, is_float
from ...rounding import to_float64
from ._elementary import GIVEN, joint, operation
from ._flat import ELEMENTWISE, RESHAPES, flat, room, unflat
from ._lane import alike, number_by_number, own_row
from ._lanes import Rounded, Wide, exact
from ._pair import Pair, shaped
from ._rounding import WIDTH, narrowed, round_by
from ._statistics import COUNT, SAMPLE, counted, positions

ADDITIONS = {"add": 1, "add_any": 1, "sub": -1}
CHOOSES = frozenset({"select_n", "max", "min", "clamp", "gather", "slice", "dynamic_slice"})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an equation is computed, and all that decides the code that this compiles to.

    Attributes:
        key: equal for equations that may share code: their place doesn't matter, and of what acts
            on each number by itself, not the shape either.
        equation: one of them.
        at: the first float among the results, or -1.
        length: the padded size of that.
        flat: whether the operands are flat as well.
        noted: whether its results are rounded, and something is to be noted of them.
        operation: which of the elementary ones it is, or GIVEN.
    """

    key: Hashable
    equation: Equation = dataclasses.field(compare=False)
    at: int = dataclasses.field(compare=False)
    length: int = dataclasses.field(compare=False)
    flat: bool = dataclasses.field(compare=False)

    @property
    def size(self) -> int:
        """How many numbers that float result has; 0 if there is none."""
        return math.prod(self.equation.out_avals[self.at].shape) if self.at >= 0 else 0

    @functools.cached_property
    def noted(self) -> bool:
        return self.equation.name not in EXACT and self.at >= 0

    @functools.cached_property
    def operation(self) -> int:
        return operation(self.equation) if self.flat else GIVEN

    @functools.cached_property
    def whole(self) -> tuple[bool, ...]:
        """Which of two operands are arrays rather than one number; a single one counts twice."""
        whole = whole_of(self.equation) if self.operation else ()
        return (whole * 2)[:2] or (True, True)

    @functools.cached_property
    def about(self) -> np.ndarray:
        """What programs are told of the equation beside its format, see ``ABOUT``."""
        sign = ADDITIONS.get(self.equation.name, 0)
        return np.array([self.size, sign, self.operation, *self.whole], np.float64)


def plan(low: Interpretation, equation: Equation, inputs: Sequence[Any]) -> Plan:
    """How ``equation`` is to be computed on these values."""
    at = next((i for i, a in enumerate(equation.out_avals) if is_float(a)), -1)
    length = room(math.prod(equation.out_avals[at].shape)) if at >= 0 else 0
    rounded, whole = isinstance(low, Rounded), whole_of(equation)
    types: Any = tuple((a.shape, a.dtype) for a in equation.in_avals + equation.out_avals)
    is_flat = bool(whole) and number_by_number(low) and all(isinstance(x, Pair) for x in inputs)
    if is_flat and not rounded:  # where operands aren't laid out by programs of their own
        is_flat = all(a.shape in (equation.out_avals[0].shape, ()) for a in equation.in_avals)
    if is_flat:
        types = (length, whole, tuple(a.dtype for a in equation.in_avals + equation.out_avals))
    key: Hashable = (equation.name, tuple(sorted(equation.params.items())), types)
    try:
        hash(key)
    except TypeError:
        key = id(equation.eqn)
    key = key if rounded else (key, alike(low, equation)[1])
    return Plan(key, equation, at, length, is_flat)


def whole_of(equation: Equation) -> tuple[bool, ...]:
    """Of what acts on each number by itself: which operands are arrays rather than one number.

    Those of the elementary operations are made as wide as the result; of others, () if an array
    has another shape than that.
    """
    if equation.name not in ELEMENTWISE or not is_float(equation.out_avals[0]):
        return ()
    own = equation.out_avals[0].shape
    if operation(equation) == GIVEN and any(a.shape not in (own, ()) for a in equation.in_avals):
        return ()
    return tuple(a.shape != () or own == () for a in equation.in_avals)


def reshapes(equation: Equation) -> bool:
    """Whether the result is the operand's numbers in the same order."""
    if equation.name == "broadcast_in_dim":  # a sum's, say, that kept its axes
        return equation.in_avals[0].size == equation.out_avals[0].size
    return equation.name in RESHAPES


@functools.lru_cache(maxsize=8192)
def compiled(step: Callable, fixed: tuple[Any, ...], plan: Plan) -> Callable:
    """A step with all that isn't an array fixed."""

    def run(*arguments):
        return step(*fixed, plan, *arguments)

    run.__name__ = plan.equation.name.replace("-", "_")
    return jax.jit(run)


def marks_of(inputs: Sequence[Any]) -> list[Any]:
    """Of each pair whether it is marred."""
    return [x.marred for x in inputs if isinstance(x, Pair)]


def joined(marks: Sequence[Any]) -> jax.Array:
    """Whether one of these is set."""
    return functools.reduce(jnp.logical_or, marks, jnp.zeros((), bool))


def lanes(plan: Plan, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The low inputs, and the shadow's."""
    avals = plan.equation.in_avals
    if plan.flat:
        own = plan.equation.out_avals[0].shape
        whole = zip(inputs, avals, whole_of(plan.equation), strict=True)
        inputs = [laid_out(x, a.shape if w else (), own, plan.length) for x, a, w in whole]
    else:
        inputs = [shaped(x, a) for x, a in zip(inputs, avals, strict=True)]
    lows = [x.low if isinstance(x, Pair) else x for x in inputs]
    return lows, [x.shadow if isinstance(x, Pair) else x for x in inputs]


def laid_out(x: Pair, shape: Sequence[int], own: Sequence[int], length: int) -> Pair:
    """An operand of what is computed flat: as wide as the result, flat as well; or one number.

    Args:
        x: in its own shape, or flat.
        shape: its own; () if it is to be one number.
        own: the result's.
        length: the padded size of that.
    """

    def one(x: Any) -> Any:
        if not shape and own:
            return x if x.ndim == 0 else x.reshape(-1)[0]
        if tuple(shape) != tuple(own):
            x = jnp.broadcast_to(unflat(x, shape), own)
        return flat(x, length)

    return Pair(jax.tree.map(one, x.low), one(x.shadow), x.marred)


def unrounded(
    low: Rounded,
    shadow: Wide,
    plan: Plan,
    about: jax.Array,
    lows: Sequence[Any],
    shadows: Sequence[Any],
) -> tuple[jax.Array, jax.Array]:
    """One equation before its rounding: what alone depends on the primitive.

    Returns:
        The exact result of the low inputs, such that it can be rounded (see :func:`narrowed`), and
        the shadow's, flat, so that what follows depends on their size alone.
    """
    (result,) = exact(plan.equation, lows)
    (wide,) = shadow.apply((), plan.equation, shadows)[1]
    result = flat(result, plan.length).astype(jnp.float64)  # or a weak type compiles all anew
    wide = flat(wide, plan.length).astype(shadow.dtype)
    return narrowed(result, about[:WIDTH], low.stored), wide


def exactly(low: Rounded, shadow: Wide, plan: Plan, about: jax.Array, inputs: Sequence[Any]):
    """The same of inputs as pairs."""
    return unrounded(low, shadow, plan, about, *lanes(plan, inputs))


def sampled(plan: Plan, exact: jax.Array, lows: Sequence[jax.Array], about: jax.Array) -> jax.Array:
    """Samples of the exact result and of the two operands of an addition: float64[3, SAMPLE]."""
    length = plan.length
    at = positions(about[COUNT], length)
    addends: Sequence[Any] = [jnp.zeros(SAMPLE)] * 2
    if plan.equation.name in ADDITIONS:
        addends = [flat(x, length)[at] if x.ndim else jnp.broadcast_to(x, at.shape) for x in lows]
    return jnp.stack([x.astype(jnp.float64) for x in (exact[at], *addends)])


def anyhow(low: Interpretation, shadow: Wide, plan: Plan, about: jax.Array, inputs: Sequence[Any]):
    """One equation in both lanes, whatever the low lane is.

    Returns:
        Its outputs; if it is noted, its tally and samples (see :class:`Note`).
    """
    outs, found = either(low, shadow, plan, about, inputs)
    if not found:
        return outs, found
    marred, *found = noted(about, *found)
    outs = [dataclasses.replace(x, marred=marred) if isinstance(x, Pair) else x for x in outs]
    return outs, found


def noted(about: jax.Array, low, exact, shadow, fmt: jax.Array, samples: jax.Array, marred: Any):
    """Whether a result is marred, its tally and its samples, from what :func:`either` found."""
    about = jnp.concatenate([fmt, about[WIDTH:]])
    tally, marred = counted(low, exact.astype, shadow, about, [marred])
    return marred, tally, joint(low, shadow, samples, about)


def either(low: Interpretation, shadow: Wide, plan: Plan, about: jax.Array, inputs: Sequence[Any]):
    """The same without what is counted, which is a program of its own for each size.

    Returns:
        Its outputs; if it is to be noted, its first float result, the exact and the shadow's, flat,
        its format, samples, and whether an input was marred.
    """
    equation, single = plan.equation, isinstance(low, Rounded)
    fmt, marred = about[:WIDTH], joined(marks_of(inputs))
    lows, shadows = lanes(plan, inputs)
    low_outs = low.apply(fmt if single else (), equation, lows)[1]
    shadow_outs = shadow.apply((), equation, shadows)[1]
    found = None
    if plan.noted:
        plain = [_plain(low, x, a) for x, a in zip(lows, equation.in_avals, strict=True)]
        aval = equation.out_avals[plan.at]
        result = flat(_plain(low, low_outs[plan.at], aval), plan.length)
        right = flat(exact(equation, plain)[plan.at], plan.length).astype(jnp.float64)
        wide = flat(shadow_outs[plan.at], plan.length).astype(shadow.dtype)
        fmt = fmt if single else jnp.asarray(own_row(low, low_outs[plan.at]))
        samples = sampled(plan, right, plain, about)
        found = result, narrowed(right, fmt, result.dtype), wide, fmt, samples, marred
    elif equation.name in CHOOSES and is_float(equation.out_avals[0]):
        result = _plain(low, low_outs[0], equation.out_avals[0])
        marred = marred & (~jnp.isfinite(result) & jnp.isfinite(shadow_outs[0])).any()

    def kept(x, aval):
        if not number_by_number(low):
            return x
        length = plan.length if plan.flat else room(math.prod(aval.shape))
        return jax.tree.map(lambda leaf: flat(leaf, length), x)

    outs = [
        Pair(kept(y, a), kept(s, a), marred) if is_float(a) else y
        for y, s, a in zip(low_outs, shadow_outs, equation.out_avals, strict=True)
    ]
    return outs, found


def _plain(low, value, aval):
    """The low lane's number in float64; what isn't a float as it is."""
    if not is_float(aval) or isinstance(low, Rounded):
        return value
    return to_float64(low.lower(value, aval))


@functools.partial(jax.jit, static_argnums=(0, 1))
def lifted(low: Rounded, shadow: Wide, x: jax.Array, row: jax.Array):
    """A flat argument in both lanes, and whether the low one is marred."""
    value, wide = round_by(to_float64(x), row).astype(low.stored), shadow.lift(x, x)
    return value, wide, (~jnp.isfinite(value) & jnp.isfinite(wide)).any()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def lifted_anyhow(low: Interpretation, shadow: Wide, aval: Any, x: Any):
    """The same, whatever the low lane is; ``x`` is flat where its arrays may be."""
    value = low.lift(x, aval)
    wide = shadow.lift(x.value() if low.is_argument(x) else x, aval)
    result = to_float64(low.lower(value, aval))
    return value, wide, (~jnp.isfinite(result) & jnp.isfinite(wide)).any()
