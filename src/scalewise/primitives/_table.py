"""The primitives of JAX: all that scalewise knows of them.

A line holds what several primitives have in common, a colon, and their names; indented lines go on
with the names. Its columns: the family (how a result depends on its operands' scales, or what kind
of operation it is where no floats are computed: see :class:`Family`); autocast's class
(`AUTOCAST`); facts (`FACTS`), and how it makes a NaN of numbers without one (`nan=`, `NANS`) or an
infinity of finite numbers other than by their size or a division by 0 (`pole=`, `POLES`).
`tests/primitives` fails for a primitive of the installed JAX that isn't named: add it to a line
here, and a rule to `autoscaling/_rules.py` if its family needs another than the family's.
"""

TABLE = """
# Move elements of one operand.
structural - exact collective direct: all_gather all_gather_invariant all_to_all ppermute
structural - exact keeps_constant direct stable: broadcast_in_dim transpose
structural - elementwise direct stable in_norms: convert_element_type
structural - same_order direct stable: copy copy_p reshape squeeze stop_gradient
structural - exact: device_put layout_constraint mesh_cast pbroadcast relayout reshard tile unstack
structural - exact direct drops: dynamic_slice
structural - same_order stable: expand_dims
structural - exact chooses drops: gather
structural - exact direct stable: name
structural - exact direct: optimization_barrier rev sharding_constraint split
structural - exact keeps_constant direct: pcast pvary
structural - exact keeps_constant direct drops: slice

# Mix elements of several operands.
aligned - adds recomputed in_norms nan=difference: add
aligned - adds nan=difference: add_any
aligned - selects direct stable: clamp max min select_n
aligned - exact chooses direct keeps_scale: concatenate pad
aligned - exact direct keeps_scale: dynamic_update_slice
aligned difference elementwise direct recomputed: rem
aligned - exact chooses: scatter
aligned sum accumulates: scatter-add scatter-sub scatter_add scatter_sub
aligned - exact: scatter-max scatter-min scatter_max scatter_min stack
aligned difference adds recomputed nan=difference: sub

# Scale as their one operand does.
homogeneous - exact elementwise direct stable: abs neg
homogeneous - exact: cummax cummin
homogeneous sum nan=difference: cumsum
homogeneous -: imag real
homogeneous - exact collective direct: pmax pmin
homogeneous sum collective direct: psum psum_invariant
homogeneous - exact direct reduces: reduce_max reduce_min
homogeneous sum collective direct reduces: reduce_scatter
homogeneous sum direct reduces in_norms nan=difference: reduce_sum
homogeneous - exact reduces: reduce_window_max reduce_window_min
homogeneous sum reduces: reduce_window_sum

# Compare two operands.
comparison - elementwise direct: eq ge gt le lt ne

# Don't depend on a positive scale of their operand.
invariant - indexes: argmax argmin
invariant - elementwise direct: is_finite
invariant - exact elementwise direct stable: sign

# Exponents add or subtract.
product difference elementwise direct stable in_norms nan=quotient: div
product - elementwise direct stable nan=product: mul

# The exponent is multiplied.
power range elementwise stable costly: cbrt
power range elementwise stable pole=power: integer_pow
power sum reduces: reduce_prod
power range elementwise direct stable nan=negative pole=root: rsqrt
power range elementwise direct stable nan=negative: sqrt
power range elementwise direct stable: square

# Odd, and never larger than a small operand.
contractive range elementwise costly: asinh
contractive - elementwise costly: atan
contractive - elementwise stable costly: erf
contractive - elementwise direct costly nan=infinite: sin
contractive - elementwise direct stable costly: tanh

# Sort.
ordered -: approx_top_k
ordered - exact indexes: sort top_k

# Sums of products of two operands.
contraction low direct: conv_general_dilated
contraction low direct nan=product: dot_general
contraction low bilinear: ragged_dot ragged_dot_general

# All others that compute with floats.
fallback - elementwise nan=beyond_1: acos asin
fallback range elementwise costly: acosh cosh erfc exp2 sinh
fallback -: all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start
  all_to_all_done all_to_all_start bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates
  bcoo_todense bcoo_transpose bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense
  csr_fromdense csr_todense empty global_array_to_host_local_array host_local_array_to_global_array
  inspect_sharding ormqr pbroadcast_done pbroadcast_dynamic pbroadcast_start polynomial
  ppermute_done ppermute_start precv preduced psend psum_done psum_invariant_start psum_start
  reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p shard_alike
  symmetric_product tie todense unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start
  unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
  xla_metadata_value
fallback - elementwise: atan2 one_minus_square
fallback range elementwise costly nan=beyond_1 pole=one: atanh
fallback range elementwise series: bessel_i0e bessel_i1e igamma igammac polygamma
  regularized_incomplete_beta zeta
fallback - own_dtype direct: bitcast_convert_type
fallback - elementwise direct recomputed whole: ceil floor round
fallback - single packed: cholesky geqp3 geqrf hessenberg lu tridiagonal
fallback - single: cholesky_update complex conj custom_linear_solve eig eigh householder_product qr
  schur svd triangular_solve tridiagonal_solve
fallback - elementwise direct costly nan=infinite: cos
fallback sum: cumlogsumexp cumprod reduce scatter-mul scatter_mul select_and_scatter
fallback - own_dtype: custom_root fft random_gamma rng_uniform select_and_gather_add
fallback - own_dtype host: debug_callback debug_print
fallback range elementwise nan=pole: digamma
fallback range elementwise nan=beyond_1 pole=one: erf_inv
fallback range elementwise direct costly: exp expm1
fallback - elementwise series: igamma_grad_a
fallback range elementwise pole=pole: lgamma
fallback range elementwise direct costly nan=negative pole=log: log log1p
fallback range elementwise: log2
fallback - elementwise direct stable costly: logistic
fallback - elementwise own_dtype: nextafter
fallback range elementwise costly nan=negative pole=power: pow
fallback - direct: ragged_all_to_all
fallback range elementwise own_dtype series: random_gamma_grad
fallback - elementwise own_dtype direct: reduce_precision
fallback sum reduces: reduce_window
fallback - own_dtype contraction: scaled_dot
fallback function: scatter_apply
fallback sum bilinear: select_and_scatter_add
fallback range elementwise direct costly nan=infinite: tan

# Products of sparse matrices.
sparse sum: bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat
  coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv
sparse - single: spsolve

# Calls and control flow: their bodies are interpreted.
call - body=call_jaxpr: call eval_jaxpr program_order
call - direct: checkpoint cond jit pjit remat2 scan shard_map while
call - direct body=call_jaxpr: closed_call custom_jvp_call custom_vjp_call
call - body=jaxpr: composite
call - body=call: custom_partitioning custom_vmap_call
call - body=callee: linear_call
call - body=fwd_jaxpr: remat_opt

# Integers, booleans, keys and tokens.
no_floats -: after_all assert_consumed_value check clz consume create_token dce_sink dim_as_value
  dimension_size empty2 from_edtype iota_2x32_shape lu_pivots_to_permutation mulhi philox2x32
  philox4x32 platform_index random_bits random_clone random_fold_in random_seed random_split
  random_unwrap random_wrap reduce_xor rng_bit_generator shape_assertion threefry2x32 threefry4x32
  to_edtype
no_floats - direct: and axis_index iota not or population_count reduce_and reduce_or shift_left
  shift_right_arithmetic shift_right_logical xor

# Kernels, foreign programs and Python functions, whose inside isn't interpreted.
kernel - host: buffer_callback
kernel -: call_exported call_hi_primitive call_hi_primitive_linearized compute_on core_map
  cudnn_fusion custom_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper
  dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
  dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper
  fused_call fusible inline_mgpu_p mosaic_gpu_p mpmd_map rnn_bwd rnn_fwd scaled_matmul
  scaled_matmul_wrapper tpu_custom_call xla_metadata_call
kernel - own_dtype: custom_call ffi_call pallas_call
kernel - own_dtype host: io_callback pure_callback

# Read and write mutable arrays.
reference -: accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref
  free_ref freeze get log_extend log_read new_box new_log new_ref pin run_state swap unpin
  with_memory_space_constraint

# Exist only while JAX traces, differentiates or compares.
internal -: custom_jvp_call_jaxpr custom_lin eq_to le_to lt_to stage unreachable zeros_like
"""
