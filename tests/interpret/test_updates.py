"""Flax NNX objects and mutable arrays (``jax.new_ref``), updated in place by transformed functions.

The truth is the same program without a transformation, in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise import training
from scalewise.interpret import Interpretation, transform

X = normal(0, (16, 8))
Y = X[:, :1] ** 2

identity = functools.partial(transform, interpretation=Interpretation(), name="identity")
TRANSFORMATIONS = {
    "identity": (lambda f: identity(f), 1e-5),
    "fp8": (lambda f: sw.autoscale(f, "fp8"), 0.05),
    "fp16_every_op": (lambda f: sw.autoscale(f, "fp16_every_op"), 0.02),
    "autocast": (lambda f: sw.autocast(f, "p=f32,c=bf16,o=f32"), 0.03),
    "emulate": (lambda f: sw.emulate(f, "tf32"), 0.02),
}


pytestmark = pytest.mark.usefixtures("users_promotion")


class Model(nnx.Module):
    """Layers scanned over, tied weights, dropout, statistics, a variable made in a call."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def blocks(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.blocks = blocks(rngs)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.tied = self.first
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, block):
            return nnx.tanh(block(x))

        self.calls[...] += 1
        x = self.dropout(self.norm(self.tied(nnx.relu(self.first(x)))))
        self.mean = nnx.Intermediate(jnp.mean(x))
        return self.head(through(x, self.blocks))

    def loss(self, x, y):
        return jnp.mean(jnp.square(self(x) - y))


def loss(model, x, y):
    return model.loss(x, y)


of_loss = nnx.value_and_grad(loss)


def step(model, optimizer, x, y, differentiate=of_loss):
    value, gradient = differentiate(model, x, y)
    optimizer.update(model, gradient)
    return value


def whole(t):
    return nnx.jit(t(step))


def eager(t):
    return t(step)


def jit_inside(t):
    return nnx.jit(t(nnx.jit(step)))


def loss_alone(t):
    return nnx.jit(functools.partial(step, differentiate=nnx.value_and_grad(t(loss))))


def gradient_alone(t):
    return nnx.jit(functools.partial(step, differentiate=t(nnx.value_and_grad(loss))))


def method(t):
    return nnx.jit(functools.partial(step, differentiate=nnx.value_and_grad(t(Model.loss))))


def functional(t):
    """``jax.jit`` of a pure function of the state that the transformation is inside of."""

    @jax.jit
    def pure(graph, state, x, y):
        model, optimizer = nnx.merge(graph, state)
        value = t(step)(model, optimizer, x, y)
        return value, nnx.split((model, optimizer))[1]

    def call(model, optimizer, x, y):
        value, state = pure(*nnx.split((model, optimizer)), x, y)
        nnx.update((model, optimizer), state)
        return value

    return call


NESTINGS = (whole, eager, jit_inside, loss_alone, gradient_alone, method, functional)


def run(make, steps=2):
    """Returns the losses, and what else the objects hold after the run."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    made = make()
    losses = [float(made(model, optimizer, X, Y)) for _ in range(steps)]
    assert model.tied is model.first
    counts = int(optimizer.step[...]), int(model.calls[...]), int(model.dropout.rngs.count[...])
    assert isinstance(model.mean, nnx.Intermediate)
    return losses, counts, np.asarray(model.norm.mean[...]), np.asarray(model.head.kernel[...])


@functools.cache
def reference():
    return run(lambda: nnx.jit(step))


def assert_trains_like_float32(got, tolerance):
    (losses, counts, mean, kernel), (want, truly, means, kernels) = got, reference()
    assert counts == truly == (2, 2, 2)
    np.testing.assert_allclose(losses, want, rtol=tolerance)
    assert losses[0] != losses[1]
    np.testing.assert_allclose(mean, means, atol=tolerance * np.abs(means).max() * 2)
    start = np.asarray(Model(nnx.Rngs(0)).head.kernel[...])
    moved, truth = kernel - start, kernels - start  # Adam's first steps: signs of gradients
    assert np.linalg.norm(moved - truth) < max(0.3 * (tolerance > 1e-3), 1e-3) * np.linalg.norm(
        truth
    )


@pytest.mark.parametrize("nesting", nightly(NESTINGS, but=["whole"]))
@pytest.mark.parametrize("name", nightly(TRANSFORMATIONS, but=["fp8"]))
def test_a_step_that_updates_objects_in_place(name, nesting):
    t, tolerance = TRANSFORMATIONS[name]
    assert_trains_like_float32(run(lambda: nesting(t)), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["history", "keyed"])
def test_functions_with_a_first_argument_of_their_own(kind):
    calls = []

    def make():
        if kind == "history":
            scaled = sw.autoscale(step, "fp8_delayed")

            def call(*args):
                if not calls:
                    calls.append(scaled.init(*args))
                value, calls[0] = nnx.jit(scaled.step)(calls[0], *args)
                return value

            return call
        scaled = nnx.jit(sw.autoscale(step, "nvfp4", keyed=True))

        def call(*args):
            calls.append(None)
            return scaled(jax.random.key(len(calls)), *args)

        return call

    if kind != "keyed":
        assert_trains_like_float32(run(make), 0.05)
    else:
        assert run(make)[1] == reference()[1]


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
@pytest.mark.parametrize(
    "t",
    [
        lambda f: sw.autocast(f, "p=bf16,c=bf16,o=f32"),
        *nightly([lambda f: sw.emulate(f, "e4m3fn")]),
    ],
)
def test_what_a_function_leaves_alone_keeps_its_bits(t):
    model = Model(nnx.Rngs(0))
    before = {
        path: np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    for forward in (model, model.__call__, functools.partial(model)):
        t(forward)(X)
    for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        np.testing.assert_array_equal(np.asarray(x[...]), before[path])
    assert int(model.calls[...]) == 3


def test_an_audit_leaves_the_callers_objects_alone():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    report = sw.audit(step, "bf16", trials=0)(model, optimizer, X, Y)
    assert 0 < report.error.relative < 0.1
    assert int(model.calls[...]) == int(optimizer.step[...]) == 0
    rows = sw.explain(step, "fp8")(model, optimizer, X, Y).rows
    assert {row.direction for row in rows if row.kind == "contraction"} >= {"forward", "backward"}
    assert int(model.calls[...]) == 0


class Own:
    """A pytree that a function can update, of a kind that scalewise doesn't know."""

    def __init__(self, w):
        self.w = w


jax.tree_util.register_pytree_node(Own, lambda x: ((x.w,), None), lambda _, c: Own(*c))


def test_an_update_that_would_be_lost_is_refused():
    def update(own, x):
        own.w = own.w - x
        return jnp.sum(own.w)

    for t, _ in TRANSFORMATIONS.values():
        with pytest.raises(TypeError, match=r"update updates its argument \[0\].* in place"):
            jax.jit(t(update))(Own(X), X)


# mutable arrays


def of_argument(x, ref):
    ref[...] = ref[...] * 0.5 + x @ x.T
    return jnp.sum(ref[...])


CLOSED = jax.new_ref(jnp.zeros((16, 16)))


def of_closure(x, ref):
    CLOSED[...] += jax.nn.relu(x @ x.T)
    return jnp.sum(CLOSED[...]) + ref[0, 0]


def of_own(x, ref):
    own = jax.new_ref(jnp.zeros((16, 16)))

    def add(i, _):
        own[...] += x @ x.T
        ref[...] += 1.0

    jax.lax.fori_loop(0, 3, add, None)
    return jnp.sum(own[...])


def of_gradient(x, ref):
    def loss(x):
        y = x @ x.T
        ref[...] += jax.lax.stop_gradient(y)
        return jnp.mean(jnp.square(y))

    value, gradient = jax.value_and_grad(loss)(x)
    return value + jnp.sum(gradient)


def of_branch(x, ref):
    def update(_):
        ref[...] = x @ x.T

    jax.lax.cond(jnp.sum(x) > -1e9, update, lambda _: None, 0)
    return jnp.sum(ref[...])


def of_reading(x, ref):
    return jnp.sum(x @ x.T + ref[...])


REFERENCES = (of_argument, of_closure, of_own, of_gradient, of_branch, of_reading)


@pytest.mark.parametrize("jit", [True, *nightly([False])])
@pytest.mark.parametrize("f", REFERENCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", nightly(TRANSFORMATIONS, but=["fp8"]))
def test_mutable_arrays(name, f, jit):
    def after(f):
        ref = jax.new_ref(jnp.full((16, 16), 0.3))
        CLOSED[...] = jnp.zeros((16, 16))
        outs = [float(f(X, ref)) for _ in range(2)]
        return outs, np.asarray(ref[...]), np.asarray(CLOSED[...])

    t, tolerance = TRANSFORMATIONS[name]
    got, want = after(jax.jit(t(f)) if jit else t(f)), after(f)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
    if f is of_reading:
        np.testing.assert_array_equal(got[1], want[1])


def test_a_mutable_array_passed_twice_or_returned_is_refused():
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(ValueError, match="only one reference to a mutable array"):
        sw.autoscale(lambda a, b: a[...] + b[...])(ref, ref)
    with pytest.raises(TypeError, match="is a mutable array; return its value"):
        sw.autoscale(lambda a: a)(ref)


@pytest.mark.parametrize("policy", [None, "fp8", "c=bf16"])
def test_a_training_step_updates_mutable_arrays(policy):
    seen = jax.new_ref(jnp.zeros(()))

    def loss(params, x):
        seen[...] += jax.lax.stop_gradient(jnp.mean(jnp.abs(x)))
        return jnp.mean(jnp.square(x @ params["w"]))

    train = training.step(loss, optax.sgd(0.1), policy)
    state = train.init({"w": normal(1, (8, 8))})
    for _ in range(2):
        state, _ = jax.jit(train)(state, X)
    assert float(seen[...]) == pytest.approx(2 * float(jnp.mean(jnp.abs(X))), rel=0.01)


class Plain:
    """An object that JAX doesn't know."""

    def __init__(self):
        self.kept, self.inner, self.history = 1, [{}], []

    def step(self, x):
        self.kept = x * 2
        return jnp.sum(x)

    def __call__(self, x):
        self.history.append(x * 2)
        return jnp.sum(x)


class Slotted:
    __slots__ = ("kept",)


def keeps_in_attribute(o, x):
    o.kept = x * 2
    return jnp.sum(x)


def keeps_in_list(o, x):
    o.inner[0]["x"] = [x * 2]
    return jnp.sum(x)


def keeps_and_returns(o, x):
    o.kept = x * 2
    return o.kept


ALL = {
    **{name: make for name, (make, _) in TRANSFORMATIONS.items()},
    "grad of autoscale": lambda f: (
        lambda *a: jax.grad(lambda x: jnp.sum(sw.autoscale(f, "fp8")(*a[:-1], x)))(a[-1])
    ),
    "audit": lambda f: sw.audit(f, "fp16"),
    "explain": lambda f: sw.explain(f, "fp8"),
}


@pytest.mark.parametrize("name", ALL)
def test_an_update_of_another_object_is_refused(name):
    x = jnp.ones(3)
    for f, path in (
        (keeps_in_attribute, r"argument \[0\].kept"),
        (keeps_in_list, r"argument \[0\].inner\[0\]\['x'\]\[0\]"),
        (keeps_and_returns, r"argument \[0\].kept"),
    ):
        o = Plain()
        with pytest.raises(TypeError, match=f"{f.__name__} updates its {path} in place"):
            ALL[name](f)(o, x)
        assert vars(o) == vars(Plain())  # nothing of the update is left
    o = Slotted()
    with pytest.raises(TypeError, match=r"updates its argument \[0\].kept"):
        ALL[name](keeps_in_attribute)(o, x)
    assert not hasattr(o, "kept")
    o = Plain()
    with pytest.raises(TypeError, match=r"step updates its own object.kept"):
        ALL[name](o.step)(x)
    with pytest.raises(TypeError, match=r"updates its own object.history\[0\]"):
        ALL[name](o)(x)
    assert vars(o) == vars(Plain())


@pytest.mark.parametrize("name", ALL)
def test_an_object_that_is_read_is_passed_on(name):
    def f(o, x):
        o.kept = 3  # a number, not an array
        return jnp.sum(x * o.kept)

    o = Plain()
    o.outer = jnp.ones(3)
    ALL[name](f)(o, jnp.ones(3))
    assert o.kept == 3


@pytest.mark.parametrize("name", nightly(TRANSFORMATIONS, but=["autocast"]))
def test_einsum_takes_parameters(name):
    make, error = TRANSFORMATIONS[name]
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    w = nnx.Param(normal(3, (8, 4)))

    def f(layer, w, x):
        return jnp.einsum("bi,io->bo", x, layer.kernel) + jnp.einsum("bi,io->bo", x, w)

    want = f(layer, w, X)
    np.testing.assert_allclose(make(f)(layer, w, X), want, atol=8 * error)
    # one that the function closes over is read
    np.testing.assert_allclose(make(lambda x: f(layer, w, x))(X), want, atol=8 * error)
