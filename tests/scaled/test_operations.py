"""Operations on ScaledArrays: values, published scales, special scales, conversions of trees."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs import scaling_kinds
from scipy.special import erf, expit

import scalewise as sw
from arrays import normal
from cases import nightly
from pages import DOCS, page_script
from scalewise import scaled
from scalewise.scaled import RULES, scaled_tree

HALF = 2.0**-11  # the relative error of one rounding to FP16
OPERATIONS = sorted(RULES)


def array(seed, scale, shape=(4, 16)):
    """FP16 data of unit size behind a scale."""
    return sw.ScaledArray(normal(seed, shape).astype(jnp.float16), scale)


def exact(x):
    return np.asarray(x.data.astype(jnp.float32), np.float64) * scale_of(x)


def scale_of(x):
    return np.asarray(1.0 if x.scale is None else x.scale, np.float64)


SCALES = [(2.0**20, 2.0**-30), (3.0, 5.0), (2.0**10, 128), (None, 4.0)]


@pytest.mark.parametrize(("s", "t"), nightly(SCALES, but=[(3.0, 5.0)]))
@pytest.mark.parametrize(
    ("name", "f", "rule"),
    [
        ("add", np.add, np.maximum),
        ("sub", np.subtract, np.maximum),
        ("mul", np.multiply, np.multiply),
        ("div", np.divide, np.divide),
        ("maximum", np.maximum, np.maximum),
        ("minimum", np.minimum, np.maximum),
        ("matmul", lambda a, b: a @ b.T, lambda a, b: a * b * 4),  # sqrt(16)
    ],
)
def test_two_operands_give_the_value_behind_the_published_scale(name, f, rule, s, t):
    a, b = array(0, s), array(1, t)
    y = getattr(scaled, name)(a, b.T if name == "matmul" else b)
    assert y.data.dtype == jnp.float16
    scale = scale_of(y)
    np.testing.assert_allclose(scale, rule(scale_of(a), scale_of(b)), rtol=1e-6)
    want = f(exact(a), exact(b))
    slack = 2.0**-24 * scale + HALF * np.abs(want)  # a subnormal's half spacing, or a rounding's
    if name == "matmul":
        slack = slack + 1e-6 * scale
    assert (np.abs(exact(y) - want) <= slack * 1.001).all()


@pytest.mark.parametrize("s", nightly([2.0**6, 3.0, None, 2.0**-40], but=[3.0]))
@pytest.mark.parametrize(
    ("name", "f", "rule"),
    [
        ("neg", np.negative, lambda s: s),
        ("abs", np.abs, lambda s: s),
        ("relu", lambda x: np.maximum(x, 0), lambda s: s),
        ("square", np.square, np.square),
        ("sum", np.sum, lambda s: s * 8),
        ("mean", np.mean, lambda s: s / 8),
        ("max", np.max, lambda s: s),
        ("min", np.min, lambda s: s),
        ("tanh", np.tanh, lambda s: np.minimum(s, 1)),
        ("sigmoid", expit, np.ones_like),
        ("sin", np.sin, lambda s: np.minimum(s, 1)),
        ("cos", np.cos, np.ones_like),
        ("erf", erf, lambda s: np.minimum(2 * s, 1)),
        ("gelu", None, lambda s: s),
        ("softmax", None, None),
        ("log_softmax", None, lambda s: np.maximum(s, 1)),
        ("cumsum", lambda x: np.cumsum(x, -1), lambda s: s * 4),
        ("clip", lambda x: np.clip(x, -0.5, 3.0), lambda s: np.minimum(s, 2)),
    ],
)
def test_one_operand_gives_the_value_behind_the_published_scale(name, f, rule, s):
    a = array(0, s)
    y = getattr(scaled, name)(a, *([-0.5, 3.0] if name == "clip" else []))
    x = exact(a)
    if f is None:
        f = getattr(jax.nn, name)
        x = jnp.asarray(x, jnp.float32)
    assert y.data.dtype == jnp.float16
    if rule is not None:
        np.testing.assert_allclose(scale_of(y), rule(np.float64(scale_of(a))), rtol=1e-6)
    np.testing.assert_allclose(exact(y), f(x), rtol=2 * HALF, atol=1e-5 * scale_of(y).max())


def test_scales_that_leave_float32s_range_move_to_the_data():
    small, large = (sw.ScaledArray(jnp.float16([1, 2, 3]), 2.0**e) for e in (-70, 65))
    x = np.float64([1, 2, 3])
    for y, exponent, want in (
        (scaled.mul(small, small), -140, x * x), (scaled.div(small, large), -135, x / x),
        (scaled.square(small), -140, x * x), (scaled.integer_pow(large, -2), -130, x**-2),
        (scaled.matmul(small, small), -140, x @ x), (scaled.mul(large, large), 130, x * x),
    ):  # fmt: skip
        assert np.finfo(np.float32).tiny <= float(y.scale) <= np.finfo(np.float32).max
        np.testing.assert_allclose(exact(y) * 2.0**-exponent, want, rtol=0, atol=2.0**-10)


@pytest.mark.parametrize("make", [sw.ScaledArray, scaled.as_scaled, sw.rebalance])
def test_a_scale_out_of_float32s_normal_range_is_refused(make):
    x = scaled.as_scaled(jnp.ones(2)) if make is sw.rebalance else jnp.ones(2)
    for c, why in ((1e-40, "below the smallest normal"), (1e39, "beyond the largest")):
        for given in (c, np.float64(c), np.array([1.0, -c])):
            with pytest.raises(ValueError, match=re.escape(f"{c}, {why} float32")):
                make(x, given)
    with pytest.raises(ValueError, match="below the smallest normal"):
        make(x, np.float32(1e-40))


@pytest.mark.parametrize("seed", nightly(range(6), but=[0, 1]))
def test_a_chain_of_products_loses_what_its_roundings_lose(seed):
    """1,000 numbers and arrays of unit size: 30 numbers of 3.0 were infinite."""
    rng = np.random.default_rng(seed)
    a = sw.ScaledArray(jnp.float16(rng.uniform(1, 2, 8)), 1.0)
    want = exact(a)
    for _ in range(60):
        c = float(2.0 ** rng.uniform(-3, 3))
        match rng.integers(4):
            case 0:
                a, want = scaled.mul(a, c), want * np.float32(c)
            case 1:
                a, want = scaled.div(a, c), want / np.float32(c)
            case 2:
                a, want = scaled.mul(sw.ScaledArray(jnp.float16(-1.5), c), a), want * -1.5 * c
            case _:
                b = sw.ScaledArray(jnp.float16(rng.choice([0.5, 1, 2], 8)), c)
                a, want = scaled.div(scaled.mul(a, b), b), want
    np.testing.assert_allclose(exact(a), want, rtol=1e-5)


def test_the_arithmetic_of_exp_follows_the_values():
    a, b = (sw.ScaledArray(jnp.float16([0.3, 1.7, -1.9]), 2.0**e) for e in (-1, 2))
    for x, narrow in ((a, True), (b, False)):
        auto = scaled.exp(x, arithmetic="auto").data
        np.testing.assert_array_equal(
            auto, scaled.exp(x, arithmetic="narrow" if narrow else "float32").data
        )
        np.testing.assert_allclose(auto, np.exp(exact(x)), rtol=2 * HALF)
    np.testing.assert_array_equal(scaled.exp(b).data, scaled.exp(b, arithmetic="float32").data)


def test_log_and_roots_behind_small_scales():
    positive = sw.ScaledArray(jnp.float16([1.0, 4.0]), 1e-30)
    np.testing.assert_allclose(scaled.sqrt(positive).value(), [1e-15, 2e-15], rtol=1e-3)
    np.testing.assert_allclose(scaled.rsqrt(positive).value(), [1e15, 5e14], rtol=1e-3)
    np.testing.assert_allclose(scaled.log(positive).value(), np.log([1e-30, 4e-30]), rtol=1e-3)


def test_bounds_of_clip_are_optional_and_behind_scales_of_their_own():
    a = array(0, 2.0**40)
    low, high = sw.ScaledArray(jnp.float16(-1.5), 2.0**39), 2.0**39
    np.testing.assert_array_equal(
        scaled.clip(a, min=low).value(), np.maximum(exact(a), -1.5 * high)
    )
    np.testing.assert_array_equal(scaled.clip(a, max=high).value(), np.minimum(exact(a), high))
    np.testing.assert_array_equal(
        scaled.clip(a, low, high).value(), np.clip(exact(a), -1.5 * high, high)
    )
    with pytest.raises(ValueError, match="expected at least one bound"):
        scaled.clip(a)


def test_the_log_softmax_is_finite_far_beyond_the_range_of_float16():
    a = sw.ScaledArray(jnp.float16([[1.0, 2.0, 3.0]]), 2.0**40)
    y = scaled.log_softmax(a)
    assert float(y.scale) == 2.0**40
    np.testing.assert_allclose(exact(y), [[-(2.0**41), -(2.0**40), 0]], rtol=1e-3)


def test_rows_of_a_softmax_have_scales_of_their_own():
    a = array(3, 2.0**8)
    y = scaled.softmax(a)
    assert y.scale.shape == (4, 1)
    assert float(jnp.max(y.data)) == 1.0
    np.testing.assert_allclose(jnp.sum(y.value(), axis=-1), 1, rtol=1e-2)


def test_contractions_with_unit_data_give_unit_data():
    a, b = array(0, 2.0**30, (64, 1024)), array(1, 2.0**-90, (1024, 64))
    y = scaled.matmul(a, b)
    assert 0.8 < float(jnp.std(y.data.astype(jnp.float32))) < 1.2
    assert float(y.scale) == 2.0**-55
    dims = (((1,), (0,)), ((), ()))
    same = scaled.dot_general(a, b, dims)
    np.testing.assert_array_equal(same.data, y.data)
    plain = scaled.matmul(a, b, static=1, dtype=jnp.float32)
    assert (float(plain.scale), plain.data.dtype) == (2.0**-60, jnp.float32)
    x, k = array(0, 4.0, (2, 3, 8, 8)), array(1, 0.5, (5, 3, 3, 3))
    z = scaled.conv(x, k, (1, 1), "SAME")
    want = jax.lax.conv_general_dilated(x.value(), k.value(), (1, 1), "SAME")
    np.testing.assert_allclose(z.value(), want, rtol=2 * HALF, atol=2.0**-7)
    assert float(z.scale) == 2 * 4  # sqrt(27), rounded


def test_the_static_scale_of_a_product_is_a_number_or_a_function_of_the_operands():
    a, b = array(0, 4.0, (4, 16)), array(1, 0.5, (16, 4))
    want = exact(a) @ exact(b)
    for static in (3.0, 8, np.float32(0.25), lambda x, y: 2.0 * x.shape[1], lambda x, y: 48):
        s = static(a, b) if callable(static) else static
        y = jax.jit(lambda a, b, static=static: scaled.matmul(a, b, static=static))(a, b)
        assert float(y.scale) == pytest.approx(4 * 0.5 * s)
        np.testing.assert_allclose(exact(y), want, rtol=2 * HALF, atol=0.02)


@pytest.mark.parametrize(
    ("static", "error"),
    [(0, ValueError), (-1.0, ValueError), (np.inf, ValueError), (np.nan, ValueError),
     ("4", TypeError), (True, TypeError), (np.ones(2), TypeError), (lambda x, y: None, TypeError),
     (lambda x, y: jnp.max(x.data), TypeError)],
)  # fmt: skip
def test_wrong_static_scales_are_refused(static, error):
    a, b = array(0, 4.0, (4, 16)), array(1, 0.5, (16, 4))
    with pytest.raises(error, match="matmul: static is"):
        jax.jit(lambda a, b: scaled.matmul(a, b, static=static))(a, b)


def test_operands_in_8_bits():
    a = scaled.cast_data(array(0, 2.0**20), "e4m3fn")
    b = scaled.cast_data(array(1, 2.0**-20), "e5m2")
    assert (a.data.dtype, float(a.scale)) == (jnp.float8_e4m3fn, 2.0**20)
    y = scaled.matmul(a, b.T)
    assert y.data.dtype == jnp.float16
    np.testing.assert_allclose(y.value(), a.value() @ b.value().T, rtol=2 * HALF, atol=1e-3)
    assert scaled.add(a, a).data.dtype == jnp.float8_e4m3fn
    assert scaled.add(a, b).data.dtype == jnp.float16
    assert scaled.mul(a, 0.75).data.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    "name", ["add", "mul", "concatenate", "div", *nightly(["sub", "maximum", "where"])]
)
def test_special_scales(name):
    a, zero = array(0, 4.0), sw.ScaledArray(jnp.ones((4, 16), jnp.float16), 0)
    f = getattr(scaled, name)
    if name == "where":
        f = lambda x, y: scaled.where(x.data > 0, x, y)  # noqa: E731
    if name == "concatenate":
        f = lambda x, y: scaled.concatenate([x, y])  # noqa: E731
    y = f(a, zero)
    positive = jnp.maximum(a.value(), 0)
    want = {"maximum": positive, "mul": 0 * a.value(), "where": positive, "div": a.value() / 0}
    want["concatenate"] = jnp.concatenate([a.value(), zero.value()])
    np.testing.assert_array_equal(y.value(), want.get(name, a.value()))
    if name not in ("mul", "div"):
        assert float(y.scale) == 4
    one = f(a, sw.ScaledArray(jnp.ones((4, 16), jnp.float16), None))
    np.testing.assert_array_equal(one.value(), f(a, sw.ScaledArray(zero.data, 1)).value())
    assert scaled.add(zero, zero).value().tolist() == zero.value().tolist()
    assert jax.jit(f)(a, zero).data.dtype == jnp.float16


def test_numbers_go_into_the_scale_and_arrays_have_the_scale_1():
    a = array(0, 2.0)
    for number in (3e20, jnp.float32(3e20), sw.ScaledArray(jnp.float16(3), 1e20)):
        y = scaled.mul(a, number)
        assert float(y.scale) == pytest.approx(2 * 3e20, rel=1e-6)
        np.testing.assert_array_equal(y.data, a.data)
        y = scaled.div(scaled.neg(a), number)
        assert float(y.scale) == pytest.approx(2 / 3e20, rel=1e-6)
        np.testing.assert_array_equal(y.data, -a.data)
    assert float(scaled.mul(a, jnp.ones((4, 16), jnp.float16)).scale) == 2
    with pytest.raises(TypeError, match="mul takes ScaledArrays and real floating-point arrays"):
        scaled.mul(a, jnp.arange(3))


@pytest.mark.parametrize(
    ("fmt", "axis"),
    nightly([("fp16", 0), ("mxfp8_e4m3", None), ("nvfp4", None), ("e2m1fn", 1)], [("e2m1fn", 1)]),
)
def test_channels_blocks_and_codes_are_brought_to_their_largest_scale(fmt, axis):
    x = normal(0, (4, 64)) * jnp.float32([[1e-3], [1.0], [1e3], [1e6]])
    a = sw.quantize(x, fmt, axis=axis)
    y = scaled.mul(a, sw.ScaledArray(jnp.ones(x.shape, jnp.float32), 2.0))
    np.testing.assert_allclose(y.value(), 2 * a.value(), rtol=1e-3, atol=1e-2)
    assert y.scale.ndim == 0


def test_an_axis_that_an_operand_lacks_is_refused():
    for f, x, axis in ((scaled.sum, array(0, 2.0), 2), (scaled.mean, array(0, 3), (0, -3)),
                       (scaled.cumsum, 0.5, -1)):  # fmt: skip
        with pytest.raises(ValueError, match=r"axis is .*; expected different axes of"):
            f(x, axis)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_says_its_rule_first(name):
    text = inspect.getdoc(getattr(scaled, name)).replace("\n", " ")
    formula = RULES[name].formula
    named = {
        "max(sA, sB)": ("max(sA, sB)", "largest of their scales"),
        "1": ("scale 1",),
        "sA^(1/n)": ("sqrt(sA)",),
        "1 / sA^(1/n)": ("1 / sqrt(sA)",),
        "sA^n": ("sA^2", "sA^n"),
        "1 / sum of the data": ("1 / sum(data)",),
    }
    assert any(part in text for part in named.get(formula, (formula,))), text


def test_gradients_pass_through():
    def loss(w, x):
        y = scaled.gelu(scaled.matmul(scaled.as_scaled(x, "l2"), sw.ScaledArray(w, 1.0)))
        return jnp.mean(jnp.square(y.value()))

    def plain(w, x):
        return jnp.mean(jnp.square(jax.nn.gelu(x @ w)))

    w, x = normal(0, (16, 4)), normal(1, (8, 16))
    got, want = (jax.jit(jax.grad(f))(w, x) for f in (loss, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


# -- conversions -----------------------------------------------------------------------------------


def test_trees_as_scaled_and_back():
    tree = {"w": normal(0, (8,)) * 1e6, "lr": 0.75, "step": 3, "name": "x", "n": jnp.arange(2)}
    a = scaled.as_scaled(tree, "l2", dtype=jnp.float16)
    assert (a["step"], a["name"], a["n"].dtype) == (3, "x", jnp.int32)
    assert a["w"].data.dtype == jnp.float16
    assert 0.5 < float(jnp.sqrt(jnp.mean(jnp.square(a["w"].data.astype(jnp.float32))))) < 2
    back = scaled.asarray(a)
    np.testing.assert_allclose(back["w"], tree["w"], rtol=HALF)
    assert (
        scaled.asarray(a, jnp.float64 if jax.config.jax_enable_x64 else jnp.float16)["lr"] == 0.75
    )
    assert scaled.as_scaled(a)["w"] is a["w"]
    plain = scaled.as_scaled(tree)
    assert float(plain["w"].scale) == 1
    assert (float(plain["lr"].data), float(plain["lr"].scale)) == (1.5, 0.5)
    given = scaled.as_scaled(tree["w"], 1e6)
    np.testing.assert_allclose(given.data, tree["w"] / 1e6)
    assert scaled.as_scaled(tree["w"], 0).value().tolist() == [0.0] * 8
    with pytest.raises(ValueError, match=r"scale is 'rms'; expected .* 'max', 'l2'"):
        scaled.as_scaled(tree, "rms")


def test_scaled_tree_takes_a_scaled_array_for_a_leaf():
    tree = {"a": array(0, 2.0), "b": [1, array(1, 3)]}
    leaves, structure = scaled_tree.flatten(tree)
    assert [scaled.is_scaled(x) for x in leaves] == [True, False, True]
    assert scaled_tree.structure(tree) == structure == jax.tree.structure({"a": 0, "b": [1, 2]})
    assert scaled_tree.unflatten(structure, leaves)["b"][0] == 1
    assert len(scaled_tree.leaves(tree)) == 3
    assert not scaled_tree.all(scaled_tree.map(scaled.is_scaled, tree))
    assert tree["a"].aval.shape == (4, 16)
    assert tree["a"].aval.dtype == jnp.float16


@pytest.mark.parametrize("measure", ["l2", "max"])
def test_dynamic_rescaling_changes_no_value(measure):
    data = normal(0, (64,)) * 300
    a = sw.ScaledArray(data.astype(jnp.float16), 3.0)
    b = scaled.dynamic_rescale({"x": a, "n": 1}, measure)["x"]
    np.testing.assert_array_equal(exact(b), exact(a))
    size = float(jnp.max(jnp.abs(b.data)))
    assert (2.0**14 <= size < 2.0**15) if measure == "max" else 1 < size < 2.0**16
    zeros = scaled.dynamic_rescale(sw.ScaledArray(jnp.zeros(3, jnp.float16), 2.0), measure)
    assert zeros.value().tolist() == [0, 0, 0]


@pytest.mark.parametrize("measure", ["l2", "max"])
@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e30, 1e36])
def test_dynamic_rescaling_of_numbers_whose_squares_leave_float32(size, measure):
    x = size * normal(0, (64,))
    for a in (scaled.dynamic_rescale(sw.ScaledArray(x), measure, dtype="fp16"),
              scaled.as_scaled(x, measure, dtype="fp16")):  # fmt: skip
        np.testing.assert_allclose(a.value(), x, rtol=2.0**-11)


@pytest.mark.parametrize("measure", ["l2", "max"])
@pytest.mark.parametrize(
    "fmt",
    nightly(
        ["e4m3fn", "e5m2", "e4m3fnuz", "e2m3fn", "e2m1fn", "fp16", "bf16"], ["e4m3fn", "e2m1fn"]
    ),
)
def test_dynamic_rescaling_to_every_format(fmt, measure):
    """The error is that of the format, behind each kind of scale, with and without outliers."""
    fmt = sw.format(fmt)
    x = normal(0, (512,)).at[7].set(3000.0)
    for data in (x.at[7].set(1), x if fmt.bits > 6 else x.at[7].set(20)):
        for a in (sw.ScaledArray(data * 100, -0.03), sw.ScaledArray(data, 4096)):
            want = np.asarray(a.value(), np.float64)
            for b in (scaled.dynamic_rescale(a, measure, dtype=fmt),
                      scaled.as_scaled(a.value(), measure, dtype=fmt)):  # fmt: skip
                if fmt.dtype is not None and fmt.bits >= 8:
                    assert b.data.dtype == fmt.dtype
                wrong = np.abs(np.asarray(b.value(), np.float64) - want)
                top = float(fmt.max) * np.abs(np.float64(scale_of(b)))
                step = float(fmt.smallest) * np.abs(scale_of(b))
                allowed = float(fmt.eps) / 2 * np.abs(want) + step / 2
                saturated = np.maximum(np.abs(want) - top, 0)
                assert (wrong <= 1.01 * np.maximum(allowed, saturated)).all()
                assert np.count_nonzero(saturated) <= (0 if measure == "max" else 25)


# -- the same under autoscale ----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["scalify", *nightly(["fp16_every_op"])])
def test_autoscale_of_scaled_arrays_returns_scaled_arrays(recipe):
    def step(w, x):
        y = jnp.tanh(x @ w) * 1e12
        return {"y": y, "sum": jnp.sum(y), "n": jnp.argmax(y), "w": w - 1e-3 * w}

    w, x = normal(0, (16, 8)) * 1e-5, normal(1, (4, 16)) * 1e5
    want = step(w, x)
    given = scaled.as_scaled((w, x), "l2", dtype=jnp.float16)
    out = jax.jit(sw.autoscale(step, recipe))(*given)
    for name in ("y", "sum", "w"):
        got = out[name]
        assert scaled.is_scaled(got)
        assert got.data.dtype == jnp.float16
        top = jnp.max(jnp.abs(want[name]))
        np.testing.assert_allclose(got.value(), want[name], rtol=0.02, atol=0.01 * top)
        size = float(jnp.max(jnp.abs(got.data)))
        assert 1 <= size < 16 if recipe == "scalify" else 2.0**14 <= size < 2.0**15
    assert not scaled.is_scaled(out["n"])
    assert np.log2(float(out["y"].scale) / float(out["w"].scale)) > 40  # scales have moved


# -- the page --------------------------------------------------------------------------------------


def test_the_page_covers_every_operation():
    assert set(page_script("scalify_page").DATA) == set(RULES)


@pytest.mark.slow
def test_the_comparison_of_kinds_measures_the_same_again():
    recorded = json.loads((DOCS / "scaling_kinds.json").read_text())["kinds"]
    weights, batch = scaling_kinds.network()
    for kind in ("static", "unit", "propagated"):
        again = scaling_kinds.changes(kind, weights, batch)
        assert again == pytest.approx(recorded[kind]["changes"], rel=0.2, abs=1e-4)
        sources = scaling_kinds.sources(kind, weights, batch)
        assert sources == recorded[kind]["sources"]


@pytest.mark.parametrize("block", [None, (1, 16), (-1, 16)])
def test_a_transposed_array_keeps_its_data_and_scales(block):
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.standard_normal((8, 32)), jnp.float8_e4m3fn)
    scale = jnp.asarray(rng.integers(-3, 4, (8, 2 if block else 1)))
    x = sw.ScaledArray(data, scale + 5, block)
    assert isinstance(x.T, sw.ScaledArray)
    assert x.T.data.dtype == data.dtype
    np.testing.assert_array_equal(x.T.value(), x.value().T)
    np.testing.assert_array_equal(x.T.T.value(), x.value())
    one = sw.ScaledArray(data, jnp.float32([0.5] * 32))
    np.testing.assert_array_equal(one.T.value(), one.value().T)


@pytest.mark.parametrize("rows", [False, True])
def test_scales_of_rows_and_columns_multiply_the_sums_of_stored_data(rows):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float8_e4m3fn) for s in ((8, 32), (32, 16)))
    x = sw.ScaledArray(a, jnp.exp2(jnp.arange(8.0))[:, None] if rows else 0.5)
    y = sw.ScaledArray(b, jnp.linspace(0, 3, 16)[None])
    want = np.asarray(x.value(), np.float64) @ np.asarray(y.value(), np.float64)
    got = scaled.matmul(x, y, dtype=jnp.float32).value()
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * np.abs(want).max())
    text = jax.jit(lambda x, y: scaled.matmul(x, y).value()).lower(x, y).as_text()
    assert "(tensor<1x16xf32>) -> tensor<8x16xf32>" in text  # scales reach the sums, not the data
    assert "(tensor<1x16xf32>) -> tensor<32x16xf32>" not in text
    assert "(tensor<8x1xf32>) -> tensor<8x32xf32>" not in text
