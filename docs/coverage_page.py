"""Writes docs/coverage.md: what `autoscale` does with each primitive of JAX's public modules.

Every name stands in a table, here or in the library, so that the page is the same on each release
of JAX, and a primitive that a release adds has no row until somebody decides what happens to it.
"""

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

import jax
import jax.extend.core as jex

from scalewise.autoscale import RULES, Family
from scalewise.autoscale._keep import CALLBACKS
from scalewise.autoscale._rules import SPARSE
from scalewise.interpret import CONTROL, KERNELS

HERE = Path(__file__).parent

PASSED = """and or xor not clz population_count mulhi reduce_and reduce_or reduce_xor shift_left
    shift_right_arithmetic shift_right_logical iota axis_index platform_index dim_as_value
    dimension_size shape_assertion threefry2x32 threefry4x32 philox2x32 philox4x32 random_bits
    random_fold_in random_seed random_split random_wrap random_unwrap random_clone
    iota_2x32_shape rng_bit_generator from_edtype to_edtype consume assert_consumed_value
    lu_pivots_to_permutation create_token after_all check dce_sink empty2"""

CALLS = "call closed_call custom_jvp_call custom_vjp_call eval_jaxpr program_order"

# Computed on plain numbers in the compute dtype, results scaled anew by whoever stores them.
ELEMENTWISE = """acos acosh asin atan2 atanh bessel_i0e bessel_i1e ceil cos cosh digamma erf_inv
    erfc exp exp2 expm1 floor igamma igamma_grad_a igammac lgamma log log1p log2 logistic nextafter
    one_minus_square polygamma polynomial pow random_gamma random_gamma_grad
    regularized_incomplete_beta round rng_uniform sinh tan zeta"""
FACTORS = """cholesky cholesky_update custom_linear_solve eig eigh fft geqp3 geqrf hessenberg
    householder_product lu ormqr qr schur svd triangular_solve tridiagonal tridiagonal_solve"""
OTHERS = """bitcast_convert_type complex conj cumlogsumexp cumprod debug_callback debug_print empty
    inspect_sharding reduce reduce_precision reduce_window scatter-mul scatter_mul scatter_apply
    select_and_gather_add select_and_scatter select_and_scatter_add shard_alike tie
    xla_metadata_value"""
SPARSE_FORMS = """bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense
    bcoo_transpose bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense
    csr_fromdense csr_todense todense"""
COLLECTIVES = """ragged_all_to_all psend precv preduced reduced_vary_cast reduced_vary_cast_p
    vary_unreduced_cast vary_unreduced_cast_p unreduced_psum unreduced_pmax unreduced_pmin
    unreduced_reduce_scatter all_gather_reduced pbroadcast_dynamic
    all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done
    pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done
    psum_invariant_start reduce_scatter_start reduce_scatter_done unreduced_psum_start
    unreduced_reduce_scatter_start global_array_to_host_local_array
    host_local_array_to_global_array"""
FALLBACKS = " ".join([ELEMENTWISE, FACTORS, OTHERS, SPARSE_FORMS, COLLECTIVES])

REFERENCES = """get swap addupdate new_ref empty_ref free_ref freeze accum_grad_in_ref run_state
    broadcast_to create_linear pin unpin with_memory_space_constraint box_get box_set new_box
    log_extend log_read new_log"""
INTERNAL = """custom_lin custom_jvp_call_jaxpr unreachable zeros_like stage eq_to le_to lt_to"""

KINDS = {
    "control flow": ("its body is interpreted", [*CONTROL, *CALLS.split()]),
    "passes through": ("no floats", PASSED.split()),
    "warns, float32": (
        "a kernel or foreign program, which can't be transformed: it gets plain numbers",
        [k for k in KERNELS if k != "custom_linear_solve"],
    ),
    "warns, float32 fallback": ("the operands of a sparse product stay wide", SPARSE.split()),
    "refused": ("calls Python, unless the recipe's `keep` names it", list(CALLBACKS)),
    "mutable array": ("interpreted on the values that the array holds", REFERENCES.split()),
    "internal": (
        "exists only while JAX traces, differentiates or compares",
        INTERNAL.split(),
    ),
}
# What a rule does whose results count as those of a fallback.
SPECIAL = {
    "scaled_dot": "8-bit operands keep their numbers and scales; others are those of a contraction",
    "symmetric_product": "a contraction; its sum with the other operand in the compute dtype",
}
# Primitives of kernel languages, which occur nowhere else: the call of the kernel has a row.
KERNEL_MODULES = ("jax._src.pallas", "jax.experimental.pallas", "jax.experimental.mosaic",
                  "jax._src.thunky")  # fmt: skip
NOT_IMPORTED = ("_src", "pallas", "mosaic", "tools", "jax2tf", "collect_profile", "serialization")


def row(name: str) -> tuple[str, str] | None:
    """What happens to a primitive, and how; None for a name that stands in no table."""
    for what, (how, names) in KINDS.items():
        if name in names:
            return what, how
    if name in SPECIAL:
        return "rule: product", SPECIAL[name]
    if name in RULES:
        family = RULES[name].family
        return f"rule: {family.name.lower()}", family.value
    return ("float32 fallback", Family.FALLBACK.value) if name in FALLBACKS.split() else None


def names() -> list[str]:
    """Every name that has a row."""
    tables = [name for _, kind in KINDS.values() for name in kind]
    return sorted({*tables, *RULES, *FALLBACKS.split()})


def public_primitives() -> set[str]:
    """The primitives that JAX's public modules, experimental ones as well, bring into a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
            if not any(part in module.name for part in NOT_IMPORTED):
                try:
                    importlib.import_module(module.name)
                except ImportError:  # of what isn't installed
                    continue
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jax":
            for value in list(vars(module).values()):
                if isinstance(value, jex.Primitive):
                    found.setdefault(value, set()).add(name)
    return {
        p.name
        for p, modules in found.items()
        if not any(m.startswith(KERNEL_MODULES) for m in modules)
    }


def page() -> str:
    """The page's text."""
    lines = [
        "# What `autoscale` does with each primitive",
        "",
        "Made by `python docs/coverage_page.py`. `tests/autoscale/test_coverage.py` runs the rows",
        "of `jax.extend.core.primitives` and checks that every primitive of JAX's public modules",
        "has a row, on JAX 0.10.2 and on 0.12. A *fallback* computes on plain float32 numbers; its",
        "result is a value like any other. `scatter_apply` is a `scatter` that applies a function",
        "to elements (`x.at[i].apply(f)`). What *warns* does so once, with the source line, until",
        "a recipe's `keep` names it. So does `custom_linear_solve` if its solver multiplies. The",
        "primitives of kernel languages (Pallas, Mosaic) occur only inside of kernels.",
        "",
        "| primitive | what | how |",
        "|---|---|---|",
    ]
    for name in names():
        what, how = row(name) or ("", "")
        lines.append(f"| `{name}` | {what} | {how} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "coverage.md").write_text(page())
