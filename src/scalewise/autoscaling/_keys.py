"""Random keys of operands, and the random Hadamard transform of a product's operands."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.linalg import hadamard

from ..interpret import Equation
from ..scaled import merge_blocks, split_blocks


def operand_key(key: jax.Array | None, operand_id: str, *operands: jax.Array) -> jax.Array:
    """Returns a key made of the program's, the operand's place and its bits."""
    key = jax.random.key(0) if key is None else key
    key = jax.random.fold_in(key, zlib.crc32(operand_id.encode()))
    for x in operands:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        key = jax.random.fold_in(key, jnp.sum(bits, dtype=jnp.uint32))
    return key


def place_of(equation: Equation) -> str:
    return ".".join(map(str, equation.order))


def hadamard_signs(size: int, key: jax.Array | None) -> jax.Array:
    if key is None:
        return jnp.asarray(np.random.RandomState(size).choice(np.array([-1, 1], np.float32), size))
    return jax.random.rademacher(key, (size,), jnp.float32)


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
