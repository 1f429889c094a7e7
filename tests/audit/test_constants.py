"""Constants that a format changes: which are at fault, and what takes their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.auditing._run._session import Session
from scalewise.auditing._search._apply import AuditedArithmetic, FixedFunction, FormatChoice
from scalewise.auditing._tape._interpretations import TableEmulation
from scalewise.interpret import trace


def pixel_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-8)


def test_a_lost_constant_beside_an_overflow_is_not_at_fault():
    finding = sw.audit(pixel_norm, "fp16")(normal(0, (4, 3, 8, 8)) * 300).findings[0]
    assert (finding.kind, finding.primitive) == ("overflow", "mul")


def test_a_lost_constant_that_is_needed_is_at_fault():
    x = (normal(0, (4, 3, 8, 8)) * 1e-3).at[0].set(0.0)
    finding = sw.audit(pixel_norm, "fp16")(x).findings[0]
    assert finding.kind == "underflow"
    assert finding.evidence == "the constant 1e-08 flushed to zero"


def doubled(x):
    return jax.lax.while_loop(lambda x: x < 1e5, lambda x: x * 2, x)


def test_a_loops_own_limit_is_kept_in_float32():
    """32752 in its place would end the loop early."""
    report = sw.audit(doubled, "fp16")(jnp.float32(1))
    assert report.findings[0].kind == "overflow"
    assert float(report.error_fixed) == 0
    assert report.apply_fixes(doubled)(jnp.float32(1)) == 2.0**17


def test_a_scaled_number_in_a_loop_is_no_product():
    def f(x):
        return jax.lax.map(lambda v: jnp.exp(v) * 100, x)

    (finding,) = sw.audit(f, "fp16")(normal(0, (700,)) * 3).findings
    assert (finding.kind, finding.primitive) == ("overflow", "mul")
    assert "log" not in str(finding.fix)


def once(x):
    return (x + 1e-8) * 2


def looped(x):
    return jax.lax.fori_loop(0, 700, lambda i, x: x + 1e-8, x)


def looped_without_a_dtype(x):  # of Python's numbers alone
    return x + jax.lax.fori_loop(0, 700, lambda i, total: total + 1e-8, 0.0)


@pytest.mark.parametrize(
    ("f", "times"), [(once, 2), (looped, 700), *nightly([(looped_without_a_dtype, 700)])]
)
@pytest.mark.parametrize("number", [0.0, *nightly([0.5, 1e-8])])
def test_another_number_takes_a_constants_place_in_float32_too(f, times, number):
    low, x = TableEmulation(sw.format("fp16")), jnp.zeros(3)
    session = Session(trace(f, low, (x,), {}, name="audit"), low)
    session.run()
    old = float(np.float32(1e-8))
    setting = FormatChoice(session.formats()).widened(range(session.program.equations))
    setting = setting.with_constant(old, old if number == 1e-8 else number)
    (got,) = setting.run(session).low
    np.testing.assert_allclose(got, np.full(3, number * times), rtol=1e-5)
    places = {path: (i, session.recorded[i].name) for path, i in session.indices.items()}
    fixed = FixedFunction(f, AuditedArithmetic(low, setting, places), setting)
    np.testing.assert_allclose(fixed(x), got, rtol=1e-6)


def resonator(x):
    def step(before, x):
        y = 1e-4 * x + 1.98 * before[0] - 0.9801 * before[1]
        return (y, before[0]), y

    return jax.lax.scan(step, (0.0, 0.0), x)[1]


@pytest.mark.parametrize(
    ("f", "x", "evidence"),
    [
        (resonator, normal(1, (400,)), "the constant 1.98 becomes 1.97656"),
        *nightly(
            [((lambda t: (t - 273.15) ** 2), jnp.linspace(260, 286, 14), "273.15 becomes 274")]
        ),
    ],
)
def test_a_constant_whose_rounding_makes_the_error_is_its_cause(f, x, evidence):
    """Of numbers that round like any other: not flushed, subnormal or 1."""
    finding = sw.audit(f, "bf16")(x).findings[0]
    assert finding.kind == "precision"
    assert finding.evidence.endswith(evidence)
    assert finding.error_after < 0.9 * finding.error_before


def test_a_flushed_constant_beside_a_larger_error_is_no_cause():
    def ridge(x, y):
        squares = x.T @ x  # about 2e-7, three units of FP16
        return jnp.linalg.solve(squares + 1e-9 * jnp.eye(4), x.T @ y)

    (finding, *_) = sw.audit(ridge, "fp16")(1e-4 * normal(2, (20, 4)), normal(3, (20,))).findings
    assert finding.kind == "underflow"
    assert finding.source.startswith("squares =")


def test_a_number_that_float32_rounds_as_well_is_that_of_the_source():
    """``1 + 1e-9`` is 1 in float32 too, so that no fix in float32 helps."""

    def f(x):
        return (1 - x) / (1.0 + 1e-9 - x)

    x = jnp.ones(3)
    report = sw.audit(f, "fp16")(x)
    assert "1.000000001 becomes 1" in report.findings[0].evidence
    assert report.wide == "float64"
    assert report.error_fixed.non_finite == 0
    assert np.isfinite(report.apply_fixes(f)(x)).all()
