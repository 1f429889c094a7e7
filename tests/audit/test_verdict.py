"""The verdict: true in each case, with the cause, the change to make and the error that remains."""

import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import scalewise as sw
from arrays import normal
from scalewise.auditing import Fix, OutputError
from scalewise.auditing._search._kinds import exceeds
from scalewise.auditing._search._search import Search
from scalewise.formats import FP16


def shown(report, **options):
    stream = io.StringIO()
    report.show(Console(file=stream, width=400), **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def overflow():
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    return sw.audit(norm, "fp16", trials=4)(jnp.full(4096, 16.0))


def test_it_does_not_compute(overflow):
    where = overflow.findings[0].where
    assert overflow.verdict == (
        f"No: norm breaks in fp16 (1 number not finite): overflow in reduce_sum at {where}. "
        "Change: ops.l2_norm in place of the root of a sum of squares; then no error."
    )
    assert shown(overflow).splitlines()[1] == overflow.verdict
    assert overflow.as_dict()["verdict"] == overflow.verdict


def test_fixes_that_help_partly(overflow):
    """Which error remains, what causes it, and what wasn't tried."""
    fixed, left = overflow.findings[0], dataclasses.replace(overflow.findings[0], fix=None)
    partly = dataclasses.replace(overflow, findings=(fixed, left), error_fixed=OutputError(0, 0.25))
    assert partly.verdict.endswith(
        f"; then error 0.25, with overflow in reduce_sum at {left.where} left."
    )
    partly = dataclasses.replace(
        partly, error_fixed=OutputError(2, 0.0), untried=7,
        findings=(
            fixed, dataclasses.replace(fixed, order=2), dataclasses.replace(left, tried=False)
        ),
    )  # fmt: skip
    assert " and 1 more fix; then 2 numbers not finite, with overflow in " in partly.verdict
    assert partly.verdict.endswith(" left; no trials were left for 7 more findings.")
    narrow = dataclasses.replace(
        partly, error_fixed=OutputError(0, 0.1), error_float32=OutputError(0, 0.1), untried=0
    )
    assert narrow.verdict.endswith("; then error 0.1.")
    for error, said in ((math.nan, "(its error is NaN)"), (2.0, "(error 2)"), (0.3, "(error 0.3)")):
        bad = dataclasses.replace(overflow, error=OutputError(0, error))
        what = "breaks" if math.isnan(error) else "loses accuracy"
        assert bad.verdict.startswith(f"No: norm {what} in fp16 (")
        assert said in bad.verdict
    small = OutputError(0, 0.03)
    one = dataclasses.replace(overflow, error=small, outputs=(("['w']", OutputError(0, 0.4)),))
    assert "loses accuracy in fp16 (output['w'] has error 0.4)" in one.verdict
    usable = dataclasses.replace(overflow, error=small, outputs=(("", small),))
    assert usable.verdict.startswith("norm computes in fp16 with error 0.03, ")
    narrow = dataclasses.replace(usable, error=OutputError(0, 0.2), precision=4)  # as of FP8
    assert narrow.verdict.startswith("norm computes in fp16 with error 0.2, 3.2 times one rounding")


def test_an_overflow_just_beyond_the_maximum_is_given_in_numbers():
    assert exceeds(65535.0, FP16) == "exceeds FP16's maximum, 65504 (largest value 65535)"
    assert exceeds(7e4, FP16) == "exceeds FP16's maximum by 2^0.1 (largest value 2^16.1)"


def test_a_simulation_is_not_said_to_train():
    def verlet(x, v):
        return x + 0.1 * v - 0.01 * jax.grad(lambda x: jnp.sum(x**4))(x)

    def train(x, v):
        return verlet(x, v)

    x = jnp.linspace(0.1, 1, 5)
    assert " verlet computes in fp16 " in f" {sw.audit(verlet, 'fp16', trials=0)(x, x).verdict}"
    assert " train trains in fp16 " in f" {sw.audit(train, 'fp16', trials=0)(x, x).verdict}"


def test_nothing_went_wrong_or_nothing_was_tried(overflow):
    def half(x):
        return x / 2

    report = sw.audit(half, "fp16")(jnp.ones(3))
    assert report.verdict == "Yes: half computes in fp16 without error."
    assert "No fix was tried, since no operation needs one." in shown(report)
    none = sw.audit(half, "fp16", trials=0)(jnp.ones(3) / 3)
    assert none.verdict.startswith("Yes: half computes in fp16 with error 0.00024, within one ")
    assert (none.trials, none.untried) == (0, 0)
    finding = dataclasses.replace(overflow.findings[0], fix=None, tried=False)
    untried = dataclasses.replace(overflow, findings=(), unfixed=(finding,), trials=0, untried=1)
    assert "; suspected cause: overflow in reduce_sum at " in untried.verdict
    assert untried.verdict.endswith("; no fix was tried.")
    assert "No fix was tried.\n" in shown(untried)
    finding = dataclasses.replace(finding, tried=True)
    failed = dataclasses.replace(untried, unfixed=(finding,), trials=9)
    assert "; none of the fixes tried helps the outputs (9 trials)" in failed.verdict
    listed = dataclasses.replace(failed, findings=(finding,), unfixed=())
    assert "; none of the fixes tried helps the outputs (9 trials)" in listed.verdict
    same = dataclasses.replace(overflow, findings=(), error_float32=OutputError(1, 0.0))
    assert same.verdict.endswith(
        " which stay in fp16 (float32 for every operation leaves 1 not finite)."
    )


@pytest.mark.slow
def test_an_average_that_starts_at_zero_may_be_off_by_the_signs_of_small_gradients():
    """It is the step itself then, whose errors the weights bear too."""

    def train_step(state, x):
        w, (average,) = state
        slope = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        step = 1e-3 * jnp.sign(slope)
        return w - step, (average + 0.001 * (step - average),)

    w, x = (normal(i, (64, 64)) / 8 for i in range(2))
    audited = sw.audit(train_step, "p=f32,c=bf16,o=f32", trials=0)
    report = audited((w, (jnp.zeros_like(w),)), x)
    assert report.started_at_zero == ("[1][0]",)
    outputs = (("[0]", OutputError(0, 0.001)), ("[1][0]", OutputError(0, 0.2)))
    report = dataclasses.replace(report, error=OutputError(0, 0.05), outputs=outputs)
    assert report.verdict.startswith("train_step trains in")
    assert audited((w, (w,)), x).started_at_zero == ()
    later = dataclasses.replace(report, started_at_zero=())
    assert later.verdict.startswith("No: train_step loses accuracy")


def test_an_error_that_comes_in_with_the_arguments():
    report = sw.audit(jnp.sin, "fp16")(jnp.full(3, 100.1))
    assert "; cause: the arguments, which stay in fp16 (float32 for every " in report.verdict
    assert "No fix was tried, since the error comes in with the arguments." in shown(report)


def test_only_finite_errors_are_green(overflow):
    infinite = dataclasses.replace(overflow, error_fixed=OutputError(2, 0.0))
    for report, green in ((overflow, True), (infinite, False)):
        stream = io.StringIO()
        report.show(Console(file=stream, force_terminal=True, width=400))
        line = next(x for x in stream.getvalue().splitlines() if "outputs: error" in x)
        assert ("\x1b[1;32m" in line) == green
    assert isinstance(overflow.findings[0].fix, Fix)


@pytest.mark.slow
def test_a_gradient_that_is_as_good_as_its_policy_lets_it_be_has_no_cause():
    """Float32 for all matrix products is no finding: it would undo the policy."""

    def loss(w, x, y):
        h = jax.nn.relu(x @ w["a"])
        h = h + jax.nn.gelu(h @ w["b"])
        return jnp.mean((h @ w["c"] - y) ** 2)

    shapes = {"a": (32, 64), "b": (64, 64), "c": (64, 1), "x": (64, 32), "y": (64, 1)}
    w = {
        name: normal(i, shape) / (1 if name in "xy" else 7)
        for i, (name, shape) in enumerate(shapes.items())
    }
    x, y = w.pop("x"), w.pop("y")
    report = sw.audit(jax.grad(loss), "c=bf16")(w, x, y)
    assert 2 * 2.0**-8 < report.error.relative < 16 * 2.0**-7
    assert not report.findings
    assert "% of it is made at test_verdict.py:" in report.verdict


def test_outputs_that_are_rounding_errors_alone_are_no_yes():
    """Of what float32 computes there, no digit is right: nothing says what FP16 does to it."""

    def distance(x):
        a, b = x[:-1], x[1:]
        cosine = jnp.sin(a) * jnp.sin(b) + jnp.cos(a) * jnp.cos(b)
        return jnp.arccos(jnp.clip(cosine, -1, 1))

    x = 0.87 + 1e-5 * normal(0, (32,))
    report = sw.audit(distance, "fp16")(x)
    assert report.noise == ("output",)
    assert report.verdict.startswith("Neither yes nor no: no number that distance returns has")
    assert report.verdict.endswith("reference='float64' has more digits.")
    exact = sw.audit(distance, "fp16", reference="float64")(x)
    assert exact.noise == ()
    assert exact.verdict.startswith("No")


def test_zeros_that_the_reference_run_has_flushed_are_no_yes():
    product = sw.audit(lambda p: jnp.prod(p).reshape(1), "fp16", dtypes="all")
    report = product(jnp.full(64, 1e-4))
    assert report.noise == ("output",)
    assert report.verdict.startswith("Neither yes nor no")
    zeros = sw.audit(lambda p: jax.nn.relu(-p) * 0.3, "fp16")(jnp.full(64, 1e-4))
    assert zeros.verdict.startswith("Yes")


def test_gradients_that_are_wrong_are_a_no_though_weights_hardly_show_it():
    def step(w, x):
        def loss(w):
            h = x @ w
            return jnp.mean(jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2)

        return w.astype(jnp.float32) - 1e-5 * jax.grad(loss)(w).astype(jnp.float32)

    w = 0.1 * normal(0, (16, 32)) + 3
    x = jnp.ones((4, 16)) + jnp.linspace(0, 1, 64).reshape(4, 16)
    report = sw.audit(step, "bf16", dtypes="as_written")(w, x)
    assert report.error.relative < 0.02
    assert report.gradients.relative > 0.1 > report.gradients_fixed.relative
    assert f" loses accuracy in bf16 (error {report.gradients} of the gradients)" in report.verdict
    assert sw.audit(lambda w, x: w - 1e-5 * x, "bf16")(w, w).gradients.relative == 0


def test_an_interruption_leaves_what_was_found(monkeypatch):
    def interrupt(self, fix, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "attempt", interrupt)
    report = sw.audit(lambda x: jnp.sqrt(jnp.sum(x * x)), "fp16")(jnp.full(4096, 16.0))
    assert report.interrupted
    assert report.findings[0].kind == "overflow"
    assert report.verdict.endswith("interrupted after 1 trial.")


def test_the_users_line_stands_before_the_librarys():
    report = sw.audit(lambda x: optax.tree.norm(x), "fp16")(jnp.full(4096, 16.0))
    worst = report.findings[0]
    assert worst.where.startswith("test_verdict.py:")
    assert worst.library.startswith("optax/tree_utils/")
    assert f"at {worst.where} ({worst.library})" in report.verdict
