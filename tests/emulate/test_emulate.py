"""Emulation against native arithmetic, ml_dtypes and exact rational arithmetic."""

import operator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from programs import DIFFERENTIABLE, PROGRAMS, scalar, together
from scalewise.formats import CATALOGUE, Format

MINE = Format("e6m9", exponent_bits=6, mantissa_bits=9)
FORMATS = [f for f in CATALOGUE.values() if f.signed and f.bits < 64] + [MINE]


def numbers(fmt: Format, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, fmt.max_code + 1, n, dtype=np.uint64)
    return (fmt.decode(codes) * rng.choice([-1, 1], n)).astype(np.float32)


def exactly(fmt: Format, x: Fraction) -> float:
    """The nearest number of the format by rational arithmetic alone: shares nothing with ours."""
    size, sign = abs(x), -1 if x < 0 else 1
    if size == 0:
        return 0.0
    exponent = fmt.min_exponent
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(size / quantum) * quantum  # Python rounds Fractions half to even
    if not fmt.subnormals and rounded < fmt.smallest:
        rounded = fmt.smallest if size > fmt.smallest / 2 else Fraction(0)
    if rounded > fmt.max:
        beyond = fmt.max if fmt.nan_code is None else None
        if beyond is None:
            return sign * float("inf") if fmt.infinities else float("nan")
        rounded = beyond
    return sign * float(rounded)


OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)


@pytest.mark.parametrize(
    "fmt", nightly(FORMATS, but=["fp16", "bf16", "e4m3fn", "e2m1fn", "dlfloat16", "e6m9"])
)
def test_arithmetic_is_correctly_rounded(fmt):
    a, b = numbers(fmt, 300, 1), numbers(fmt, 300, 2)
    b[b == 0] = 1
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    results = jax.jit(sw.emulate(lambda a, b: [f(a, b) for f in OPERATIONS], fmt))(a, b)
    for f, got in zip(OPERATIONS, results, strict=True):
        with np.errstate(over="ignore"):
            want = np.asarray([exactly(fmt, f(x, y)) for x, y in pairs], np.float32)
        np.testing.assert_array_equal(got, want, str(f))


def test_subnormals_survive():
    x = jnp.float32(2.0**-24)
    assert float(sw.emulate(lambda x: x * 1.0 + 0.0, "fp16")(x)) == 2.0**-24
    tiny = np.float32(2.0**-133)  # the smallest bfloat16, a float32 subnormal
    f = sw.emulate(lambda x: x * 2.0**100 * 3.0, "bf16")
    assert float(f(tiny)) == 3 * 2.0**-33
    assert float(jax.jit(f)(tiny)) == 3 * 2.0**-33


def test_published_failures():
    """pytorch #66707 (a sum of squares), arXiv 1710.03740 (1 + 0.0001), optax #1754 (1e-8)."""
    f16 = lambda f: sw.emulate(f, "fp16")  # noqa: E731
    assert float(f16(lambda x: jnp.sum(x * x))(jnp.full(4096, 16.0))) == np.inf
    assert float(f16(lambda x: x + 0.0001)(jnp.float32(1))) == 1
    assert float(f16(jnp.exp)(jnp.float32(11.0859375))) < np.inf
    assert float(f16(jnp.exp)(jnp.float32(11.09))) == np.inf
    assert float(f16(lambda x: x / 1e-8)(jnp.float32(1))) == np.inf
    assert float(f16(lambda x: 1 / jnp.exp(8 * x))(jnp.float32(1.5))) == 0  # XLA says 6.14e-6
    assert float(sw.emulate(lambda x: x * 0.999, "bf16")(jnp.float32(1))) == 1
    # what a fused bf16 doesn't do: under jit (1 + 2^-8) + 2^-8 reads back as 1.00390625
    f = sw.emulate(lambda x: (x + 2.0**-8) + 2.0**-8, "bf16")
    assert float(jax.jit(f)(jnp.float32(1))) == 1


@pytest.mark.parametrize("part", [jnp.abs, *nightly([jnp.real, jnp.imag])])
def test_parts_of_complex_numbers_are_rounded(part):
    def f(x):
        return part(jnp.fft.rfft(x))

    x = normal(0, (64,))
    got = sw.emulate(f, "bf16")(x)
    np.testing.assert_array_equal(got, sw.round_to(f(sw.round_to(x, "bf16")), "bf16"))
    error = sw.audit(f, "bf16", trials=0)(x).error.relative
    want = f(x)
    np.testing.assert_allclose(
        error, jnp.linalg.norm(got - want) / jnp.linalg.norm(want), rtol=1e-3
    )


def test_a_scan_swamps_as_published():
    """ml_dtypes #63: a sequential sum of ones stalls at 256 in BF16; at 2048 in FP16."""

    def total(x):
        return jax.lax.scan(lambda c, v: (c + v, None), jnp.float32(0), x)[0]

    assert float(sw.emulate(total, "fp16")(jnp.ones(4096))) == 2048
    assert float(sw.emulate(total, "bf16")(jnp.ones(1000))) == 256


FEW = [p for p in PROGRAMS if p.__name__ in ("calls", "custom_derivatives", "while_loop")]


@pytest.mark.parametrize(
    ("fmt", "programs"), [("fp16", FEW), *nightly([("fp16", PROGRAMS), (MINE, PROGRAMS)])]
)
def test_every_output_is_a_number_of_the_format_under_jit_and_eagerly(fmt, programs):
    f, x = sw.emulate(together(programs), fmt), normal(0, (4, 4))
    for a, b in zip(jax.tree.leaves(f(x)), jax.tree.leaves(jax.jit(f)(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(sw.round_to(a, fmt)), np.asarray(a))


@pytest.mark.parametrize("programs", [FEW[:2], *nightly([(DIFFERENTIABLE,)])])
def test_gradients_from_outside_are_the_gradients_inside(programs):
    x = normal(0, (4, 4))
    outside = together(programs, lambda f: jax.grad(sw.emulate(scalar(f), "fp16")))
    inside = sw.emulate(together(programs, lambda f: jax.grad(scalar(f))), "fp16")
    jax.tree.map(np.testing.assert_array_equal, jax.jit(outside)(x), jax.jit(inside)(x))


def test_emulating_float32_in_float32_arithmetic_changes_nothing():
    x = numbers(sw.formats.FP16, 256, 0).reshape(16, 16)
    f = lambda x: (x * 3 + 1) / (x * x + 2) - jnp.sqrt(jnp.abs(x))  # noqa: E731
    np.testing.assert_array_equal(np.asarray(sw.emulate(f, "fp32")(x)), np.asarray(f(x)))


def test_fp64_is_float64s_own_arithmetic():
    x = jnp.float32(0.1)
    got = sw.emulate(lambda x: (x + 1e10) - 1e10, "fp64")(x)
    assert float(got) == np.float32((np.float64(np.float32(0.1)) + 1e10) - 1e10)


def test_a_product_by_an_algorithm_for_fp16_which_a_cpu_lacks():
    def f(x):
        preset = jax.lax.DotAlgorithmPreset.F16_F16_F32
        return jax.lax.dot(x, x, precision=preset, preferred_element_type=jnp.float32)

    x = jax.random.normal(jax.random.key(0), (4, 4), jnp.float16)
    want = sw.emulate(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32), "fp16")(x)
    np.testing.assert_array_equal(sw.emulate(f, "fp16")(x), want)
    np.testing.assert_allclose(sw.autocast(f, "bfloat16")(x), want, atol=0.05)

    def attention(q):  # takes it for FP16, as which the audit traces the program
        return jnp.sum(jax.nn.dot_product_attention(q, q, q))

    report = sw.audit(attention, "fp16", trials=0)(jnp.ones((1, 2, 1, 4)))
    assert report.error.non_finite == 0


def test_a_program_written_in_half_precision():
    x = jnp.asarray(numbers(sw.formats.E4M3FN, 64, 0)).astype(jnp.float16)

    def f(x):
        y = x.astype(jnp.float32) * 2
        return (x * jnp.sum(y).astype(jnp.float16)).at[jnp.array([0])].add(x[:1])

    got = sw.emulate(lambda x: f(x.reshape(8, 8)[:, 0]), "e5m2")(x)
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(sw.round_to(got, "e5m2")), np.asarray(got))


test_invalid_arguments_are_refused = refused(
    (lambda: sw.emulate(jnp.sin, "fp61"), "no format is called 'fp61'; did you"),
    (lambda: sw.emulate(jnp.sin, Format("e11m30", 11, 30)),
     "e11m30 has 31 significant bits; expected at most 25"),
)  # fmt: skip
