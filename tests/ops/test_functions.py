"""Elementary functions and their error tables, against published figures and mpmath."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from proofs.function_errors import EXACT, function_table, reference
from proofs.function_tables import cast_table, function_ranges

from cases import nightly
from scalewise import ops
from scalewise.formats import format as format_
from scalewise.ops import functions, isinf_sign
from scalewise.ops.functions import FUNCTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_is_mpmaths(name):
    """Two routes: NumPy's float64, and mpmath whose result is rounded by rational comparison."""
    fmt, function = format_("fp16"), FUNCTIONS[name]
    values = fmt.values()
    x = np.random.default_rng(0).choice(values[np.isfinite(values)], 60)
    exact, rounded = reference(fmt, function, x)
    spacing = [2.0 ** (max(math.frexp(r)[1] - 1, -14) - 10) for r in rounded]
    for v, y, r, ulp in zip(x, exact, rounded, spacing, strict=True):
        with mpmath.workprec(300):
            try:
                definition = EXACT[name].exact
                if isinstance(definition, str):
                    want = getattr(mpmath, definition)(mpmath.mpf(v))
                else:
                    want = definition(mpmath, mpmath.mpf(v))
            except (ZeroDivisionError, ValueError):
                want = None
            if want is None or isinstance(want, mpmath.mpc) or not mpmath.isfinite(want):
                assert not math.isfinite(y), (v, y)
                continue
            if 2.0**-1000 < abs(want) < 2.0**1000:  # beyond, the rounding is all that counts
                assert abs(y - want) <= abs(want) * 2.0**-40, (v, y)
            if math.isfinite(r):
                assert abs(r - want) <= ulp / 2, (v, r)
            else:
                assert abs(want) >= 65520


def test_a_tie_is_a_tie():
    """1.03125^2 lies exactly between two numbers of FP16... as does its neighbour's, a bit off."""
    fmt = format_("fp16")
    x = np.array([1 + 2.0**-9 + 2.0**-10, 1 + 2.0**-5 + 2.0**-6])
    _, rounded = reference(fmt, FUNCTIONS["square"], x)
    np.testing.assert_array_equal(rounded, (x.astype(np.float16) ** 2).astype(np.float64))


# PaddlePaddle's low-precision operator guide, FP16 against FP32: max abs, mean abs, mean rel
PUBLISHED = {
    "sqrt": (0.06249, 4.158e-3, 1.72e-4),
    "rsqrt": (0.031227, 2.071e-3, 1.79e-4),
    "log10": (0.0019532, 4.0e-4, 1.75e-4),
    "log2": (None, 1.258e-3, 1.71e-4),
    "log1p": (0.0039054, None, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_computed_in_float32_the_published_errors_are_those_of_normal_inputs(name):
    _, wide = function_table("fp16", [name], domain="normal")
    assert (wide.arithmetic, wide.domain) == ("float32", "normal")
    ours = wide.max_absolute, wide.mean_absolute, wide.mean_relative
    for got, published in zip(ours, PUBLISHED[name], strict=True):
        if published is not None:
            assert got == pytest.approx(published, rel=4e-3)
    assert wide.max_relative <= 2.0**-11
    assert wide.max_ulp < 0.51
    assert wide.correctly_rounded > 0.9995


@pytest.mark.parametrize("name", nightly(["round", "floor", "ceil", "relu", "abs", "negative"]))
def test_what_only_moves_is_exact(name):
    for row in function_table("fp16", [name]):
        assert row.max_absolute == 0
        assert row.correctly_rounded == 1


def test_what_native_arithmetic_costs():
    native, wide = function_table("fp16", ["softsign"])
    assert (native.arithmetic, wide.arithmetic) == ("native", "float32")
    assert native.max_ulp > 1.4
    assert native.correctly_rounded < 0.85
    assert wide.max_ulp <= 0.5


@pytest.mark.slow
def test_casts_to_fp16_over_every_float32_number():
    """Exhaustive; the largest relative error is 1/3 at 1.5 * 2^-24 by theory."""
    every, normal = cast_table("fp16")
    assert (every.count, normal.count) == (335_536_129, 251_650_049)
    assert every.max_absolute == normal.max_absolute == 16
    assert every.max_relative == pytest.approx(1 / 3, abs=1e-12)
    assert every.mean_absolute == pytest.approx(0.39981, abs=1e-5)
    assert every.mean_relative == pytest.approx(0.0086849, abs=1e-7)
    assert normal.max_relative == pytest.approx(2.0**-11 / (1 + 2.0**-11), rel=1e-3)
    assert normal.mean_absolute == pytest.approx(0.53309, abs=1e-5)
    assert normal.mean_relative == pytest.approx(1.69227e-4, abs=1e-9)


def test_casts_to_e2m1_by_theory():
    """Half its spacing of 2 at the top; a third where 0.75 goes to 0.5 or 1."""
    every, normal = cast_table("e2m1fn")
    bits = [int(np.float32(x).view(np.uint32)) for x in (0.5, 1, 6)]
    assert every.count == bits[2] - bits[0] + 1
    assert normal.count == bits[2] - bits[1] + 1
    assert every.max_absolute == normal.max_absolute == 1
    assert every.max_relative == pytest.approx(1 / 3, abs=1e-7)
    assert normal.max_relative == pytest.approx(1 / 5, abs=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_the_result_is_float32s_rounded_once(dtype):
    fmt = format_(dtype)
    values = fmt.values()
    x = values[np.isfinite(values) & (np.abs(values) < 80)][::37]
    got = jax.jit(functions.exp)(jnp.asarray(x.astype(dtype)))
    assert got.dtype == dtype
    want = fmt.decode(fmt.encode(np.asarray(jnp.exp(jnp.asarray(x, jnp.float32)))))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


def test_the_computing_type_can_be_chosen_and_gradients_go_through():
    x = jnp.asarray([0.1, 0.2], jnp.float16)
    assert functions.sin(x, compute=jnp.float16).dtype == jnp.float16
    slope = jax.grad(lambda v: functions.tanh(v).astype(jnp.float32).sum())(x)
    np.testing.assert_allclose(slope, 1 - np.tanh([0.1, 0.2]) ** 2, rtol=1e-3)


def test_a_format_is_given_by_its_name_its_dtype_or_itself():
    for fmt in ("fp16", "float16", jnp.float16, np.dtype("float16"), format_("fp16")):
        assert functions.COMPUTE[fmt] == np.float32
        assert ops.ulp_bound(fmt, 16) == ops.ulp_bound("fp16", 16)


def test_which_infinity():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2):
        x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0, -1], dtype)
        assert isinf_sign(x).tolist() == [1, -1, 0, 0, 0]


def test_the_tables_of_the_page():
    assert round(cast_table("fp16", "log_uniform")[1].mean_relative, 7) == 0.0001761
    (found,) = function_ranges("e5m2", ["exp"])
    assert found.overflows == ((12.0, 57344.0),)


def test_integers_are_rejected():
    with pytest.raises(TypeError, match="exp takes real floating-point arrays, not int32"):
        functions.exp(jnp.arange(3))


def test_a_function_is_an_attribute_and_listed():
    assert functions.exp is FUNCTIONS["exp"]
    assert {"exp", "gelu_tanh", "COMPUTE"} <= set(dir(functions))


@pytest.mark.parametrize("name", ["e2m1fn", *nightly(["e4m3fn", "e5m2"])])
def test_the_table_of_casts_counts_every_number(name):
    """The table repeats a binade's errors; here each binade is computed."""
    fmt = format_(name)
    first, last = (
        int(np.float32(float(x)).view(np.uint32)) for x in (fmt.smallest_normal, fmt.max)
    )
    worst = total = count = 0
    for start in range(first, last + 1, 1 << 23):
        x = np.arange(start, min(start + (1 << 23), last + 1), 7, dtype=np.uint32)
        x = x.view(np.float32).astype(np.float64)
        error = np.abs(fmt.decode(fmt.encode(x)) - x) / x
        worst, total, count = max(worst, error.max()), total + error.sum(), count + len(x)
    found = cast_table(name)[1]
    assert found.count == last - first + 1
    assert found.mean_relative == pytest.approx(total / count, rel=1e-4)
    assert found.max_relative == pytest.approx(worst, rel=1e-4)
