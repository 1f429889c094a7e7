"""Stores an optax optimizer's state in narrow formats between steps.

Beside formats there are codes of tables and expanded FP8. Both store an array flattened, in blocks
of consecutive elements with float32 scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._check import Count, Natural, checked
from .._resolve import as_format
from .._types import PyTree
from ..autoscaling import Recipe
from ..formats import E4M3FN, FP16, BlockFormatLike
from ..rounding import StoredArray, decode, encode
from ..scaled import Storage, is_stored, store_array


@checked
@dataclasses.dataclass(frozen=True)
class TableStorage:
    """Stores each number as the nearest entry of a table, times its block's largest magnitude.

    8 bits: the state of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), whose
    table spans 7 decades. 4 bits: that of "Memory Efficient Optimizers with 4-bit States" (arXiv
    2309.01507), for the second moment with a linear table without zero.
    """

    bits: Literal[8, 4] = 8  # of a code; two codes of 4 bits share a byte
    # False for non-negative arrays such as a second moment. Then the dynamic table has zero; a
    # second moment that is stored as zero leaves its step to epsilon
    signed: bool = True
    # ``"dynamic"``: decimal exponents with fractions of as many bits as the exponent leaves;
    # ``"linear"``: multiples of ``2**-bits`` from that to 1, without zero
    table: Literal["dynamic", "linear"] = "dynamic"
    block: Count = 256  # consecutive elements that share a scale; zeros fill up the last
    min_size: Natural = 4096  # of an array to be stored so

    def __post_init__(self):
        if self.table == "linear" and self.signed:
            raise ValueError("TableStorage: the linear table is for signed=False")
        _check_block("TableStorage", self.block, self.bits)

    def store(self, x: jax.Array) -> BlockwiseStored:
        """Returns the codes and scales of an array of floats; NaN gets the code of the largest."""
        blocks = _in_blocks(x, self.block)
        scale = jnp.maximum(jnp.max(jnp.abs(blocks), 1), np.float32(1e-12))
        entries = dynamic_table(self.bits, self.signed, self.table)
        middles = jnp.asarray((entries[1:] + entries[:-1]) / 2)
        relative = blocks / scale[:, None]
        # a number in the middle of two entries becomes the larger one
        codes = jnp.searchsorted(middles, relative, side="right").astype(jnp.uint8)
        if self.bits == 4:
            codes = codes[:, ::2] * np.uint8(16) + codes[:, 1::2]
        return BlockwiseStored(codes, (scale,), self, x.shape)

    def load(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns the numbers of blocks of codes with their scales."""
        if self.bits == 4:
            pairs = jnp.stack([codes >> np.uint8(4), codes & np.uint8(15)], -1)
            codes = pairs.reshape(len(codes), -1)
        return jnp.asarray(dynamic_table(self.bits, self.signed, self.table))[codes] * scale


@checked
@dataclasses.dataclass(frozen=True)
class ExpandedStorage:
    """Stores E4M3 numbers after each block's range is expanded to E4M3's (COAT, arXiv 2410.19313).

    Moments of a block span far fewer powers of two than E4M3. A block's numbers are divided by the
    geometric mean of its largest and its smallest nonzero magnitude and raised to a power k, which
    is the largest multiple of ``1/steps`` with which they span at most 448**2 / 2.
    """

    steps: Count = 16  # k is a multiple of its inverse; COAT's programs have 16
    block: Count = 128  # consecutive elements that share a scale, a centre and a power
    min_size: Natural = 4096  # of an array to be stored so

    def __post_init__(self):
        _check_block("ExpandedStorage", self.block, 8)

    def store(self, x: jax.Array) -> BlockwiseStored:
        """Returns the numbers, scales, centres and powers of an array of floats."""
        top = float(E4M3FN.max)
        blocks = _in_blocks(x, self.block)
        size = jnp.abs(blocks)
        tiny = np.float32(1e-30)  # COAT's; it keeps zeros' blocks finite
        largest = jnp.max(size, 1, keepdims=True)
        smallest = jnp.min(jnp.where(size > 0, size, jnp.inf), 1, keepdims=True)
        smallest = jnp.minimum(smallest, largest) + tiny
        largest = largest + tiny
        span = jnp.maximum(jnp.log2(largest / smallest), np.float32(1 / 16))
        power = jnp.floor(np.float32(math.log2(top * top / 2)) / span * self.steps) / self.steps
        power = jnp.maximum(power, np.float32(1 / self.steps))
        center = jnp.sqrt(largest) * jnp.sqrt(smallest)
        scale = (largest / center) ** power / np.float32(top)
        expanded = jnp.sign(blocks) * (size / center) ** power / scale
        data = encode(expanded, E4M3FN, saturate="finite")
        assert isinstance(data, jax.Array)
        factors = scale[:, 0], center[:, 0], power[:, 0]
        return BlockwiseStored(data, factors, self, x.shape)

    def load(
        self, data: jax.Array, scale: jax.Array, center: jax.Array, power: jax.Array
    ) -> jax.Array:
        """Returns the numbers of blocks of E4M3 numbers with their scales, centres and powers."""
        y = decode(jax.lax.bitcast_convert_type(data, jnp.uint8), E4M3FN).astype(jnp.float32)
        y = y * scale
        return jnp.sign(y) * (jnp.abs(y) ** (1 / power) * center)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockwiseStored(StoredArray):
    """An array as :class:`TableStorage` or :class:`ExpandedStorage` stores it."""

    STATIC: ClassVar = ("storage", "shape")

    data: jax.Array  # codes, uint8, or E4M3, one row for each block
    factors: tuple[jax.Array, ...]  # float32, one for each block: its scale, and what else it needs
    storage: TableStorage | ExpandedStorage
    shape: tuple[int, ...]  # of the array, without axes that vmap, scan or stack add in front

    def value(self) -> jax.Array:
        """Returns the array, float32."""
        if self.data.ndim > 2:
            return jax.vmap(lambda one: one.value())(self)
        blocks = self.storage.load(self.data, *(x[:, None] for x in self.factors))
        return jnp.ravel(blocks)[: math.prod(self.shape)].reshape(self.shape)


@functools.cache
def dynamic_table(bits: int, signed: bool, table: str = "dynamic") -> np.ndarray:
    """Returns the entries of a table, float32, increasing.

    The dynamic ones as bitsandbytes and torchao build them: for each decimal exponent, the middles
    of equal parts of [0.1, 1], in twice as many parts from one exponent to the next; 0 and 1.
    """
    if table == "linear":
        return np.linspace(0, 1, 2**bits + 1, dtype=np.float32)[1:]
    exponents, fraction = bits - 1, [2**i for i in range(bits - 1)]
    if not signed:
        fraction = [2 * n for n in fraction]
    entries: list[float] = [0.0, 1.0]
    for i, parts in enumerate(fraction):
        ends = np.linspace(0.1, 1, parts + 1, dtype=np.float32)
        middles = (ends[1:] + ends[:-1]) / 2 * np.float32(10.0 ** (i - exponents + 1))
        entries += [*middles.tolist(), *((-middles).tolist() if signed else [])]
    return np.sort(np.array(entries, np.float32))


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    flat = jnp.ravel(jnp.asarray(x).astype(jnp.float32))
    return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def _check_block(owner: str, block: int, bits: int) -> None:
    if block < 2 or (bits == 4 and block % 2):
        even = "an even number" if bits == 4 else "an integer"
        raise ValueError(f"{owner}: block is {block!r}; expected {even} of at least 2")


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
        :class:`~scalewise.SqrtStored` and :class:`BlockwiseStored` leaves: pytrees that can be
        jitted and checkpointed.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = store_state(optax.adam(1e-3), {"mu": "bf16", "nu": "mxfp8_e4m3"})
        >>> state = optimizer.init({"w": jnp.ones((4, 64))})
        >>> state[0].mu["w"].data.dtype.name, state[0].nu["w"].scale.shape
        ('bfloat16', (4, 2))
    """
    if isinstance(storages, str):
        if storages not in STATES:
            expected = ", ".join(map(repr, STATES))
            raise ValueError(
                f"store_state: {storages!r} is no optimizer state; expected {expected}"
            )
        storages = STATES[storages]

    def storage(pattern: str, given: StateFormat) -> STORAGES:
        if isinstance(given, STORAGES):
            return given
        where = f"store_state: storages[{pattern!r}]"
        return Storage(as_format(given, where, blocks=True))

    pairs = [(p, storage(p, s)) for p, s in storages.items()]
    Recipe(state=tuple((p, Storage(FP16)) for p, _ in pairs))  # checks the expressions
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> PyTree:
        state = inner.init(params)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        floats = [p for p, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        paths = list(map(jax.tree_util.keystr, floats))
        for pattern, _ in pairs:
            if not any(re.search(pattern, path) for path in paths):
                shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
                there = f"the optimizer's state has: {shown or 'none at all'}"
                raise ValueError(f"store_state: {pattern!r} is in no float leaf's path; {there}")
        return _stored(state, pairs)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        updates, after = inner.update(updates, widen(state), params, **extra)
        return updates, _stored(after, pairs)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def widen(tree: PyTree) -> PyTree:
    """Returns a pytree with its stored leaves (ScaledArray, SqrtStored...) as plain arrays."""
    return jax.tree.map(lambda x: x.value() if _is_stored(x) else x, tree, is_leaf=_is_stored)


def _is_stored(x: object) -> bool:
    return is_stored(x) or isinstance(x, BlockwiseStored)


def _stored(state: PyTree, pairs: Sequence[tuple[str, STORAGES]]) -> PyTree:
    def leaf(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        name = jax.tree_util.keystr(path)
        storage = next((s for p, s in pairs if re.search(p, name)), None)
        floats = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        if storage is None or not floats or jnp.size(x) < storage.min_size:
            return x
        x = jnp.asarray(x)
        return store_array(x, storage) if isinstance(storage, Storage) else storage.store(x)

    return jax.tree_util.tree_map_with_path(leaf, state)
