"""The dtypes that torch and JAX share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._torch import Dtype, torch

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
