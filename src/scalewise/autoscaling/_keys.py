"""Random keys of operands, and the random Hadamard transform of a product's operands."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.linalg import hadamard

from ..interpret import Equation, outlined
from ..scaled import merge_blocks, split_blocks

THREEFRY, ROTATIONS = "threefry2x32", ((13, 15, 26, 6), (17, 29, 16, 24))


def operand_key(key: jax.Array | None, operand_id: str, *operands: jax.Array) -> jax.Array:
    """Returns a key made of the program's, the operand's place and its bits.

    By calls that a CPU's program keeps: it compiles Threefry once for all operands.
    """
    key = jax.random.key(0) if key is None else key
    sums = [outlined(_sum_of_bits, None, x.astype(jnp.float32).reshape(-1)) for x in operands]
    kind, place = jax.random.key_impl(key), np.uint32(zlib.crc32(operand_id.encode()))
    data = outlined(_folded, kind, jax.random.key_data(key), [place, *sums])
    return jax.random.wrap_key_data(data, impl=kind)


def _sum_of_bits(_: None, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)


def _folded(kind: Hashable, data: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
    if str(kind) == THREEFRY:
        for number in numbers:
            data = jnp.stack(threefry(data[0], data[1], jnp.zeros((), jnp.uint32), number))
        return data
    key = jax.random.wrap_key_data(data, impl=kind)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def threefry(
    first: jax.Array, second: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns Threefry-2x32 of two counters under a key of two numbers.

    JAX's own is a loop on a CPU, whose compiler compiles the body of each loop anew.
    """
    keys = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x, y = x + first, y + second
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x = x + y
            y = ((y << np.uint32(r)) | (y >> np.uint32(32 - r))) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def random_bits(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """Returns what ``jax.random.bits`` has at flat indices of an array, if it draws by index."""
    x, y = threefry(first, second, jnp.zeros_like(index), index)
    return x ^ y


def draws_by_index(kind: object) -> bool:
    """Returns whether a key of this implementation is Threefry's that draws each number apart."""
    return str(kind) == THREEFRY and jax.config.jax_threefry_partitionable  # pyright: ignore


def place_of(equation: Equation) -> str:
    return ".".join(map(str, equation.order))


def hadamard_signs(size: int, key: jax.Array | None) -> jax.Array:
    if key is None:
        return jnp.asarray(np.random.RandomState(size).choice(np.array([-1, 1], np.float32), size))
    options = size, jax.random.key_impl(key)
    return outlined(_drawn_signs, options, jax.random.key_data(key))


def _drawn_signs(options: tuple, data: jax.Array) -> jax.Array:
    size, kind = options
    return jax.random.rademacher(jax.random.wrap_key_data(data, impl=kind), (size,), jnp.float32)


def hadamard_transform(
    x: jax.Array, axis: int, signs: jax.Array, *, inverse: bool = False
) -> jax.Array:
    """Returns ``x @ diag(signs) @ H / sqrt(len(signs))`` by parts along an axis, or its inverse.

    H is Sylvester's Hadamard matrix. The result is float32 or float64; its axis has the next
    multiple of ``len(signs)``, filled up by zeros.
    """
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    size = len(signs)
    blocks = split_blocks(x, size, axis)
    matrix = signs[:, None].astype(x.dtype) * np.asarray(hadamard(size) * size**-0.5, x.dtype)
    matrix = matrix.T if inverse else matrix
    moved = jnp.moveaxis(blocks, axis + 1, -1)
    product = lax.dot_general(moved, matrix, (((x.ndim,), (0,)), ((), ())), precision="highest")
    shape = list(x.shape)
    shape[axis] = blocks.shape[axis] * size
    return merge_blocks(jnp.moveaxis(product, -1, axis + 1), shape, axis)
