"""Fixes that are tried: norms, other formats, exceptions to policies and recipes; their order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.style import Style

import scalewise as sw
from arrays import normal
from scalewise import ops
from scalewise.auditing._audit import low_interpretation
from scalewise.auditing._run._causes import Causes
from scalewise.auditing._search import _trial
from scalewise.auditing._search._apply import AuditedArithmetic, FormatChoice
from scalewise.auditing._search._fixes import FIXES, Context, described
from scalewise.auditing._search._groups import Group
from scalewise.auditing._search._kinds import FINDING_KINDS
from scalewise.auditing._search._rewrites import Rewrite
from scalewise.auditing._tape._loss_scale import LossScaled
from scalewise.auditing._thresholds import HALF_UNITS, unusable
from scalewise.autocasting import Policy, Rule
from scalewise.formats import E4M3FN, FP16, FP32
from scalewise.rounding import format_params


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def error(outs, want):
    """The relative error of outputs, root mean square over them, as a report has it."""
    outs, want = ([np.float64(x) for x in jax.tree.leaves(tree)] for tree in (outs, want))
    shares = [np.sum((a - b) ** 2) / np.sum(b**2) for a, b in zip(outs, want, strict=True)]
    return np.sqrt(np.mean(shares))


def check_applied(report, f, *args, rel=1e-3):
    """The fixes applied to ``f``, the first and all, have the errors that the audit measured."""
    first = min((x for x in report.findings if x.fix), key=lambda x: x.order)
    with jax.enable_x64(True):
        want = f(*jax.tree.map(lambda x: np.asarray(x).astype(np.float64), args))
    got = error(jax.jit(first.fix.apply(f))(*args), want)
    assert got == pytest.approx(first.error_after, rel=rel, abs=1e-6)
    if max(x.order for x in report.findings) > 1:
        got = error(report.apply_fixes(f)(*args), want)
        assert got == pytest.approx(float(report.error_fixed), rel=rel, abs=1e-6)
    return first.fix.kind and first.fix.kind.name


@pytest.mark.parametrize("size", [16.0, 1e-5])
def test_a_written_out_norm_is_replaced_by_l2_norm(size):
    x = jnp.full(4096, size)
    report = sw.audit(norm, "fp16", trials=3)(x)
    worst = report.findings[0]
    assert str(worst.fix) == "ops.l2_norm in place of the root of a sum of squares"
    really = ops.l2_norm(x.astype(jnp.float16))  # the fix, applied by hand
    error = abs(float(really) / float(norm(x)) - 1)
    assert worst.error_after == pytest.approx(error, abs=1e-6)
    assert check_applied(report, norm, x) == "norm"


def test_a_norm_over_several_arrays_with_an_epsilon():
    def f(a, b):
        return jnp.sqrt(jnp.sum(jnp.square(a)) + jnp.sum(b**2) + 1e-3)

    report = sw.audit(f, "fp16", trials=2)(jnp.full(64, 300.0), jnp.full((8, 8), 2.0))
    assert str(report.findings[0].fix).startswith("ops.l2_norm")
    assert report.findings[0].error_after < 1e-3


@pytest.mark.slow
def test_a_root_of_a_plain_sum_is_no_norm():
    def f(x):
        return jnp.sqrt(jnp.sum(x))

    report = sw.audit(f, "fp16", trials=4)(jnp.full(64, 6e4))
    assert str(report.findings[0].fix).startswith("float32 for the reduce_sum at line")
    check_applied(report, f, jnp.full(64, 6e4))


def test_two_faults_that_one_fix_removes_are_two_findings():
    def f(w, average, step):
        moved = w + 1e-4 * step  # BF16 loses the step
        average = 0.9999 * average + 0.0001 * w  # 0.9999 is 1
        return moved - w, average - 0.5 * w

    w = 1.0 + jnp.arange(16.0) / 16
    report = sw.audit(f, "bf16", trials=20)(w, 0.5 * w, normal(0, (16,)))
    first, second = report.findings[:2]
    assert {x.line - f.__code__.co_firstlineno for x in (first, second)} == {1, 2}
    assert first.order == second.order == 1
    assert first.error_after < 0.1 < first.error_before
    assert f"together with float32 for line {first.line}" in str(second.fix)
    # 0.9999 is rounded to float32 where the program is traced, and amplified 5,000 times
    check_applied(report, f, w, 0.5 * w, normal(0, (16,)), rel=1e-2)


def test_lines_of_a_library_are_fixed_as_the_call_and_fixes_within_others_as_one():
    optimizer = optax.adamw(1e-3)

    def step(state, x):
        weights, moments = state
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        updates, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, updates), moments

    weights, x = normal(0, (16, 8)) / 4, normal(1, (32, 16)) / 100
    with jax.numpy_dtype_promotion("standard"):
        report = sw.audit(step, "fp16")((weights, optimizer.init(weights)), x)
    fixes = {str(finding.fix) for finding in report.findings}
    call = f"test_fixes.py:{step.__code__.co_firstlineno + 3}"
    assert any(text.startswith(f"float32 for the call at {call}") for text in fixes)
    assert not any("_tree_math.py" in text for text in fixes)
    assert float(report.error_fixed) < HALF_UNITS * 2.0**-11  # fewer lines are widened from there


def test_a_subnormal_constant_is_found_if_its_error_is_that_of_the_outputs():
    def f(w):
        return jax.grad(lambda w: jnp.sum(jnp.square(w)))(w) * 2e-7  # 3 * 2^-24

    x = jnp.exp2(jnp.arange(14.0))
    worst = sw.audit(f, "fp16", trials=4)(x).findings[0]
    assert (worst.evidence, str(worst.fix)) == (
        "the constant 2e-07 is off by 10.6%",
        "2e-07 kept in float32",
    )
    assert worst.error_after < 0.5 * worst.error_before


def test_the_operations_of_a_fix_are_named_if_their_lines_have_others():
    def f(frequency, sample):
        phase = frequency * (sample.astype(jnp.float32) / 1024.0)
        return phase - jnp.floor(phase)

    arguments = jnp.full(64, 110.0), 2048 + jnp.arange(64)
    report = sw.audit(f, "bf16", trials=8, dtypes="all")(*arguments)
    line = f.__code__.co_firstlineno
    assert report.findings[0].line == line + 1  # the product's error is what the difference shows
    assert str(report.findings[0].fix).startswith(f"float32 for line {line + 1}")
    few = [e for e in report.equations if e.primitive in ("mul", "sub")]
    assert described(few, few) == f"lines {line + 1} and {line + 2}"
    assert described(few, report.equations) == f"the mul and sub at lines {line + 1} and {line + 2}"


@pytest.mark.slow
def test_findings_are_sorted_by_the_effect_of_their_fix():
    def f(x):
        small = (x + 1024.0) - 1024.0  # loses a little
        large = jnp.exp(x) * 1e-6  # overflows
        return small, large

    report = sw.audit(f, "fp16", trials=16)(jnp.array([12.3, 11.7]))
    check_applied(report, f, jnp.array([12.3, 11.7]))
    fixed = [k for k in report.findings if k.fix]
    made_finite = [k.non_finite_before - k.non_finite_after for k in fixed]
    assert made_finite == sorted(made_finite, reverse=True)
    orders = {k.order for k in fixed}  # findings of one fix share its order
    assert orders == set(range(1, len(orders) + 1))
    tried = [k.tried for k in report.findings]
    assert tried == sorted(tried, reverse=True)


def test_an_operation_that_amplifies_is_kept_in_float32():
    """Though that leaves nothing of the policy: its error of 11 % is no gradient's."""
    places = jnp.asarray(np.random.default_rng(0).uniform(size=(32, 3)), "float32")
    frequencies = jnp.asarray(np.random.default_rng(1).integers(-90, 90, (3, 16)), "float32")

    def features(x, w):
        phases = x @ w
        return jnp.sin(phases)

    report = sw.audit(features, "c=bf16")(places, frequencies)
    worst = report.findings[0]
    assert (worst.kind, worst.primitive) == ("amplified", "dot_general")
    assert report.error_fixed.relative < 1e-4


def test_an_exception_to_a_policy():
    def layer(x, w):
        return jnp.sum((x @ w) * 1e-3)

    x, w = jnp.full((4, 64), 40.0), jnp.full((64, 4), 40.0)
    report = sw.audit(layer, "p=f32,c=f16,o=f32", trials=1)(x, w)
    worst = report.findings[0]
    assert worst.primitive == "dot_general"
    assert str(worst.fix) == "Rule('full', primitive='dot_general', function='layer')"
    assert worst.error_before == float("inf") > 1e-3 > worst.error_after
    rule = Rule("full", primitive="dot_general", function="layer")
    kept = sw.Policy(params="f32", compute="f16", output="f32", rules=(rule,))
    assert worst.fix.apply("p=f32,c=f16,o=f32") == kept
    assert check_applied(report, layer, x, w) == "rule"
    assert float(sw.autocast(layer, kept)(x, w)) == pytest.approx(float(layer(x, w)), rel=1e-3)


@pytest.fixture
def any_error(monkeypatch):
    """Lets a search look for fixes of errors as small as those of some roundings."""
    monkeypatch.setattr(_trial.Trial, "_needs_a_cause", lambda _, stage: stage.error > 1e-6)


@pytest.mark.slow
def test_an_exception_to_a_recipe(any_error):
    recipe = sw.Recipe(sw.Products.short(E4M3FN, E4M3FN))

    def f(x, w):
        with jax.named_scope("head"):
            return x @ w

    x = normal(0, (8, 16))
    report = sw.audit(f, recipe, trials=1)(x, x.T)
    worst = report.findings[0]
    assert str(worst.fix) == "keep={'dot_general': FP32} in the recipe"
    kept = dataclasses.replace(recipe, keep={"dot_general": FP32})
    assert worst.fix.apply(recipe) == kept == report.apply_fixes(recipe)
    assert check_applied(report, f, x, x.T) == "keep"
    want = x @ x.T
    error = jnp.linalg.norm(sw.autoscale(f, kept)(x, x.T) - want) / jnp.linalg.norm(want)
    assert worst.error_after == pytest.approx(float(error), abs=1e-6)
    assert worst.error_before > 100 * worst.error_after
    assert sw.audit(f, kept, trials=0)(x, x.T).error.relative < 1e-6  # the audit applies `keep`


@pytest.mark.slow
def test_an_exception_to_an_every_op_recipe(any_error):
    def f(x):
        with jax.named_scope("norms"):
            inner = jnp.sum(x * x, axis=1) * jnp.array([1.0, 2.0**30])
        return inner, jnp.sum(x * x, axis=1) * jnp.array([1.0, 2.0**30])  # outside of it

    def within(x):
        return f(x)[0]

    x = normal(0, (2, 16)) * jnp.array([[1.0], [2.0**-15]])
    report = sw.audit(within, sw.recipes.scalify, trials=3)(x)
    worst = report.findings[0]
    assert report.low == "autoscale scalify"
    assert (worst.kind, str(worst.fix)) == ("underflow", "keep={'norms': FP32} in the recipe")
    kept = dataclasses.replace(sw.recipes.scalify, keep={"norms": FP32})
    assert worst.fix.apply("scalify") == kept
    low, want = sw.autoscale(f, kept)(x), f(x)
    errors = [jnp.linalg.norm(y - s) / jnp.linalg.norm(s) for y, s in zip(low, want, strict=True)]
    assert worst.error_after == pytest.approx(float(errors[0]), abs=1e-6)
    assert worst.error_after < 1e-5 < 1e-4 < worst.error_before  # float32's error, FP16's
    outputs = sw.audit(f, kept, trials=0)(x).outputs  # one in the scope, one not
    assert [e.relative for _, e in outputs] == pytest.approx([float(e) for e in errors], abs=1e-6)
    assert outputs[1][1].relative > 1e-4


AUDITED = {
    "format": None,
    "constant": None,
    "lost_updates": None,
    "policy": Policy(compute="f16"),
    "recipe": sw.Recipe(sw.Products.short(E4M3FN, E4M3FN, sw.Fixed())),
    "every_op": sw.Scalify(arithmetic="narrow"),
    "rounding_of_scales": sw.recipes.mxfp8_floor,
    "matrix_units": dataclasses.replace(sw.recipes.fp8, emulate="h100"),
}


@pytest.fixture(scope="module")
def context():
    f = jax.grad(lambda x: jnp.sqrt(jnp.sum(x * x)) * 4e-5)
    equations = sw.audit(f, "fp16", trials=0)(jnp.full(8, 30.1)).equations
    backward = next(e for e in equations if e.direction == "backward")
    indices = tuple(e.index for e in equations)
    literal = sw.literals(lambda x: x * 1e-8, "fp16")(jnp.ones(1))[0]
    return Context(
        group=Group((backward,)), kind=FINDING_KINDS["overflow"], fmt=FP16, now=None, low=None,
        norms=[indices], equations=equations, gradients=[backward], literal=literal,
        causes=Causes({backward.index: [indices]}, equations), masks=[-65504.0],
        rewrites=[Rewrite("another function", indices, backward.index)],
    )  # fmt: skip


@pytest.mark.parametrize(("name", "run"), [(k.name, r) for k in FIXES.values() for r in k.runs])
def test_a_fix_can_be_applied(context, name, run):
    """Each kind proposes at least one, and each can be applied to what was audited."""
    target = AUDITED.get(name, AUDITED.get(run))
    low = low_interpretation("fp16" if target is None else target)
    table = FormatChoice(np.tile(format_params("fp16"), (len(context.equations), 1)))
    origin = AuditedArithmetic(low, table if target is None else None)
    now = low if target is not None else table
    context = dataclasses.replace(context, low=low, now=now)
    if name == "logarithm":
        product = dataclasses.replace(context.group.first, primitive="reduce_prod")
        double = dataclasses.replace(table, double=True)  # float32 doesn't hold the product
        context = dataclasses.replace(context, group=Group((product,)), now=double)
    kinds = [dataclasses.replace(context, kind=kind) for kind in FINDING_KINDS.values()]
    fixes = [fix for each in kinds for fix in FIXES[name].propose(each)]
    assert fixes
    for fix in fixes:
        fix = dataclasses.replace(fix, origin=origin)
        if target is None or isinstance(fix.change(now), LossScaled):
            assert callable(fix.apply(norm))
            with pytest.raises(TypeError, match=r"fix.apply: .*function"):
                fix.apply(target or "fp16")
        else:
            assert fix.apply(target) != target
            other = sw.Recipe if name == "results" else type(target)
            assert type(fix.apply(target)) is other


@pytest.mark.parametrize("kind", FINDING_KINDS.values(), ids=list(FINDING_KINDS))
def test_a_kind_of_finding_is_told_in_words(context, kind):
    assert kind.evidence(context.group, FP16)
    last = list(FINDING_KINDS)[-1]
    assert kind.found(Group(()), False, FP16) == (kind.name == last)  # of what has no other
    assert Style.parse(kind.style)


def test_a_single_number_is_told_in_the_singular():
    found = sw.audit(lambda x: jnp.exp(x), "fp16", trials=0)(jnp.array([12.0])).unfixed[0]
    assert found.evidence.endswith("in the only number")
    found = sw.audit(lambda x: 1 / (x * x), "fp16", trials=0)(jnp.array([1e-5, 1.0])).unfixed[0]
    assert found.evidence.startswith("1 of 2 numbers flushed to zero")


def test_roundings_of_many_operations_cost_few_trials():
    def layers(x, w):
        for i in range(12):
            x = jnp.tanh(x @ w[i]) + x - 0.5 * jnp.mean(x)
        return x

    keys = np.random.default_rng(0)
    x, w = keys.standard_normal((4, 8)), keys.standard_normal((12, 8, 8)) * 0.3
    report = sw.audit(layers, "fp16")(jnp.asarray(x, "float32"), jnp.asarray(w, "float32"))
    assert not report.findings
    assert report.trials <= 1
    assert f"it is made at test_fixes.py:{layers.__code__.co_firstlineno + 2}" in report.verdict


def test_a_fix_for_another_program_is_refused():
    x = jnp.full(4096, 16.0)
    fix = sw.audit(norm, "fp16", trials=2)(x).findings[0].fix
    with pytest.raises(ValueError, match="expected the audited function"):
        fix.apply(lambda x: jnp.log(jnp.max(jnp.exp(x))))(x)
    with pytest.raises(ValueError, match="expected the audited function"):
        fix.apply(lambda x: x)(x)
    with pytest.raises(ValueError, match=r"to differentiate it, audit jax.grad\(f\)"):
        jax.grad(fix.apply(norm))(x)


def test_four_lines_whose_results_vanish_one_after_another_are_widened_together():
    """Nothing becomes finite before all of them are; the parts of a line count once."""

    def factored(g):
        squares = g**2 + 1e-30
        rows = jnp.mean(squares, axis=1, keepdims=True)
        columns = jnp.mean(squares, axis=0, keepdims=True)
        second = rows * columns / jnp.mean(rows)
        return g / jnp.sqrt(second)

    report = sw.audit(factored, "fp16")(1e-5 * normal(0, (8, 12)))
    assert report.error.non_finite == 96
    assert report.error_fixed.relative < 0.01
    assert {x.line for x in report.findings} >= {report.findings[0].line + i for i in range(4)}
    assert "float32 for lines" in report.verdict


def test_a_healthy_step_whose_activations_are_decided_otherwise_has_no_finding():
    """A ReLU near zero makes an error of many roundings in gradients."""

    def step(w, x, y):
        def loss(w):
            return jnp.mean((jax.nn.relu(jax.nn.relu(x @ w[0]) @ w[1]) @ w[2] - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(16, 64), (64, 64), (64, 4), (4, 16), (4, 4)]
    *w, x, y = (normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True))
    w[0] = w[0].at[:, 0].set(0.0).at[:2, 0].set(jnp.array([1.0, -1.0]))
    x = x.at[0, :2].set(jnp.array([1.0002, 1.0001]))  # which FP16 rounds to the same number
    report = sw.audit(step, "p=f32,c=f16,o=f32")(w, x, y)
    assert 10 * 2.0**-11 < report.gradients.relative < unusable(11)
    assert report.findings == ()


def test_a_fix_of_a_program_that_converts_a_python_integer_is_applied():
    """As jnp.var does; emulation takes it for a constant, the audit for an operation."""

    def normal(x):
        return x / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-12)

    x = jnp.zeros((4, 8))
    report = sw.audit(normal, "fp16")(x)
    assert report.error.non_finite == 32
    assert jnp.isfinite(report.apply_fixes(normal)(x)).all()


def test_what_an_overflow_hid_is_a_fault_with_a_fix_of_its_own():
    """The derivative of the root overflows; behind it gradients are flushed."""

    def loss(params, y):
        x, w = params
        z = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) @ w
        return 1e-6 * jnp.mean((z - y) ** 2)

    args = (0.01 * normal(0, (8, 16)), normal(1, (16,))), normal(2, (8,))
    report = sw.audit(jax.grad(loss), "fp16", dtypes="all")(*args)
    first, second, *_ = report.findings
    assert (first.kind, first.fix.word, first.non_finite_after) == ("overflow", "float32", 0)
    assert (second.kind, second.direction) == ("underflow", "backward")
    assert second.fix.power > 0
    assert report.error_fixed.relative < 1e-3


def test_a_fix_holds_numbers_beyond_float32():
    """``exp`` of 340 is 2^491, which the logarithm of the sum takes back."""

    def f(x):
        return jnp.log(jnp.sum(jnp.exp(x)))

    x = jnp.linspace(300.0, 340.0, 8)
    report = sw.audit(f, "fp16")(x)
    assert report.findings[0].fix.better == ("logsumexp(x)",)
    assert float(report.apply_fixes(f)(x)) == pytest.approx(340.0, rel=1e-3)
