"""Plans: what they round, what they predict, and what they cost."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from scalewise.auditing import kl
from scalewise.autoscaling import Boundaries, Operand
from scalewise.interpret import trace
from scalewise.planning._predict import WORST, prediction
from scalewise.planning._sites import WIDE, sites
from scalewise.planning._space import Lists, Space

FORMATS = ("nvfp4", "mxfp8_e4m3", "bf16")


KERNEL = jnp.ones((8, 4))


def dense(w, x):
    return x @ w


def logits(params, x):
    for w in params["layers"]:
        x = x + jnp.tanh(dense(w, x))
    with jax.named_scope("head"):
        return dense(params["head"], x)


def loss(params, x, y):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], -1)
    return -chosen.mean()


def arguments(layers=3, seed=0):
    scale = [1.0, 0.1, 0.5, 0.3][:layers]
    params = {
        "layers": [s * normal(seed + i, (32, 32)) / 6 for i, s in enumerate(scale)],
        "head": normal(seed + 9, (32, 48)) / 3,
    }
    return params, normal(seed + 10, (64, 32))


def measured(recipe, params, x):
    reference = jax.jit(sw.autoscale(logits, WIDE))(params, x)
    return float(kl(reference, jax.jit(sw.autoscale(logits, recipe))(params, x)).mean())


@pytest.fixture(scope="module")
def found():
    return sw.plan(logits, 6.5, objective="kl")(*arguments())


def test_a_plan_keeps_its_budget_and_is_what_its_recipe_does(found):
    assert found.bits <= 6.5
    bits = sum(line.bits * line.elements for line in found.lines)
    np.testing.assert_allclose(bits / sum(line.elements for line in found.lines), found.bits)
    np.testing.assert_allclose(measured(found.recipe, *arguments()), found.measured, rtol=1e-3)
    assert 0.7 < found.predicted / found.measured < 1.4


def test_calls_on_one_line_are_told_apart_and_named_by_their_weights(found):
    line = logits.__code__.co_firstlineno - 4
    names = [f"test_plan.py:{line + 1}#{i}" for i in (1, 2, 3)]
    assert [x.name for x in found.lines] == [*names, f"head test_plan.py:{line + 1}"]
    assert found.lines[1].weights == ("[0]['layers'][1]",)
    assert found.lines[3].weights == ("[0]['head']",)


def test_no_other_plan_of_the_budget_is_better(found):
    """All 81 plans are emulated, as ``autoscale`` computes them."""
    space = space_of(arguments(), weights=FORMATS)
    choices = np.stack(np.meshgrid(*[range(3)] * 4), -1).reshape(-1, 4)
    runs = [space.run(choice) for choice in choices]
    best = min(r.measured for r in runs if r.cost <= 6.5)
    np.testing.assert_allclose(found.measured, best, rtol=0.02)
    predicted, true = (np.log([getattr(r, k) for r in runs]) for k in ("predicted", "measured"))
    assert np.corrcoef(predicted, true)[0, 1] > 0.99
    assert abs(np.median(predicted - true)) < np.log(1.2)


def space_of(given, *, weights=(None,), activations=(None,), objective="kl", f=logits):
    program = trace(f, Boundaries.of(WIDE), given, {}, name="plan")
    lists = Lists(*([x and Operand(x) for x in some] for some in (weights, activations)))
    return Space(program, lists, objective, 0, "f")


def test_a_loop_is_one_site_with_all_its_weights():
    def stacked(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    given = jnp.ones((5, 8, 8)), jnp.ones((2, 8))
    program = trace(stacked, Boundaries.of(WIDE), given, {}, name="plan")
    (site,), _ = sites(program)
    assert site.elements == 5 * 64
    found = sw.plan(stacked, 8.25)(normal(0, (5, 16, 16)), normal(1, (4, 16)))
    assert [x.formats for x in found.lines] == ["weight mxfp8_e4m3"]


def test_a_recurrent_weight_counts_once():
    def recurrent(w, x):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0]

    program = trace(
        recurrent, Boundaries.of(WIDE), (jnp.ones((8, 8)), jnp.ones((5, 2, 8))), {}, name=""
    )
    (site,), _ = sites(program)
    assert site.elements == 64


def test_a_shared_weight_has_one_format_and_is_stored_once():
    def tied(params, x):
        for _ in range(3):
            x = jnp.tanh(dense(params["w"], x))
        return (params["w"] @ x.T).T @ params["head"]

    params = {"w": normal(0, (32, 32)) / 6, "head": normal(1, (32, 48)) / 3}
    found = sw.plan(tied, 6.5, objective="kl")(params, normal(2, (64, 32)))
    assert [(x.weights, x.elements) for x in found.lines] == [
        (("[0]['w']",), 1024), (("[0]['head']",), 1536),
    ]  # fmt: skip
    assert len(found.lines[0].name.split(", ")) == 4
    np.testing.assert_allclose(found.measured, found.predicted, rtol=0.3)
    groups = found.compressed_tensors()["config_groups"].values()
    assert [g["targets"] for g in groups] == [["re:^w$"], ["re:^head$"]]
    namespace = {}
    exec(found.python(), namespace)
    assert namespace["recipe"] == found.recipe


@pytest.mark.slow
def test_parts_of_a_stacked_weight_have_formats_of_their_own():
    def stacked(params, x):
        for i in range(3):
            x = jnp.tanh(dense(params[i], x))
        return x

    given = normal(0, (3, 32, 32)) * jnp.array([0.5, 0.1, 0.02])[:, None, None], normal(1, (64, 32))
    found = sw.plan(stacked, 6.0, objective="error")(*given)
    assert [x.elements for x in found.lines] == [1024] * 3
    assert len({x.formats for x in found.lines}) > 1
    with pytest.raises(ValueError, match=r"this plan gives parts of .* different formats"):
        found.compressed_tensors()


@pytest.mark.slow
def test_weights_that_a_function_closes_over_are_planned():
    params, x = arguments()
    found = sw.plan(lambda x: logits(params, x), 8.0, objective="kl")(x)
    assert [line.elements for line in found.lines] == [1024, 1024, 1024, 1536]


@pytest.mark.slow
def test_discrete_decisions_are_reported():
    def routed(params, x):
        scores = x @ params["router"]
        best = jnp.argmax(scores, -1)
        return jnp.einsum("bd,bdk->bk", x, params["experts"][best])

    params = {"router": normal(0, (16, 8)) / 4, "experts": normal(1, (8, 16, 16)) / 4}
    found = sw.plan(routed, 4.5, formats=["nvfp4", "bf16"], objective="error")(
        params, normal(2, (256, 16))
    )
    router = found.lines[0]
    assert router.alone > 0
    assert "may change decisions at test_plan.py" in router.note
    assert router.note.count("(") == router.note.count("(argmax)") == 1


def test_the_mask_of_a_gradient_is_a_decision():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jax.nn.relu(dense(w, x)) ** 2))(w)

    program = trace(step, Boundaries.of(WIDE), (KERNEL, jnp.ones((2, 8))), {}, name="plan")
    found, _ = sites(program)
    assert any("(gt)" in where for site in found for where in site.discrete)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kl", "error"])
def test_products_that_vmap_cannot_batch_are_planned(objective):
    def experts(params, x):
        sizes = jnp.array([5, 11])
        h = jnp.tanh(lax.ragged_dot(x, params["up"], sizes))
        return lax.ragged_dot(h, params["down"], sizes)

    params = {"up": normal(0, (2, 16, 32)) / 4, "down": normal(1, (2, 32, 16)) / 6}
    found = sw.plan(experts, 6, objective=objective)(params, normal(2, (16, 16)))
    assert [line.weights for line in found.lines] == [("[0]['up']",), ("[0]['down']",)]
    assert found.measured == pytest.approx(found.predicted, rel=0.3)


def test_squares_of_large_outputs_do_not_overflow():
    small, large = (
        sw.plan(dense, 8.25, formats=["mxfp8_e4m3", "bf16"])(x * KERNEL / 3, normal(0, (2, 8)))
        for x in (1.0, 2.0**100)
    )
    assert 0 < large.measured == pytest.approx(small.measured, rel=1e-3)


def test_a_promise_is_kept_by_the_fewest_bits():
    given = arguments()
    found = sw.plan(logits, error=2e-3, objective="kl", formats=FORMATS)(*given)
    assert found.measured <= 2e-3
    assert 4.5 < found.bits < 16
    cheaper = sw.plan(logits, 0.9 * found.bits, objective="kl", formats=FORMATS)(*given)
    assert cheaper.measured > 2e-3


def test_the_result_is_printed_saved_and_written_as_python(found, tmp_path):
    assert len(repr(found)) < 600
    assert found.verdict in " ".join(str(found).split())
    data = json.loads(found.save(tmp_path / "p.json").read_text())
    assert data["lines"][0]["name"] == found.lines[0].name
    page = found.save(tmp_path / "p.html").read_text()
    assert "Content-Security-Policy" in page
    assert found.save(tmp_path / "p.csv").read_text().startswith("line,weights,formats")
    namespace = {}
    exec(found.python(), namespace)
    assert namespace["recipe"] == found.recipe
    bits = [p.bits for p in found.front]
    assert bits == sorted(bits)


@pytest.mark.slow
def test_lines_that_stay_unrounded_are_in_the_python():
    found = sw.plan(logits, 20.0, objective="kl", formats=["nvfp4", None])(*arguments())
    assert None in dict(found.recipe.keep).values()
    namespace = {}
    exec(found.python(), namespace)
    assert namespace["recipe"] == found.recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sw.plan(dense, 4.0)(KERNEL, jnp.ones((2, 8))),
            "the cheapest plan of dense takes 4.5 bits",
        ),
        (lambda: sw.plan(dense, 5.0)(KERNEL, jnp.full((2, 8), jnp.nan)), "dense returns NaN"),
        (lambda: sw.plan(dense, 5.0)(KERNEL, jnp.ones((0, 8))), "dense returns no numbers"),
        (lambda: sw.plan(logits), "expected one of bits, .* and error"),
        (lambda: sw.plan(logits, 4, error=0.1), "expected one of bits, .* and error"),
        (lambda: sw.plan(logits, 5, formats=[]), "a sequence of at least one"),
        (lambda: sw.plan(logits, 5, formats=["fp9"]), "'fp9'"),
        (lambda: sw.plan(logits, 5, formats=[Operand("nvfp4", rounding="stochastic")]), "draws"),
        (lambda: sw.plan(logits, 5, objective="loss")(*arguments()), "needs one output without"),
        (lambda: sw.plan(jnp.sum, 5, objective="kl")(jnp.ones(3)), "has no product"),
        (lambda: sw.plan(dense, error=1e-9)(KERNEL / 3, jnp.ones((2, 8)) / 3), "widest"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_kernel_of_a_line_is_found_by_keep_in_autoscale():
    params, x = arguments()
    line = f"test_plan.py:{dense.__code__.co_firstlineno + 1}"
    whole = sw.Recipe(sw.Products.short(None, None), residuals=None, keep={line: "e4m3fn"})
    rows = [r for r in sw.explain(logits, whole)(params, x).rows if r.kind == "contraction"]
    assert {r.format for r in rows} == {"e4m3fn x e4m3fn"}
    second = sw.Products((None, "nvfp4"), (None, None), (None, None))
    one = sw.Recipe(sw.Products.short(None, None), residuals=None, keep={f"{line}#2": second})
    rows = [r for r in sw.explain(logits, one)(params, x).rows if r.kind == "contraction"]
    assert [r.format for r in rows] == ["fp32 x fp32", "fp32 x nvfp4", "fp32 x fp32", "fp32 x fp32"]
    with pytest.raises(ValueError, match="neither a primitive, nor a scope, nor a line"):
        sw.autoscale(logits, sw.Recipe(keep={"test_plan.py:1": "e4m3fn"}))(params, x)


@pytest.mark.slow
def test_the_weight_is_the_first_argument_on_either_side_of_a_product():
    def left(w, x):
        return jnp.tanh(w @ x).T

    def right(w, x):
        return jnp.tanh(x @ w)

    w, x = normal(0, (48, 32)) / 6, normal(1, (32, 24))
    on_the_left = sw.plan(left, 4.5, formats=["nvfp4", "bf16"], objective="kl")(w, x)
    on_the_right = sw.plan(right, 4.5, formats=["nvfp4", "bf16"], objective="kl")(w.T, x.T)
    for found in (on_the_left, on_the_right):
        assert found.lines[0].weights == ("[0]",)
        assert found.lines[0].elements == w.size
    np.testing.assert_allclose(on_the_left.measured, on_the_right.measured, rtol=1e-3)
    rows = sw.explain(left, on_the_left.recipe)(w, x).rows
    assert rows[0].format == "nvfp4 x fp32"


def test_a_while_loop_is_planned():
    def root(w, x):
        def body(s):
            return s[0] + 1, 0.5 * (s[1] + jnp.tanh(s[1] @ w))

        return lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]

    found = sw.plan(root, error=5e-2, objective="error")(
        normal(0, (16, 16)) / 4, normal(1, (8, 16))
    )
    assert 0 < found.measured <= 5e-2
    assert found.bits < 16


@pytest.mark.slow
def test_a_training_step_with_large_gradients_is_planned():
    """Gradients of 4,096 numbers that are added up are materialized."""

    def step(params, x):
        return jax.grad(lambda p: jnp.sum(logits(p, x) ** 2))(params)

    params, _ = arguments()
    found = sw.plan(step, error=5e-2)(params, normal(10, (256, 32)))
    assert found.measured <= 5e-2


def test_roundings_that_undo_each_other_are_predicted_by_pairs():
    random = np.random.default_rng(0)
    plans = random.integers(2, size=(400, 3)).astype(bool)
    measured = [WORST if c else a + b - 1.5 * a * b for a, b, c in plans.astype(float)]
    found = prediction(np.array([1.0, 1.0, WORST]), plans, np.array(measured))
    both = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    np.testing.assert_allclose(found(both), [1, 1, 0.5], atol=0.1)
    np.testing.assert_allclose(found.among_others([0], [[], [0]]), 0.25, atol=0.1)
    assert found.effects[2] == WORST  # what isn't finite alone says nothing of the others


def test_what_two_roundings_do_together_is_in_the_mean_of_a_site():
    """Both are of one site: no plan of the other sites decides whether they meet."""
    alone, plans = np.array([1.0, 2.0]), np.array([[1, 0], [0, 1], [1, 1]] * 20, bool)
    found = prediction(alone, plans, plans @ alone + 0.5 * plans.all(1))
    assert found.among_others([0, 1], [[0], [1], [0, 1]]) == pytest.approx(3.5, rel=0.02)
