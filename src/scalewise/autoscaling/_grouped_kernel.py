"""A kernel for Hopper that multiplies grouped rows, each by its group's matrix (``ragged_dot``).

XLA expands a grouped product to a dense one: all rows by each group's matrix. The kernel multiplies
a tile of rows by the matrices of the groups that have rows in it. Operands in 8 bits go to the
matrix units (wgmma) as they are, of MXFP8 as bfloat16 (Hopper has no units for blocks), which holds
a number times its scale. Sums are float32; those of FP8 products leave the units, which keep fewer
bits, after each 128 bytes of operands. The units read 8 bits with the sum innermost alone: tiles in
another order are transposed within the kernel, so that no operand is stored in both.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import gpu_dot, gpu_kernel, gpu_load, gpu_span, gpu_store
from ..rounding import widened
from ._kernels import kernel_primitive

TILE = 128  # rows and columns of a result that one program of the kernel computes


@dataclasses.dataclass(frozen=True)
class GroupedProduct:
    """What the kernel computes of ``(left, right, sizes, factors)`` and, of MXFP8, the operands'
    scales: ``lax.ragged_dot_general(left, right, sizes)``, times two numbers.

    Attributes:
        dimensions: as those of ``lax.ragged_dot_general``.
        dtype: the result's.
        precision: for XLA.
        exchanged: whether the last two axes of ``right``, matrices, are exchanged in memory, as
            :func:`quantize_params` writes them.
    """

    dimensions: lax.RaggedDotDimensionNumbers
    dtype: DTypeLike
    precision: Any = None
    exchanged: bool = False

    @property
    def sums_rows(self) -> bool:
        """Whether a group's rows are summed over, as for the gradient of its matrix."""
        return not self.dimensions.rhs_group_dimensions


def is_supported(dimensions: lax.RaggedDotDimensionNumbers | None) -> bool:
    """Returns whether the kernel computes such a product, one that ``ragged_dot`` or a gradient of
    it has: without batches, groups along the first axes."""
    if dimensions is None or any(dimensions.dot_dimension_numbers[1]):
        return False
    contracted, groups = dimensions.dot_dimension_numbers[0], dimensions.rhs_group_dimensions
    known: dict = {((0,), (0,)): (), ((1,), (1,)): (0,), ((1,), (2,)): (0,)}
    return dimensions.lhs_ragged_dimensions == (0,) and known.get(contracted) == groups


def grouped_product(*operands: jax.Array, rule: GroupedProduct) -> jax.Array:
    """Returns a product by the kernel where a program is compiled for CUDA, otherwise by XLA."""
    return grouped_p.bind(*operands, rule=rule)[0]


def by_kernel(
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    factors: jax.Array,
    *scales: jax.Array,
    rule: GroupedProduct,
    interpret: bool = False,
) -> list[jax.Array]:
    (axes, others), _ = rule.dimensions.dot_dimension_numbers
    (type_,) = _types(left, right, sizes, rule=rule)
    if rule.exchanged:
        right, others = right.swapaxes(1, 2), (3 - others[0],)
        scales = (*scales[:1], *(s.swapaxes(1, 2) for s in scales[1:]))
    summed = axes[0] - left.ndim, others[0] - right.ndim
    count, (rows, columns) = sizes.size, (n + -n % TILE for n in type_.shape[-2:])
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), left.shape[0])
    depth = TILE // (2 if scales else left.dtype.itemsize)
    numbers = [_tiled(x, a, depth) for x, a in zip((left, right), summed, strict=True)]
    exact = (s.astype(jnp.bfloat16) for s in scales)
    numbers += [_tiled(s, a, depth // 32) for s, a in zip(exact, summed, strict=False)]
    if rule.sums_rows:
        given = [jnp.concatenate([jnp.zeros(1, jnp.int32), ends])]
        grid, shape = (rows // TILE, columns // TILE, count), (count, rows, columns)
        kernel = partial(_grouped_sums, depth)
    else:  # the rows behind the last group's are a group whose matrix is 0
        bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, rows, jnp.int32)])
        given = [bounds, *_visits(bounds, rows // TILE)]
        grid, shape = (given[1].size, columns // TILE), (rows, columns)
        kernel = partial(_grouped_rows, depth, summed[1], count)
    whole = [(x, x.shape, None) for x in (factors, *given, *numbers)]
    result = jax.ShapeDtypeStruct(shape, rule.dtype)
    (out,) = gpu_kernel(kernel, grid, whole, [(result, shape, None)], interpret, warps=8, stages=3)
    return [lax.slice(out, [0] * out.ndim, type_.shape)]


def _tiled(x: jax.Array, summed: int, depth: int) -> jax.Array:
    """Returns an array padded with zeros to whole tiles of its last two axes.

    Of 8 bits, whose tiles have to be transposed, each four rows have an axis of their own.
    """
    whole = {summed: depth, -3 - summed: TILE}
    short = [(0, -n % whole.get(i - x.ndim, 1)) for i, n in enumerate(x.shape)]
    x = jnp.pad(x, short) if any(n for _, n in short) else x
    *lead, rows, columns = x.shape
    in_fours = summed == -2 and x.dtype.itemsize == 1
    return x.reshape(*lead, rows // 4, 4, columns) if in_fours else x


def _visits(bounds: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Returns the pairs of a group and a tile that has rows of it, in order, as two arrays.

    Of the pairs that there may be at most, the last ones are the last group's with the last tile.
    """
    start, end = bounds[:-1], bounds[1:]
    first = start // TILE
    counts = jnp.where(end > start, (end + TILE - 1) // TILE - first, 0)
    before = jnp.cumsum(counts) - counts
    at = lax.iota(jnp.int32, tiles + len(bounds) - 2)
    group = jnp.sum(at[:, None] >= (before + counts)[None, :-1], axis=1, dtype=jnp.int32)
    return group, jnp.minimum(first[group] + at - before[group], tiles - 1)


# -- one tile of the result ----------------------------------------------------------------------


def _operand(
    at: tuple, span, step, depth: int, summed: int, group: tuple | None, numbers, *scales
) -> jax.Array:
    """Returns a tile of an operand, with the sum along its last axis.

    Of numbers in blocks it has the products with their scales, in bfloat16. Where a group's first
    and last rows are given, all others are read as 0. The rows of a tile that is transposed have
    another order, see :func:`_in_order`.
    """

    def tile(array, block: int) -> jax.Array:
        fours = _in_fours(array, at)
        each = 4 if fours else 1
        count = depth // block // each

        def read(*part: np.int32) -> jax.Array:
            spans = gpu_span(step * count, count), *part, span
            own = array.at[(*at, *(spans if summed == -2 else spans[::-1]))]
            if group is None:
                return gpu_load(own)
            row = (step * count + lax.broadcasted_iota(jnp.int32, (count, TILE), 0)) * each * block
            row = row + sum(part)
            return gpu_load(own, (row < group[1]) & (row + block > group[0]))

        if fours:
            # each thread reads 16 numbers of each of four rows and writes 4 of each of 16 columns:
            # Triton alone would write single bytes, and wouldn't read ahead
            a, b, c, d = map(read, np.arange(4, dtype=np.int32))
            whole = jnp.stack([jnp.stack([a, c], -1), jnp.stack([b, d], -1)], -1)
            return lax.transpose(whole, (1, 0, 2, 3)).reshape(TILE, depth)
        return read().T if summed == -2 else read()

    x = tile(numbers, 1)
    if scales:
        blocks = x.astype(jnp.float32).reshape(TILE, -1, 32)
        wide = blocks * lax.expand_dims(tile(scales[0], 32).astype(jnp.float32), [2])
        x = wide.reshape(TILE, depth).astype(jnp.bfloat16)
    if not _in_fours(numbers, at):
        return x
    return lax.transpose(x.reshape(8, 16, depth), (1, 0, 2)).reshape(TILE, depth)


def _in_fours(array, at: tuple = ()) -> bool:
    return array.ndim > len(at) + 2


def _in_order(total: jax.Array, rows: bool, columns: bool) -> jax.Array:
    """Returns sums of tiles that were transposed with rows, or columns, in the order of memory.

    A warp writes words of one row in 16 to shared memory, which would meet in the same banks. Row
    16 i + j of memory is therefore row 8 j + i of the tile, so that they lie in eight rows in
    succession.
    """
    if rows:
        total = lax.transpose(total.reshape(16, 8, TILE), (1, 0, 2)).reshape(TILE, TILE)
    if columns:
        total = lax.transpose(total.reshape(TILE, 16, 8), (0, 2, 1)).reshape(TILE, TILE)
    return total


def _grouped_rows(
    depth: int, summed: int, count: int, at, factors, bounds, groups, tiles, *refs
) -> None:
    left, right, *scales, out = refs
    group, first = groups[at[0]], tiles[at[0]] * TILE
    rows, columns = gpu_span(first, TILE), gpu_span(at[1] * TILE, TILE)
    own = jnp.minimum(group, count - 1)

    def step(i, total):
        x = _operand((), rows, i, depth, -1, None, left, *scales[:1])
        y = _operand((own,), columns, i, depth, summed, None, right, *scales[1:])
        return gpu_dot(x, y, total)

    steps = jnp.where(group < count, np.int32(left.shape[-1] // depth), np.int32(0))
    total = lax.fori_loop(np.int32(0), steps, step, jnp.zeros((TILE, TILE), jnp.float32))
    row = first + lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
    inside = (row >= bounds[group]) & (row < bounds[group + 1])
    total = _in_order(total, False, _in_fours(right, (own,)))
    total = (total * factors[0] * factors[1]).astype(out.dtype)
    gpu_store(out.at[rows, columns], total, inside)


def _grouped_sums(depth: int, at, factors, bounds, *refs) -> None:
    left, right, *scales, out = refs
    group = bounds[at[2]], bounds[at[2] + 1]
    spans = [gpu_span(i * TILE, TILE) for i in at[:2]]

    def step(i, total):
        x = _operand((), spans[0], i, depth, -2, group, left, *scales[:1])
        y = _operand((), spans[1], i, depth, -2, group, right, *scales[1:])
        # without the select Triton reads each number of the left tile by itself
        x = jnp.where(group[1] > group[0], x, jnp.zeros_like(x)) if _in_fours(left) else x
        return gpu_dot(x, y, total)

    total = jnp.zeros((TILE, TILE), jnp.float32)
    total = lax.fori_loop(group[0] // depth, (group[1] + depth - 1) // depth, step, total)
    total = _in_order(total, _in_fours(left), _in_fours(right))
    out[(at[2], *spans)] = (total * factors[0] * factors[1]).astype(out.dtype)


# -- without the kernel --------------------------------------------------------------------------


def by_xla(
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    factors: jax.Array,
    *scales: jax.Array,
    rule: GroupedProduct,
) -> list[jax.Array]:
    (axes, others), _ = rule.dimensions.dot_dimension_numbers
    if scales:
        operands = zip((left, right), scales, (axes[0], others[0]), strict=True)
        left, right = (_decoded(*operand) for operand in operands)
    out = lax.ragged_dot_general(
        left, right, sizes, rule.dimensions, rule.precision, preferred_element_type=rule.dtype
    )
    return [(out.astype(jnp.float32) * factors[0] * factors[1]).astype(rule.dtype)]


def _decoded(x: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    factor = jnp.repeat(scale.astype(jnp.float32), 32, axis)
    factor = lax.slice_in_dim(factor, 0, x.shape[axis], axis=axis)
    return (widened(x).astype(jnp.float32) * factor).astype(jnp.bfloat16)


def _types(left, right, sizes, *others, rule: GroupedProduct) -> list[jax.ShapeDtypeStruct]:
    del others
    (axes, contracted), _ = rule.dimensions.dot_dimension_numbers
    rows = left.shape[1 - axes[0]]
    columns = right.shape[-1] if rule.sums_rows else right.shape[3 - contracted[0]]
    lead = (sizes.shape[0],) if rule.sums_rows else ()
    return [jax.ShapeDtypeStruct((*lead, rows, columns), rule.dtype)]


grouped_p = kernel_primitive("grouped_product", by_kernel, by_xla, _types)
