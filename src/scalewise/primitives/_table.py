"""One row for each primitive of JAX: all that scalewise knows of it.

Columns: the name; the family (how a result depends on its operands' scales, or what kind of
operation it is where no floats are computed: see :class:`Family`); autocast's class (`AUTOCAST`);
facts (`FACTS`), and how it makes a NaN of numbers without one (`nan=`, `NANS`) or an infinity of
finite numbers other than by their size or a division by 0 (`pole=`, `POLES`). `tests/primitives`
fails for a primitive of the installed JAX without a row: add a line here, and a rule in
`autoscaling/_rules.py` if its family needs another than the family's.
"""

TABLE = """
# Move elements of one operand.
all_gather                           structural   -          exact collective direct
all_gather_invariant                 structural   -          exact collective direct
all_to_all                           structural   -          exact collective direct
broadcast_in_dim                     structural   -          exact keeps_constant direct stable
convert_element_type                 structural   -          elementwise direct stable in_norms
copy                                 structural   -          same_order direct stable
copy_p                               structural   -          same_order direct stable
device_put                           structural   -          exact
dynamic_slice                        structural   -          exact direct drops
expand_dims                          structural   -          same_order stable
gather                               structural   -          exact chooses drops
layout_constraint                    structural   -          exact
mesh_cast                            structural   -          exact
name                                 structural   -          exact direct stable
optimization_barrier                 structural   -          exact direct
pbroadcast                           structural   -          exact
ppermute                             structural   -          exact collective direct
pcast                                structural   -          exact keeps_constant direct
pvary                                structural   -          exact keeps_constant direct
relayout                             structural   -          exact
reshape                              structural   -          same_order direct stable
reshard                              structural   -          exact
rev                                  structural   -          exact direct
sharding_constraint                  structural   -          exact direct
slice                                structural   -          exact keeps_constant direct drops
split                                structural   -          exact direct
squeeze                              structural   -          same_order direct stable
stop_gradient                        structural   -          same_order direct stable
tile                                 structural   -          exact
transpose                            structural   -          exact keeps_constant direct stable
unstack                              structural   -          exact

# Mix elements of several operands.
add                                  aligned      -          adds recomputed in_norms nan=difference
add_any                              aligned      -          adds nan=difference
clamp                                aligned      -          selects direct stable
concatenate                          aligned      -          exact chooses direct keeps_scale
dynamic_update_slice                 aligned      -          exact direct keeps_scale
max                                  aligned      -          selects direct stable
min                                  aligned      -          selects direct stable
pad                                  aligned      -          exact chooses direct keeps_scale
rem                                  aligned      difference elementwise direct recomputed
scatter                              aligned      -          exact chooses
scatter-add                          aligned      sum        accumulates
scatter-max                          aligned      -          exact
scatter-min                          aligned      -          exact
scatter-sub                          aligned      -          accumulates
scatter_add                          aligned      sum        accumulates
scatter_max                          aligned      -          exact
scatter_min                          aligned      -          exact
scatter_sub                          aligned      -          accumulates
select_n                             aligned      -          selects direct stable
stack                                aligned      -          exact
sub                                  aligned      difference adds recomputed nan=difference

# Scale as their one operand does.
abs                                  homogeneous  -          exact elementwise direct stable
cummax                               homogeneous  -          exact
cummin                               homogeneous  -          exact
cumsum                               homogeneous  sum        nan=difference
imag                                 homogeneous  -
neg                                  homogeneous  -          exact elementwise direct stable
pmax                                 homogeneous  -          exact collective direct
pmin                                 homogeneous  -          exact collective direct
psum                                 homogeneous  sum        collective direct
psum_invariant                       homogeneous  sum        collective direct
real                                 homogeneous  -
reduce_max                           homogeneous  -          exact direct reduces
reduce_min                           homogeneous  -          exact direct reduces
reduce_scatter                       homogeneous  sum        collective direct reduces
reduce_sum                           homogeneous  sum        direct reduces in_norms nan=difference
reduce_window_max                    homogeneous  -          exact reduces
reduce_window_min                    homogeneous  -          exact reduces
reduce_window_sum                    homogeneous  sum        reduces

# Compare two operands.
eq                                   comparison   -          elementwise direct
ge                                   comparison   -          elementwise direct
gt                                   comparison   -          elementwise direct
le                                   comparison   -          elementwise direct
lt                                   comparison   -          elementwise direct
ne                                   comparison   -          elementwise direct

# Don't depend on a positive scale of their operand.
argmax                               invariant    -          indexes
argmin                               invariant    -          indexes
is_finite                            invariant    -          elementwise direct
sign                                 invariant    -          exact elementwise direct stable

# Exponents add or subtract.
div                                  product      difference elementwise direct stable in_norms nan=quotient
mul                                  product      -          elementwise direct stable nan=product

# The exponent is multiplied.
cbrt                                 power        range      elementwise stable costly
integer_pow                          power        range      elementwise stable pole=power
reduce_prod                          power        sum        reduces
rsqrt                                power        range      elementwise direct stable nan=negative pole=root
sqrt                                 power        range      elementwise direct stable nan=negative
square                               power        range      elementwise direct stable

# Odd, and never larger than a small operand.
asinh                                contractive  range      elementwise costly
atan                                 contractive  -          elementwise costly
erf                                  contractive  -          elementwise stable costly
sin                                  contractive  -          elementwise direct costly nan=infinite
tanh                                 contractive  -          elementwise direct stable costly

# Sort.
approx_top_k                         ordered      -
sort                                 ordered      -          exact indexes
top_k                                ordered      -          exact indexes

# Sums of products of two operands.
conv_general_dilated                 contraction  low        direct
dot_general                          contraction  low        direct nan=product
ragged_dot                           contraction  low        bilinear
ragged_dot_general                   contraction  low        bilinear

# All others that compute with floats.
acos                                 fallback     -          elementwise nan=beyond_1
acosh                                fallback     range      elementwise costly
all_gather_done                      fallback     -
all_gather_reduced                   fallback     -
all_gather_reduced_start             fallback     -
all_gather_start                     fallback     -
all_to_all_done                      fallback     -
all_to_all_start                     fallback     -
asin                                 fallback     -          elementwise nan=beyond_1
atan2                                fallback     -          elementwise
atanh                                fallback     range      elementwise costly nan=beyond_1 pole=one
bcoo_extract                         fallback     -
bcoo_fromdense                       fallback     -
bcoo_sort_indices                    fallback     -
bcoo_sum_duplicates                  fallback     -
bcoo_todense                         fallback     -
bcoo_transpose                       fallback     -
bcsr_extract                         fallback     -
bcsr_fromdense                       fallback     -
bcsr_todense                         fallback     -
bessel_i0e                           fallback     range      elementwise series
bessel_i1e                           fallback     range      elementwise series
bitcast_convert_type                 fallback     -          own_dtype direct
ceil                                 fallback     -          elementwise direct recomputed whole
cholesky                             fallback     -          single packed
cholesky_update                      fallback     -          single
complex                              fallback     -          single
conj                                 fallback     -          single
coo_fromdense                        fallback     -
coo_todense                          fallback     -
cos                                  fallback     -          elementwise direct costly nan=infinite
cosh                                 fallback     range      elementwise costly
csr_fromdense                        fallback     -
csr_todense                          fallback     -
cumlogsumexp                         fallback     sum
cumprod                              fallback     sum
custom_linear_solve                  fallback     -          single
custom_root                          fallback     -          own_dtype
debug_callback                       fallback     -          own_dtype host
debug_print                          fallback     -          own_dtype host
digamma                              fallback     range      elementwise nan=pole
eig                                  fallback     -          single
eigh                                 fallback     -          single
empty                                fallback     -
erf_inv                              fallback     range      elementwise nan=beyond_1 pole=one
erfc                                 fallback     range      elementwise costly
exp                                  fallback     range      elementwise direct costly
exp2                                 fallback     range      elementwise costly
expm1                                fallback     range      elementwise direct costly
fft                                  fallback     -          own_dtype
floor                                fallback     -          elementwise direct recomputed whole
geqp3                                fallback     -          single packed
geqrf                                fallback     -          single packed
global_array_to_host_local_array     fallback     -
hessenberg                           fallback     -          single packed
host_local_array_to_global_array     fallback     -
householder_product                  fallback     -          single
igamma                               fallback     range      elementwise series
igamma_grad_a                        fallback     -          elementwise series
igammac                              fallback     range      elementwise series
inspect_sharding                     fallback     -
lgamma                               fallback     range      elementwise pole=pole
log                                  fallback     range      elementwise direct costly nan=negative pole=log
log1p                                fallback     range      elementwise direct costly nan=negative pole=log
log2                                 fallback     range      elementwise
logistic                             fallback     -          elementwise direct stable costly
lu                                   fallback     -          single packed
nextafter                            fallback     -          elementwise own_dtype
one_minus_square                     fallback     -          elementwise
ormqr                                fallback     -
pbroadcast_done                      fallback     -
pbroadcast_dynamic                   fallback     -
pbroadcast_start                     fallback     -
polygamma                            fallback     range      elementwise series
polynomial                           fallback     -
pow                                  fallback     range      elementwise costly nan=negative pole=power
ppermute_done                        fallback     -
ppermute_start                       fallback     -
precv                                fallback     -
preduced                             fallback     -
psend                                fallback     -
psum_done                            fallback     -
psum_invariant_start                 fallback     -
psum_start                           fallback     -
qr                                   fallback     -          single
ragged_all_to_all                    fallback     -          direct
random_gamma                         fallback     -          own_dtype
random_gamma_grad                    fallback     range      elementwise own_dtype series
reduce                               fallback     sum
reduce_precision                     fallback     -          elementwise own_dtype direct
reduce_scatter_done                  fallback     -
reduce_scatter_start                 fallback     -
reduce_window                        fallback     sum        reduces
reduced_vary_cast                    fallback     -
reduced_vary_cast_p                  fallback     -
regularized_incomplete_beta          fallback     range      elementwise series
rng_uniform                          fallback     -          own_dtype
round                                fallback     -          elementwise direct recomputed whole
scaled_dot                           fallback     -          own_dtype contraction
scatter-mul                          fallback     sum
scatter_apply                        fallback     function
scatter_mul                          fallback     sum
schur                                fallback     -          single
select_and_gather_add                fallback     -          own_dtype
select_and_scatter                   fallback     sum
select_and_scatter_add               fallback     sum        bilinear
shard_alike                          fallback     -
sinh                                 fallback     range      elementwise costly
svd                                  fallback     -          single
symmetric_product                    fallback     -
tan                                  fallback     range      elementwise direct costly nan=infinite
tie                                  fallback     -
todense                              fallback     -
triangular_solve                     fallback     -          single
tridiagonal                          fallback     -          single packed
tridiagonal_solve                    fallback     -          single
unreduced_pmax                       fallback     -
unreduced_pmin                       fallback     -
unreduced_psum                       fallback     -
unreduced_psum_start                 fallback     -
unreduced_reduce_scatter             fallback     -
unreduced_reduce_scatter_start       fallback     -
vary_unreduced_cast                  fallback     -
vary_unreduced_cast_p                fallback     -
xla_metadata_value                   fallback     -
zeta                                 fallback     range      elementwise series

# Products of sparse matrices.
bcoo_dot_general                     sparse       sum
bcoo_dot_general_sampled             sparse       sum
bcoo_spdot_general                   sparse       sum
bcsr_dot_general                     sparse       sum
coo_matmat                           sparse       sum
coo_matvec                           sparse       sum
coo_spmm                             sparse       sum
coo_spmv                             sparse       sum
csr_matmat                           sparse       sum
csr_matvec                           sparse       sum
csr_spmm                             sparse       sum
csr_spmv                             sparse       sum
spsolve                              sparse       -          single

# Calls and control flow: their bodies are interpreted.
call                                 call         -          body=call_jaxpr
checkpoint                           call         -          direct
closed_call                          call         -          direct body=call_jaxpr
composite                            call         -          body=jaxpr
cond                                 call         -          direct
custom_jvp_call                      call         -          direct body=call_jaxpr
custom_partitioning                  call         -          body=call
custom_vjp_call                      call         -          direct body=call_jaxpr
custom_vmap_call                     call         -          body=call
eval_jaxpr                           call         -          body=call_jaxpr
jit                                  call         -          direct
linear_call                          call         -          body=callee
pjit                                 call         -          direct
program_order                        call         -          body=call_jaxpr
remat2                               call         -          direct
remat_opt                            call         -          body=fwd_jaxpr
scan                                 call         -          direct
shard_map                            call         -          direct
while                                call         -          direct

# Integers, booleans, keys and tokens.
after_all                            no_floats    -
and                                  no_floats    -          direct
assert_consumed_value                no_floats    -
axis_index                           no_floats    -          direct
check                                no_floats    -
clz                                  no_floats    -
consume                              no_floats    -
create_token                         no_floats    -
dce_sink                             no_floats    -
dim_as_value                         no_floats    -
dimension_size                       no_floats    -
empty2                               no_floats    -
from_edtype                          no_floats    -
iota                                 no_floats    -          direct
iota_2x32_shape                      no_floats    -
lu_pivots_to_permutation             no_floats    -
mulhi                                no_floats    -
not                                  no_floats    -          direct
or                                   no_floats    -          direct
philox2x32                           no_floats    -
philox4x32                           no_floats    -
platform_index                       no_floats    -
population_count                     no_floats    -          direct
random_bits                          no_floats    -
random_clone                         no_floats    -
random_fold_in                       no_floats    -
random_seed                          no_floats    -
random_split                         no_floats    -
random_unwrap                        no_floats    -
random_wrap                          no_floats    -
reduce_and                           no_floats    -          direct
reduce_or                            no_floats    -          direct
reduce_xor                           no_floats    -
rng_bit_generator                    no_floats    -
shape_assertion                      no_floats    -
shift_left                           no_floats    -          direct
shift_right_arithmetic               no_floats    -          direct
shift_right_logical                  no_floats    -          direct
threefry2x32                         no_floats    -
threefry4x32                         no_floats    -
to_edtype                            no_floats    -
xor                                  no_floats    -          direct

# Kernels, foreign programs and Python functions, whose inside isn't interpreted.
buffer_callback                      kernel       -          host
call_exported                        kernel       -
call_hi_primitive                    kernel       -
call_hi_primitive_linearized         kernel       -
compute_on                           kernel       -
core_map                             kernel       -
cudnn_fusion                         kernel       -
custom_call                          kernel       -          own_dtype
custom_fusion                        kernel       -
dot_product_attention_bwd            kernel       -
dot_product_attention_bwd_wrapper    kernel       -
dot_product_attention_fp8_bwd        kernel       -
dot_product_attention_fp8_bwd_wrapper kernel       -
dot_product_attention_fp8_fwd        kernel       -
dot_product_attention_fp8_fwd_wrapper kernel       -
dot_product_attention_fwd            kernel       -
dot_product_attention_fwd_wrapper    kernel       -
ffi_call                             kernel       -          own_dtype
fused_call                           kernel       -
fusible                              kernel       -
inline_mgpu_p                        kernel       -
io_callback                          kernel       -          own_dtype host
mosaic_gpu_p                         kernel       -
mpmd_map                             kernel       -
pallas_call                          kernel       -          own_dtype
pure_callback                        kernel       -          own_dtype host
rnn_bwd                              kernel       -
rnn_fwd                              kernel       -
scaled_matmul                        kernel       -
scaled_matmul_wrapper                kernel       -
tpu_custom_call                      kernel       -
xla_metadata_call                    kernel       -

# Read and write mutable arrays.
accum_grad_in_ref                    reference    -
addupdate                            reference    -
box_get                              reference    -
box_set                              reference    -
broadcast_to                         reference    -
create_linear                        reference    -
empty_ref                            reference    -
free_ref                             reference    -
freeze                               reference    -
get                                  reference    -
log_extend                           reference    -
log_read                             reference    -
new_box                              reference    -
new_log                              reference    -
new_ref                              reference    -
pin                                  reference    -
run_state                            reference    -
swap                                 reference    -
unpin                                reference    -
with_memory_space_constraint         reference    -

# Exist only while JAX traces, differentiates or compares.
custom_jvp_call_jaxpr                internal     -
custom_lin                           internal     -
eq_to                                internal     -
le_to                                internal     -
lt_to                                internal     -
stage                                internal     -
unreachable                          internal     -
zeros_like                           internal     -
"""  # noqa: E501
