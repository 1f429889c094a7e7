"""Modules in program order up to the first infinity, latent overflows, and unambiguous names."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import scalewise as sw
from scalewise.auditing._file import name_of
from scalewise.autocasting import Policy, Rule


class Attention:
    def __call__(self, x):
        return jnp.exp(x) * 1e-3


def network(x):
    attention = Attention()
    with jax.named_scope("embed"):
        x = x * 2.0
    x = attention(x)
    x = attention(x)
    with jax.named_scope("head"):
        return jnp.sum(x * 1e-4)


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip() == text)


@pytest.fixture(scope="module")
def report():
    return sw.audit(network, "fp16", trials=2)(jnp.array([0.01, 4.0, 4.8]))


def shown(report):
    stream = io.StringIO()
    report.show(Console(file=stream, width=200), everything=True)
    return stream.getvalue()


def test_the_trace_ends_at_the_first_overflow(report):
    call = f"called at test_trace.py:{line_of('x = attention(x)')}"
    embed, first, second = report.trace()
    assert (embed.scope, embed.operations, embed.primitive) == ("embed", 1, "mul")
    assert embed.largest == pytest.approx(9.6, rel=1e-3)
    assert embed.smallest == pytest.approx(0.02, rel=1e-3)
    assert first.scope == f"Attention.__call__ ({call})"
    assert first.largest == pytest.approx(14764.8, rel=1e-2)
    assert (first.operations, first.overflowed) == (2, 0)
    assert second.scope != first.scope
    assert (second.primitive, second.operations, second.overflowed) == ("exp", 1, 1)
    assert second.place == f"test_trace.py:{line_of('return jnp.exp(x) * 1e-3')}"
    text = shown(report)
    assert "The last modules before the first number that overflows or is NaN" in text
    assert text.index("embed") < text.index("Attention.__call__ (called at")
    assert report.as_dict()["trace"][0]["scope"] == "embed"


def test_without_an_overflow_the_trace_has_all_modules():
    report = sw.audit(network, "bf16", trials=0)(jnp.zeros(3))
    assert [row.scope for row in report.trace()][::3] == ["embed", "head"]
    assert "The last modules" not in shown(report)


def test_findings_name_the_class_and_the_call_sites(report):
    calls = [f"test_trace.py:{line_of('x = attention(x)') + i}" for i in (0, 1)]
    (worst, *_) = [x for x in report.findings if x.primitive == "exp"]
    head = f"{worst.where} in Attention.__call__ called at {', '.join(calls)}  exp, forward"
    assert head in shown(report)


def test_a_rule_names_the_class_of_a_method():
    policy = Policy(compute="f16", rules=(Rule("low", primitive="exp"),))
    (finding,) = sw.audit(network, policy)(jnp.array([0.01, 4.0, 5.0])).findings
    rule = Rule("full", primitive="exp", function="Attention.__call__")
    assert finding.fix.apply(policy).rules == (rule, *policy.rules)


def test_names_of_audited_functions():
    def inner(x):
        return x

    assert [name_of(f) for f in (inner, Attention(), Attention().__call__, jax.jit(inner))] == [
        "inner", "Attention.__call__", "Attention.__call__", "inner",
    ]  # fmt: skip
    bare = lambda x: x  # noqa: E731
    assert (
        name_of(bare) == f"<lambda> at test_trace.py:{line_of('bare = lambda x: x  # noqa: E731')}"
    )


def test_operations_within_a_factor_of_4_of_overflowing():
    def f(x):
        return (x * 64.0) / (x * 1024.0 + x * 2048.0)

    report = sw.audit(f, "fp16", trials=0)(jnp.array([8.0, 9.0]))
    place = f"test_trace.py:{line_of('return (x * 64.0) / (x * 1024.0 + x * 2048.0)')}"
    assert report.latent == (
        f"{place}: add, largest value 2^14.8, within a factor of 4 of FP16's maximum",
        f"{place}: mul, largest value 2^14.2, within a factor of 4 of FP16's maximum",
    )
    assert f"latent  {report.latent[0]}" in shown(report)
    assert sw.audit(f, "bf16", trials=0)(jnp.array([8.0, 9.0])).latent == ()
    inverse = sw.audit(lambda x: 1 / (1 + jnp.exp(x * x)), "p=f32,c=f16,o=f32", trials=0)
    assert inverse(jnp.array([3.0, 20.0])).latent == ()  # exp(400) is infinite in float32 too


@pytest.mark.slow
def test_latent_operations_of_policies_and_recipes():
    def product(x):
        return (x @ x.T) * 1e4

    x = jnp.full((1, 16), 40.0)
    place = f"test_trace.py:{line_of('return (x @ x.T) * 1e4')}"
    report = sw.audit(product, "c=f16", trials=0)(x)
    assert report.latent == (  # the product runs in float32, and its largest value is 2.56e8
        f"{place}: dot_general, largest value 2^14.6, within a factor of 4 of FP16's maximum",
    )
    assert [e["amax"] for e in report.equations] == [25600.0, 2.56e8]
    fixed = sw.Recipe(sw.Products.short("e4m3fn", "e5m2", scaling=sw.scaled.Fixed()))
    assert sw.audit(product, fixed, trials=0)(x * 4).latent == (
        f"{place}: dot_general, 32 of 32 numbers of its operands would be cut off with values 4 "
        "times as large",
    )
    assert sw.audit(product, sw.recipes.fp8, trials=0)(x * 4).latent == ()  # scaled by their amax


def test_constants_of_a_library_name_the_users_lines():
    def step(w, state):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optax.adam(1e-3).update(w, state)
        return w + updates, state

    w = jnp.ones(3)
    (epsilon,) = sw.literals(step, "fp16")(w, optax.adam(1e-3).init(w))
    call = line_of("updates, state = optax.adam(1e-3).update(w, state)")
    assert epsilon.callers == (f"{__file__}:{call}",)
    assert epsilon.called == f"called at test_trace.py:{call}"
    report = sw.audit(step, "fp16", trials=0)(w, optax.adam(1e-3).init(w))
    assert f"1e-08 flushed to zero (0) in add, {epsilon.called}" in shown(report)
