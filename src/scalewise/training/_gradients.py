"""Gradients: whether they are finite, updates only if they are, their mean over devices."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._check import checked
from .._jax import Tracer, gather_invariant, jex
from .._resolve import as_format
from .._types import AxisName, PyTree, TreeDef
from ..autoscaling import as_bits, narrow_over
from ..formats import Format, FormatLike
from ..interpret import Applied, Equation, Interpretation, State, Value, run, trace


@checked
def all_finite(tree: PyTree, *, axis_name: AxisName = None) -> jax.Array:
    """Returns a scalar boolean array: True if every float or complex number in a pytree is finite.

    Takes the largest magnitude of each leaf (which XLA fuses with the computation of the leaf, and
    which is NaN if an element is) and tests all of them at once. Integers, booleans and keys count
    as finite; so does an empty tree.

    Args:
        axis_name: mapped axes (``jax.shard_map``, ``jax.pmap``) along which all trees have to be
            finite, so that every device gets the same answer. Not needed for global arrays, as
            under ``jit`` with shardings.

    Example:
        >>> import jax.numpy as jnp
        >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf]), "n": jnp.int32(3)}))
        False
    """
    # no backend compares FP8
    wide = (x.astype(jnp.float32) if x.dtype.itemsize < 2 else x for x in real_parts(tree))
    largest = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in wide if x.size]
    finite = jnp.isfinite(jnp.stack(largest)).all() if largest else jnp.asarray(True)
    if axis_name is not None:
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0
    return finite


def tree_where(predicate: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    def leaf(a: PyTree, b: PyTree) -> PyTree:
        return jnp.where(predicate, a, b) if is_array(a) or is_array(b) else a

    return jax.tree.map(leaf, on_true, on_false)


def own_buffers(tree: PyTree, others: PyTree) -> PyTree:
    """Returns a pytree with copies of arrays that it holds twice or that are in ``others``.

    JAX donates a pytree only if each buffer occurs once, and deletes the donated arrays.
    """
    seen = {id(x) for x in jax.tree.leaves(others)}

    def leaf(x: PyTree) -> PyTree:
        if id(x) in seen and isinstance(x, jax.Array):
            x = jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(leaf, tree)


def is_array(x: object) -> bool:
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def is_float_array(x: PyTree) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def by_parts(f: Callable[[jax.Array], jax.Array], x: PyTree) -> PyTree:
    """Returns a function of a float array in float32, of the parts of a complex one.

    float64 stays; so does anything else than an array of floats or complex numbers.
    """
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(f(jnp.real(x)), f(jnp.imag(x)))
    return f(at_least_float32(x)) if is_float_array(x) else x


def real_parts(tree: PyTree) -> list[jax.Array]:
    """Returns a pytree's arrays of floats, and the two parts of its arrays of complex numbers."""
    found: list[jax.Array] = []
    for x in jax.tree.leaves(tree):
        if is_float_array(x):
            found.append(x)
        elif hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            found += [jnp.real(x), jnp.imag(x)]
    return found


def at_least_float32(x: jax.Array) -> jax.Array:
    """Returns a float array in float32; float64 and complex numbers stay."""
    wide = x.dtype == jnp.float64 or jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x if wide else x.astype(jnp.float32)


def update_if(
    predicate: jax.Array, update: Callable[..., tuple[PyTree, PyTree]], old: PyTree, *args: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns ``update(*args)``, results and new state; zeros and ``old`` if the predicate fails.

    Selecting between new and old state after the update makes XLA compute the new state twice: once
    for the selection, once for the results that depend on it. Here, results that depend on a leaf
    of the new state get the selected leaf: the same if the predicate holds, and discarded if it
    doesn't. Leaves that aren't arrays or numbers come from the new state in any case.
    """
    if not isinstance(predicate, Tracer):  # outside of jit
        results, state = update(*args)
        return _or_zeros(predicate, results), tree_where(predicate, state, old)
    found: list[tuple[TreeDef, list[PyTree]]] = []

    def arrays(*args: PyTree) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten(update(*args))
        found[:] = [(tree, [None if is_array(x) else x for x in leaves])]
        return [jnp.asarray(x) for x in leaves if is_array(x)]

    program = trace(arrays, Interpretation(), args, {}, name="update_if")
    ((tree, static),) = found
    kept = [x for x in jax.tree.leaves(old) if is_array(x)]
    jaxpr = getattr(program.jaxpr, "jaxpr", program.jaxpr)
    variables = jaxpr.outvars[len(jaxpr.outvars) - len(kept) :]
    select = _SelectState(predicate, variables, kept)
    _, outs = run(program, select, None)
    first = len(outs) - len(kept)
    for i, (variable, before) in enumerate(zip(variables, kept, strict=True)):
        if id(variable) not in select.done:
            outs[first + i] = jnp.where(predicate, outs[first + i], before)
    rest = iter(outs)
    results, state = jax.tree.unflatten(tree, [next(rest) if x is None else x for x in static])
    return _or_zeros(predicate, results), state


def _or_zeros(predicate: jax.Array, results: PyTree) -> PyTree:
    return tree_where(predicate, results, jax.tree.map(jnp.zeros_like, results))


class _SelectState(Interpretation):
    """Runs each equation, and replaces results that are new state by the selected state.

    Results inside of nested jits and loops, and results that are several leaves, are not replaced.
    """

    def __init__(
        self, predicate: jax.Array, variables: Sequence[jex.Var], old: Sequence[ArrayLike]
    ):
        times = Counter(map(id, variables))
        self.predicate, self.done = predicate, set()
        self.old = {id(v): x for v, x in zip(variables, old, strict=True) if times[id(v)] == 1}

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        state, outs = super().apply(state, equation, inputs)

        def selected(variable: jex.Var, x: Value) -> Value:
            if id(variable) not in self.old:
                return x
            self.done.add(id(variable))
            return jnp.where(self.predicate, x, self.old[id(variable)])

        return state, [selected(v, x) for v, x in zip(equation.eqn.outvars, outs, strict=True)]


@checked
def mean_over(tree: PyTree, axis_name: AxisName, fmt: FormatLike | None = None) -> PyTree:
    """Returns the mean of each array of floats or complex numbers over a mapped axis.

    It has the same bits on every device.

    With a format, the devices agree on a power-of-two scale by the largest magnitude on any of them
    (one ``pmax`` of a scalar), and each rounds its array to the format once. Each device receives
    its share of the elements from all others, sums them in float32, rounds the mean with a second
    agreed scale, and sends it to all. No sum is computed in the format. Each device sends
    2 (n - 1) / n times the array, like a ring all-reduce, in the format instead of float32.

    Args:
        tree: gradients, under ``jax.shard_map``, ``vmap`` or ``pmap``. Under a ``shard_map`` with
            ``check_vma=True`` (the default) JAX itself sums the gradients of replicated parameters:
            differentiate with respect to ``jax.lax.pcast(params, axis_name, to="varying")`` to get
            each device's own gradients.
        fmt: a format stored in one or two bytes, ``"e5m2"`` or ``"fp16"`` say; None: float32.

    Returns:
        Float32 arrays (complex64; float64 and complex128 stay). Elements that aren't finite on one
        device aren't finite in the mean. The error of all others is at most that of two roundings.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.array([[1.0, 1000.0], [3.0, -2000.0]])
        >>> jax.vmap(lambda x: mean_over(x, "data", "fp16"), axis_name="data")(x).tolist()
        [[2.0, -500.0], [2.0, -500.0]]
    """
    chosen = None if fmt is None else as_format(fmt, "mean_over")
    if chosen is not None and (chosen.dtype is None or chosen.bits not in (8, 16)):
        raise ValueError(f"mean_over: {chosen.name} isn't stored in one or two bytes")

    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x, axis_name) if chosen is None else _mean(x, axis_name, chosen)

    return jax.tree.map(functools.partial(by_parts, mean), tree)


def _mean(x: jax.Array, axis_name: AxisName, fmt: Format) -> jax.Array:
    members: int = lax.psum(1, axis_name)
    share = -(-x.size // members)
    flat = jnp.pad(x.reshape(-1), (0, share * members - x.size)).reshape(members, share)
    parts, scale = narrow_over(flat, axis_name, fmt)
    received = as_bits(lambda x: lax.all_to_all(x, axis_name, 0, 0), parts)
    mine = received.astype(x.dtype).sum(axis=0) * (scale / members)
    mean, scale = narrow_over(mine, axis_name, fmt)
    whole = as_bits(lambda x: gather_invariant(x, axis_name), mean).astype(x.dtype) * scale
    return whole.reshape(-1)[: x.size].reshape(x.shape)
