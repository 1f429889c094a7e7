"""torch's automatic mixed precision: the dtype in which each ATen operation gets its operands.

The lists are those of ``torch.autocast("cuda")``, ATen/autocast_mode.h; a test compares them with
the header that torch installs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree
from ._convert import jax_dtype
from ._torch import Node, torch

# Names of overloads, "default" left out.
_LOW = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
LOW = frozenset(_LOW.split())
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
FLOAT32 = frozenset(_FLOAT32.split())
# Their `dtype` is float32 unless one is given.
_FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
FLOAT32_RESULT = frozenset(_FLOAT32_RESULT.split())
_PROMOTED = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
PROMOTED = frozenset(_PROMOTED.split())
# Neither promote their operands nor are listed; fake tensors don't check their dtypes.
EQUAL_DTYPES = frozenset(["index_add", "index_copy", "index_reduce", "put"])
# Operations of a graph that torch calls inside of a listed one.
INSIDE = {
    "_prelu_kernel": "prelu",
    "_cdist_forward": "cdist",
    "_pdist_forward": "pdist",
    "grid_sampler_2d": "grid_sampler",
    "square": "pow.Tensor_Scalar",
    "upsample_nearest2d.vec": "upsample_nearest2d",
    "upsample_bilinear2d.vec": "upsample_bilinear2d",
}

Cast = Callable[[Any, np.dtype], Any]


def listed(target: Any) -> str:
    """Returns the name of an operation as the lists have it."""
    name = str(target).removeprefix("aten.").removesuffix(".default")
    return INSIDE.get(name, name)


def autocast(
    target: Any, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], low: np.dtype, cast: Cast
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns an operation's arguments as ``torch.autocast`` passes them; ``cast`` is ``x.to``."""
    name = listed(target)
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if _is_eligible(x)]
    if name in LOW:
        dtype = low
    elif name in FLOAT32:
        dtype = jnp.dtype(jnp.float32)
    elif name in PROMOTED:
        dtype = low if {_dtype(x) for x in arrays} <= {low} else jnp.dtype(jnp.float32)
    elif name in FLOAT32_RESULT and _is_eligible(args[0]):
        return _with_float32(target, args, kwargs)
    else:
        return args, kwargs

    def converted(x: Any) -> Any:
        return cast(x, dtype) if _is_eligible(x) and _dtype(x) != dtype else x

    return jax.tree.map(converted, (args, kwargs))


def refusal(node: Node, args: Sequence[PyTree], low: np.dtype | None) -> str:
    """Returns why torch raises in place of computing an operation, or ""."""
    name = listed(node.target)
    if name == "binary_cross_entropy" and low is not None:
        return "autocast refuses binary_cross_entropy: use binary_cross_entropy_with_logits"
    dtypes = sorted({str(_dtype(x)) for x in args if _is_eligible(x)})
    if name not in EQUAL_DTYPES or len(dtypes) == 1:
        return ""
    # a constant's dtype may be one that the model read without autocast
    made = node.args[0].op == "call_function" and not node.args[0].all_input_nodes
    if made and node.args[0].kwargs.get("dtype"):
        return ""
    return f"{name} of {' and '.join(dtypes)} raises: convert one by .to()"


def _dtype(x: Any) -> np.dtype | None:
    if isinstance(x, torch.Tensor):
        return jax_dtype(x.dtype)
    return x.dtype if isinstance(x, jax.Array | np.ndarray) else None


def _is_eligible(x: object) -> bool:
    dtype = _dtype(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float64


def _with_float32(
    target: Any, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns arguments with float32 for a ``dtype`` that isn't given."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.get("dtype") is not None:
        return args, kwargs
    at = names.index("dtype")
    return args[:at], {**kwargs, "dtype": torch.float32}
