"""The primitives of JAX: all that scalewise knows of them.

A line holds what several primitives have in common, a colon, and their names; indented lines go on
with the names. Its columns: the family (how a result depends on its operands' scales, or what kind
of operation it is where no floats are computed: see :class:`Family`); autocast's class
(`AUTOCAST`); facts (`FACTS`), and how it makes a NaN of numbers without one (`nan=`, `NANS`) or an
infinity of finite numbers other than by their size or a division by 0 (`pole=`, `POLES`).
`tests/primitives` fails for a primitive of the installed JAX that isn't named: add it to a line
here, and a rule to `autoscaling/_rules.py` if its family needs another than the family's.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from types import MappingProxyType

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
fallback range elementwise costly: acosh cosh erfc sinh
fallback range elementwise costly masks: exp2
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
fallback range elementwise direct costly masks: exp
fallback range elementwise direct costly: expm1
fallback - elementwise series: igamma_grad_a
fallback range elementwise pole=pole: lgamma
fallback range elementwise direct costly nan=negative pole=log: log log1p
fallback range elementwise: log2
fallback - elementwise direct stable costly masks: logistic
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


class Family(enum.Enum):
    """How a primitive's result depends on its operands' scales, or why it has no scale."""

    STRUCTURAL = "moves elements of one operand, and keeps its exponent"
    ALIGNED = "mixes elements of several operands, which are first brought to one exponent"
    HOMOGENEOUS = "scales as its one operand does"
    COMPARISON = "compares operands at one exponent; returns no float"
    INVARIANT = "doesn't depend on its operand's scale"
    PRODUCT = "exponents add or subtract"
    POWER = "the exponent is multiplied"
    CONTRACTIVE = "odd and never larger than a small operand, whose scale it keeps"
    ORDERED = "sorts; each result keeps its operand's exponent"
    CONTRACTION = "operands are rounded to the recipe's formats, exponents add"
    FALLBACK = "computed on plain numbers in the compute dtype"
    SPARSE = "a product of a sparse matrix, whose operands stay wide"
    CALL = "its body is interpreted"
    NO_FLOATS = "no floats"
    KERNEL = "a kernel, foreign program or Python function: gets plain numbers"
    REFERENCE = "interpreted on the values in the array"
    INTERNAL = "exists only while JAX traces, differentiates or compares"


# The dtype in which autocast runs a primitive, and why.
AUTOCAST = MappingProxyType({
    "low": "a contraction: products of narrow numbers, summed in float32 by the hardware",
    "range": "float32: exponentials, logarithms and powers leave FP16's range (256 * 256)",
    "sum": "float32: a narrow accumulator stagnates at 2048 (FP16) or 256 (BF16)",
    "difference": "float32: cancellation exposes earlier rounding; in FP16 x - max(x) = -20 is off "
    "by 0.008, its exponential by 0.8 %",
    "function": "float32: applies a function that was traced for one dtype",
    "-": "the widest dtype among the operands, constants apart",
})  # fmt: skip

FACTS = MappingProxyType({
    "exact": "results are operands' values, possibly negated, which need no rounding",
    "elementwise": "a real function of the operands' elements at each index",
    "series": "elementwise, by a loop or a long expansion",
    "chooses": "returns some of its operands' elements",
    "selects": "one of the operands' elements at each index",
    "same_order": "the operand's elements in the same order",
    "keeps_constant": "the result of an operand whose elements are equal has equal elements",
    "single": "needs float32 at least: a library's kernel, its caller, or complex numbers",
    "packed": "its result holds several matrices, or one beside what is left of its operand, of "
    "different magnitudes",
    "own_dtype": "depends on the bits of its operand's dtype, or holds code traced for that dtype",
    "drops": "may leave elements of its operands out, so that one which isn't finite may be gone",
    "keeps_scale": "no larger than the largest operand, whose scale `every_op` therefore keeps",
    "reduces": "each result is found from many elements of its operand",
    "recomputed": "a backward pass computes it again from its operand rather than read it",
    "stable": "recomputed with a relative error of at most a small multiple of its operand's, or "
    "within a rounding error of one (tanh)",
    "costly": "recomputed by several operations for each element: its result is stored if it is "
    "read twice",
    "masks": "a mask's large negative numbers become its zeros",
    "in_norms": "may stand between the squares and the root of a norm that is written out",
    "adds": "adds or subtracts two operands",
    "accumulates": "adds elements of another operand to, or subtracts them from, some of its first",
    "whole": "its results are whole numbers: of nearby operands, one may be the next number",
    "indexes": "its integers are indices of its operand's elements",
    "host": "calls a Python function on the host",
    "contraction": "multiplies and adds, in a form that no rule of contractions covers",
    "bilinear": "linear in one operand, given the others, whatever its family",
    "collective": "exchanges data between the devices of a mesh",
    "direct": "lowered to one operation of its operands' types, or re-issues traced jaxprs",
})  # fmt: skip

# How a primitive makes a NaN of numbers without one.
NANS = MappingProxyType({
    "difference": "infinity minus infinity",
    "product": "0 times infinity, or infinity minus infinity",
    "quotient": "0 / 0, or infinity / infinity",
    "negative": "of a negative number",
    "infinite": "of infinity",
    "beyond_1": "of a number beyond 1",
    "pole": "of a pole",
})  # fmt: skip

# How a primitive makes an infinity of finite numbers, other than by their size or a division by 0.
POLES = MappingProxyType({
    "log": "the logarithm of 0",
    "root": "the inverse root of 0",
    "power": "a negative power of 0",
    "one": "of 1 or -1",
    "pole": "of a pole",
})  # fmt: skip

CAUSES = {"nan": NANS, "pole": POLES}

# The facts that another one implies.
IMPLIED = MappingProxyType({
    "selects": frozenset({"exact", "elementwise", "chooses", "drops", "keeps_scale"}),
    "same_order": frozenset({"exact", "keeps_constant"}),
    "adds": frozenset({"elementwise", "direct"}),
    "stable": frozenset({"recomputed"}),
    "costly": frozenset({"recomputed"}),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A primitive, as the table describes it.

    Attributes:
        name: as JAX prints it.
        family: how the result depends on its operands' scales.
        autocast: a key of :data:`AUTOCAST`.
        facts: keys of :data:`FACTS`.
        body: name of the parameter that holds the jaxpr which a call stands for, or None.
        nan, pole: how it makes a NaN and an infinity, a text of :data:`NANS` and of :data:`POLES`;
            "" if it makes none, or an infinity by a division by 0.
    """

    name: str
    family: Family
    autocast: str
    facts: frozenset[str]
    body: str | None = None
    nan: str = ""
    pole: str = ""

    @property
    def full(self) -> bool:
        """Whether autocast runs the primitive in float32."""
        wide = bool(self.facts & {"single", "own_dtype"})
        return self.autocast not in ("low", "-") or wide


def parsed(table: str) -> dict[str, Primitive]:
    """Returns the primitives of a table, by name.

    Raises:
        ValueError: a word is in no column's vocabulary, or a name occurs twice.
    """
    rows: dict[str, Primitive] = {}
    for line in re.sub(r"\n +", " ", table).splitlines():
        if not line or line.startswith("#"):
            continue
        columns, _, members = line.partition(":")
        family, autocast, *facts = columns.split()
        given = dict(f.split("=") for f in facts if "=" in f)
        known = frozenset(f for f in facts if "=" not in f)
        known = known.union(*(IMPLIED.get(f, ()) for f in known))
        body = given.pop("body", None)
        unknown = not known <= set(FACTS) or any(
            x not in CAUSES.get(k, ()) for k, x in given.items()
        )
        named = members.split()
        if rows.keys() & set(named) or autocast not in AUTOCAST or unknown or not named:
            raise ValueError(f"primitives/_table.py: a name twice or an unknown word in {line!r}")
        causes = {k: CAUSES[k][x] for k, x in given.items()}
        kind = Family[family.upper()]
        rows |= {x: Primitive(x, kind, autocast, known, body, **causes) for x in named}
    return rows


PRIMITIVES = MappingProxyType(parsed(TABLE))


def names(holds: Callable[[Primitive], object]) -> frozenset[str]:
    """Returns the names of the primitives whose rows satisfy a predicate."""
    return frozenset(name for name, row in PRIMITIVES.items() if holds(row))


def having(fact: str) -> frozenset[str]:
    """Returns the names of the primitives with one of :data:`FACTS`.

    Example:
        >>> "reshape" in having("exact"), "add" in having("exact")
        (True, False)
    """
    if fact not in FACTS:
        raise ValueError(f"{fact!r} is no fact of a primitive; expected one of {', '.join(FACTS)}")
    return names(lambda row: fact in row.facts)
