"""Changes of carried state that the rounding loses, and outputs whose true value is 0."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.auditing._run._changes import carried
from scalewise.emulating import Emulation
from scalewise.formats import BF16
from scalewise.interpret import trace

W = normal(0, (16, 4))
X = normal(1, (32, 16))


def average(decay):
    def f(state, x):
        return {"n": state["n"] + 1, "mean": decay * state["mean"] + (1 - decay) * x}

    return f


STATE = {"n": jnp.float32(3), "mean": W + 3}


@pytest.mark.parametrize(
    ("decay", "lost"), [(0.9999, True), *nightly([(0.999, True), (0.5, False)])]
)
def test_an_average_that_forgets_nothing(decay, lost):
    """In BF16 a decay of 0.9999 is 1: after 200 steps the average is still what it was."""
    report = sw.audit(average(decay), "bf16")(STATE, W)
    assert report.error.relative < 2.0**-8  # one step hardly shows it
    assert bool(report.findings) == bool(report.lost_changes) == lost
    assert report.verdict.startswith("No: f loses changes of its state") == lost
    if not lost:
        return
    assert report.findings[0].line == average.__code__.co_firstlineno + 2
    low, fixed, plain = (
        sw.emulate(average(decay), "bf16"),
        report.apply_fixes(average(decay)),
        average(decay),
    )
    before, (a, b, c) = np.asarray(W + 3), (f(STATE, W) for f in (low, fixed, plain))
    rounded = np.asarray(sw.round_to(W + 3, "bf16"))
    want = np.linalg.norm(c["mean"] - before)
    assert np.linalg.norm(a["mean"] - rounded) < 0.5 * want
    assert np.linalg.norm(b["mean"] - rounded) == pytest.approx(want, rel=0.2)


class Average(nnx.Module):
    def __init__(self):
        self.mean = nnx.Variable(W + 3)


def in_an_object(average, x):
    average.mean[...] = 0.999 * average.mean[...] + (1 - 0.999) * x


def in_a_mutable_array(mean, x):
    mean[...] = 0.999 * mean[...] + (1 - 0.999) * x


@pytest.mark.parametrize("f", [in_an_object, in_a_mutable_array])
def test_an_average_that_is_updated_in_place(f):
    state = Average() if f is in_an_object else jax.new_ref(W + 3)
    report = sw.audit(f, "bf16", trials=4)(state, W)
    assert report.findings[0].evidence.startswith("the constant 0.999 becomes 1")
    assert report.verdict.startswith("No: in_a")
    assert "outputargument" not in " ".join(report.lost_changes)


def test_an_average_of_several_steps():
    f = average(0.999)
    report = sw.audit(lambda state: f(state, W), "bf16", trials=4, steps=3)(STATE)
    assert report.findings[0].evidence.startswith("the constant 0.999 becomes 1")


def added(state):
    return {"a": state["a"] + 1e-4}


def added_in_a_loop(state):
    return jax.lax.fori_loop(0, 20, lambda _, state: added(state), state)


@pytest.mark.parametrize(("f", "steps"), [(added, 3), (added_in_a_loop, 1)])
def test_what_each_step_loses_adds_up(f, steps):
    report = sw.audit(f, "bf16", steps=steps)({"a": jnp.ones(3)})
    assert report.lost_changes[0].endswith("with error 100%")
    assert report.findings[0].line == added.__code__.co_firstlineno + 1


def sgd(rate):
    def step(w, x):
        return w - rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    return step


@pytest.mark.parametrize(("rate", "lost"), [(1e-4, True), (0.3, False)])
def test_updates_below_a_rounding_of_the_weights(rate, lost):
    report = sw.audit(sgd(rate), "bf16")(W, X)
    assert bool(report.lost_changes) == lost == bool(report.findings)


def test_a_layer_is_no_state():
    """Its result has the shape of its argument, and changes it by little."""
    report = sw.audit(lambda x: x + 1e-6 * jnp.tanh(x), "bf16")(W)
    assert not report.lost_changes
    assert not report.findings


@pytest.mark.parametrize(
    ("f", "args", "want"),
    [
        (lambda s, x: (s, x.sum()), ({"w": W, "b": W[0]}, X), {0: 0, 1: 1}),
        (lambda s, x: {"b": s["b"], "w": s["w"]}, ({"w": W, "b": W[0]}, X), {0: 0, 1: 1}),
        (lambda x, s: (x, s), (X, (W, W[0])), {0: 0, 1: 1, 2: 2}),
        (lambda w, x: w * 2, (W, X), {0: 0}),
        (lambda w, x: (x, w.sum()), (W, X), {}),
    ],
)
def test_outputs_that_are_the_next_arguments(f, args, want):
    program = trace(f, Emulation(BF16), args, {}, name="audit")
    assert {x.output: x.argument for x in carried(program)} == want


def attention(p, x):
    q, k, v = (x @ p[n] + p[f"{n}_bias"][None] for n in "qkv")
    return jnp.sum((jax.nn.softmax(q @ k.T / 4.0) @ v) ** 2)


@pytest.mark.slow
def test_a_gradient_of_0_is_compared_at_the_size_of_what_it_is_made_of():
    """Softmax doesn't change if each row of its argument does, so that a key's bias has none."""
    keys = jax.random.split(jax.random.key(3), 4)
    p = {n: normal(k, (16, 16)) / 4 for n, k in zip("qkv", keys, strict=False)}
    p |= {f"{n}_bias": jnp.full(16, 0.1) for n in "qkv"}
    x = normal(keys[3], (8, 16))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (p, x))
        exact = jax.grad(attention)(*wide)
    assert np.linalg.norm(exact["k_bias"]) < 1e-12 < 1e-2 < np.linalg.norm(exact["q_bias"])
    report = sw.audit(jax.grad(attention), "c=bf16")(p, x)
    errors = dict(report.outputs)
    assert errors["['k_bias']"].relative < 0.03
    assert not report.findings
    assert report.trials == 0
    assert not report.verdict.startswith("No")


def test_an_output_with_digits_has_no_floor():
    """It is small and a cancellation, but float32 knows it."""
    report = sw.audit(lambda x: (jnp.sum(x), (1 + x) - 1), "bf16", trials=0)(jnp.full(8, 1e-3))
    assert dict(report.outputs)["[1]"].relative == pytest.approx(1.0, rel=0.01)


def bias_of_experts(bias, load):
    return bias + 1e-3 * jnp.sign(0.5 - load)


@pytest.mark.parametrize("size", [1.5, *nightly([0.01])])
def test_an_argument_that_is_one_array_is_state_if_something_is_added_to_it(size):
    report = sw.audit(bias_of_experts, "bf16")(jnp.full(8, size), X[0, :8])
    assert [x.kind for x in report.findings] == ["swamping"] * (size > 1)
    if report.findings:
        bias, load = jnp.full(8, size), X[0, :8]
        change = report.apply_fixes(bias_of_experts)(bias, load) - bias
        assert change == pytest.approx(np.asarray(1e-3 * jnp.sign(0.5 - load)), rel=1e-2)


optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=1e-6)


def decayed(state, x):
    """A step of AdamW with a weight decay far below a rounding of its update."""
    w, moments = state
    updates, moments = optimizer.update(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), moments, w)
    return optax.apply_updates(w, updates), moments


def places(report, name):
    return [x for x in report.findings if x.kind == "swamping" and name in (x.file or "")]


@pytest.mark.parametrize("low", ["bf16", *nightly(["fp16"])])
def test_a_weight_decay_of_a_millionth_that_adds_nothing(low):
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer
        report = sw.audit(decayed, low)((W, optimizer.init(W)), X)
    (decay,) = places(report, "_adding.py")  # optax.add_decayed_weights
    assert decay.evidence.startswith("100% of additions change nothing")
    assert decay.fix
    assert bool(places(report, "update.py")) == (low == "bf16")  # optax.apply_updates


@pytest.mark.parametrize(("decay", "lost"), [(1e-6, True), (1e-2, False)])
def test_a_weight_decay_of_gradients_that_are_arguments(decay, lost):
    def update(params, gradients):
        return jax.tree.map(lambda w, g: w - 0.1 * g - decay * w, params, gradients)

    report = sw.audit(update, "bf16")({"w": W}, {"w": W[::-1]})
    assert [x.kind for x in report.findings] == ["swamping"] * lost


def counted(state, x):
    new = state["n"] + 1.0
    return {"n": new, "sum": state["sum"] + x / new}, x


@pytest.mark.parametrize(("n", "ends"), [(2040.0, True), (100.0, False), (2040.5, False)])
def test_a_counter_that_will_stay_where_it_is(n, ends):
    """FP16 has no 2049, so that a counter stays at 2048: nothing of one step shows it."""
    state = {"n": jnp.float32(n), "sum": W}
    report = sw.audit(counted, "fp16")(state, X[:1, :4])
    assert report.error.relative < 2.0**-10
    assert any("stays at 2048" in x.evidence for x in report.findings) == ends
    if ends:
        assert report.findings[0].line == counted.__code__.co_firstlineno + 1
        assert report.findings[0].fix is not None
        assert "a counter, now 2041, stays at 2048" in report.verdict


def flushed(w, x, scale=1e-6):
    """Gradients that FP16 flushes to zero, with a learning rate that fits them."""
    gradient = jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w))) * scale)(w)
    return w - 0.05 / scale * gradient


@pytest.mark.parametrize("low", ["fp16", *nightly(["p=f32,c=f16,o=f32"])])
def test_a_step_that_changes_nothing_is_no_training(low):
    """The weights are within a rounding or few; only their change shows that nothing is trained."""
    report = sw.audit(flushed, low)(W, X)
    assert report.verdict.startswith("No: flushed does not train")
    assert report.wrong_changes[0].endswith("with error 100%")
    worst = report.findings[0]
    assert (worst.kind, worst.direction) == ("underflow", "backward")
    assert str(worst.fix).startswith("loss scale 2^")
    plain, fixed = flushed(W, X), report.apply_fixes(flushed)(W, X).astype(jnp.float32)
    rounded = sw.round_to(W, "fp16") if low == "fp16" else W
    assert jnp.linalg.norm(fixed - plain) < 0.5 * jnp.linalg.norm(plain - rounded)
    assert not sw.audit(flushed, low)(W, X, 1.0).wrong_changes


def corrected(state, x):
    """A step of RMSProp, whose bias correction is 0 in BF16."""
    w, t = state
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    second = 0.001 * gradient**2 / (1 - 0.999**t)
    return w - 0.3 * gradient / (jnp.sqrt(second) + 1e-6), t + 1


def test_a_change_is_explained_by_the_lines_that_make_it_wrong():
    """An infinite second moment makes it 0; no number that isn't finite leaves the step."""
    report = sw.audit(corrected, "bf16")((W, jnp.float32(1)), X)
    assert report.error.non_finite == 0
    assert report.verdict.startswith("No: corrected does not train")
    assert report.findings[0].line == corrected.__code__.co_firstlineno + 4
    assert report.error_fixed.relative < 0.02 < 0.5 < report.error.relative


@pytest.mark.slow
def test_changes_that_are_roundings_are_not_judged():
    """The gradient of a key's bias is 0, and Adam moves it by noise as far as other weights."""
    x, y = X[:8], W[:8, :1] * jnp.ones((1, 16))
    start = {"q": W @ W.T / 8, "k": W @ W.T / 8, "bias": jnp.full(16, 0.1)}
    adam = optax.adam(1e-3)

    def step(w, state, x, y):
        def loss(w):
            scores = (x @ w["q"]) @ (x @ w["k"] + w["bias"][None]).T
            return jnp.mean(jnp.square(jax.nn.softmax(scores) @ x - y))

        updates, _ = adam.update(jax.grad(loss)(w), state)
        return optax.apply_updates(w, updates)

    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer
        report = sw.audit(step, "p=f32,c=bf16,o=f32")(start, adam.init(start), x, y)
    assert not report.wrong_changes


def test_the_square_of_a_gradient_of_0_is_no_lost_change():
    """Of a bias before a normalisation float32 returns rounding errors; FP16 flushes the square."""

    def step(state, x):
        def loss(w, bias):
            h = x @ w + bias[None]
            h = (h - h.mean(0)[None]) / jnp.sqrt(h.var(0)[None] + 1e-3)
            return jnp.mean(jnp.tanh(h + 0.3) ** 2)

        dw, db = jax.grad(loss, (0, 1))(state["w"], state["bias"])
        new = {"w": state["w"] - 0.3 * dw, "bias": state["bias"] - 0.3 * db}
        return new | {"square": 0.9 * state["square"] + 0.1 * db**2}

    state = {"w": W, "bias": jnp.full(4, 0.1), "square": jnp.zeros(4)}
    report = sw.audit(step, "fp16")(state, X)
    assert not report.lost_changes
    assert not report.findings


def test_moments_that_start_at_zero_are_compared_by_themselves():
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w))) * 1e-6)(state["w"])
        moment = {"a": 0.9 * state["moment"]["a"] + 0.1 * gradient}
        return {"w": state["w"] - 1e-3 * moment["a"], "moment": moment}

    report = sw.audit(step, "p=f32,c=f16,o=f32")({"w": W, "moment": {"a": jnp.zeros_like(W)}}, X)
    assert report.error.relative > 0.5
    assert report.findings[0].kind == "underflow"


def test_a_counter_that_has_reached_its_end():
    """Outside of a training step too; not numbers of which some still count."""

    def count(n):
        return n + 1.0

    first = sw.audit(count, "bf16")(jnp.array([256.0, 512.0])).findings[0]
    assert (first.kind, first.primitive) == ("swamping", "add")
    assert first.evidence.startswith("a counter, now 513, stays where it is")
    for n in (jnp.arange(600.0), jnp.zeros(0), jnp.array([256.5])):
        assert "counter" not in sw.audit(count, "bf16")(n).verdict


def test_a_state_behind_the_first_argument():
    """A result in an argument's place is its next value if the results before it are, too."""

    def step(params, count, x):
        gradient = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)["w"]
        params = {"w": params["w"] - 0.1 * jnp.minimum(1.0, count / 8192) * gradient}
        return params, count + 1

    report = sw.audit(step, "fp16")({"w": W}, jnp.float32(4096), X)
    assert report.findings[0].line == step.__code__.co_firstlineno + 3
    assert "output[1] changes by 0.0002 of its size, with error 100%" in report.verdict

    def reconstructed(params, noise, x):  # as large as an argument, but not in its place
        return x @ params["w"], noise.sum()

    program = trace(reconstructed, Emulation(BF16), ({"w": W}, X[0], X), {}, name="")
    assert not carried(program)
