"""Expressions for which the audit tries the function of JAX that computes them better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly


def softmax(x):
    e = jnp.exp(x)
    return e / jnp.sum(e, -1, keepdims=True)


def loss_of_ones(x):
    return -jnp.log(jax.nn.sigmoid(x))


def loss_of_zeros(x):
    return -jnp.log(1 - jax.nn.sigmoid(x))


def mixture(x):
    return jnp.log(jnp.sum(jnp.array([[0.25, 0.5, 0.25]]) * jnp.exp(x), -1))


def mean_of_weights(x):
    return jnp.log(jnp.mean(jnp.exp(x), -1))


def volume(x):
    return jnp.log(jnp.prod(jnp.exp(x), -1))


LARGE = jnp.array([[13.0, 2.0, -1.0], [20.0, 19.0, 18.0]])
CASES = {
    "softmax(x) in place of exp(x) / sum(exp(x))": (softmax, LARGE, jax.nn.softmax),
    "log_sigmoid(x) in place of log(sigmoid(x))": (
        loss_of_ones, jnp.array([-18.0, -20.0, 3.0]), lambda x: -jax.nn.log_sigmoid(x),
    ),
    "log_sigmoid(-x) in place of log(1 - sigmoid(x))": (
        loss_of_zeros, jnp.array([12.0, 14.0, 3.0]), lambda x: -jax.nn.log_sigmoid(-x),
    ),
    "logsumexp(x, b=w) in place of log(sum(w * exp(x)))": (
        mixture, LARGE - 30.0, lambda x: jax.nn.logsumexp(x, -1, b=jnp.array([[0.25, 0.5, 0.25]])),
    ),
    "logsumexp(x) - log(n) in place of log(mean(exp(x)))": (
        mean_of_weights, LARGE, lambda x: jax.nn.logsumexp(x, -1) - jnp.log(3.0),
    ),
    "sum(x) in place of log(prod(exp(x)))": (volume, LARGE - 20.0, lambda x: jnp.sum(x, -1)),
}  # fmt: skip


@pytest.mark.parametrize("text", nightly(CASES, but=[*CASES][:1]))
def test_the_fix_has_the_functions_error(text):
    f, x, better = CASES[text]
    report = sw.audit(f, "fp16")(x)
    assert text in [str(finding.fix) for finding in report.findings]
    got, want = report.apply_fixes(f)(x).astype(jnp.float32), better(x)
    assert jnp.linalg.norm(got - want) <= 2.0**-10 * jnp.linalg.norm(want)


SMALL = jnp.linspace(1e-6, 1e-5, 8)
WIDE = jnp.linspace(2.0, 30.0, 8)
MATRIX = 1e-2 * jnp.eye(40) + 1e-4 * np.random.default_rng(0).standard_normal((40, 40))
OTHERS = {
    "logaddexp(x, -x) - log(2) in place of log(cosh(x))": (
        lambda x: jnp.log(jnp.cosh(x)), "fp16", WIDE,
    ),
    "cumlogsumexp(x) in place of log(cumsum(exp(x)))": (
        lambda x: jnp.log(jnp.cumsum(jnp.exp(x))), "fp16", WIDE,
    ),
    "x + log(-expm1(-x)) in place of log(exp(x) - 1)": (
        lambda x: jnp.log(jnp.exp(x) - 1), "fp16", WIDE,
    ),
    "x + log(-expm1(y - x)) in place of log(exp(x) - exp(y))": (  # no logaddexp
        lambda x: jnp.log(jnp.exp(x) - jnp.exp(x - 1)), "fp16", WIDE,
    ),
    "sqrt((x - y) * (x + y)) in place of sqrt(x * x - y * y)": (  # no hypot
        lambda x: jnp.sqrt(x * x - (x / 2) ** 2), "fp16", 100 * WIDE,
    ),
    "slogdet(a) in place of log(det(a))": (
        lambda a: jnp.log(jnp.linalg.det(a)), "float32", MATRIX,
    ),
    "2 * arcsinh(sqrt(x / 2)) in place of arccosh(1 + x)": (
        lambda x: jnp.arccosh(1 + x), "float32", SMALL,
    ),
    "2 * arcsin(sqrt(x / 2)) in place of arccos(1 - x)": (
        lambda x: jnp.arccos(1 - x), "float32", SMALL,
    ),
    "exp(n * log1p(x)) in place of (1 + x)**n": (lambda x: (1 + x) ** 3000.5, "float32", SMALL),
    "-expm1(x) in place of 1 - exp(x)": (lambda x: 1 - jnp.exp(-x), "float32", SMALL),
    "log(-expm1(x)) in place of log(1 - exp(x))": (
        lambda x: jnp.log(1 - jnp.exp(-x)), "float32", SMALL,
    ),
    "2 * sin(x / 2)**2 in place of 1 - cos(x)": (
        lambda x: (1 - jnp.cos(x)) / x, "float32", 1e3 * SMALL,
    ),
    "sigmoid(-x) in place of 1 - sigmoid(x)": (
        lambda x: 1 - jax.nn.sigmoid(x), "float32", jnp.linspace(9.0, 13.0, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", nightly(OTHERS, but=[*OTHERS][:3]))
def test_the_first_fix_is_what_an_expert_would_write(text):
    f, low, x = OTHERS[text]
    report = sw.audit(f, low)(x)
    assert str(report.findings[0].fix) == text
    assert not report.error_fixed.non_finite
    assert report.error_fixed.relative <= float(sw.format(low).eps)


def test_a_logarithm_of_one_less_is_no_log1p():
    report = sw.audit(lambda x: jnp.log(x - 1), "float32")(1 + 1e4 * SMALL)
    assert not any("log1p" in str(x.fix) for x in report.findings)


def test_a_softmax_that_subtracts_the_maximum_is_left():
    def shifted(x):
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        return e / jnp.sum(e, -1, keepdims=True)

    assert not sw.audit(shifted, "fp16")(LARGE).findings


def test_arguments_that_the_format_cannot_hold_are_the_cause():
    report = sw.audit(lambda u: jnp.log(u), "fp16")(jnp.array([1e-9, 0.5]))
    assert "cause: the arguments, rounded to fp16 ([0]: 0 overflow, 1 flushed" in report.verdict
