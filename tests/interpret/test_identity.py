"""The identity interpretation returns the program's own bits, whatever the control flow."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from programs import DIFFERENTIABLE, PROGRAMS, scalar, together
from scalewise.interpret import Equation, Interpretation, transform


def identity(f):
    return transform(f, Interpretation(), name="identity")


def example(seed=0):
    return normal(seed, (4, 4))


def assert_same_bits(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


EXAMPLES = jnp.stack([example(1), example(2)])
PARTS = together(PROGRAMS)


def gradients(t=lambda f: f):
    """The gradients of transformed programs."""
    return together(DIFFERENTIABLE, lambda f: jax.grad(t(scalar(f))))


def of_maps(t):
    def of(f):
        return jax.grad(lambda xs: jnp.sum(jax.vmap(t(scalar(f)))(xs)))

    return together(DIFFERENTIABLE, of)


EXACT = {
    "eagerly": lambda t: t(PARTS)(example()),
    "jit": lambda t: jax.jit(t(PARTS))(example()),
    "vmap outside": lambda t: jax.jit(jax.vmap(t(PARTS)))(EXAMPLES),
    "vmap inside": lambda t: jax.jit(t(jax.vmap(PARTS)))(EXAMPLES),
    "gradient inside": lambda t: jax.jit(t(gradients()))(example()),
    "gradient outside, eagerly": lambda t: gradients(t)(example()),
}


@pytest.mark.parametrize(
    "way", nightly(EXACT, but=["eagerly", "jit", "vmap outside", "gradient inside"])
)
def test_bits_are_the_programs_own(way):
    assert_same_bits(EXACT[way](identity), EXACT[way](lambda f: f))


@pytest.mark.parametrize(("of", "x"), [(gradients, example()), (of_maps, EXAMPLES)])
def test_gradients_from_outside_under_jit(of, x):
    """The same equations, but in two programs joined by residuals: XLA may fuse them otherwise."""
    got, want = jax.jit(of(identity))(x), jax.jit(of(lambda f: f))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)


def test_a_closed_over_parameter_is_differentiated():
    x = example()

    def loss(w):
        return identity(lambda y: jnp.sum(jnp.sin(y @ w) * w))(x)

    want = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w) * w))(x)
    assert_same_bits(jax.grad(loss)(x), want)


def test_pytrees_keywords_flags_and_integers():
    def f(tree, *, flag, n, power=2):
        assert flag is True
        assert power == 2
        return {"y": tree["a"] ** power + n.astype("float32"), "n": n, "flags": [tree["b"] > 0]}

    args = ({"a": example(), "b": jnp.arange(3)},)
    got = identity(f)(*args, flag=True, n=jnp.int32(3))
    assert_same_bits(got, f(*args, flag=True, n=jnp.int32(3)))


def test_gradient_beside_integer_arguments_and_outputs():
    def f(x, i):
        return jnp.sum(x[i] ** 2), i + 1

    got = jax.grad(lambda x: identity(f)(x, jnp.int32(1))[0])(example())
    assert_same_bits(got, jax.grad(lambda x: f(x, jnp.int32(1))[0])(example()))


def test_a_nested_jit_keeps_its_shardings():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    f = identity(lambda x: jax.jit(jnp.sin, in_shardings=rows, out_shardings=rows)(x) * 2)
    assert str(jax.make_jaxpr(f)(example())).count("sharding_constraint") == 2
    assert_same_bits(f(example()), jnp.sin(example()) * 2)


class Recorder(Interpretation):
    """Notes each equation's provenance while it hands the program on."""

    def __init__(self):
        self.seen: list[Equation] = []

    def apply(self, state, equation, inputs):
        self.seen.append(equation)
        return super().apply(state, equation, inputs)


def test_scope_line_and_direction_of_every_equation():
    def model(x):
        with jax.named_scope("layer"):
            y = jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=2)[0]
        return jnp.sum(y)

    def step(x):
        return x - 0.1 * jax.grad(model)(x)

    recorder = Recorder()
    transform(step, recorder, name="record")(example())
    dots = [e for e in recorder.seen if e.name == "dot_general"]
    assert {e.direction for e in dots} == {"forward", "backward"}
    assert all("layer" in e.scope for e in dots)
    assert [e.direction for e in recorder.seen][-1] == "update"
    files = {e.source[0] for e in recorder.seen if e.source}
    assert files == {__file__}
    (tanh,) = [e for e in recorder.seen if e.name == "tanh"]
    assert "jnp.tanh" in Path(__file__).read_text().splitlines()[tanh.source[1] - 1]
    assert f"{__file__}:{tanh.source[1]}" in tanh.where()


def test_caller_of_a_library():
    def step(x):
        y = jax.nn.log_softmax(x)  # JAX's own
        return optax.tree.norm(y)

    recorder = Recorder()
    transform(jax.grad(step), recorder, name="record")(example())
    lines = Path(__file__).read_text().splitlines()
    by_name = {e.name: e for e in recorder.seen if e.direction == "forward"}
    assert "log_softmax" in lines[by_name["exp"].source[1] - 1]  # inside of a jit of JAX's
    assert by_name["exp"].caller is None
    assert "optax" in by_name["sqrt"].source[0]
    assert by_name["sqrt"].caller[0] == __file__
    assert "tree.norm" in lines[by_name["sqrt"].caller[1] - 1]


def test_outputs_that_are_no_arrays_are_returned_unchanged():
    kept = object()

    def f(x, n, rate):
        assert type(n) is int
        assert type(rate) is float
        return {"y": x * rate, "n": n + 1, "name": "gpt", "sin": jnp.sin, "kept": kept, "no": None}

    got = identity(f)(example(), 3, 0.5)
    assert_same_bits(got.pop("y"), example() * 0.5)
    assert got == {"n": 4, "name": "gpt", "sin": jnp.sin, "kept": kept, "no": None}
    assert type(got["n"]) is int


def test_an_output_that_hides_arrays_is_refused():
    class Holder:
        def __init__(self, x):
            self.x = [x]

    with pytest.raises(
        TypeError, match=r"identity: output\['h'\] of <lambda> is a Holder: <.*no py"
    ):
        identity(lambda x: {"y": x, "h": Holder(x)})(example())
    with pytest.raises(TypeError, match="it holds arrays, but it is no pytree"):
        identity(lambda x: lambda: x * 2)(example())


class Awaited:
    def __await__(self):
        yield


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize(
    "f", [lambda x: Awaited(), lambda x: (row for row in x), lambda x: [map(jnp.sin, x)]]
)
def test_results_that_are_computed_later_are_refused(f):
    with pytest.raises(TypeError, match="it would compute after the function has returned"):
        identity(f)(example())


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.datetime64("2020"), np.zeros(2, [("a", "f4")])]
)
def test_arrays_that_jax_cannot_hold_are_passed_on(array):
    y, same = identity(lambda x, a: (x * 2, a))(example(), array)
    assert_same_bits(y, example() * 2)
    assert same is array


def test_numbers_on_which_a_function_fails_are_traced_as_jit_does():
    def f(x, state):
        return x / jnp.sqrt(1 / state["step"]), {"step": state["step"] + 1}

    got, state = identity(f)(example(), {"step": 0})
    want = jax.jit(f)(example(), {"step": 0})
    assert_same_bits((got, state), want)
    with pytest.raises(ZeroDivisionError):  # the first error of two
        identity(lambda x, n: x / (1 / n) if n == 0 else x)(example(), 0)


def test_rejects_non_callables():
    with pytest.raises(TypeError, match=r"identity\(f, ...\) takes a function, not a dict: \{\}"):
        identity({})


@pytest.mark.parametrize("t", [identity, lambda f: sw.autoscale(f, "fp16_every_op")])
def test_results_are_arrays_as_weakly_typed_as_the_programs_own(t):
    def f(a, x):
        looped = jax.lax.scan(lambda c, _: (c, c), a, None, 2)
        return 2 * a, a * x, jnp.full(2, a), jax.jit(lambda: 3)(), looped

    def described(g):
        leaves = jax.tree.leaves(g(2.0, jnp.ones(3)))
        return [(isinstance(x, jax.Array), jax.typeof(x)) for x in leaves]

    assert described(t(f)) == described(f)
    assert described(jax.jit(t(f))) == described(jax.jit(f))


@pytest.mark.parametrize("t", [identity, lambda f: sw.autocast(f, "bf16")])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.grad(lambda *a: jax.grad(f)(*a) * a[0]),
        lambda f: jax.jit(jax.hessian(f, (0, 1))),
        lambda f: lambda *a: jax.jvp(f, a, a),
        lambda f: lambda a, x: jax.linear_transpose(lambda b: f(2.0, b), x)(f(a, x)),
    ],
)
def test_derivatives_are_as_weakly_typed_as_those_of_the_program(t, derivative):
    def f(a, x):
        return jnp.sum(a * a * x)

    for arguments in [(2.0, jnp.ones(3)), (jnp.float32(2), 3.0), (2.0, 3.0)]:
        got, want = derivative(t(f))(*arguments), derivative(f)(*arguments)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
