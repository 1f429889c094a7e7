"""Programs whose outputs are integers and predicates: the error is the share that differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly

KEYS = jax.random.split(jax.random.key(0), 8)
POINTS, CENTRES = 20 + normal(KEYS[0], (64, 16)), 20 + normal(KEYS[1], (32, 16))
FAR = 1e4 + 0.1 * normal(KEYS[2], (64, 8)), 1e4 + 0.1 * normal(KEYS[3], (32, 8))
STATES, HEAD = 200 * normal(KEYS[4], (32, 256)), 40 * normal(KEYS[5], (256, 100))


def nearest(x, c):
    squares = jnp.sum(x * x, 1)[:, None] + jnp.sum(c * c, 1)[None]  # amplified
    return jnp.argmin(squares - 2 * x @ c.T, 1)


def mean_and_nearest(x, c):
    return {"mean": jnp.mean(x, 0), "at": nearest(x, c)}


def tokens(h, w):
    logits = h @ w  # overflow
    return jnp.argmax(jax.nn.softmax(logits - jnp.max(logits, -1, keepdims=True)), -1)


def steps_to(x, d):
    def body(carry):
        return carry[0] + 1, carry[1] + 30 * d[carry[0]]

    return lax.while_loop(lambda carry: carry[1] < x, body, (0, jnp.float32(0)))[0]


FAULTS = {
    "nearest": (nearest, "fp16", (POINTS, CENTRES)),
    "tokens": (tokens, "fp16", (STATES, HEAD)),
}


def share(f, low, arguments):
    wants, gots = jax.tree.leaves(f(*arguments)), jax.tree.leaves(sw.emulate(f, low)(*arguments))
    shares = [np.mean(np.asarray(x) != np.asarray(y)) for x, y in zip(wants, gots, strict=True)]
    return np.sqrt(np.mean(np.square(shares)))


@pytest.mark.parametrize("name", nightly(FAULTS, but=[*FAULTS][:1]))
def test_the_cause_of_other_decisions_is_found(name):
    f, low, arguments = FAULTS[name]
    report = sw.audit(f, low, dtypes="all")(*arguments)
    assert report.error.relative == pytest.approx(share(f, low, arguments))
    worst = report.findings[0]
    assert worst.source.endswith(f"# {worst.kind}") or worst.kind == "decision"
    assert report.error_fixed.relative < report.error.relative / 10
    assert report.verdict.startswith(f"No: {name} makes other decisions in {low} (")
    assert share(f, low, arguments) > 10 * np.mean(
        np.asarray(report.apply_fixes(f)(*arguments)) != np.asarray(f(*arguments))
    )


@pytest.mark.parametrize("low", ["fp16", *nightly(["p=f32,c=bf16,o=f32", "fp8"])])
def test_decisions_beside_floats_that_are_as_they_should_be(low):
    report = sw.audit(mean_and_nearest, low)(POINTS, CENTRES)
    (before,), after = report.decided, report.decided_fixed
    assert report.verdict.startswith("No: mean_and_nearest makes other decisions")
    finding = report.findings[0]
    assert finding.decided
    assert finding.kind in ("amplified", "cancellation", "decision")
    assert finding.error_before == before[1] / 64 > 0.1
    assert finding.error_after == sum(n for _, n, _ in after) / 64 < 0.05
    assert not report.error.decided
    assert report.error <= sw.auditing.OutputError(0, 2.0**-report.precision)


def test_the_report_shows_shares(tmp_path):
    report = sw.audit(nearest, "fp16")(POINTS, CENTRES)
    assert str(report.error) == f"{100 * report.error.relative:.3g}%"
    for name in ("a.html", "a.json", "a.csv"):
        report.save(tmp_path / name)
    page = (tmp_path / "a.html").read_text()
    assert "of the elements compared differ" in page
    assert "One rounding" not in page
    assert f"{report.error} of the elements compared differ" in str(report)


def test_the_same_decisions():
    def signs(x):
        return x >= 0

    report = sw.audit(signs, "fp16")(jnp.round(normal(KEYS[7], (256,))))
    assert report.verdict == "Yes: signs makes the same decisions in fp16 as in float32."
    assert [path for path, _ in report.outputs] == [""]


def test_few_that_differ_may_do_so_by_chance():
    def above(x, y):
        return x * y > 1

    x = 1 + normal(KEYS[0], (2000,)) ** 2
    y = jnp.where(jnp.arange(2000) == 7, jnp.float32(1.0001) / x, 3.0)
    report = sw.audit(above, "fp16")(x, y)
    assert report.decided == (("", 1, 2000),)
    assert report.trials == 1
    assert not report.findings
    assert "nearly the same decisions in fp16 (1 of 2,000 elements of output differs)" in (
        report.verdict
    )


def test_decisions_of_rounding_errors_are_not_compared():
    report = sw.audit(nearest, "bf16")(*FAR)
    assert report.verdict.startswith("Neither yes nor no: rounding errors of float32 make")
    assert report.noise == ("output",)
    beside = sw.audit(mean_and_nearest, "bf16")(*FAR)
    assert beside.verdict.startswith("Yes: ")
    assert not beside.decided
    assert any("64 of 64 numbers are rounding errors" in line for line in beside.benign)


@pytest.mark.parametrize("x", [3.0, *nightly([2.9])])
def test_a_count_that_differs_is_no_refusal(x):
    d = jnp.asarray(np.random.default_rng(1).uniform(1e-4, 2e-4, 2000), jnp.float32)
    report = sw.audit(steps_to, "fp16")(jnp.float32(x), d)
    assert sw.emulate(steps_to, "fp16")(jnp.float32(x), d) != steps_to(x, d)
    start = "steps_to makes other decisions in fp16 (the only element of output differs)"
    assert report.verdict.startswith(start)
    assert report.findings[0].line == steps_to.__code__.co_firstlineno + 2


def test_integers_that_no_float_decides():
    with pytest.raises(ValueError, match="nothing that floats decide"):
        sw.audit(lambda i: i + 1, "fp16")(jnp.arange(3))


@pytest.mark.slow
def test_a_recipe_whose_results_a_fix_leaves_alone_is_searched_as_what_it_is_now():
    report = sw.audit(nearest, "fp16_every_op", trials=6)(POINTS, CENTRES)
    assert "autoscale under 'fp16' in place of scalify" in [str(x.fix) for x in report.findings]
    assert report.error_fixed < report.error


@pytest.mark.slow
def test_counts_differ_by_what_they_count():
    def histogram(x):
        return jnp.zeros(64, int).at[jnp.searchsorted(jnp.linspace(-3, 3, 63), x)].add(1)

    def inside(x):
        return {"rows": jnp.sum(x * x < 0.5, 1), "all": jax.jit(jnp.sum)(x * x < 0.5)}

    x = normal(KEYS[7], (64, 200))
    for f, path in ((histogram, ""), (inside, "['all']")):
        report = sw.audit(f, "fp16", trials=0)(x)
        assert path in report.sums
        low, own = (jax.tree.leaves(g(x))[0] for g in (sw.emulate(f, "fp16"), f))
        differ, size = int(jnp.abs(low - own).sum()), int(own.sum())
        assert {p: (n, m) for p, n, m in report.decided}[path] == (differ, size)
        assert not report.fails
    assert "a sum, differs by" in report.verdict


def test_a_position_is_no_sum():
    def f(x):
        at = jnp.argmax(jnp.cumsum(x > 0))
        return at, jnp.arange(64)[at] + 1

    assert sw.audit(f, "fp16", trials=0)(normal(KEYS[7], (64,))).sums == ()
