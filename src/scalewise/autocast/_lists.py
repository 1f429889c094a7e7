"""The two lists: what runs in the narrow dtype, and what runs in float32. All else follows.

They are plain sets of names of JAX primitives, to be read, and to be changed by
``dataclasses.replace(policy, low=LOW | {...})`` or by rules. A primitive in neither list runs in
the widest dtype among its operands, constants apart.
"""

from __future__ import annotations

# Contractions: products of two narrow numbers, summed in float32 by the hardware, rounded once.
LOW = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})

# Exponentials, logarithms and powers leave FP16's range at once: exp(11.09), 256 * 256.
RANGE = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "log2", "pow", "integer_pow", "square", "sqrt", "rsqrt",
    "cbrt", "sinh", "cosh", "tan", "asinh", "acosh", "atanh", "lgamma", "digamma", "polygamma",
    "erfc", "erf_inv", "bessel_i0e", "bessel_i1e", "igamma", "igammac",
    "regularized_incomplete_beta", "random_gamma_grad", "zeta",
})  # fmt: skip

# Sums: a narrow accumulator swamps at 2048 (FP16) or 256 (BF16).
SUMS = frozenset({
    "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum",
    "reduce_window", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "reduce",
    "psum", "psum_invariant", "reduce_scatter", "all_reduce",
})  # fmt: skip

# Differences: softmax, norms and losses subtract a maximum, a mean or a target; what cancels
# there was rounded before. (In a narrow dtype x - max(x) = -20 is off by 0.008, its exp by 0.8 %.)
DIFFERENCES = frozenset({"sub", "div", "rem"})

# Primitives that mean the bits of their dtype, call out, or factorise.
LITERAL = frozenset({
    "bitcast_convert_type", "reduce_precision", "nextafter", "custom_linear_solve", "custom_root",
    "pure_callback", "io_callback", "ffi_call", "pallas_call", "approx_top_k", "rng_uniform",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add", "tridiagonal_solve",
    "eig", "eigh", "svd", "lu", "qr", "householder_product", "geqrf", "geqp3", "cholesky",
    "triangular_solve", "schur", "hessenberg", "tridiagonal", "cholesky_update", "fft",
    "debug_callback", "debug_print", "custom_call", "scatter_apply", "random_gamma",
})  # fmt: skip

FULL = RANGE | SUMS | DIFFERENCES | LITERAL
