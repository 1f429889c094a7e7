"""Published rules of saturation, ONNX's tables of casts to float8, and the page that has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from pages import page_script
from scalewise.formats import SATURATE
from scalewise.rounding import SATURATION_RULES

# https://onnx.ai/onnx/technical/float8.html#cast, and what Cast 24 changed in the first table
MAX = "FLT_MAX"
SATURATING = {
    "0": ["0", "0", "0", "0"],
    "-0": ["-0", "0", "-0", "0"],
    "NaN": ["NaN", "NaN", "NaN", "NaN"],
    "Inf": [MAX, "NaN", MAX, "NaN"],
    "-Inf": [f"-{MAX}", "NaN", f"-{MAX}", "NaN"],
    r"\[x] > FLT_MAX": [MAX] * 4,
    r"\[x] < -FLT_MAX": [f"-{MAX}"] * 4,
    "else": ["RNE"] * 4,
}
SINCE_24 = SATURATING | {"Inf": [MAX] * 4, "-Inf": [f"-{MAX}"] * 4}
NOT_SATURATING = {
    "0": ["0", "0", "0", "0"],
    "-0": ["-0", "0", "-0", "0"],
    "NaN": ["NaN", "NaN", "NaN", "NaN"],
    "-NaN": ["-NaN", "NaN", "-NaN", "NaN"],
    "Inf": ["NaN", "NaN", "Inf", "NaN"],
    "-Inf": ["-NaN", "NaN", "-Inf", "NaN"],
    r"\[x] > FLT_MAX": ["NaN", "NaN", "Inf", "NaN"],
    r"\[x] < -FLT_MAX": ["-NaN", "NaN", "-Inf", "NaN"],
    "else": ["RNE"] * 4,
}


@pytest.mark.parametrize(
    ("saturate", "published"),
    [("onnx-19", SATURATING), ("onnx", SINCE_24), (False, NOT_SATURATING)],
    ids=["onnx-19", "onnx", "False"],
)
def test_the_tables_of_the_page_are_the_published_ones(saturate, published):
    found = {row[0]: row[1:] for row in page_script("casts_page").float8_table(saturate)}
    for x, row in published.items():
        if x == "NaN":  # the published rows leave its sign open where they say nothing of -NaN
            assert [cell.removeprefix("-") for cell in found[x]] == row
        else:
            assert found[x] == row, x


@pytest.mark.parametrize("rule", nightly(SATURATION_RULES, but=["onnx"]))
def test_a_rule_is_one_of_the_proved_modes_for_each_format(rule):
    """The exhaustive proofs cover False, True and "finite"; a rule only chooses among them."""
    x = jnp.array([0.3, 1e6, jnp.inf, -jnp.inf, jnp.nan])
    for fmt, mode in SATURATION_RULES[rule].items():
        assert mode in SATURATE
        assert sw.saturation(rule, fmt) is mode
        for cast in (sw.cast, sw.round_to):
            if fmt.bits > 8 and fmt.name != "fp16":  # none of them saturates
                continue
            got, want = cast(x, fmt, saturate=rule), cast(x, fmt, saturate=mode)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype("float32"), want.astype("float32"))


def test_other_functions_take_rules_too():
    x = jnp.array([1.0, jnp.inf])
    assert sw.quantize(x, "e4m3fn", saturate="onnx").data.tolist()[1] == 448
    assert sw.emulate(lambda x: x + x, "e5m2fnuz", saturate="onnx")(x).tolist() == [2, 57344]
    older = sw.emulate(lambda x: x + x, "e5m2fnuz", saturate="onnx-19")(x)
    assert jnp.isnan(older[1])
    assert sw.literals(lambda x: x * 1e9, "e4m3fn", saturate="onnx")(x)[0].what == "saturates"
    assert jax.jit(lambda x: sw.cast(x, "e4m3fnuz", saturate="onnx"))(x).tolist() == [1, 240]


@pytest.mark.parametrize(
    ("rule", "fmt", "message"),
    [
        ("onnx", "e3m4", "saturate='onnx' says nothing of e3m4; it covers fp64, fp32"),
        ("onnx-19", "e8m0", "saturate='onnx-19' says nothing of e8m0"),
    ],
)
def test_an_unknown_rule_is_rejected(rule, fmt, message):
    with pytest.raises(ValueError, match=message):
        sw.cast(jnp.ones(2), fmt, saturate=rule)


@pytest.mark.parametrize("fmt", ["mxfp8_e5m2", *nightly(["mxfp8_e4m3"])])
def test_a_block_with_an_infinity_is_nan_as_in_torchao(fmt):
    x = np.ones((3, 64), np.float32)
    x[1, 40], x[2, 3] = np.inf, np.nan
    scaling = sw.Mx(nan_scale=True)
    a = sw.quantize(jnp.asarray(x), fmt, scaling=scaling)
    blocks = np.isnan(np.asarray(a.scale).astype(np.float32))
    np.testing.assert_array_equal(blocks, [[0, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(np.isnan(a.value()), np.repeat(blocks, 32, axis=1))
    plain = np.asarray(sw.quantize(jnp.asarray(x), fmt).value())
    assert np.isnan(plain).sum() + np.isinf(plain).sum() == 2
    # the one function in which a CPU rounds operands gives the same numbers
    wide = jnp.asarray(x.T[None])
    again = sw.scaled.round_in_blocks(wide, sw.formats.block_format(fmt), scaling)
    np.testing.assert_array_equal(again[0].T, a.value())
