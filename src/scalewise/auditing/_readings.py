"""Statistics of numbers in a pytree, jitted or not: their range, and what a format would do."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import Natural, Pattern, checked
from .._resolve import as_format
from .._types import PyTree
from ..formats import Format, FormatLike
from ..interpret import is_float
from ..rounding import StoredArray

Groups = Natural | Mapping[str, Pattern]
MOMENTS = {  # fields of optax's states with an array for each parameter
    "mu", "nu", "nu_max", "trace", "sum_of_squares", "m", "v", "v_row", "v_col", "e_g", "e_x",
}  # fmt: skip
BARE = re.compile(r"\['?(.*?)'?\]|\.(\w+)")  # a key of keystr: ['w'], [0] or .field
LOWEST = -127  # the bin of float32's zeros and subnormals
BINS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Exponents:
    """How many numbers have each exponent of two; ``repr`` draws the histogram.

    Attributes:
        counts: float32 of shape (256,): of numbers x with ``2**e <= |x| < 2**(e + 1)`` for e from
            -126 to 127; the first also counts float32's subnormals, the last infinities and NaN.
        zeros: how many numbers are zero; float32 scalar. They are in no bin.
    """

    counts: jax.Array
    zeros: jax.Array

    def bins(self) -> dict[int, int]:
        """Returns the counts of the exponents that occur, by exponent."""
        counts = np.asarray(self.counts)
        return {i + LOWEST: int(n) for i, n in enumerate(counts[:-1]) if n}

    def flushed(self, fmt: FormatLike, scale: float = 1.0) -> float:
        """Returns the share of the nonzero numbers that are below half of a format's smallest.

        Args:
            fmt: a format.
            scale: a loss scale that the numbers are multiplied by first.
        """
        smallest = float(as_format(fmt, "Exponents").smallest)
        below = [n for e, n in self.bins().items() if 2.0**e * scale < smallest / 2]
        return sum(below) / max(sum(self.bins().values()), 1)

    def __repr__(self) -> str:
        bins = self.bins()
        total = sum(bins.values())
        lines = [f"{total} nonzero numbers, {int(self.zeros)} zeros"]
        last = max(bins, default=0)
        for top in range(last, min(bins, default=0) - 4, -4) if bins else ():
            share = sum(bins.get(e, 0) for e in range(top - 3, top + 1)) / total
            bar = "#" * round(50 * share)
            lines.append(f"2^{top - 3:<4} to 2^{top + 1:<4} {share:6.1%} {bar}".rstrip())
        return "\n".join(lines)


def exponents_of(arrays: Sequence[jax.Array | StoredArray]) -> Exponents:
    parts = [_of_array(_wide(x)) for x in arrays]
    counts, zeros = (functools.reduce(jnp.add, list(part)) for part in zip(*parts, strict=True))
    return Exponents(counts, zeros)


def _of_array(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32).ravel()
    zeros = jnp.sum(bits == 0).astype(jnp.float32)
    field = jnp.where(bits == 0, BINS, lax.shift_right_logical(bits, np.int32(23)))
    counts = jnp.zeros(BINS, jnp.int32).at[field].add(1, mode="drop")
    return counts.astype(jnp.float32), zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """Statistics of a group of arrays with respect to a format; float32 scalars.

    Attributes:
        amax: largest finite magnitude.
        flushed: share of the nonzero numbers that the format would flush to zero.
        saturated: share of all numbers at or beyond the format's largest, infinities included.
        nonfinite: how many numbers are infinite or NaN.
    """

    amax: Any
    flushed: Any
    saturated: Any
    nonfinite: Any


@checked
def readings(
    tree: PyTree,
    fmt: FormatLike = "float16",
    groups: Groups = 1,
) -> dict[str, Reading]:
    """Reads a pytree's float arrays by group, in one pass over each; works inside a jitted step.

    Args:
        tree: any pytree: parameters, gradients, activations, an optimizer's state. Of a stored
            array (:class:`~scalewise.ScaledArray`, ...) its value is read. Leaves that aren't
            arrays of real floats are left out.
        fmt: a format, or a name or dtype of one.
        groups: how many keys of a path name a group (``1``: ``params``; ``2``: ``params/blocks``);
            an optimizer's moments are kept apart (``opt_state/mu``, ``opt_state/nu``). Or a dict
            from names of groups to regular expressions: an array belongs to the first that matches
            its path (as ``jax.tree_util.keystr`` prints it).

    Returns:
        A :class:`Reading` for each group, in the order of the tree (or of ``groups``).

    Raises:
        ValueError: an unknown format, or a group without a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> found = readings({"w": jnp.array([1e5, 2.0, 1e-9, 0.0]), "n": jnp.arange(3)})
        >>> [(k, float(r.saturated), round(float(r.flushed), 3)) for k, r in found.items()]
        [('w', 0.25, 0.333)]
    """
    fmt = as_format(fmt, "readings")
    found = _grouped(tree, groups, "readings")
    return {name: _read(arrays, fmt) for name, arrays in found.items()}


@checked
def exponents(tree: PyTree, groups: Groups = 1) -> dict[str, Exponents]:
    """Counts the numbers of a pytree's float arrays by their exponent of two, for each group.

    The histogram of gradients that shows what a format or a loss scale would lose (Micikevicius et
    al., arXiv 1710.03740, figure 3). It works inside a jitted step, in one pass over each array.

    Args:
        tree, groups: as for :func:`readings`.

    Returns:
        An :class:`Exponents` for each group.

    Raises:
        ValueError: a group without a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> found = exponents({"w": jnp.array([1.5, 3.0, 2.0**-25, 0.0])})["w"]
        >>> found.bins(), round(found.flushed("fp16", scale=0.5), 2)
        ({-25: 1, 0: 1, 1: 1}, 0.33)
        >>> found
        3 nonzero numbers, 1 zeros
        2^-2   to 2^2     66.7% #################################
        2^-6   to 2^-2     0.0%
        ...
    """
    found = _grouped(tree, groups, "exponents")
    return {name: exponents_of(arrays) for name, arrays in found.items()}


def floats_only(tree: PyTree) -> PyTree:
    """Returns a pytree with None in place of leaves that aren't arrays of floats, as jit needs."""
    return jax.tree.map(lambda x: x if _is_read(x) else None, tree, is_leaf=_is_stored)


def _is_stored(x: object) -> bool:
    return isinstance(x, StoredArray)


def _is_read(x: Any) -> bool:
    return _is_stored(x) or (hasattr(x, "dtype") and is_float(x))


def _wide(x: jax.Array | StoredArray) -> jax.Array:
    """Returns the numbers of an array in float32, or in float64 if they are."""
    x = x.value() if isinstance(x, StoredArray) else jnp.asarray(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _grouped(tree: PyTree, groups: Groups, where: str) -> dict[str, list[jax.Array | StoredArray]]:
    named = groups if isinstance(groups, Mapping) else {}
    found: dict[str, list[jax.Array | StoredArray]] = {name: [] for name in named}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_stored):
        if _is_read(leaf):
            name = _group(path, groups)
            if name is not None:
                found.setdefault(name, []).append(leaf)
    empty = [f"group {name!r} ({named[name]!r})" for name, x in found.items() if not x]
    if empty or not found:
        what = empty[0] if empty else "tree"
        raise ValueError(f"{where}: the {what} holds no float array; expected at least one")
    return found


def _group(path: Sequence[Any], groups: Groups) -> str | None:
    if not isinstance(groups, Mapping):
        n = max(groups, 1)
        moment = next((key for key in path[n:] if _names_moment(key)), None)
        text = jax.tree_util.keystr((*path[:n], *([moment] if moment else [])))
        return "/".join(a or b for a, b in BARE.findall(text)) or "all"
    text = jax.tree_util.keystr(tuple(path))
    return next((name for name, pattern in groups.items() if re.search(pattern, text)), None)


def _names_moment(key: Any) -> bool:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name in MOMENTS
    return getattr(key, "key", None) in ("mu", "nu")


def _read(given: Sequence[jax.Array | StoredArray], fmt: Format) -> Reading:
    arrays = [_wide(x) for x in given]
    parts = [_read_array(x, fmt) for x in arrays]
    amax = functools.reduce(jnp.maximum, [p[0] for p in parts])
    nonzero, flushed, saturated, nonfinite = (
        functools.reduce(jnp.add, [p[i] for p in parts]) for i in range(1, 5)
    )
    size = sum(x.size for x in arrays)
    shares = flushed / jnp.maximum(nonzero, 1), saturated / max(size, 1)
    return Reading(amax, *shares, nonfinite)


def _read_array(x: jax.Array, fmt: Format) -> list[jax.Array]:
    """Returns amax, and how many numbers are nonzero, flushed, saturated, non-finite; float32."""
    size = jnp.abs(x)
    finite = jnp.isfinite(size)
    half = float(fmt.smallest) / 2  # itself a tie, which rounds to even: to zero
    counted = [size != 0, (size > 0) & (size <= half), ~(size < float(fmt.max)), ~finite]
    axes = tuple(range(1, x.ndim)) or tuple(range(x.ndim))  # counts of one row fit int32
    amax, *counts = lax.reduce(
        (jnp.where(finite, size, 0), *(c.astype(jnp.int32) for c in counted)),
        (np.zeros((), size.dtype), *[np.int32(0)] * len(counted)),
        lambda a, b: (jnp.maximum(a[0], b[0]), *(p + q for p, q in zip(a[1:], b[1:], strict=True))),
        axes,
    )
    largest = jnp.max(amax, initial=0).astype(jnp.float32)
    return [largest, *(jnp.sum(c.astype(jnp.float32)) for c in counts)]
