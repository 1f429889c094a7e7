"""Averages gradients over devices; they can be sent in a narrow format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from .._jax import gather_invariant
from .._resolve import as_format
from .._types import AxisName, PyTree
from ..formats import Format, FormatLike
from ..rounding import cast
from ..scaled import Amax
from ._finite import at_least_float32, is_float_array


@checked
def mean_over(tree: PyTree, axis_name: AxisName, fmt: FormatLike | None = None) -> PyTree:
    """Returns the mean of each float array over a mapped axis, the same bits on every device.

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
        Float32 arrays. Elements that aren't finite on one device aren't finite in the mean. The
        error of all others is at most that of two roundings.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.array([[1.0, 1000.0], [3.0, -2000.0]])
        >>> jax.vmap(lambda x: mean_over(x, "data", "fp16"), axis_name="data")(x).tolist()
        [[2.0, -500.0], [2.0, -500.0]]
    """
    chosen = None if fmt is None else as_format(fmt, "mean_over")
    if chosen is not None and (chosen.dtype is None or chosen.bits not in (8, 16)):
        raise ValueError(f"mean_over: {chosen.name} isn't stored in one or two bytes")

    def leaf(x: jax.Array) -> jax.Array:
        if not is_float_array(x):
            return x
        x = at_least_float32(x)
        return lax.pmean(x, axis_name) if chosen is None else _mean(x, axis_name, chosen)

    return jax.tree.map(leaf, tree)


def _mean(x: jax.Array, axis_name: AxisName, fmt: Format) -> jax.Array:
    members: int = lax.psum(1, axis_name)
    share = -(-x.size // members)
    flat = jnp.pad(x.reshape(-1), (0, share * members - x.size)).reshape(members, share)
    codes, scale = _narrow(flat, axis_name, fmt)
    received = lax.all_to_all(codes, axis_name, 0, 0)
    mine = _wide(received, fmt, x.dtype).sum(axis=0) * (scale / members)
    codes, scale = _narrow(mine, axis_name, fmt)
    whole = _wide(gather_invariant(codes, axis_name), fmt, x.dtype) * scale
    return whole.reshape(-1)[: x.size].reshape(x.shape)


def _narrow(x: jax.Array, axis_name: AxisName, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns codes as integers, which every network can send, and the scale of all devices."""
    local, _ = Amax().scale(x, fmt, tuple(range(x.ndim)))
    scale = lax.pmax(local, axis_name)
    unsigned = jnp.uint8 if fmt.bits == 8 else jnp.uint16
    return lax.bitcast_convert_type(cast(x / scale, fmt), unsigned), scale


def _wide(codes: jax.Array, fmt: Format, dtype: DTypeLike) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.dtype(fmt.dtype)).astype(dtype)
