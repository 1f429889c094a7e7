"""``to_jax`` and ``to_torch``: tensors as arrays and back, without a copy where possible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._types import PyTree
from ._torch import Dtype, Tensor, torch

NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "int64", "int32", "int16",
    "int8", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
TO_JAX = {getattr(torch, name): jnp.dtype(name) for name in NAMES if hasattr(torch, name)}
TO_TORCH = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in TO_JAX.items()}
TO_JAX[torch.complex32] = jnp.dtype(jnp.complex64)  # JAX has no narrower one


def jax_dtype(dtype: Dtype) -> np.dtype:
    """Returns JAX's dtype for one of torch's; the 32-bit one for 64 bits unless x64 is on."""
    if dtype not in TO_JAX:
        raise TypeError(f"JAX has no dtype for {dtype}; expected one of {', '.join(NAMES)}")
    return jax.dtypes.canonicalize_dtype(TO_JAX[dtype])


def torch_dtype(dtype: DTypeLike) -> Dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in TO_TORCH:
        raise TypeError(f"torch has no dtype for {dtype}; expected one of {', '.join(NAMES)}")
    return TO_TORCH[dtype]


# Numbers of a program that depend on its dtype: the largest one, and 1000 less (transformers).
LIMITS = {d: {torch.finfo(d).max - x for x in (0, 1000)} for d in map(torch_dtype, (
    jnp.float16, jnp.bfloat16, jnp.float32))}  # fmt: skip


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype of JAX is a float of at most 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def is_limit(x: Any, *dtypes: Dtype) -> bool:
    """Returns whether a number is the limit of a dtype: of one of 16 bits, unless others are
    given."""
    dtypes = dtypes or (torch.float16, torch.bfloat16)
    return isinstance(x, float) and any(abs(x) in LIMITS[d] for d in dtypes)


def to_jax(tree: PyTree) -> PyTree:
    """Returns a pytree with a JAX array for each torch tensor.

    The array shares the tensor's memory (by DLPack) if the tensor is contiguous, on a device that
    JAX has, and aligned to 64 bytes, as torch's own allocations are. Do not write to such a tensor
    while the array is in use. Other tensors are copied. Gradients don't pass.

    Args:
        tree: containers that JAX knows (tuples, lists, dicts) with tensors of any shape among the
            leaves. Other leaves are returned unchanged.

    Returns:
        Arrays of the same shapes and dtypes, bfloat16 and the float8 ones included. Unless x64 is
        on, 64-bit dtypes become 32-bit ones: floats are rounded, and integers have to fit.

    Raises:
        TypeError: a sparse or quantized tensor, or one of a dtype that JAX doesn't have.
        OverflowError: an int64 tensor with a number beyond int32, with x64 off.
    """
    return jax.tree.map(lambda x: _array(x) if isinstance(x, torch.Tensor) else x, tree)


def to_torch(tree: PyTree) -> PyTree:
    """Returns a pytree with a torch tensor for each JAX or NumPy array.

    A tensor shares the memory of a JAX array (by DLPack). JAX assumes that its arrays don't change:
    do not write to the tensor (``tensor.clone()`` gives one of its own). NumPy arrays are copied.

    Args:
        tree: containers that JAX knows, with arrays of any shape among the leaves. Other leaves are
            returned unchanged.

    Returns:
        Tensors of the same shapes and dtypes.

    Raises:
        TypeError: an array of a dtype that torch doesn't have.
    """
    arrays = jax.Array | np.ndarray | np.generic
    return jax.tree.map(lambda x: _tensor(x) if isinstance(x, arrays) else x, tree)


def _array(tensor: Tensor) -> jax.Array:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"to_jax takes dense tensors, not {tensor.layout}; call .to_dense() first")
    dtype = jax_dtype(tensor.dtype)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if TO_JAX[tensor.dtype] != dtype:
        tensor = _narrowed(tensor, dtype)
    if tensor.numel() == 0:
        return jnp.zeros(tuple(tensor.shape), dtype)
    if tensor.device.type != "cpu" and not any(
        d.platform in ("gpu", "cuda", "rocm") for d in jax.devices()
    ):
        tensor = tensor.cpu()
    return jnp.from_dlpack(tensor.contiguous())


def _narrowed(tensor: Tensor, dtype: np.dtype) -> Tensor:
    narrow = tensor.to(torch_dtype(dtype))
    if not dtype.kind == "f" and not dtype.kind == "c" and not torch.equal(narrow.long(), tensor):
        raise OverflowError(
            f"to_jax: a tensor of {tensor.dtype} has numbers beyond {dtype}; turn x64 on "
            "(jax.config.update('jax_enable_x64', True))"
        )
    return narrow


def _tensor(array: jax.Array) -> Tensor:
    dtype = torch_dtype(array.dtype)
    if not isinstance(array, jax.Array):
        array = jnp.asarray(np.array(array))
        if torch_dtype(array.dtype) != dtype:  # 64 bits, which JAX may not have
            raise TypeError(f"to_torch takes NumPy arrays of {dtype} only with JAX's x64 on")
    if array.size == 0:
        return torch.zeros(array.shape, dtype=dtype)
    return torch.from_dlpack(jax.block_until_ready(array))
