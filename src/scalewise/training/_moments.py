"""Stores an optax optimizer's state in narrow formats between steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._check import checked
from .._resolve import as_format
from .._types import PyTree
from ..autoscaling import Recipe, Storage, is_stored, store_array
from ..formats import E4M3FN, FP16, BlockFormatLike
from ._state_codes import ExpandedStorage, ExpandedStored, TableStorage, TableStored

STORAGES = Storage | TableStorage | ExpandedStorage
StateFormat: TypeAlias = STORAGES | BlockFormatLike  # a format means ``Storage(format)``

# Three bytes per parameter for Adam's two moments. Like the first moment, the square root of the
# second has the gradients' exponents; E4M3 would flush what is 2^18 below the maximum, FP16 2^40.
NARROW_ADAM: Mapping[str, Storage] = {
    r"\.mu\b": Storage(E4M3FN),
    r"\.nu\b": Storage(FP16, root=2),
}


# Optimizer states by name, for Adam's two moments; bytes per parameter in comments.
STATES: Mapping[str, Mapping[str, StateFormat]] = {
    "narrow_adam": NARROW_ADAM,  # 3
    # FP8-LM (arXiv 2310.18313); a nonzero second moment never becomes zero. 3
    "fp8_lm": {r"\.mu\b": Storage(E4M3FN), r"\.nu\b": Storage(FP16, nonzero=True)},
    # COAT (arXiv 2410.19313): both moments E4M3, in expanded blocks of 128. 2.19
    "coat": {r"\.mu\b": ExpandedStorage(), r"\.nu\b": ExpandedStorage()},
    # bitsandbytes' 8-bit Adam (arXiv 2110.02861), blocks of 256. 2.03
    "adam8bit": {r"\.mu\b": TableStorage(), r"\.nu\b": TableStorage(signed=False)},
    # torchao's 4-bit Adam (after arXiv 2309.01507), blocks of 128. 1.06
    "adam4bit": {
        r"\.mu\b": TableStorage(4, block=128),
        r"\.nu\b": TableStorage(4, signed=False, table="linear", block=128),
    },
}


@checked
def store_state(
    optimizer: optax.GradientTransformation,
    storages: Mapping[str, StateFormat] | str = NARROW_ADAM,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its state is stored in narrow formats, with scales.

    Each update widens the stored leaves to float32, applies the optimizer, and stores the new
    leaves, rounded once to nearest. With ``root=2`` or ``nonzero`` a nonzero second moment is never
    stored as zero, so that no first moment is divided by epsilon alone.

    Args:
        optimizer: any optax transformation.
        storages: maps regular expressions to a :class:`~scalewise.Storage`, :class:`TableStorage`
            or :class:`ExpandedStorage`, or to a format, which means ``Storage(format)``; or one of
            the names of ``STATES`` (``"coat"``, ``"adam8bit"``). Each float leaf of the optimizer's
            state is stored by the first expression that is found in its path, written as by
            ``jax.tree_util.keystr`` (``"[0].mu['w']"``). By default E4M3 first moments and FP16
            roots of second moments.

    Returns:
        A transformation whose state holds :class:`~scalewise.ScaledArray`,
        :class:`~scalewise.SqrtStored`, :class:`TableStored` and :class:`ExpandedStored` leaves:
        pytrees that can be jitted and checkpointed.

    Raises:
        ValueError: a format or regular expression is invalid; or, in ``init``, an expression is
            found in no path.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = store_state(optax.adam(1e-3), {"mu": "bf16", "nu": "mxfp8_e4m3"})
        >>> state = optimizer.init({"w": jnp.ones((4, 64))})
        >>> state[0].mu["w"].data.dtype.name, state[0].nu["w"].scale.shape
        ('bfloat16', (4, 2))
    """
    if isinstance(storages, str):
        if storages not in STATES:
            raise ValueError(
                f"store_state: {storages!r} is no optimizer state; expected one of "
                + ", ".join(map(repr, STATES))
            )
        storages = STATES[storages]
    pairs = [(p, s if isinstance(s, STORAGES) else _plain(s)) for p, s in storages.items()]
    Recipe(state=tuple((p, Storage(FP16)) for p, _ in pairs))  # checks the expressions
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> PyTree:
        state = inner.init(params)
        _check_patterns([p for p, _ in pairs], state)
        return _stored(state, pairs)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        updates, after = inner.update(updates, widen(state), params, **extra)
        return updates, _stored(after, pairs)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def widen(tree: PyTree) -> PyTree:
    """Returns a pytree with its stored leaves (ScaledArray, SqrtStored...) as plain arrays."""
    return jax.tree.map(lambda x: x.value() if _is_stored(x) else x, tree, is_leaf=_is_stored)


def _plain(fmt: BlockFormatLike) -> Storage:
    return Storage(as_format(fmt, "Storage.format", blocks=True))


def _is_stored(x: object) -> bool:
    return is_stored(x) or isinstance(x, TableStored | ExpandedStored)


def _stored(state: PyTree, pairs: Sequence[tuple[str, STORAGES]]) -> PyTree:
    """Returns a state with each float leaf stored as the first pattern found in its path says."""

    def leaf(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        name = jax.tree_util.keystr(path)
        storage = next((s for p, s in pairs if re.search(p, name)), None)
        floats = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        if storage is None or not floats or jnp.size(x) < storage.min_size:
            return x
        x = jnp.asarray(x)
        return store_array(x, storage) if isinstance(storage, Storage) else storage.store(x)

    return jax.tree_util.tree_map_with_path(leaf, state)


def _check_patterns(patterns: Sequence[str], state: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(p) for p, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ValueError(
                f"store_state: {pattern!r} is in no float leaf's path; the optimizer's state has: "
                f"{shown or 'none at all'}"
            )
