"""``l2_norm``: ``auto`` within its bound on the torture set; the published methods as published."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs.norms import torture

from cases import nightly
from scalewise.formats import CATALOGUE, Format
from scalewise.formats import format as format_
from scalewise.ops import NORM_METHODS, ORDERS, beta_high, beta_low, l2_norm, ulp_bound

NAMES = ["fp16", "bf16", "e5m2", "e4m3", "dlfloat16"]


@pytest.mark.parametrize(
    ("name", "n"),
    nightly([*((f, 300) for f in NAMES), ("fp16", 2), ("e4m3", 3), ("fp16", 65536)], [("e4m3", 3)]),
)
def test_auto_keeps_its_bound_whatever_the_vector(name, n):
    fmt = format_(name)
    for record in torture(fmt, n, ("auto",)):
        assert record["overflows"] == record["flushes"] == 0, record
        bound = ulp_bound(fmt, n)
        if record["case"] == "ε near -Σx²":  # the difference is all that is left of the sum
            bound = 1.0
        assert float(record["worst"]) <= bound, record


@pytest.mark.parametrize("name", ["e3m4", *nightly(["fp32", "e2m3fn", "e2m1fn"])])
def test_auto_keeps_its_bound_in_other_formats(name):
    fmt = format_(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 50)) * min(1.0, float(fmt.max) / 16)
    x = fmt.decode(fmt.encode(x))
    with jax.enable_x64(True):
        got = np.asarray(l2_norm(jnp.asarray(x), axis=1, arithmetic=fmt))
    for y, row in zip(got, x, strict=True):
        want = math.sqrt(math.fsum(row * row))
        ulp = 2.0 ** (math.frexp(want)[1] - fmt.precision)
        assert abs(y - want) <= ulp_bound(fmt, 50) * ulp


def test_the_bound_is_near_half_an_ulp_in_every_format():
    for fmt in CATALOGUE.values():
        if fmt.zero and fmt.precision <= 25:
            assert all(0.5 < ulp_bound(fmt, n) <= 0.625 + 2.0**-28 for n in (1, 100, 65536)), fmt
    assert ulp_bound("fp16", 16) == ulp_bound(format_("fp16"), 16)


@pytest.mark.parametrize(
    "method", ["auto", *nightly(["power_of_two", "blue", "two_segment_overflow_corrected"])]
)
def test_an_epsilon_beyond_the_scale_of_the_vector(method):
    x = half([[2e-4, 0, 0], [2, 200, 3], [2, 6, 3], [2.0**-8, 2.0**-9, 0]])
    eps = np.array([1e-4, 60000, 65504, -(2.0**-17)])  # the last cancels most of small squares
    got = np.asarray(l2_norm(x, eps, axis=1, method=method), np.float64)
    want = np.sqrt(np.square(np.asarray(x, np.float64)).sum(1) + eps)
    rows = slice(3 if method == "two_segment_overflow_corrected" else 4)  # which flushes
    np.testing.assert_allclose(got[rows], want[rows], rtol=1e-3)
    if method == "auto":
        assert math.isinf(l2_norm(half([200.0, 0, 0]), 60000.0, method="direct"))  # as published


def half(x):
    return jnp.asarray(x, jnp.float16)


def test_4096_sixteens():
    """The direct norm is infinite in FP16."""
    x = jnp.full(4096, 16, jnp.float16)
    assert jnp.isinf(l2_norm(x, method="direct"))
    assert float(l2_norm(x)) == 1024


@pytest.mark.slow
def test_the_published_methods_fail_where_known():
    # a Taylor step from 257 to 257 and 255: 6 % off
    x, exactly = half([257, 255]), math.hypot(257, 255)
    published = float(l2_norm(x, method="two_segment_overflow"))
    assert published / exactly - 1 == pytest.approx(0.06, abs=0.005)
    assert abs(float(l2_norm(x, method="two_segment_overflow_corrected")) - exactly) <= 0.25
    # beta = 256 isn't safe: two of 200 overflow though none is beyond it
    x = half([200, 200])
    assert jnp.isinf(l2_norm(x, method="two_segment_overflow"))
    assert (
        abs(float(l2_norm(x, method="two_segment_overflow_corrected")) - math.hypot(200, 200))
        <= 0.25
    )
    # the sum swamps at 2048 ones
    x = jnp.ones(4096, jnp.float16)
    assert float(l2_norm(x, method="two_segment_overflow")) == pytest.approx(
        math.sqrt(2048), rel=1e-3
    )
    assert float(l2_norm(x)) == 64
    # with all below beta, Q = 0 and gamma is infinite
    x = half([1e-4, 1e-4])
    assert not jnp.isfinite(l2_norm(x, method="two_segment_underflow"))
    exactly = math.hypot(*(float(v) for v in x))
    for method in ("two_segment_underflow_corrected", "blue", "power_of_two", "auto"):
        assert abs(float(l2_norm(x, method=method)) - exactly) <= 2.0**-23
    # and max-normalised, small parts flush beside one giant
    x = half([256.0] + [0.05] * 4000)
    exactly = math.sqrt(sum(float(v) ** 2 for v in x))
    assert float(l2_norm(x, method="max_normalised")) == 256
    assert abs(exactly - 256) < 0.125  # which here is right; not so with less of a giant
    x = half([8.0] + [2.0**-10] * 60000)
    assert float(l2_norm(x, method="direct")) == 8


def numpy_direct(x, eps):
    total = np.float16(0)
    for v in x:
        total = total + v * v
    return np.sqrt(total + np.float16(eps))


@pytest.mark.parametrize("eps", [0.5, -2.0])
def test_direct_is_numpys_halves_bit_for_bit(eps):
    x = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float16)
    got = l2_norm(jnp.asarray(x), eps, axis=1, method="direct")
    assert got.tolist() == [float(numpy_direct(row, eps)) for row in x]


@pytest.mark.parametrize("method", nightly(NORM_METHODS, but=["auto"]))
def test_every_method_on_an_easy_vector_under_jit_vmap_and_eagerly(method):
    x = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1, (3, 40)), jnp.float16)
    norm = lambda v: l2_norm(v, 0.25, axis=-1, method=method)  # noqa: E731
    want = np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, axis=-1) + 0.25)
    eager = norm(x)
    np.testing.assert_allclose(np.asarray(eager, np.float64), want, rtol=2e-3)
    assert eager.dtype == jnp.float16
    if method in ("auto", "direct", "blue"):
        np.testing.assert_array_equal(jax.jit(norm)(x), eager)
        np.testing.assert_array_equal(jax.vmap(norm)(x), eager)


@pytest.mark.parametrize("method", nightly(NORM_METHODS, but=["auto", "direct"]))
def test_what_is_defined_of_the_undefined(method):
    nan, inf = math.nan, math.inf
    rows = [
        ([1.0, nan], 0.0, nan),
        ([inf, nan], 0.0, nan),
        ([1.0, -inf], 0.0, inf),
        ([1.0, 2.0], -6.0, nan),
        ([0.0, -0.0], 0.0, 0.0),
        ([0.0, 0.0], 0.25, 0.5),
        ([3.0, 4.0], nan, nan),
        ([3.0, 4.0], inf, inf),
        ([3.0, 4.0], -inf, nan),
    ]
    x, eps, want = (np.array(column) for column in zip(*rows, strict=True))
    got = l2_norm(half(x), eps, axis=1, method=method)
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


@pytest.mark.parametrize("method", ["auto", *nightly(["direct", "blue"])])
def test_of_nothing_and_without_infinity(method):
    assert float(l2_norm(half([]), method=method)) == 0
    assert float(l2_norm(half([]), 4.0, method=method)) == 2
    empty = l2_norm(
        jnp.zeros((2, 0), jnp.float16), jnp.asarray([0.25, -1.0]), axis=1, method=method
    )
    np.testing.assert_array_equal(empty, [0.5, math.nan])
    # E4M3FN has no infinity
    assert jnp.isnan(l2_norm(jnp.asarray([jnp.inf, 1.0]), arithmetic="e4m3fn", method=method))


def test_the_norm_overflows_only_if_it_must():
    assert jnp.isinf(l2_norm(half([65504.0, 65504.0])))
    assert float(l2_norm(half([65504.0, 1000.0]))) == 65504
    assert float(l2_norm(half([2.0**-24, 0]))) == 2.0**-24


@pytest.mark.slow
def test_an_unsigned_format_has_one_bit_more():
    wide = Format("ue5m11", 5, 11, signed=False)
    x = np.random.default_rng(0).standard_normal((50, 100)).astype(np.float16)
    want = np.sqrt(np.sum(x.astype(np.float64) ** 2, axis=1))
    worst = {
        fmt.name: np.abs(
            np.asarray(l2_norm(jnp.asarray(x, jnp.float32), axis=1, arithmetic=fmt)) - want
        ).max()
        for fmt in (wide, format_("fp16"))
    }
    assert worst["ue5m11"] < 0.6 * worst["fp16"]
    ulp = 2.0 ** (math.frexp(want.max())[1] - 12)
    assert worst["ue5m11"] <= ulp_bound(wide, 100) * ulp
    assert jnp.isnan(l2_norm(jnp.ones(3), -1.0, arithmetic=wide))


@pytest.mark.parametrize("name", nightly(NAMES, but=["fp16"]))
def test_narrow_squares_need_no_wide_vector(name):
    """Each square is rounded to the format, and only the sum to float32; the norm may be any."""
    fmt = format_(name)
    rng = np.random.default_rng(0)
    scales = np.linspace(fmt.min_exponent, fmt.max_exponent - 4, 9).round()
    x = fmt.decode(fmt.encode(rng.uniform(0.5, 2, (9, 100)) * 2.0 ** scales[:, None] / 10))
    eps = fmt.decode(fmt.encode(np.resize([0.0, 1.0, float(fmt.max) / 4], 9)))
    with jax.enable_x64(True):
        norm = jax.jit(lambda x, e: l2_norm(x, e, axis=1, method="narrow_squares", arithmetic=fmt))
        got = np.asarray(norm(jnp.asarray(x), jnp.asarray(eps)))
        one = np.asarray(norm(jnp.asarray(x[:, :1]), jnp.zeros(9)))
    ulp = lambda y: np.maximum(2.0 ** (np.frexp(y)[1] - fmt.precision), float(fmt.smallest))  # noqa: E731
    want = np.sqrt(np.square(x).sum(1) + eps)
    assert (np.abs(got - want) <= 1.01 * ulp(want)).all()
    # of one number the square is rounded, in contrast to wide_scalar's
    top = np.frexp(x[:, 0])[1]
    scaled = np.ldexp(x[:, 0], 3 - top)
    square = fmt.decode(fmt.encode(scaled * scaled))
    rounded = np.ldexp(np.sqrt(square), top - 3)
    np.testing.assert_array_equal(one, fmt.decode(fmt.encode(rounded)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", nightly([m for m in NORM_METHODS if m != "auto"]))
def test_an_unsigned_format_is_enough_for_every_method_and_order(method, order):
    x = np.full(4, 63.984375)
    got = l2_norm(jnp.asarray(x, jnp.float32), method=method, arithmetic="ue5m11", order=order)
    assert float(got) == pytest.approx(127.96875, rel=2.0**-11)


def test_axes():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)), jnp.float32)
    for axis in (1, (0, 2)):
        for keepdims in (False, True):
            got = l2_norm(x, axis=axis, keepdims=keepdims, arithmetic="fp32")
            want = np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, axis=axis, keepdims=keepdims))
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-7)
    np.testing.assert_allclose(l2_norm(x, axis=(), arithmetic="fp32"), np.abs(x))


def test_gradients():
    x = jnp.asarray([3.0, -4.0, 12.0])
    value, (g, e) = jax.value_and_grad(lambda v, e: l2_norm(v, e, arithmetic="fp32"), (0, 1))(
        x, 2.0
    )
    np.testing.assert_allclose(g, np.asarray(x) / float(value), rtol=1e-6)
    assert float(e) == pytest.approx(0.5 / math.sqrt(171))
    grad = jax.jit(jax.grad(lambda v, e: l2_norm(v, e).astype(jnp.float32), argnums=(0, 1)))
    g, e = grad(half([3.0, -4.0]), 0.0)
    np.testing.assert_allclose(np.asarray(g, np.float64), [0.6, -0.8], rtol=2.0**-11)
    assert g.dtype == jnp.float16
    assert float(e) == pytest.approx(0.1, rel=1e-3)
    # at zero, at the largest and the smallest numbers, where the norm itself overflows
    assert grad(half([0.0, 0.0]), 0.0)[0].tolist() == [0, 0]
    assert grad(half([65504.0, 65504.0]), 0.0)[0] == pytest.approx(math.sqrt(0.5), rel=2.0**-10)
    assert grad(half([2.0**-24, 2.0**-24]), 0.0)[0] == pytest.approx(math.sqrt(0.5), rel=2.0**-10)
    inf = grad(half([math.inf, 1.0]), 0.0)[0].tolist()
    assert math.isnan(inf[0])
    assert inf[1] == 0
    bf16 = jax.grad(lambda v: l2_norm(v).astype(jnp.float32))
    assert bf16(jnp.full(4, 2.0**-133, jnp.bfloat16)).tolist() == [0.5] * 4
    # whatever the method, and batched
    direct = jax.vmap(jax.grad(lambda v: l2_norm(v, method="direct").astype(jnp.float32)))
    assert direct(jnp.full((2, 4), 300.0, jnp.float16)).tolist() == [[0.5] * 4] * 2


def test_the_power_of_two_goes_through():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(100), jnp.float16)
    assert float(l2_norm(x * 16)) == 16 * float(l2_norm(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "best"}, "method is 'best'; expected one of 'auto', 'direct'"),
        ({"arithmetic": "e8m0"}, "e8m0 has no zero"),
        ({"arithmetic": "fp64"}, "fp64 has 53 significant bits"),
        ({"order": "pairwise"}, "order='pairwise' is for other methods"),
        ({"order": "random", "method": "direct"}, "order is 'random'"),
        ({"axis": 2}, "axis is 2; expected different axes of 1 dimensions"),
        ({"axis": (0, -1)}, "different axes"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        l2_norm(jnp.ones(3), **arguments)
    with pytest.raises(TypeError, match="l2_norm takes real floating-point arrays, not int32"):
        l2_norm(jnp.arange(3))


# -- thresholds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sequential", "blocked", "pairwise", "compensated"])
@pytest.mark.parametrize("n", [2, *nightly([1, 100, 3000])])
def test_below_beta_high_no_sum_of_squares_overflows(order, n):
    fmt = format_("fp16")
    beta = beta_high(fmt, n, order=order)
    below = float(fmt.decode([fmt.encode(beta) - 1])[0])
    x = half(np.full(n, below))
    assert jnp.isfinite(l2_norm(x, method="direct", order=order))
    if n <= 2:  # one addition, or none
        assert beta == beta_high("fp16", n)
    if n == 2 and order == "pairwise":
        assert jnp.isinf(l2_norm(half([2 * beta, 2 * beta]), method="direct"))


def test_from_beta_low_on_squares_keep_their_bits():
    for name in ("fp16", "bf16", "e5m2", "e4m3"):
        fmt = format_(name)
        low = beta_low(fmt)
        assert low**2 >= float(fmt.smallest_normal) > (low / 4) ** 2
    x = half([beta_low("fp16") * 1.5])
    assert float(l2_norm(x, method="direct")) == float(x[0])


def test_the_published_overflow_method_halves_by_a_shift():
    x = half([6e4, *[10.0] * 100])  # 2 K x would overflow
    assert float(l2_norm(x, method="two_segment_overflow")) == 60000
    x = half([6e4, *[100.0] * 100])  # Q does
    assert jnp.isinf(l2_norm(x, method="two_segment_overflow"))
    assert abs(float(l2_norm(x, method="two_segment_overflow_corrected")) - 60008) <= 32


@pytest.mark.slow
def test_another_threshold():
    x = half([200, 200])
    assert jnp.isinf(l2_norm(x, method="two_segment_overflow"))
    beta = beta_high("fp16", 2)
    assert float(l2_norm(x, method="two_segment_overflow", beta=beta)) == 282.75
    tiny = half([2.0**-14, 1.0])
    for method in NORM_METHODS:
        if "two_segment" in method:
            assert float(l2_norm(tiny, method=method, beta=2.0**-4)) == 1
    with pytest.raises(ValueError, match="beta is for two_segment methods, not for 'auto'"):
        l2_norm(x, beta=4.0)
    with pytest.raises(ValueError, match="l2_norm: beta is 0; expected a positive finite number"):
        l2_norm(x, method="two_segment_overflow", beta=0)
    with pytest.raises(ValueError, match="beta_high: n is 0; expected a positive integer"):
        beta_high("fp16", 0)
