"""What a finding says of its operation holds: which of a line it is, and what it does there."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.auditing import OutputError
from scalewise.auditing._search._measure import better
from scalewise.auditing._thresholds import ENOUGH

CLEAR = 0.2

W = normal(0, (2, 64, 64)) / 8
X = normal(1, (8, 64))


def model(f):
    def run(w, x):
        return jnp.tanh(f(jnp.tanh(x @ w[0]) * 1.3) @ w[1])

    return run


def training(f):
    def train_step(w, x):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((model(f)(w, x) - 0.3) ** 2))(w)
        return w - 0.1 * slope, loss

    return train_step


def naive_variance(x):
    x = x * 0.2 + 30
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(x**2, -1, keepdims=True) - mean**2  # here
    return (x - mean) / jnp.sqrt(variance + 1e-3)


def difference(x):
    a = x * 0.01 + 500  # here
    b = jnp.flip(x) * 0.01 + 500  # here
    return (a - b) * 30


def chosen(x):
    return lax.cond(x.sum() < 1e9, difference, lambda y: y, x)


def long_sum(x):
    def body(_, total):
        return total + jnp.abs(x) * 0.01  # here

    return lax.fori_loop(0, 2000, body, jnp.zeros_like(x)) / 20


def short_steps(x):
    def body(total, _):
        return total + 0.003 * jnp.abs(x), None  # here

    return lax.scan(body, jnp.ones_like(x), None, length=600)[0]


def small_norm(x):
    g = x * 1e-4
    return g / jnp.sqrt(jnp.sum(g * g, -1, keepdims=True)) * 8  # here


def alternating(x):
    total, term = jnp.ones_like(x), jnp.ones_like(x)
    for k in range(1, 30):
        term = term * (-jnp.abs(x) * 7) / k  # here
        total = total + term
    return total * x


@pytest.mark.parametrize(
    ("f", "whole", "fmt", "kind", "primitive"),
    [
        (naive_variance, model, "fp16", "cancellation", "sub"),
        (chosen, model, "fp16", "amplified", "add"),  # not the small addend's own rounding
        (long_sum, model, "fp16", "swamping", "add"),  # a sum of positive numbers amplifies none
        *nightly([(short_steps, training, "bf16", "swamping", "add")]),
        (small_norm, model, "fp16", "underflow", "mul"),  # not 0 / 0
        (alternating, model, "fp16", "amplified", "mul"),  # 80 operations before what shows it
    ],
)
def test_the_operation_at_fault(f, whole, fmt, kind, primitive):
    report = sw.audit(whole(f), fmt)(W, X)
    lines, start = inspect.getsourcelines(difference if f is chosen else f)
    here = {n for n, line in enumerate(lines, start) if line.rstrip().endswith("# here")}
    first = report.findings[0]
    assert (first.kind, first.primitive) == (kind, primitive)
    if f is long_sum:
        told = "the rounding errors of 2,000 additions to a sum grow to 0.1"
        assert first.evidence.startswith(told)
    assert first.line in here
    assert first.fix is not None
    assert not report.error_fixed.non_finite
    assert report.error_fixed.relative < 0.01


def test_a_factor_is_no_mask():
    """1e10 isn't there to hide anything: a smaller number in its place makes the product wrong."""

    def f(x):
        return jnp.prod(jnp.abs(x[:, :8]) * 0.05, -1, keepdims=True) * 1e10 + x

    report = sw.audit(training(f), "fp16")(W, X)
    assert not any("in place of" in str(x.fix) for x in report.findings)
    assert report.error_fixed.relative < 2.0**-11

    def masked(x):
        scores = x @ x.T
        return jax.nn.softmax(scores + (1 - jnp.tril(jnp.ones((8, 8)))) * -1e9, -1) @ x

    fixes = [str(x.fix) for x in sw.audit(model(masked), "fp16")(W, X).findings]
    assert "-32752 in place of -1e+09" in fixes


def test_a_threshold_is_no_mask():
    """Compared with a smaller number, other elements are chosen."""

    def f(x):
        cubes = x * x * x
        return jnp.where(cubes > 1e6, 1.0, 2.0) * x

    report = sw.audit(f, "fp16")(jnp.linspace(1.0, 200.0, 64))
    assert not any("in place of" in str(x.fix) for x in report.findings)
    assert report.error_fixed.relative < 2.0**-11


def test_of_two_fixes_the_one_that_helps_alone_comes_first():
    def f(x):
        p = jax.nn.softmax(x * 12, -1)
        return jnp.log(p + 1e-9) * 0.05

    report = sw.audit(training(f), "fp16")(W, X)
    assert "underflow in add" in report.verdict


def test_what_is_computed_before_the_gradient_is_no_optimizer():
    """JAX moves ``0.003 * abs(x)`` out of the loop, and out of the differentiated function."""
    equations = sw.audit(training(short_steps), "bf16", trials=0)(W, X).equations
    scaled = [e for e in equations if e.primitive == "mul" and e.function.endswith("body")]
    assert {e.direction for e in scaled} == {"forward", "backward"}

    def train_step(w, x):
        x = (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 0.1)
        rate = 0.1 * jnp.cos(x[0, 0] * 0 + 0.5)
        slope = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return w - rate * slope - 0.01 * w

    equations = sw.audit(train_step, "fp16", trials=0)(W[0], X).equations
    found = {
        (e.primitive, e.line - train_step.__code__.co_firstlineno): e.direction for e in equations
    }
    assert found["div", 1] == found["sub", 1] == "forward"
    assert found["sub", 4] == found["mul", 4] == "optimizer"
    assert found["cos", 2] == "optimizer"


def test_an_epsilon_that_changes_nothing_is_no_lost_update():
    """Adamax adds its epsilon to each gradient, and keeps the sum."""

    def train_step(w, x):
        slope = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        largest = jnp.abs(slope) + 1e-7
        return w - 0.05 * slope / largest, largest

    report = sw.audit(train_step, "fp16")(W[0], X)
    assert report.updates_lost < 0.05
    assert "hardly" not in report.verdict


POINTS = jnp.linspace(0.0, 3.0, 40)


def covariance(x):
    k = jnp.exp(-0.5 * (x[:, None] - x[None]) ** 2)
    return k + 1e-3 * jnp.eye(x.size)


def likelihood(x):
    factor = jnp.linalg.cholesky(covariance(x))
    value = -jnp.sum(jnp.log(jnp.diag(factor)))
    return jnp.where(jnp.isfinite(value), value, -jnp.inf)


@pytest.mark.slow
def test_a_matrix_that_rounding_makes_indefinite():
    """Computing the decomposition in float32 doesn't help: the matrix has to be."""
    report = sw.audit(likelihood, "bf16")(POINTS)
    found = report.findings[0]
    assert (found.kind, found.primitive) == ("nan", "exp")
    assert "from it cholesky at" in found.evidence
    assert report.error_fixed.relative < 0.01


def test_a_zero_divided_by_a_difference_of_nearly_equal_numbers():
    """The cancellation is the finding, and its evidence counts the NaNs of the division."""

    def standardised(x):
        mean = jnp.mean(x)
        variance = jnp.mean(x * x) - mean * mean
        return (x - mean) / jnp.sqrt(variance)

    found = sw.audit(standardised, "bf16")(100 + X[0] * 0.3).findings[0]
    assert found.kind == "cancellation"
    assert "numbers are NaN" in found.evidence
    assert "E[x^2]" in str(found.fix)


def test_a_loss_that_becomes_finite_beside_an_array_that_does_not():
    """It is one of two outputs, and one of 17 numbers."""
    both, array, numbers = (OutputError(n, 0.1, of) for n, of in ((17, 2), (16, 1), (16, 2)))
    assert better(array, both, ENOUGH)
    assert not better(numbers, both, ENOUGH)
    assert not better(array, both, CLEAR)


def test_an_error_that_arguments_explain_hides_none_of_other_outputs():
    def f(x, i):
        count = jnp.zeros(8).at[i].add(1.0)
        return count / jnp.sum(count), jnp.mean(x * x) - jnp.mean(x) ** 2

    index = jax.random.randint(jax.random.key(3), (4000,), 0, 8)
    report = sw.audit(f, "bf16", dtypes="all")(3 + X[0] * 0.01, index)
    assert {x.primitive for x in report.findings if x.fix} >= {"reduce_sum", "scatter-add"}
    left = report.error_float32.relative
    assert report.error_fixed.relative == pytest.approx(left, rel=1e-3)
    assert left > 0.01  # the variance of rounded numbers


def test_a_flushed_bound_that_matters_once_other_faults_are_fixed():
    def f(x):
        small = (jnp.abs(x) * 1e-4) ** 3
        return x * small / jnp.maximum(small, 1e-12)

    report = sw.audit(f, "fp16")(X)
    assert report.error_fixed.relative < 2.0**-11


def test_a_cast_of_the_program_that_overflows_under_a_policy():
    """The policy's format holds the number; the cast's own dtype doesn't."""

    def f(w, x):
        h = x @ w[0]
        energy = jnp.sum(jnp.square(h * 90)).astype(jnp.float16)
        return h, 1e-6 * energy.astype(jnp.float32)

    report = sw.audit(f, "p=f32,c=bf16,o=f32")(W, X)
    (found,) = report.findings
    assert "exceeds FP16's maximum by 2^" in found.evidence
    assert "primitive='convert_element_type'" in str(found.fix)
    assert not report.error_fixed.non_finite


def test_of_two_overflows_that_one_fix_needs_the_first_comes_first():
    """The second line's own fix makes some numbers finite, the first one's none."""

    def speed(x):
        energy = 0.5 * 70.0 * x * x
        return jnp.sqrt(2 * energy / 70.0)

    found = sw.audit(speed, "fp16")(jnp.linspace(1.0, 100.0, 64)).findings
    assert [x.evidence.startswith("exceeds FP16's maximum") for x in found] == [True, True]
    assert found[0].line < found[1].line


def test_numbers_flushed_where_others_overflow_are_the_cause_if_they_are_divided_by():
    def forces(x):
        apart = x[:, None] - x[None]
        squares = jnp.sum(apart * apart, -1) + 1e-6
        cubes = squares * jnp.sqrt(squares)  # overflows far away, and is 0 at the point itself
        return jnp.sum(apart / cubes[..., None], 1)

    x = normal(0, (64, 3)) * 50
    (finding, *_) = sw.audit(forces, "fp16")(x).findings
    assert finding.source.startswith("cubes =")
    assert finding.kind == "underflow"


def test_an_underflow_that_was_refuted_is_no_cause_behind_an_amplification():
    def attention(q, k):
        scores = jnp.einsum("btd,bsd->bts", q * 30, k * 30) / 8  # up to 3,600: rounded by 1
        return jax.nn.softmax(scores)

    keys = jax.random.split(jax.random.key(2))
    report = sw.audit(attention, "fp16")(*(normal(key, (4, 64, 64)) for key in keys))
    finding = report.findings[0]
    assert finding.kind == "amplified"
    assert "flushed" not in finding.evidence
    made, _, factor = finding.evidence.partition(", amplified ")
    assert float(made.split()[-1]) * float(factor.split()[0]) > report.error.relative / 2
