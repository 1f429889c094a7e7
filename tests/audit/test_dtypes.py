"""A program as written: its own conversions are honoured where it asks for float32 itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from scalewise import Report


def norm(x, w):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) @ w


def plain_norm(x, w):
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


def accumulated(x, w):
    total = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return (total / 7).astype(x.dtype)


SMALL = jnp.asarray(np.random.default_rng(1).normal(size=(8, 64)), jnp.float32)
LARGE = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)) * 3000, jnp.float32)
WEIGHTS = jnp.full((64, 4), 0.125)
CASES = {
    "a norm in float32": (norm, (LARGE, WEIGHTS)),
    "a sum in float32": (accumulated, (jnp.full((2, 64), 3001.7), jnp.ones((64, 2)))),
}


def audited(f, arguments, **options) -> Report:
    return sw.audit(f, "fp16", trials=0, **options)(*arguments)


@pytest.mark.parametrize("name", CASES)
def test_what_the_program_asks_for_in_float32_stays_there(name):
    f, arguments = CASES[name]
    halves = [x.astype(jnp.float16) for x in arguments]
    exact = np.asarray(f(*arguments), np.float64)
    measured = np.asarray(f(*halves), np.float64)  # what the cast program computes
    expected = np.sqrt(np.sum((measured - exact) ** 2) / np.sum(exact**2))
    report = audited(f, arguments)
    assert report.error.non_finite == 0
    assert not report.findings
    assert float(report.error) == pytest.approx(expected, rel=0.2)
    assert "as written" in report.semantics
    rounded = audited(f, arguments, dtypes="all")
    assert rounded.error > report.error
    assert "as written" not in rounded.semantics


def test_constants_that_the_format_cannot_hold_warn_of_nothing():
    """JAX warns while it converts -1e9 to float16; a filter makes an error of that."""

    def masked(x, mask):
        scores = x @ x.T + (1.0 - mask) * -1e9
        return jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ x

    report = audited(masked, (SMALL / 8, jnp.tril(jnp.ones((8, 8)))))
    assert "as written" in report.semantics


def test_a_mean_is_computed_in_float32_as_jax_does_it():
    """The squares overflow in both; their mean does only where each operation is rounded."""
    arguments = jnp.full((2, 4096), 10.0), jnp.ones((4096, 2))
    report = audited(plain_norm, arguments)
    halves = plain_norm(*[x.astype(jnp.float16) for x in arguments])
    assert np.isfinite(np.asarray(halves)).all()
    assert "as written" in report.semantics
    assert float(report.error) < 2.0**-10
    assert float(audited(plain_norm, arguments, dtypes="all").error) > 0.9


def with_epsilon(m, v):
    return (m / (jnp.sqrt(v + 0.0) + 1e-8)).astype(jnp.float32)


def averaged(x, average):
    def step(average, row):
        return jax.jit(lambda a, r: a * 0.999 + r * 0.001)(average, row), None

    return jax.lax.scan(step, average, x)[0].astype(jnp.float32)


def by_table(x, y):
    table = jnp.asarray(np.linspace(0.1, 0.7, 64), x.dtype)
    return (x * table[None]).astype(jnp.float32) + y.astype(jnp.float32)


ONES = jnp.ones((8, 64))
CONSTANTS = {
    "an epsilon": (with_epsilon, "fp16", (jnp.zeros(64), jnp.zeros(64))),
    "an epsilon in bf16": (with_epsilon, "bf16", (jnp.full(64, 1e-9), jnp.full(64, 1e-17))),
    "a decay in a loop": (averaged, "bf16", (ONES, ONES[0] * 3)),
    "an array": (by_table, "bf16", (SMALL, ONES * 0)),
}


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "16 bits"])
@pytest.mark.parametrize("name", nightly(CONSTANTS, but=[*CONSTANTS][:1]))
def test_the_reference_has_constants_as_they_are_written(name, narrow):
    """The error is that of the program in 16 bits, whose trace has rounded constants."""
    f, low, arguments = CONSTANTS[name]
    dtype = jnp.dtype("float16" if low == "fp16" else "bfloat16")
    halves = [x.astype(dtype) for x in arguments]
    arguments = halves if narrow else arguments
    exact = flat(f(*(x.astype(jnp.float32) for x in arguments)))
    report = sw.audit(f, low)(*arguments)
    applied, low_run = (flat(x.apply_fixes(f)(*arguments)) for x in (report, without_fixes(report)))
    difference = np.linalg.norm(low_run - exact) / np.linalg.norm(exact)
    if report.error.non_finite:
        assert not np.isfinite(low_run).all()
        assert np.isfinite(applied).all()
        assert [x.number for x in report.literals] == [np.float32(1e-8)]
    else:
        assert float(report.error) == pytest.approx(difference, rel=1e-3)
        measured = np.linalg.norm(flat(f(*halves)) - exact) / np.linalg.norm(exact)
        assert float(report.error) == pytest.approx(measured, rel=0.2)


def flat(outputs) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(outputs)])


def without_fixes(report: Report) -> Report:
    return dataclasses.replace(report, findings=(), unfixed=())


@pytest.mark.slow
def test_without_fixes_a_function_runs_in_the_audited_arithmetic():
    for f, fmt in [(plain_norm, "fp16"), (norm, "fp16"), (plain_norm, "fp8")]:
        arguments = LARGE, WEIGHTS
        report = sw.audit(f, fmt, trials=0)(*arguments)
        exact = np.asarray(f(*arguments), np.float64)
        found = np.asarray(report.apply_fixes(f)(*arguments), np.float64)
        error = np.sqrt(np.sum((found - exact) ** 2) / np.sum(exact**2))
        assert error == pytest.approx(float(report.error_fixed), rel=1e-2)
        assert error > 1e-4


def test_other_words_and_formats_are_refused():
    with pytest.raises(ValueError, match="dtypes is 'half'; expected one of 'as_written'"):
        audited(norm, (LARGE, WEIGHTS), dtypes="half")
    with pytest.raises(ValueError, match="dtypes='as_written'; expected low"):
        sw.audit(norm, "float32", dtypes="as_written")(LARGE, WEIGHTS)


def quantized(x, w):
    codes = (x / 4).astype(jnp.float8_e4m3fn)
    return (codes.astype(x.dtype) * 4) @ w


@pytest.mark.parametrize("low", ["fp16", "bf16", "e5m2"])
def test_the_programs_own_casts_to_8_bits_are_honoured(low):
    """The low-precision run rounds as ``emulate`` does, and the cast is the error's cause."""
    exact = np.asarray((SMALL @ WEIGHTS), np.float64)
    emulated = np.asarray(sw.emulate(quantized, low)(SMALL, WEIGHTS), np.float64)
    expected = np.sqrt(np.sum((emulated - exact) ** 2) / np.sum(exact**2))
    report = sw.audit(quantized, low, trials=4, dtypes="all")(SMALL, WEIGHTS)
    assert float(report.error) == pytest.approx(expected, rel=1e-5)
    cast = next(e for e in report.equations if e.quantizes)
    assert (2.0**-6 < cast.introduced < 2.0**-4) is (low != "e5m2")  # whose numbers E4M3 holds


def test_an_overflow_of_an_own_cast_is_told_in_its_format():
    worst = sw.audit(quantized, "fp16", trials=4)(SMALL * 4096, WEIGHTS).findings[0]
    assert (worst.kind, worst.primitive) == ("overflow", "convert_element_type")
    assert "exceeds E4M3FN's maximum" in worst.evidence
    assert worst.fix.indices == worst.equations
    assert worst.error_after < 1e-3


def masked(scores, mask):
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return scores - jnp.max(scores, -1, keepdims=True)


def masked_attention(scores, mask):
    return jax.nn.softmax(masked(scores, mask)) + 0.0 * jnp.sum(scores)


@pytest.mark.parametrize("f", [masked, masked_attention])
def test_a_row_without_unmasked_scores_is_no_fault(f):
    """A dtype's smallest number is FP16's own in FP16, and float32's in the reference."""
    report = sw.audit(f, "fp16")(SMALL, (jnp.arange(8) < 5)[:, None])
    assert not report.findings
    assert float(report.error) < 2.0**-10


SMALLEST = 1e-9


def never_run(small):
    return never_run(small=1 / 0), never_run(small="a" * 3), never_run(small=10**10**10)


def test_constants_that_the_program_rounds_itself_are_those_of_the_source():
    def entropy(x, eps=1e-9, small=1e-9):
        p = jax.nn.softmax(x.astype(jnp.float16))
        logs = jnp.log(p + 1e-9) + jnp.log(p + eps) + jnp.log(p + SMALLEST) + jnp.log(p + small)
        return jnp.mean(logs)

    report = sw.audit(entropy, "fp16")(jnp.array([[20.0, 0.0, 1.0], [1.0, 30.0, 0.0]]))
    first = report.findings[0]
    assert (first.kind, first.evidence) == ("underflow", "the constant 1e-09 flushed to zero")
    assert float(report.error_fixed) < 1e-3
