"""``KVCache``: keys and values of an attention layer, quantised when they are written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._check import Count, checked
from .._jax import Tracer
from .._resolve import as_format
from ..formats import BlockFormat, BlockFormatLike, Format
from ..rounding import encode, exportable, float_array
from ._amax import amax, to_top
from ._array import ScaledArray
from ._blocks import quantize_blocks, tensor_scale_of
from ._power import quotient
from ._quantize import storable

Kind: TypeAlias = Literal["tensor", "head", "token", "token_head"]
KEPT: dict[Kind, tuple[int, ...]] = {  # axes with a scale for each index, counted from the last
    "tensor": (), "head": (-2,), "token": (-4, -3), "token_head": (-4, -3, -2),
}  # fmt: skip
STATIC = {"static": True}


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one attention layer in 8 or 4 bits, as a pytree.

    :meth:`init` makes an empty cache, :meth:`update` quantises what it writes, and :meth:`read` and
    :meth:`attend` dequantise. A cache is an immutable value: it is an argument and a result of
    ``jit`` (donate it, so that it is updated in place), a carry of ``scan``, and is mapped by
    ``vmap``.

    Each number read is ``round_to(x / scale, format) * scale`` bit for bit in float32, where the
    quotient is exact before the one rounding to nearest even, and then rounded once to the cache's
    dtype. In NVFP4 ``scale`` is the product of the block's scale and the upper one, rounded to
    float32. Finite numbers beyond the format's largest saturate. Zeros keep their sign; positions
    that were never written are zeros. NaN and infinities are as in :func:`scalewise.quantize`, and
    change no scale.

    Attributes:
        keys: the stored keys.
        values: the stored values.
        format: the format of both.
        scales: which numbers share a float32 scale, see :meth:`init`.
    """

    keys: ScaledArray
    values: ScaledArray
    format: Format | BlockFormat = dataclasses.field(metadata=STATIC)
    scales: Kind = dataclasses.field(metadata=STATIC)

    @classmethod
    @checked
    def init(
        cls,
        shape: tuple[Count, ...],
        format: BlockFormatLike,
        *,
        scales: Kind = "token",
        dtype: DTypeLike = jnp.bfloat16,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> KVCache:
        """Returns an empty cache.

        Args:
            shape: (batch, positions, heads, head_dim), or without batch; of a paged cache (pages,
                positions of a page, heads, head_dim).
            format: a format of whole bytes (``"e4m3fn"``, ``"e5m2"``), or a block format
                (``"mxfp8_e4m3"``, ``"mxfp4"``, ``"nvfp4"``), whose blocks lie along head_dim.
            scales: what has a scale of its own: the whole ``"tensor"``, each ``"head"``, each
                ``"token"`` of each sequence, or each head of each token (``"token_head"``). The
                first two are found from the first write that isn't zero (the prompt, usually), and
                kept; later numbers beyond them saturate. In NVFP4 it is the upper scale; the MX
                formats have none, and ``scales`` has no effect.
            dtype: of the arrays that :meth:`read` returns.
            k_scale: the scale of the keys, from a checkpoint: a positive number, or one for each
                head with ``scales="head"``. Read values are multiplied by it, as in vLLM.
            v_scale: the scale of the values.

        Raises:
            ValueError: an unknown format, a shape of another rank, or a scale that isn't positive,
                has another shape, or that ``scales`` or the format leave no place for.

        Example:
            >>> cache = KVCache.init((8, 1, 2), "e4m3fn", dtype="float32")
            >>> cache = cache.update(jnp.full((1, 1, 2), 3.1), jnp.ones((1, 1, 2)), 0)
            >>> cache.read()[0][:2, 0].tolist(), cache.keys.data.dtype.name
            ([[3.0, 3.0], [0.0, 0.0]], 'float8_e4m3fn')
        """
        fmt = as_format(format, "KVCache.init", blocks=True)
        if isinstance(fmt, Format):
            storable(fmt)
        if len(shape) not in (3, 4):
            raise ValueError(
                f"KVCache.init: shape is {shape}; expected (batch, positions, heads, head_dim), or "
                "without batch"
            )
        dtype = np.dtype(dtype)

        def stored_zeros(name: str, scale: ArrayLike | None) -> ScaledArray:
            x = jax.ShapeDtypeStruct(shape, jnp.float32)
            held = _given(name, scale, shape, fmt, scales)
            stored = jax.eval_shape(lambda x: _quantised(x, fmt, scales, held, dtype), x)
            empty = jax.tree.map(_zeros, stored)
            if held is None:
                return empty
            scale = dataclasses.replace(empty.scale, scale=held) if empty.block else held
            return dataclasses.replace(empty, scale=scale)

        keys, values = stored_zeros("k_scale", k_scale), stored_zeros("v_scale", v_scale)
        return cls(keys, values, fmt, scales)

    @checked
    def update(
        self, k: ArrayLike, v: ArrayLike, position: ArrayLike, pages: ArrayLike | None = None
    ) -> KVCache:
        """Returns the cache with keys and values of consecutive positions written.

        With one position for all sequences this is ``lax.dynamic_update_slice``, in place in a
        donated cache; it moves a traced position so that all of ``k`` fits. With a position for
        each sequence, or pages, it is a scatter, for which XLA on CPU copies the cache; what lies
        beyond the end, or on a page below 0, isn't written.

        Args:
            k: keys, floats of shape (batch, tokens, heads, head_dim), without batch as the cache.
            v: values, of the same shape.
            position: of the first token: an integer, or one for each sequence of the batch.
            pages: of a paged cache: the page that holds each part of each sequence, integers of
                shape (batch, pages of a sequence).

        Raises:
            TypeError: k or v aren't floats, or position or pages aren't integers.
            ValueError: a shape that doesn't fit, a position, where it is known, out of range, or a
                cache that :func:`scalewise.autoscale` has turned into plain arrays.
        """
        if not isinstance(self.keys, ScaledArray):
            raise ValueError(
                "KVCache.update: the cache is of plain arrays, without scales to write with; call "
                "update outside of autoscale, which may contain read and attend"
            )
        k, v = float_array(k, "KVCache.update: k"), float_array(v, "KVCache.update: v")
        position, pages = self._places("update", k, position, pages)
        if v.shape != k.shape:
            raise ValueError(f"KVCache.update: v has the shape {v.shape}, and k {k.shape}")

        slots = None
        if position.ndim or pages is not None:
            slots = self._slots(k.shape[0], k.shape[1], position, pages)

        def written(old: ScaledArray, x: jax.Array) -> ScaledArray:
            held = self._shared_scale(old)
            new = _quantised(x.astype(jnp.float32), self.format, self.scales, held, old.dtype)
            return jax.tree.map(lambda a, b: b if a is held else write(a, b), old, new)

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            if slots is None:
                return lax.dynamic_update_slice_in_dim(old, new, position, old.ndim - 3)
            return old.at[slots].set(new, mode="drop")

        keys, values = written(self.keys, k), written(self.values, v)
        return dataclasses.replace(self, keys=keys, values=values)

    @checked
    def read(self, pages: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of all positions, in the cache's dtype.

        Args:
            pages: as for :meth:`update`; the positions are then those of the pages, in order.
        """
        table = None if pages is None else self._pages("read", pages)

        def gathered(x: jax.Array) -> jax.Array:
            return x[table].reshape(table.shape[0], -1, *x.shape[2:])  # pyright: ignore

        def value(a: ScaledArray | jax.Array) -> jax.Array:
            if not isinstance(a, ScaledArray):  # autoscale traces stored arguments as plain arrays
                return a if table is None else gathered(a)
            if table is None:
                return a.value()
            held = self._shared_scale(a)
            return jax.tree.map(lambda x: x if x is held else gathered(x), a).value()

        return value(self.keys), value(self.values)

    @checked
    def attend(
        self, q: ArrayLike, position: ArrayLike, pages: ArrayLike | None = None
    ) -> jax.Array:
        """Returns the causal attention of queries to the cache.

        It is ``jax.nn.dot_product_attention`` of what :meth:`read` returns, in q's dtype.

        Args:
            q: queries of consecutive positions, floats of shape (batch, tokens, query heads,
                head_dim), without batch as the cache. Their heads are a multiple of the cache's.
            position: of the first query, as for :meth:`update`. Each query attends to its own
                position and those before it.
            pages: as for :meth:`update`.

        Returns:
            An array of q's shape and dtype.
        """
        q = float_array(q, "KVCache.attend: q")
        position, pages = self._places("attend", q, position, pages)
        keys, values = (x.astype(q.dtype) for x in self.read(pages))
        shape = *q.shape[:-3], 1, q.shape[-3], keys.shape[-3]  # of the mask
        first = jnp.broadcast_to(position, q.shape[:-3])[..., None, None, None]
        query, past = (lax.broadcasted_iota(jnp.int32, shape, len(shape) - a) for a in (2, 1))
        return jax.nn.dot_product_attention(q, keys, values, mask=past <= first + query)

    def _shared_scale(self, x: ScaledArray) -> jax.Array | None:
        scale: Any = x.scale if isinstance(self.format, Format) else x.tensor_scale
        return scale if _is_shared(self.format, self.scales) else None

    def _places(
        self, name: str, x: jax.Array, position: Any, pages: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Checks new keys, or queries, and returns their positions and pages."""
        shape, queries = self.keys.shape, name == "attend"
        batch, length = shape[:-3], shape[-3]
        if pages is not None:
            pages = self._pages(name, pages)
            batch, length = pages.shape[:1], length * pages.shape[1]
        expected = *batch, "tokens", "query heads" if queries else shape[-2], shape[-1]
        fits = x.ndim == len(shape) and (*x.shape[:-3], x.shape[-1]) == (*batch, shape[-1])
        if not fits or (x.shape[-2] % shape[-2] if queries else x.shape[-2] != shape[-2]):
            raise ValueError(
                f"KVCache.{name}: {'q' if queries else 'k'} has the shape {x.shape}; expected "
                f"({', '.join(map(str, expected))})"
            )
        found = position if isinstance(position, Tracer) else np.asarray(position)
        if not jnp.issubdtype(found.dtype, jnp.integer):
            raise TypeError(f"KVCache.{name}: position is {found.dtype}; expected integers")
        if found.shape not in ((), batch):
            raise ValueError(
                f"KVCache.{name}: position has the shape {found.shape}; expected one integer"
                + (f", or one for each of {batch[0]} sequences" if batch else "")
            )
        last = length - x.shape[-3]
        if isinstance(found, np.ndarray) and not np.all((found >= 0) & (found <= last)):
            raise ValueError(
                f"KVCache.{name}: position is {found}; expected 0 to {last}, from where "
                f"{x.shape[-3]} of {length} positions follow"
            )
        return jnp.asarray(found, jnp.int32), pages

    def _pages(self, name: str, pages: Any) -> jax.Array:
        pages = jnp.asarray(pages)
        if not jnp.issubdtype(pages.dtype, jnp.integer):
            raise TypeError(f"KVCache.{name}: pages are {pages.dtype}; expected integers")
        if pages.ndim != 2 or self.keys.ndim != 4:
            raise ValueError(
                f"KVCache.{name}: pages have the shape {pages.shape}, the cache {self.keys.shape}; "
                "expected (batch, pages of a sequence), and four axes of the cache"
            )
        return pages

    def _slots(
        self, batch: int, tokens: int, position: jax.Array, pages: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the page (or sequence) and the place in it of each new token."""
        count, size = self.keys.shape[:2]
        row, token = (lax.broadcasted_iota(jnp.int32, (batch, tokens), a) for a in (0, 1))
        slot = jnp.broadcast_to(position, (batch,))[:, None] + token
        page = row
        if pages is not None:
            page = pages.at[row, slot // size].get(mode="fill", fill_value=count)
            slot = slot % size
        return jnp.where(page < 0, count, page), slot


def _is_shared(fmt: Format | BlockFormat, scales: Kind) -> bool:
    """Returns whether all positions have one scale, which is kept from write to write."""
    has_scale = isinstance(fmt, Format) or fmt.tensor_scale is not None
    return has_scale and scales in ("tensor", "head")


def _given(name: str, scale: Any, shape: Any, fmt: Any, scales: Kind) -> jax.Array | None:
    """Returns a shared scale, 0 if it is not known yet, with the axes of the data."""
    if not _is_shared(fmt, scales):
        if scale is not None:
            raise ValueError(
                f"KVCache.init: {name} is a scale for all positions; with {fmt.name} and "
                f"scales={scales!r} there is none"
            )
        return None
    full = tuple(n if a - len(shape) in KEPT[scales] else 1 for a, n in enumerate(shape))
    x = scale if isinstance(scale, Tracer) else np.asarray(0 if scale is None else scale)
    if x.ndim and x.size != math.prod(full):
        raise ValueError(
            f"KVCache.init: {name} has the shape {x.shape}; expected a number"
            + (f", or {shape[-2]} of them" if scales == "head" else "")
        )
    tiny = np.finfo(np.float32).tiny
    if scale is not None and not isinstance(x, Tracer) and not np.all((x >= tiny) & (x < np.inf)):
        raise ValueError(f"KVCache.init: {name} is {scale}; expected positive finite numbers")
    return jnp.broadcast_to(x.reshape(full if x.ndim else (1,) * len(full)), full).astype("float32")


def _quantised(
    x: jax.Array, fmt: Format | BlockFormat, scales: Kind, held: jax.Array | None, dtype: np.dtype
) -> ScaledArray:
    """Returns float32 numbers as a cache stores them.

    ``held`` is the scale that all positions share, 0 if it isn't known; None for scales that are
    found from ``x``.
    """
    last = x.ndim - 1
    options = {"rounding": "nearest_even", "saturate": "finite", "key": None}
    if isinstance(fmt, BlockFormat) and fmt.tensor_scale is None:
        stored = quantize_blocks(x, fmt, last, None, x, **options)
        return dataclasses.replace(stored, value_dtype=dtype)
    largest = amax(x, [a for a in range(x.ndim) if a - x.ndim not in KEPT[scales]], True)
    top = fmt.element.max
    if isinstance(fmt, BlockFormat):
        each = jax.vmap(lambda a: tensor_scale_of(a, fmt, None))
        scale, top = each(largest.reshape(-1)).reshape(largest.shape), top * fmt.scale.max
    else:
        scale, _ = to_top(largest, fmt, True)
    if held is not None:
        scale = jnp.where(held != 0, held, jnp.where(largest == 0, 0, scale))
    divisor = jnp.where(scale == 0, 1, scale)  # of zeros
    if held is not None:  # what saturates, lest its quotient is infinite
        most = divisor * np.float32(float(top))
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
    if isinstance(fmt, BlockFormat):
        stored = quantize_blocks(x, fmt, last, None, x, whole=divisor, **options)
        inner: Any = stored.scale
        return dataclasses.replace(stored, scale=ScaledArray(inner, scale), value_dtype=dtype)
    return ScaledArray(encode(quotient(x, divisor), fmt, **options), scale, value_dtype=dtype)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array whose bits are 0: in E8M0, which has no zero, 2^-127."""
    dtype = np.dtype(x.dtype)
    bits = jnp.zeros(x.shape, f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(bits, dtype)
