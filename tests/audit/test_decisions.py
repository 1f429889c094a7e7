"""Both runs make their own decisions: the error is that of emulation against the plain program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly

KEY = jax.random.key(0)
TABLE = normal(KEY, (1024, 8))
W, X = normal(KEY, (8,)), 200 * normal(KEY, (64, 8))
SKIPPING = optax.apply_if_finite(optax.sgd(0.1), 5)


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


def skipped(w, x):
    return SKIPPING.update(gradient(w, x), SKIPPING.init(w))[0]


def kept_by_where(w, x):
    g = gradient(w, x)
    return jnp.where(jnp.isfinite(g).all(), w - 1e-6 * g, w)


def kept_by_cond(w, x):
    g = gradient(w, x)
    return lax.cond(jnp.isfinite(g).all(), lambda: w - 1e-6 * g, lambda: w)


def positions(mask):
    return TABLE[jnp.cumsum(mask).astype(jnp.int32) - 1]


def router(h):
    values, chosen = lax.top_k(h + 100.0, 2)
    return jax.nn.softmax(values)[..., None] * TABLE[chosen]


def codebook(x):
    return TABLE[jnp.floor(x).astype(jnp.int32)]


def stochastic(x):
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + (jax.random.bits(KEY, x.shape) & 0xFFFF)) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def steps_to_one(x):
    def body(carry):
        return carry[0] + x, carry[1] + 1.0

    return lax.while_loop(lambda carry: carry[0] < 1.0, body, (0 * x, 0.0))[1]


def steps_of_each(x):
    return jax.vmap(steps_to_one)(x)


def noisy(x):
    return x * jax.random.normal(KEY, (65536,))


CASES = {
    "apply_if_finite": (skipped, "fp16", (W, X), "is_finite"),
    "where": (kept_by_where, "fp16", (W, X), "is_finite"),
    "cond": (kept_by_cond, "fp16", (W, X), "is_finite"),
    "position ids": (positions, "bf16", (jnp.ones(700),), "convert_element_type"),
    "top_k": (router, "bf16", (normal(KEY, (64, 8)),), "top_k"),
    "floor": (codebook, "bf16", (jnp.linspace(0, 900, 300),), "convert_element_type"),
    "bitcast": (stochastic, "bf16", (W,), "bitcast_convert_type"),
    "while": (steps_to_one, "bf16", (jnp.float32(0.00311),), "lt"),
    "vmapped while": (steps_of_each, "bf16", (jnp.array([0.00311, 0.5, 0.1]),), "lt"),
    "draw": (noisy, "fp16", (jnp.float32(1),), None),
}


def error(f, low, arguments):
    total = []
    wants, gots = jax.tree.leaves(f(*arguments)), jax.tree.leaves(sw.emulate(f, low)(*arguments))
    for want, got in zip(wants, gots, strict=True):
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        total.append((np.linalg.norm(got - want) / np.linalg.norm(want)) ** 2)
    return np.sqrt(np.mean(total))


@pytest.mark.filterwarnings("ignore:.*complex numbers")
@pytest.mark.parametrize("name", nightly(CASES, but=[*CASES][:1]))
def test_the_error_is_that_of_emulation_against_the_plain_program(name):
    f, low, arguments, primitive = CASES[name]
    report = sw.audit(f, low, trials=0, dtypes="all")(*arguments)
    np.testing.assert_allclose(report.error.relative, error(f, low, arguments), rtol=0.02)
    differ = [e.primitive for e in report.equations if e["differ"]]
    assert primitive in differ if primitive else not differ


@pytest.mark.slow
def test_a_loop_that_ends_first_in_the_low_run_differs_at_its_condition():
    def iterations(dtype):
        x, total, count = np.float32(0.00311).astype(dtype), np.zeros((), dtype), 0
        while total < 1:
            total, count = (total + x).astype(dtype), count + 1
        return count

    report = sw.audit(steps_to_one, "bf16", trials=0)(jnp.float32(0.00311))
    (condition,) = [e for e in report.equations if e.primitive == "lt"]
    assert condition["differ"] == iterations(np.float32) - iterations(jnp.bfloat16) > 0


def test_decisions_are_counted_at_their_line():
    (one,) = [e for e in sw.audit(positions, "bf16", trials=0)(jnp.ones(700)).equations
              if e["decided"]]  # fmt: skip
    got = sw.emulate(lambda m: jnp.cumsum(m), "bf16")(jnp.ones(700))
    assert one["decided"] == 700
    assert one["differ"] == np.sum(np.asarray(got) != np.arange(1, 701))


def test_equal_decisions_are_no_event():
    def relu(x):
        return jnp.where(x > 0, x, 0) * jnp.argmax(x).astype(jnp.float32)

    report = sw.audit(relu, "fp16", trials=0)(jnp.array([1.0, -2.0, 3.0]))
    assert sum(e["decided"] for e in report.equations) == 4
    assert not any(e["differ"] for e in report.equations)


def to_one(x):  # stalls in a narrow format: 0.984375 + 0.001 is 0.984375 in BF16
    return lax.while_loop(lambda t: t < 1.0, lambda t: t + x, 0.984375 + 0 * x)


@pytest.mark.parametrize("low", ["bf16", "fp16_every_op"])
@pytest.mark.slow
def test_a_loop_that_ends_in_the_reference_run_alone_is_stopped(low):
    x = jnp.float32(1e-3 if low == "bf16" else 1e-4)
    report = sw.audit(to_one, low, trials=4)(x)
    assert report.error.non_finite == 1
    (finding,) = report.findings
    assert finding.line == to_one.__code__.co_firstlineno + 1
    assert not finding.non_finite_after


def test_an_error_that_reaches_the_outputs_through_a_decision_is_one():
    def routed(x, gate, experts, bias):
        logits = x @ gate + (8.0 + bias[None])
        chosen = jnp.argmax(logits, axis=-1)
        return jnp.einsum("td,tdk->tk", x, experts[chosen])

    draw = np.random.default_rng(0).normal
    shapes = {"x": (256, 32), "gate": (32, 16), "experts": (16, 32, 8), "bias": (16,)}
    arrays = {k: jnp.asarray(draw(size=s) / s[0] ** 0.5, jnp.float32) for k, s in shapes.items()}
    worst = sw.audit(routed, "bf16")(**arrays).findings[0]
    assert (worst.kind, worst.primitive) == ("decision", "add")
    assert worst.evidence.count("indices differ") == 1


def test_a_decision_that_no_output_depends_on_is_no_cause():
    def log_size(x):
        total = (x * 1.001 - x).sum()
        return jnp.log(jnp.abs(total)) + 0 * (total > 1.0).astype(jnp.float32)

    x = jnp.asarray(np.random.default_rng(3).uniform(1, 2, 4096), jnp.float32)
    report = sw.audit(log_size, "bf16")(x)
    assert report.findings
    assert all(f.kind != "decision" for f in report.findings)


@pytest.mark.parametrize(
    ("classes", "answer"), [(4000, "No: predict makes"), *nightly([(4, "Yes: predict")])]
)
def test_integers_and_predicates_that_are_outputs_are_compared(classes, answer):
    """No error of a float tells of them."""

    def predict(x):
        scores = jnp.tanh(x * 0.3 + 1)
        return {"token": jnp.argmax(scores, -1), "scores": scores, "step": jnp.int32(3)}

    x = normal(KEY, (64, classes))
    report = sw.audit(predict, "bf16")(x)
    low = sw.emulate(predict, "bf16")(x)["token"]
    differ = int(jnp.sum(low != predict(x)["token"]))
    found = (("['token']", differ, 64),)
    assert report.decided == (found if differ else ())
    assert report.verdict.startswith(answer)
    assert (f"{differ} of 64 elements of output['token']" in report.verdict) == (differ > 0)


def test_a_count_that_is_one_off_is_no_refusal():
    def count(x):
        return jnp.sum(x > 0.3), x * 2

    x = jnp.concatenate([jnp.full(1, 0.3001), jnp.ones(63)])
    verdict = sw.audit(count, "bf16")(x).verdict
    assert verdict.startswith("Yes: count computes in bf16")
    assert verdict.endswith("output[0], a sum, differs by 1 of 64.")
