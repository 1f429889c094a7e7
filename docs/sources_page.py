"""Writes ``docs/sources.md``: what the five sources describe, and where it is; run it to update it.

An item is *done* if everything that its row names exists: the names in ``scalewise``, the page and
its section, and the test. ``tests/examples/test_sources.py`` fails if an item isn't.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

from parts import parts_of

import scalewise as sw

HERE = Path(__file__).parent
PARTS = parts_of("sources")
TESTS = HERE.parent / "tests"


class Item(NamedTuple):
    """Something that a source describes.

    Attributes:
        what: in a few words.
        names: in ``scalewise``, separated by commas, each with its arguments if they matter.
        page: with its section, as in ``casts.md#e8m0``.
        test: the file and the function, as in ``scaled/test_casts.py::test_...``.
    """

    what: str
    names: str
    page: str
    test: str


CASTS, FORMATS = "scaled/test_casts.py::", "formats/test_formats.py::"
TABLES = CASTS + "test_the_tables_of_the_page_are_the_published_ones"
OPS, NORMS = "scaled/test_operations.py::", "ops/test_norms.py::"
TWO = OPS + "test_two_operands_give_the_value_behind_the_published_scale"
ONE = OPS + "test_one_operand_gives_the_value_behind_the_published_scale"
FUNCTIONS, TUTORIAL = "ops/test_functions.py::", "mixed_precision.md#"
FIGURES = "examples/test_mixed_precision.py::test_the_figures_are_made_by_the_code_of_the_page"
LOSS = "training/test_loss_scale.py::"

SOURCES: dict[str, tuple[Item, ...]] = {
    "ONNX's page on float8": (
        Item("E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ: bias, infinities, NaN, zeros, largest, smallest",
             "formats.E4M3FN, formats.E4M3FNUZ, formats.E5M2, formats.E5M2FNUZ", "formats.md",
             FORMATS + "test_published_constants"),
        Item("the value of each code, subnormal or not", "Format.decode", "formats.md",
             FORMATS + "test_decode_matches_ml_dtypes_for_every_code"),
        Item("cast: round to nearest even on the fraction's width", "cast, round_to", "casts.md",
             "rounding/test_round.py::test_round_to_matches_the_exact_rounding"),
        Item("the saturating table as printed", "cast(saturate=\"onnx-19\")",
             "casts.md#to-float8-saturating-saturateonnx", TABLES),
        Item("the saturating rule since operator set 24", "cast(saturate=\"onnx\")",
             "casts.md#rules-of-saturation", TABLES),
        Item("the table without saturation", "cast(saturate=False)",
             "casts.md#to-float8-not-saturating-saturatefalse", TABLES),
        Item("what each rule means for each format", "saturation, rounding.SATURATION_RULES",
             "casts.md#rules-of-saturation",
             CASTS + "test_a_rule_is_one_of_the_proved_modes_for_each_format"),
        Item("signs of zero and NaN", "cast", "casts.md#from-float8", TABLES),
        Item("exact casts from float8 to FP16, BF16, float32", "round_to", "casts.md#from-float8",
             "rounding/test_sources.py::test_every_float8_value_rounds_as_in_encode"),
        Item("E4M3FN isn't E4M3FNUZ with another NaN: the bias differs", "cast",
             "casts.md#from-float8",
             "rounding/test_sources.py::test_every_float8_value_rounds_as_in_encode"),
        Item("E8M0: up, down, nearest, with and without saturation", "cast(rounding=\"up\")",
             "casts.md#e8m0", FORMATS + "test_e8m0_matches_onnx"),
        Item("E8M0's tie, zero and smallest number", "Format.encode", "references.md",
             FORMATS + "test_e8m0_matches_onnx"),
        Item("float6 and float4", "formats.E2M3FN, formats.E3M2FN, formats.E2M1FN", "formats.md",
             "rounding/test_encoded.py::test_encode_and_astype_match_round_to"),
        Item("NaN or an infinity in an MX block makes its scale NaN (torchao)",
             "Mx(nan_scale=True)", "casts.md#blocks-nan-and-infinities",
             CASTS + "test_a_block_with_an_infinity_is_nan_as_in_torchao"),
    ),
    "The Scalify design": (
        Item("ScaledArray(data, scale), any scale that broadcasts", "ScaledArray", "scalify.md",
             "scaled/test_scaled.py::test_value"),
        Item("special scales 1, 0 and None; Python numbers are floats", "ScaledArray",
             "scalify.md", OPS + "test_special_scales"),
        Item("aval and value", "ScaledArray.aval, ScaledArray.value", "scalify.md",
             OPS + "test_scaled_tree_takes_a_scaled_array_for_a_leaf"),
        Item("matmul: A B / s behind sA sB s", "scaled.matmul, scaled.dot_general",
             "scalify.md#operations-and-their-rules", TWO),
        Item("another static scale than sqrt(K)", "scaled.matmul(static=)",
             "scalify.md#operations-and-their-rules",
             OPS + "test_contractions_with_unit_data_give_unit_data"),
        Item("convolutions", "scaled.conv", "scalify.md#operations-and-their-rules",
             OPS + "test_contractions_with_unit_data_give_unit_data"),
        Item("cast hands the scale on", "scaled.cast_data", "scalify.md#operations-and-their-rules",
             OPS + "test_operands_in_8_bits"),
        Item("add, sub: the larger scale", "scaled.add, scaled.sub",
             "scalify.md#operations-and-their-rules", TWO),
        Item("mul, div: scales multiply", "scaled.mul, scaled.div",
             "scalify.md#operations-and-their-rules", TWO),
        Item("a scalar operand goes into the scale", "scaled.mul",
             "scalify.md#operations-and-their-rules",
             OPS + "test_numbers_go_into_the_scale_and_arrays_have_the_scale_1"),
        Item("maximum, minimum; a zero array costs nothing", "scaled.maximum, scaled.minimum",
             "scalify.md#operations-and-their-rules", OPS + "test_special_scales"),
        Item("max, min keep the scale", "scaled.max, scaled.min",
             "scalify.md#operations-and-their-rules", ONE),
        Item("sum with a static scale", "scaled.sum, scaled.mean",
             "scalify.md#operations-and-their-rules", ONE),
        Item("relu", "scaled.relu", "scalify.md#operations-and-their-rules", ONE),
        Item("gelu, left open", "scaled.gelu", "scalify.md#operations-and-their-rules", ONE),
        Item("softmax behind 1 / sum", "scaled.softmax", "scalify.md#operations-and-their-rules",
             OPS + "test_rows_of_a_softmax_have_scales_of_their_own"),
        Item("exp, log, sqrt, powers, where, concatenate",
             "scaled.exp, scaled.log, scaled.sqrt, scaled.integer_pow, scaled.where, "
             "scaled.concatenate", "scalify.md#operations-and-their-rules",
             OPS + "test_log_and_roots_behind_small_scales"),
        Item("a transformation from arrays to ScaledArrays", "autoscale(recipe=\"scalify\")",
             "scalify.md#a-training-loop",
             OPS + "test_autoscale_of_scaled_arrays_returns_scaled_arrays"),
        Item("the same rules in both", "scaled.RULES", "scalify.md#operations-and-their-rules",
             "autoscale/test_propagation.py::test_the_scales_are_those_of_the_scaled_operations"),
        Item("a rule for each primitive", "autoscale", "coverage.md",
             "autoscale/test_coverage.py::test_no_primitive_is_missing"),
        Item("helpers for pytrees", "scaled.as_scaled, scaled.asarray, scaled.is_scaled, "
             "scaled.scaled_tree", "scalify.md",
             OPS + "test_trees_as_scaled_and_back"),
        Item("rebalance", "rebalance", "rescaling.md#rebalancing",
             "scaled/test_scaled.py::test_rebalance_moves_a_factor"),
        Item("dynamic rescaling", "scaled.dynamic_rescale, rescale, rescale_gradient",
             "rescaling.md#dynamic-rescaling", OPS + "test_dynamic_rescaling_changes_no_value"),
        Item("the scale with the least squared error", "LeastSquares",
             "rescaling.md#the-scale-with-the-least-squared-error",
             "scaled/test_scaling.py::test_least_squares_is_as_good_as_a_scan_over_scales"),
        Item("the great decoupling: arithmetic chosen by the scale",
             "scaled.exp(arithmetic=\"auto\")", "rescaling.md#the-arithmetic-by-the-scale",
             OPS + "test_the_arithmetic_of_exp_follows_the_values"),
        Item("the comparison of five kinds of scaling, with figures",
             "recipes.scalify", "scalify.md#five-kinds-of-scaling",
             OPS + "test_the_comparison_of_kinds_measures_the_same_again"),
    ),
    "FP16-safe norms": (
        Item("the direct norm", "ops.l2_norm(method=\"direct\")", "norms.md",
             NORMS + "test_direct_is_numpys_halves_bit_for_bit"),
        Item("max-normalised, LAPACK before 3.10", "ops.l2_norm(method=\"max_normalised\")",
             "norms.md#published-claims-and-results",
             NORMS + "test_the_published_methods_fail_where_known"),
        Item("two segments against overflow, as published",
             "ops.l2_norm(method=\"two_segment_overflow\")",
             "norms.md#published-claims-and-results",
             NORMS + "test_the_published_methods_fail_where_known"),
        Item("its halving by a shift", "ops.l2_norm", "norms.md#published-claims-and-results",
             NORMS + "test_the_published_overflow_method_halves_by_a_shift"),
        Item("two segments against underflow, as published",
             "ops.l2_norm(method=\"two_segment_underflow\")",
             "norms.md#published-claims-and-results",
             NORMS + "test_the_published_methods_fail_where_known"),
        Item("both corrected", "ops.l2_norm(method=\"two_segment_overflow_corrected\")",
             "norms.md#where-methods-fail", NORMS + "test_the_published_methods_fail_where_known"),
        Item("scaling by powers of two", "ops.l2_norm(method=\"power_of_two\")",
             "norms.md#where-methods-fail",
             NORMS + "test_an_epsilon_beyond_the_scale_of_the_vector"),
        Item("a float32 scalar beside narrow vectors", "ops.l2_norm(method=\"narrow_squares\")",
             "norms.md#fp16-vectors-and-float32-scalars",
             NORMS + "test_narrow_squares_need_no_wide_vector"),
        Item("Blue's accumulators, LAPACK 3.10", "ops.l2_norm(method=\"blue\")",
             "norms.md#the-torture-set", NORMS + "test_the_published_methods_fail_where_known"),
        Item("β_H from format and n", "ops.beta_high", "norms.md#thresholds",
             NORMS + "test_below_beta_high_no_sum_of_squares_overflows"),
        Item("β_L from format and n", "ops.beta_low", "norms.md#thresholds",
             NORMS + "test_from_beta_low_on_squares_keep_their_bits"),
        Item("other thresholds", "ops.l2_norm(beta=)", "norms.md#thresholds",
             NORMS + "test_another_threshold"),
        Item("the sum: order, blocks, compensation", "ops.accumulate, ops.ORDERS",
             "norms.md#published-claims-and-results",
             "ops/test_arithmetic.py::test_where_sums_stall"),
        Item("ε of either sign", "ops.l2_norm(eps=)", "norms.md#auto",
             NORMS + "test_an_epsilon_beyond_the_scale_of_the_vector"),
        Item("an error bound for all x", "ops.l2_norm, ops.ulp_bound",
             "norms.md#what-auto-promises-and-does",
             NORMS + "test_auto_keeps_its_bound_whatever_the_vector"),
        Item("other formats: FP8, BF16, DLFloat16", "ops.l2_norm(arithmetic=)",
             "norms.md#the-torture-set", NORMS + "test_auto_keeps_its_bound_in_other_formats"),
        Item("the sign bit used by an unsigned format", "Format.unsigned", "formats.md",
             NORMS + "test_an_unsigned_format_has_one_bit_more"),
        Item("layer norm and RMS norm with gradients under a bound", "ops.layer_norm, ops.rms_norm",
             "norms.md#layer-norm-and-rms-norm",
             "ops/test_normalise.py::"
             "test_values_and_gradients_are_within_the_bound_on_the_torture_set"),
        Item("as layers of Flax NNX, Linen, Equinox",
             "layers.nnx.LayerNorm, layers.linen.RMSNorm, layers.equinox.LayerNorm",
             "norms.md#layer-norm-and-rms-norm",
             "layers/test_layers.py::test_in_fp16_squares_may_overflow"),
    ),
    "PaddlePaddle's guide to low-precision operators": (
        Item("the table of types: bits, spacing, range", "formats.CATALOGUE", "formats.md",
             FORMATS + "test_published_constants"),
        Item("decimal digits", "Format.decimal_digits, Format.round_trip_digits", "formats.md",
             FORMATS + "test_decimal_digits_are_those_of_numpy_and_c"),
        Item("a compute type for each storage type", "ops.functions.COMPUTE",
             "kernels.md#the-compute-type-of-a-storage-type",
             FUNCTIONS + "test_the_computing_type_can_be_chosen_and_gradients_go_through"),
        Item("functions through float32", "ops.functions", "kernels.md#functions-through-float32",
             FUNCTIONS + "test_the_result_is_float32s_rounded_once"),
        Item("reductions in float32", "ops.sum, ops.mean, ops.var, ops.softmax",
             "kernels.md#reductions-in-float32",
             "ops/test_reductions.py::test_the_classic_failures"),
        Item("isinf of a half: -1, 0, 1", "ops.isinf_sign", "kernels.md#nan-and-infinities",
             FUNCTIONS + "test_which_infinity"),
        Item("errors of the cast FP32 to FP16", "cast",
             "functions.md#the-cast-to-fp16-published-and-ours",
             FUNCTIONS + "test_casts_to_fp16_over_every_float32_number"),
        Item("the same for log-uniform samples", "cast",
             "functions.md#the-cast-to-fp16-published-and-ours",
             "examples/test_pages.py::test_a_generated_page_is_what_its_script_writes"),
        Item("errors of functions over normal inputs", "ops.functions",
             "functions.md#functions-in-fp16-published-and-ours",
             FUNCTIONS
             + "test_computed_in_float32_the_published_errors_are_those_of_normal_inputs"),
        Item("the guide's rows beside ours", "ops.functions",
             "functions.md#functions-in-fp16-published-and-ours",
             "ops/test_pages.py::test_the_table_of_functions_measures_the_same_again"),
        Item("functions that are inaccurate or overflow, by format", "ops.functions",
             "functions.md#functions-that-are-inaccurate-or-overflow",
             "ops/test_pages.py::test_the_table_of_functions_measures_the_same_again"),
        Item("the C++ idioms", "cast, ops.functions", "kernels.md",
             "examples/test_pages.py::test_its_python_runs_and_prints_what_it_says"),
    ),
    "The blog on mixed precision": (
        Item("the bits of 0.15625 and -118.625; 0.01", "Format.encode", TUTORIAL + "bits", FIGURES),
        Item("infinity, NaN, subnormals", "Format.infinity_code, Format.nan_code",
             TUTORIAL + "bits", FORMATS + "test_infinities_and_overflow"),
        Item("65504, 2^-14, 2^-24; BF16's range", "formats.FP16, formats.BF16",
             TUTORIAL + "what-fp16-cant-hold", FORMATS + "test_published_constants"),
        Item("the norm of 4096 times 16", "ops.l2_norm, emulate", TUTORIAL + "what-fp16-cant-hold",
             NORMS + "test_4096_sixteens"),
        Item("1 + 1e-4, updates below 2^-11", "formats.next_up", TUTORIAL + "what-fp16-cant-hold",
             "emulate/test_emulate.py::test_published_failures"),
        Item("the histogram of gradients", "Monitor", TUTORIAL + "the-histogram-of-gradients",
             FIGURES),
        Item("the choice of S", "training.StaticLossScale",
             TUTORIAL + "the-histogram-of-gradients",
             LOSS + "test_scaling_keeps_gradients_that_fp16_flushes"),
        Item("master weights in float32", "training.master_weights", TUTORIAL + "master-weights",
             "training/test_weights.py::test_masters_equal_float32_training"),
        Item("without master weights", "training.stochastic_rounding, training.compensated",
             TUTORIAL + "master-weights", "training/test_weights.py::test_small_updates_are_kept"),
        Item("the dynamic loop, step by step",
             "training.DynamicLossScale, training.scale_loss, training.unscale",
             TUTORIAL + "the-loop-with-a-dynamic-scale",
             LOSS + "test_the_scale_follows_its_definition"),
        Item("clipping after unscaling", "training.loss_scaled",
             TUTORIAL + "the-loop-with-a-dynamic-scale",
             LOSS + "test_optax_clips_the_unscaled_gradient"),
        Item("a scale below 1", "training.DynamicLossScale(min_scale=)",
             "guides/loss-scaling.md#when-steps-are-left-out",
             LOSS + "test_the_scale_settles_in_a_program_that_needs_one"),
        Item("a check for NaN that costs one read", "training.all_finite",
             "guides/loss-scaling.md", LOSS + "test_it_adds_one_read_of_the_gradient"),
        Item("BF16", "formats.BF16, autocast", TUTORIAL + "bf16-and-automatic-mixed-precision",
             FIGURES),
        Item("AMP: lists of operations", "autocast, training.step",
             TUTORIAL + "bf16-and-automatic-mixed-precision",
             "autocast/test_autocast.py::test_the_lists_are_data"),
        Item("float32 for softmax, norms, losses, sums", "autocast",
             "guides/autocast.md",
             "autocast/test_autocast.py::"
             "test_compiled_code_has_narrow_dots_and_an_otherwise_wide_loss"),
        Item("every figure made by the page", "", TUTORIAL.rstrip("#"), FIGURES),
    ),
}  # fmt: skip


def _exists(name: str) -> bool:
    """Returns whether a name is one of ``scalewise``, and takes the argument that it is given."""
    name, _, argument = name.partition("(")
    value, parts = sw, name.split(".")
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                value = importlib.import_module(".".join(["scalewise", *parts[: i + 1]]))
            except ImportError:
                return False
        else:
            value = getattr(value, part)
    keyword = argument.partition("=")[0]
    return not keyword or keyword in inspect.signature(value).parameters


@functools.cache
def _sections(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", (HERE / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@functools.cache
def _tests(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing(item: Item) -> list[str]:
    """Returns what an item's row names that doesn't exist."""
    names = [n.strip() for n in re.split(r",\s*(?![^(]*\))", item.names) if n.strip()]
    wrong = [name for name in names if not _exists(name)]
    page, _, section = item.page.partition("#")
    if not (HERE / page).is_file() or (section and section not in _sections(page)):
        wrong.append(item.page)
    path, _, test = item.test.partition("::")
    if not (TESTS / path).is_file() or test not in _tests(path):
        wrong.append(item.test)
    return wrong


def row(item: Item) -> str:
    names = [n.strip() for n in re.split(r",\s*(?![^(]*\))", item.names) if n.strip()]
    test = item.test.split("::")[1].removeprefix("test_").replace("_", " ")
    wrong = missing(item)
    cells = [
        item.what,
        ", ".join(f"`{name}`" for name in names) or "–",
        f"[{item.page.split('#')[0]}]({item.page})",
        f"[{test}](../tests/{item.test.split('::')[0]})",
        "done" if not wrong else f"missing: {', '.join(wrong)}",
    ]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Returns the page as Markdown."""
    parts = [PARTS.HEAD]
    for source, items in SOURCES.items():
        done = sum(not missing(item) for item in items)
        parts.append(f"\n## {source}\n\n{done} of {len(items)} items are done.\n\n")
        parts.append("| item | names in `sw` | page | test | state |\n|---|---|---|---|---|\n")
        parts += [row(item) + "\n" for item in items]
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "sources.md").write_text(page())
