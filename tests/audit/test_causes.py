"""Small models as people write them: the line at fault is named, with its kind and an expert's fix.

The lines at fault end in ``# here``.
"""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import arrays
import scalewise as sw
from cases import nightly


def normal(seed, *shape, scale=1.0):
    return scale * arrays.normal(seed, shape)


def marked(f):
    """Returns the numbers of the lines at fault in a function's source."""
    lines, first = inspect.getsourcelines(f)
    return {first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")}


def normalized(x):
    mean = jnp.mean(x, 0, keepdims=True)
    var = jnp.mean(x * x, 0, keepdims=True) - mean * mean  # here
    return (x - mean) * lax.rsqrt(var + 1e-5)


def softmax_head(x, w):
    return jax.nn.softmax(x @ w)  # here


def recursive_least_squares(gain, xs, ys):
    def body(carry, xy):
        w, gain = carry
        x, y = xy
        g = gain @ x / (0.98 + x @ gain @ x)  # here
        return (w + g * (y - w @ x), (gain - jnp.outer(g, gain @ x)) / 0.98), w  # here

    return lax.scan(body, (jnp.zeros(4), gain), (xs, ys))[1]


def hidden_epsilon(w, query, docs):
    def unit(v):
        return v / jnp.sqrt(jnp.sum(v**2, -1, keepdims=True))  # here

    p = jax.nn.softmax(unit(query @ w) @ unit(docs @ w).T / 0.02)
    return -jnp.mean(jnp.log(jnp.diag(p) + 1e-8))  # here


def rising(step, warmup):
    return step * warmup**-1.5  # here


def secant(change, hessian):
    turn = hessian * change
    curvature = change @ turn  # here
    scale = curvature / (turn @ turn)  # here
    return 1.0 / scale - hessian.mean()


def probability(letters, change):
    """A product that is flushed to zero after some factors, and a logarithm of it."""
    first = jnp.ones_like(letters[0])
    product = lax.scan(lambda p, x: (p * (x @ change), None), first, letters)[0]  # here
    return jnp.log(jnp.sum(0.25 * product, -1))  # here


def triplet(embedded):
    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2, -1) + 1e-12)  # here

    def loss(embedded):
        anchor, positive, negative = embedded
        return jnp.mean(distance(anchor, positive) - distance(anchor, negative))

    return jax.grad(loss)(embedded)


def distances(x, y):
    cross = x @ y.T  # here
    own = jnp.sum(x**2, -1, keepdims=True) + jnp.sum(y**2, -1)[None]
    return own - 2.0 * cross


TRIPLES = normal(0, 3, 16, 8, scale=0.4)
TRIPLES = TRIPLES.at[1, 3].set(TRIPLES[0, 3]).at[2, 3].set(TRIPLES[0, 3] + 0.02)
QUERIES = normal(1, 12, 16, scale=24.0)
FOUND = {  # function, arguments, format; the kinds and the fix's first words that an expert accepts
    "normalized": (
        normalized, (normal(1, 64, 8, scale=0.2) + 6,), "bf16", {"cancellation"},
        "the mean of squared deviations",
    ),
    "recursive_least_squares": (  # the error grows through the carry
        recursive_least_squares,
        (1e3 * jnp.eye(4), normal(0, 30, 4), normal(0, 30, 4) @ normal(1, 4)), "bf16",
        {"amplified", "cancellation"}, "float32 for",
    ),
    "hidden_epsilon": (
        hidden_epsilon, (normal(0, 16, 32, scale=1.2), QUERIES, jnp.roll(QUERIES, 3, 0)), "fp16",
        {"overflow"}, "float32 for the integer_pow and reduce_sum at line",
    ),
    "softmax_head": (
        softmax_head, (normal(0, 4, 8), normal(1, 8, 8)), "e4m3fn", {"overflow"}, "-224 in place",
    ),
    "rising": (  # subnormal, not flushed
        rising, (500.0 + 100.0 * jnp.arange(8.0), jnp.float32(16000)), "fp16", {"underflow"},
        "float32 for line",
    ),
    "secant": (
        secant, (normal(0, 32, scale=1e-4), jnp.linspace(0.5, 2.0, 32)), "fp16", {"underflow"},
        "float32 for",
    ),
    "probability": (
        probability,
        (jax.nn.softmax(normal(0, 24, 12, 4)), jax.nn.softmax(normal(1, 4, 4) + 1.5 * jnp.eye(4))),
        "fp16", {"underflow"}, "float32 for",
    ),
    "triplet": (triplet, (TRIPLES,), "fp16", {"underflow"}, "float32 for"),
    "distances": (
        distances, (normal(0, 8, 3) + 6, normal(1, 12, 3) + 6), "c=bf16", {"amplified"},
        "Rule('full', primitive='dot_general'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly(FOUND, but=["normalized"]))
def test_the_line_at_fault_comes_first(name):
    f, arguments, low, kinds, fix = FOUND[name]
    report = sw.audit(f, low, dtypes="all")(*arguments)
    first = report.findings[0]
    assert first.line in marked(f)
    assert first.kind in kinds
    assert str(first.fix).startswith(fix)
    assert ("subnormal" in first.evidence) == (f in (rising, secant))
    better = first.non_finite_after < first.non_finite_before
    assert better or first.error_after < 0.5 * first.error_before


@pytest.mark.slow
def test_two_faults_of_which_one_hides_the_other():
    """Divided by infinity, the scores are equal, so that no probability is 0."""
    f, arguments, *_ = FOUND["hidden_epsilon"]
    report = sw.audit(f, "fp16")(*arguments)
    assert [(x.kind, x.line) for x in report.findings] == list(
        zip(("overflow", "underflow"), sorted(marked(f)), strict=True)
    )
    assert report.findings[1].evidence == "the constant 1e-08 flushed to zero"
    assert "more fix" not in report.verdict  # one fix helps both


def elbo(x, mean, logvar, logits):
    reconstruction = jnp.sum(jnp.logaddexp(0.0, logits) - logits * x, -1)
    divergence = 0.5 * jnp.sum(jnp.exp(logvar) + mean**2 - 1 - logvar, -1)
    return jnp.mean(reconstruction + divergence)


def huber(away):
    size = jnp.abs(away)
    return jnp.mean(
        jnp.where(away < 0, 0.25, 0.75) * jnp.where(size <= 1, 0.5 * away**2, size - 0.5)
    )


def smoothed(logits, wanted):
    return jnp.mean(optax.softmax_cross_entropy(logits, optax.smooth_labels(wanted, 0.1)))


CLEAN = {
    "squares that aren't chosen": (huber, (normal(0, 16, 8, scale=424.0),), "fp16"),
    "a lucky rounding": (
        smoothed, (normal(0, 24, 10, scale=4.0), jax.nn.one_hot(jnp.arange(24) % 10, 10)), "fp16",
    ),
    "a scalar loss": (
        elbo, (jnp.round(jax.random.uniform(jax.random.key(0), (48, 32))), normal(1, 48, 4),
               normal(2, 48, 4, scale=0.3), normal(3, 48, 32)), "bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly(CLEAN, but=[*CLEAN][:2]))
def test_roundings_of_a_program_that_works_are_no_finding(name):
    f, arguments, low = CLEAN[name]
    report = sw.audit(f, low)(*arguments)
    assert not report.findings
    assert "cause: " not in report.verdict.replace("cause: the arguments", "")


def test_the_arguments_are_blamed_only_for_what_they_cause():
    """The error of a float32 program on float32 arguments isn't theirs, however small it is."""

    def f(x):
        for _ in range(4):
            x = jnp.tanh(x) * 1.1
        return x

    report = sw.audit(f, "float32")(normal(0, 64))
    assert report.error_float32.relative == 0 < report.error.relative
    assert "arguments" not in report.verdict


def test_outputs_infinite_in_both_runs_are_counted():
    report = sw.audit(lambda x: jnp.log(x), "fp16")(jnp.array([0.0, 1.0, 2.0]))
    assert report.infinite == 1
    assert "1 number of the outputs infinite in the reference run too" in report.verdict
    assert report.verdict.startswith("Yes")


def test_a_rewrite_is_tried_where_float32_for_every_operation_fails():
    """Nor is float64 enough, whose exponentials of the rounded arguments are 0."""

    def mixture(p, x, y):
        h = jnp.tanh(x @ p["w"])
        s = jnp.log(1 + jnp.exp(h @ p["s"])) + 1e-6
        logs = -0.5 * jnp.log(2 * jnp.pi * s**2) - (y[:, None] - h @ p["m"]) ** 2 / (2 * s**2)
        return -jnp.mean(jnp.log(jnp.sum(jax.nn.softmax(h @ p["l"]) * jnp.exp(logs), -1)))

    keys = jax.random.split(jax.random.key(77), 16)
    shapes = {"w": (4, 16), "l": (16, 3), "m": (16, 3), "s": (16, 3)}
    sizes = 1.0, 0.3, 3.0, 2.0
    some = zip(shapes.items(), sizes, keys, strict=False)
    p = {name: size * jax.random.normal(key, shape) for (name, shape), size, key in some}
    x, y = jax.random.normal(keys[4], (64, 4)), 4 * jax.random.normal(keys[5], (64,))
    report = sw.audit(jax.value_and_grad(mixture), "bf16")(p, x, y)
    assert "Change: logsumexp" in report.verdict
    assert report.wide == "float32"
    assert report.error_float32.non_finite
    assert not report.error_fixed.non_finite


@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_what_fails_in_float32_too_is_compared_with_float64(reference):
    """A product of 60 probabilities is zero in float32, and its logarithm infinite."""

    def log_likelihood(x):
        infinite = jnp.log(lax.fori_loop(0, 60, lambda _, p: p * 0.1, x))
        return infinite.reshape(1, 3).astype(jnp.float32), x * 2

    report = sw.audit(log_likelihood, "fp16", reference=reference)(jnp.ones(3))
    assert report.verdict.startswith("No: log_likelihood breaks in fp16 (3 numbers not finite)")
    assert "Change: sum(log(x)) in place of prod(x)" in report.verdict
    assert report.wide == "float64"
    assert report.error_fixed.relative < 2e-3


@pytest.mark.parametrize(
    "f",
    [
        lambda x, m: (m, jnp.maximum(m, x * 0.3)),
        lambda x, m: jnp.where(x > 9, x / 3, m),
        lambda x, m: (jnp.full(2, -jnp.inf), x * 2),
        lambda x, m: jnp.where(x > 9, x, -jnp.inf),
    ],
)
def test_an_output_that_is_a_mask_is_compared(f):
    for mask in (jnp.full(2, -jnp.inf), jnp.zeros(2)):
        assert sw.audit(f, "fp16")(jnp.ones(2), mask).verdict.startswith("Yes")


def test_arguments_that_round_to_where_a_function_is_infinite_are_the_cause():
    """0.99999 is 1 in FP16, and its logarithm zero."""
    report = sw.audit(lambda u: -jnp.log(-jnp.log(u)), "fp16")(jnp.array([0.3, 0.99999]))
    assert "cause: the arguments, which stay in fp16" in report.verdict


def test_an_overflow_behind_another_is_named_rather_than_a_rounding():
    def length(x):
        return jnp.sqrt(jnp.sum(x * x, -1))

    def cosine(a, b):
        product = jnp.sum(a * b, -1)
        return product / (length(a) * length(b) + 1e-8)

    x = normal(0, 4, 512, scale=30)
    report = sw.audit(cosine, "fp16")(x, x)
    found = {(f.kind, f.primitive) for f in report.findings if f.fix}
    assert found == {("overflow", "reduce_sum"), ("overflow", "mul")}  # of two lengths of 680 too
    assert report.error_fixed.relative < 2.0**-10


def test_a_fix_that_leaves_no_error_hides_nothing():
    """The tanh's derivative is 0 for all of these numbers, in float32 too."""

    def f(w):
        return jax.grad(lambda w: jnp.mean(1e-7 * jnp.tanh(w)))(w)

    report = sw.audit(f, "fp16")(jnp.full(8, 40.0))
    assert report.verdict.startswith("Yes")


def test_a_part_that_is_not_finite_is_explained_before_one_that_is_inexact():
    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        direction = g * 3e4
        return {"w": w - direction / jnp.sqrt(jnp.sum(direction * direction))}, loss

    report = sw.audit(step, "fp16")(normal(0, 64, 8), normal(1, 4, 64))
    assert report.findings[0].kind == "overflow"
    assert "direction * direction" in report.findings[0].source
