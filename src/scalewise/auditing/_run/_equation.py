"""One equation in both runs: how it is computed, rounded and recorded, and the compiled code."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import ShapedArray
from ...autoscaling import Boundaries, OperandAmaxes
from ...emulating import is_exact, rounds_each
from ...interpret import Argument, Equation, Interpretation, RoundedOperand, Value, is_float
from ...primitives import having
from ...rounding import FORMAT_PARAMS, format_params, narrowed, round_by, to_float64
from ...scaled import ScaledArray
from .._thresholds import LATENT
from ._compiled import Compiled
from ._elementary import ADD, OTHER, SUB, Uncounted, operation, stack_samples
from ._interpretations import Runs, TableEmulation, computes_in_float32, exact
from ._pair import (
    ELEMENTWISE,
    RESHAPES,
    Decision,
    Draw,
    Flag,
    Pair,
    flat,
    low_of,
    padded_size,
    reference_of,
    shaped,
    unflat,
)
from ._specialize import kind_of_run
from ._statistics import ONE_BY_ONE, SAMPLE, is_tainted, sample_positions

DROPS, ACCUMULATES = having("drops"), having("accumulates")
SIGNS = {ADD: 1, SUB: -1}  # of the second operand, by an operation's code


@dataclasses.dataclass(frozen=True)
class EquationPlan:
    """How an equation is computed; equal plans share compiled code."""

    # primitive, parameters and types; the shape too, unless each number is computed on its own
    key: Hashable
    equation: Equation = dataclasses.field(compare=False)  # an equation with this key
    at: int = dataclasses.field(compare=False)  # the index of the first float result, or -1
    length: int = dataclasses.field(compare=False)  # the padded size of that result
    flat: bool = dataclasses.field(compare=False)  # whether the operands are flat and padded too

    @property
    def size(self) -> int:
        return math.prod(self.equation.out_avals[self.at].shape) if self.at >= 0 else 0

    @functools.cached_property
    def recorded(self) -> bool:
        """Whether its results are rounded, and statistics of them recorded."""
        return self.at >= 0 and not is_exact(self.equation)

    @functools.cached_property
    def decides(self) -> bool:
        """Whether it makes predicates, indices or counts of floats, which may differ; the rows that
        a decomposition swaps are a part of its result."""
        if computes_in_float32(self.equation):
            return False
        floats = any(map(is_float, self.equation.in_avals))
        return floats and any(map(is_discrete, self.equation.out_avals))

    @property
    def counts(self) -> bool:
        return self.recorded or self.decides

    @functools.cached_property
    def operation(self) -> int:
        return operation(self.equation) if self.flat else OTHER

    @functools.cached_property
    def is_array(self) -> tuple[bool, ...]:
        """For each of two operands whether it is an array; a single operand counts twice."""
        is_array = array_operands(self.equation) if self.operation else ()
        return (is_array * 2)[:2] or (True, True)

    @functools.cached_property
    def op_params(self) -> np.ndarray:
        sign = SIGNS.get(operation(self.equation), int(self.accumulates))
        sign = ONE_BY_ONE if rounds_each(self.equation) else sign
        return np.array([self.size, sign, self.operation, *self.is_array], np.float64)

    @property
    def accumulates(self) -> bool:
        return self.equation.name in ACCUMULATES


def is_discrete(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == jnp.bool_


def make_plan(low: Interpretation, equation: Equation, inputs: Sequence[Value]) -> EquationPlan:
    at = next((i for i, a in enumerate(equation.out_avals) if is_float(a)), -1)
    length = padded_size(math.prod(equation.out_avals[at].shape)) if at >= 0 else 0
    from_table, is_array = isinstance(low, TableEmulation), array_operands(equation)
    types: Hashable = tuple((a.shape, a.dtype) for a in equation.in_avals + equation.out_avals)
    is_flat = (
        bool(is_array) and kind_of_run(low).elementwise and all(isinstance(x, Pair) for x in inputs)
    )
    if is_flat and not from_table:  # here no separate program broadcasts the operands
        is_flat = all(a.shape in (equation.out_avals[0].shape, ()) for a in equation.in_avals)
    if is_flat:
        types = (length, is_array, tuple(a.dtype for a in equation.in_avals + equation.out_avals))
    key: Hashable = (equation.name, tuple(sorted(equation.params.items())), types)
    try:
        hash(key)
    except TypeError:
        key = id(equation.eqn)
    key = key if from_table else (key, kind_of_run(low).specialize(low, equation)[1])
    return EquationPlan(key, equation, at, length, is_flat)


def array_operands(equation: Equation) -> tuple[bool, ...]:
    """Returns for each operand of an elementwise equation whether it is an array, not a scalar.

    () for other equations. Operands of elementary operations are broadcast to the result's shape;
    another elementwise equation with an operand that would need it gets () too.
    """
    own = getattr(equation.eqn.primitive, "elementwise", False)  # of scalewise.torch
    if not (own or equation.name in ELEMENTWISE) or not is_float(equation.out_avals[0]):
        return ()
    shape = equation.out_avals[0].shape
    if any(a.shape != shape for a in equation.out_avals):
        return ()
    if operation(equation) == OTHER and any(a.shape not in (shape, ()) for a in equation.in_avals):
        return ()
    return tuple(a.shape != () or shape == () for a in equation.in_avals)


def only_reshapes(equation: Equation) -> bool:
    """Returns True if the result is the operand's numbers in the same order."""
    if equation.name == "broadcast_in_dim":  # for example after a sum with keepdims
        return equation.in_avals[0].size == equation.out_avals[0].size
    return equation.name in RESHAPES


def compiled(step: Callable, runs: Runs, plan: EquationPlan) -> Callable:
    def run(*arguments):
        return step(runs, plan, *arguments)

    run.__name__ = plan.equation.name.replace("-", "_")
    avals = plan.equation.in_avals + plan.equation.out_avals
    return Compiled(run, max([plan.length, *(math.prod(a.shape) for a in avals)]))


def taints_of(inputs: Sequence[Value]) -> list[Flag]:
    return [x.tainted for x in inputs if isinstance(x, Pair)]


def any_tainted(taints: Sequence[Flag]) -> jax.Array:
    flags = (jnp.asarray(t).astype(bool) for t in taints)
    return functools.reduce(jnp.logical_or, flags, jnp.zeros((), bool))


def split(plan: EquationPlan, inputs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    avals = plan.equation.in_avals
    if plan.flat:
        shape = plan.equation.out_avals[0].shape
        operands = zip(inputs, avals, array_operands(plan.equation), strict=True)
        inputs = [
            broadcast_flat(x, a.shape if w else (), shape, plan.length) for x, a, w in operands
        ]
    else:
        inputs = [shaped(x, a) for x, a in zip(inputs, avals, strict=True)]
    return [low_of(x) for x in inputs], [reference_of(x) for x in inputs]


def broadcast_flat(x: Pair, shape: Sequence[int], target: Sequence[int], length: int) -> Pair:
    """Returns an operand of a shape, flat or not, broadcast to ``target``, flat and padded to
    ``length``; with the shape (), its first number."""

    def one(x: jax.Array) -> jax.Array:
        if not shape and target:
            return x if x.ndim == 0 else x.reshape(-1)[0]
        if tuple(shape) != tuple(target):
            x = jnp.broadcast_to(unflat(x, shape), target)
        return flat(x, length)

    return Pair(jax.tree.map(one, x.low), one(x.reference), x.tainted)


def unrounded(
    runs: Runs, plan: EquationPlan, op_params: jax.Array, inputs: Sequence[Value]
) -> tuple[jax.Array, ...]:
    """Computes one equation without its rounding, the only part that depends on the primitive.

    Returns the exact result of the low inputs, ready to be rounded (see :func:`narrowed`), the
    reference run's result, and of an equation that accumulates the numbers that it adds to (see
    :func:`added_to`); flat, so that what follows depends only on the size.
    """
    lows, references = split(plan, inputs)
    (result,) = exact(plan.equation, lows)
    (wide,) = runs.reference.apply((), plan.equation, references)[1]
    result = flat(result, plan.length).astype(jnp.float64)  # a weak type would compile all anew
    wide = flat(wide, plan.length).astype(runs.reference.dtype)
    before = (added_to(result, lows[0], plan),) if plan.accumulates else ()
    return narrowed(result, op_params[:FORMAT_PARAMS], runs.low.carrier), wide, *before


def added_to(result: jax.Array, operand: jax.Array, plan: EquationPlan) -> jax.Array:
    """Returns an accumulating equation's first operand, flat, 0 where the exact result is equal."""
    before = flat(operand, plan.length)
    return jnp.where(result != before.astype(result.dtype), before, 0)


def addends_of(
    plan: EquationPlan, exact: jax.Array, lows: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Returns an addition's operands, flat; () for another equation."""
    if rounds_each(plan.equation):
        return (flat(lows[0], plan.length),)
    if plan.accumulates:
        return (added_to(exact, lows[0], plan),)
    if operation(plan.equation) in SIGNS:
        return tuple(flat(x, plan.length) if x.ndim else x for x in lows)
    return ()


def positions(plan: EquationPlan, exact: jax.Array) -> jax.Array:
    """Returns which numbers are sampled. Of many sums that round one by one they are the largest:
    those to which most is added have lost most, and are few."""
    if not rounds_each(plan.equation) or plan.size <= SAMPLE:
        return sample_positions(jnp.asarray(plan.size), plan.length)
    size = jnp.where(jnp.isnan(exact), jnp.inf, jnp.abs(exact)).astype(jnp.float32)
    inside = jnp.arange(plan.length) < plan.size
    return lax.top_k(jnp.where(inside, size, -1), SAMPLE)[1].astype(jnp.int64)


def with_taint(outs: Sequence[Value], tainted: Flag) -> list[Value]:
    return [dataclasses.replace(x, tainted=tainted) if isinstance(x, Pair) else x for x in outs]


def _numbers_and_samples(
    op_params: jax.Array, low, exact, reference, fmt: jax.Array, addends, at, tainted: Flag
):
    """Returns what :meth:`Uncounted.first` takes."""
    op_params, low = jnp.concatenate([fmt, op_params[FORMAT_PARAMS:]]), to_float64(low)
    samples = [jnp.broadcast_to(x[at] if x.ndim else x, at.shape) for x in (exact, *addends)]
    samples += [jnp.zeros(SAMPLE)] * (3 - len(samples))
    samples = stack_samples(low, reference, [x.astype(jnp.float64) for x in samples], at)
    return op_params, (low, exact, reference), samples, tainted


def count_result(op_params: jax.Array, *recorded) -> tuple[jax.Array, jax.Array]:
    op_params, numbers, samples, tainted = _numbers_and_samples(op_params, *recorded)
    tainted, record = Uncounted(op_params, samples, tainted, numbers).counted()
    return tainted, record.packed()


def leave_result(left: int, op_params: jax.Array, *recorded) -> tuple[jax.Array, Uncounted]:
    op_params, numbers, samples, tainted = _numbers_and_samples(op_params, *recorded)
    low, _, reference = numbers
    found = Uncounted.first(left, op_params, numbers, samples, tainted)
    return is_tainted(low, reference), found


def run_both(
    runs: Runs,
    plan: EquationPlan,
    op_params: jax.Array,
    inputs: Sequence[Value],
    past: jax.Array | None = None,
):
    """Runs one equation in both runs without counting, which is one program for each size.

    Returns its outputs; what :func:`count_result` takes if it is recorded; its events (see
    :func:`add_events`), or None. With delayed scaling, ``past`` has the largest magnitudes of the
    operands in earlier steps; those of this step then follow the events.
    """
    low, reference = runs
    equation, from_table = plan.equation, isinstance(low, TableEmulation)
    fmt, tainted = op_params[:FORMAT_PARAMS], any_tainted(taints_of(inputs))
    lows, references = split(plan, inputs)
    if past is not None:
        assert isinstance(low, Boundaries)
        low = low.with_amaxes(OperandAmaxes(past=past))
    low_outs = low.apply(fmt if from_table else (), equation, lows)[1]
    reference_outs = reference.apply((), equation, references)[1]
    uncounted = None
    if plan.recorded:
        plain = [
            to_float64(_plain(low, x, a)) if is_float(a) else x
            for x, a in zip(lows, equation.in_avals, strict=True)
        ]
        result = flat(_plain(low, low_outs[plan.at], equation.out_avals[plan.at]), plan.length)
        right = flat(exact(equation, plain)[plan.at], plan.length).astype(jnp.float64)
        wide = flat(reference_outs[plan.at], plan.length).astype(reference.dtype)
        fmt = (
            fmt
            if from_table
            else jnp.asarray(format_params(kind_of_run(low).result(low_outs[plan.at])))
        )
        addends, at = addends_of(plan, right, plain), positions(plan, right)
        uncounted = result, right, wide, fmt, addends, at, tainted
    elif equation.name in DROPS and is_float(equation.out_avals[0]):
        result = _plain(low, low_outs[0], equation.out_avals[0])
        tainted = tainted & (~jnp.isfinite(result) & jnp.isfinite(reference_outs[0])).any()

    def laid_out(x, aval):
        if not kind_of_run(low).elementwise:
            return x
        length = plan.length if plan.flat else padded_size(math.prod(aval.shape))
        return jax.tree.map(lambda leaf: flat(leaf, length), x)

    own = any(isinstance(x, Pair | Decision) for x in inputs)
    both = list(zip(low_outs, reference_outs, equation.out_avals, strict=True))
    events = _events(plan, both, low.rounded_operands(equation, lows))
    if past is not None and events is not None:
        assert isinstance(low, Boundaries)
        events = jnp.concatenate([events, low.magnitudes(lows).astype(events.dtype)])
    outs = [
        Pair(laid_out(y, a), laid_out(s, a), tainted) if is_float(a)
        else Decision(y, s) if own else y
        for y, s, a in zip(low_outs, reference_outs, equation.out_avals, strict=True)
    ]  # fmt: skip
    return outs, uncounted, events


def _events(
    plan: EquationPlan,
    both: Sequence[tuple[Value, jax.Array, ShapedArray]],
    operands: Sequence[RoundedOperand],
) -> jax.Array | None:
    """Returns the events of one visit: float64[6], or None if the equation can't have any."""
    if not plan.decides and not operands:
        return None
    discrete = [(y, s) for y, s, a in both if plan.decides and is_discrete(a)]
    counts = (
        sum(y.size for y, _ in discrete),
        sum(jnp.sum(y != s) for y, s in discrete),
        sum(x.exact.size for x in operands),
        sum(jnp.sum(x.saturated) for x in operands),
        sum(jnp.sum((x.rounded == 0) & (x.exact != 0)) for x in operands),
        sum(jnp.sum(jnp.abs(x.exact) * LATENT > x.limit) for x in operands),
    )
    return jnp.stack([jnp.asarray(n, jnp.float64) for n in counts])


def run_draw(runs: Runs, plan: EquationPlan, inputs: Sequence[Value]) -> list[Value]:
    equation = plan.equation
    inputs = [shaped(x, a) for x, a in zip(inputs, equation.in_avals, strict=True)]
    references = [x.reference if isinstance(x, Draw) else reference_of(x) for x in inputs]
    exact_inputs = [
        x.exact if isinstance(x, Draw) else x.reference if isinstance(x, Pair) else low_of(x)
        for x in inputs
    ]
    outs = zip(
        exact(equation, exact_inputs),
        runs.reference.apply((), equation, references)[1],
        equation.out_avals,
        strict=True,
    )
    return [Draw(y, s) if is_float(a) else Decision(y, s) for y, s, a in outs]


@functools.partial(
    Compiled, size=lambda runs, draw, params: draw.exact.size, static_argnums=(0,), often=True
)
def round_draw(runs: Runs, draw: Draw, params: jax.Array) -> Pair:
    low = round_by(draw.exact, params).astype(runs.low.carrier)
    tainted = (~jnp.isfinite(low) & jnp.isfinite(draw.reference)).any()
    length = padded_size(low.size)
    return Pair(flat(low, length), flat(draw.reference, length), tainted)


def _plain(low, value, aval):
    """Returns an array of the low-precision run, in float32 where the program has a narrower dtype:
    ``low`` may hold what that doesn't."""
    if isinstance(low, TableEmulation):
        return value
    narrow = is_float(aval) and aval.dtype.itemsize < 4
    return low.lower(value, aval.update(dtype=np.dtype(np.float32)) if narrow else aval)


@functools.partial(Compiled, size=lambda runs, x, params: x.size, static_argnums=(0,))
def lift_from_table(runs: Runs, x: jax.Array, params: jax.Array):
    low, reference = runs
    value, wide = round_by(to_float64(x), params).astype(low.carrier), reference.lift(x, x)
    return value, wide, (~jnp.isfinite(value) & jnp.isfinite(wide)).any()


@functools.partial(
    Compiled, size=lambda runs, aval, x: math.prod(aval.shape), static_argnums=(0, 1)
)
def lift_any(runs: Runs, aval: ShapedArray, x: Argument):
    low, reference = runs
    value = low.lift(x, aval)
    exact = x.value() if low.is_argument(x) else x
    if isinstance(x, ScaledArray):
        exact = x.astype(x.wide_dtype)
    wide = reference.lift(exact, aval)
    result = to_float64(low.lower(value, aval))
    return value, wide, (~jnp.isfinite(result) & jnp.isfinite(wide)).any()
