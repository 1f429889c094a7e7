"""Each function of ``ops`` and each layer as one operation: under ``emulate``, ``autocast`` and
``audit``, and its derivatives of every order, against plain formulas in float64."""

import inspect
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scalewise as sw
from cases import nightly
from scalewise import ops
from scalewise.layers import equinox, linen
from scalewise.layers import nnx as ours_nnx
from scalewise.ops import functions

FORMATS = ["fp16", "bf16", "e5m2", "e4m3fn", "dlfloat16"]
# Numbers of every format, so that arguments aren't rounded.
X = np.array([[1.5, -0.5, 0.75], [0.25, 2.0, -1.25]])
W, B = np.array([1.0, 0.5, -2.0]), np.array([0.25, -1.0, 0.5])
POSITIVE = np.array([0.25, 0.5, 0.875])  # where every function but one is defined
T = np.array([1.0, -0.5, 0.75])  # of a gradient
LABELS = np.array([2, 0])
EPSILON = {"LayerNorm": 1e-5, "RMSNorm": 1e-6}


def norm(x):
    return jnp.sqrt(jnp.sum(x * x, axis=-1))


def normalise(x, w, b=0.0, eps=1e-6):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * w + b


def centre(x, w, b, eps=1e-5):
    return normalise(x - jnp.mean(x, axis=-1, keepdims=True), w, b, eps)


def sum_rows(x):
    return jnp.sum(x, axis=-1)


def product(x, w):
    return x @ w


def convolve(x, w):
    numbers = jax.lax.conv_dimension_numbers((1, 1, 6), (1, 1, 3), ("NCH", "OIH", "NCH"))
    of = ops.conv_general_dilated if x.dtype == jnp.float32 else jax.lax.conv_general_dilated
    options = {"accumulator": "fp32"} if x.dtype == jnp.float32 else {}
    signal, kernel = x.reshape(1, 1, 6), w.reshape(1, 1, 3)
    return of(signal, kernel, (1,), [(0, 0)], dimension_numbers=numbers, **options)


def of_nnx(kind, x, *parameters):
    layer = getattr(ours_nnx, kind)(3, epsilon=EPSILON[kind], rngs=nnx.Rngs(0))
    for own, p in zip((layer.scale, getattr(layer, "bias", None)), parameters, strict=False):
        own[...] = p
    return layer(x)


def of_linen(kind, x, *parameters):
    params = dict(zip(("scale", "bias"), parameters, strict=False))
    return getattr(linen, kind)(epsilon=EPSILON[kind]).apply({"params": params}, x)


def of_equinox(kind, x, *parameters):
    made = getattr(equinox, kind)(3, eps=EPSILON[kind], use_bias=len(parameters) == 2)
    for name, p in zip(("weight", "bias"), parameters, strict=False):
        made = eqx.tree_at(lambda m, name=name: getattr(m, name), made, p)
    return jax.vmap(made)(x)


# By the function's name: ours, the same formula, and the arguments.
CASES = {
    "l2_norm": (lambda x: ops.l2_norm(x, axis=-1), norm, (X,)),
    "l2_norm of an epsilon": (
        lambda x, e: ops.l2_norm(x, e, axis=-1),
        lambda x, e: jnp.sqrt(jnp.sum(x * x, axis=-1) + e),
        (X, np.array([0.5, 2.0])),
    ),
    "l2_norm by power_of_two": (
        lambda x: ops.l2_norm(x, axis=-1, method="power_of_two"), norm, (X,),
    ),
    "rms_norm": (ops.rms_norm, normalise, (X, W, B)),
    "layer_norm": (ops.layer_norm, centre, (X, W, B)),
    "softmax": (ops.softmax, lambda x: jax.nn.softmax(x), (X,)),
    "softmax in fp32": (
        lambda x: ops.softmax(x, arithmetic="fp32"), lambda x: jax.nn.softmax(x), (X,),
    ),
    "log_softmax": (ops.log_softmax, lambda x: jax.nn.log_softmax(x), (X,)),
    "logsumexp": (ops.logsumexp, lambda x: jax.nn.logsumexp(x, axis=-1), (X,)),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, jnp.asarray(LABELS)),
        lambda x: -jax.nn.log_softmax(x)[jnp.arange(2), jnp.asarray(LABELS)],
        (X,),
    ),
    "sum": (lambda x: ops.sum(x, axis=-1), sum_rows, (X,)),
    "sum in an accumulator": (
        lambda x: ops.sum(x, axis=-1, accumulator=ops.Accumulator("fp32")), sum_rows, (X,),
    ),
    "mean": (lambda x: ops.mean(x, axis=-1), lambda x: jnp.mean(x, axis=-1), (X,)),
    "var": (lambda x: ops.var(x, axis=-1), lambda x: jnp.var(x, axis=-1), (X,)),
    "var in fp32": (
        lambda x: ops.var(x, axis=-1, arithmetic="fp32"), lambda x: jnp.var(x, axis=-1), (X,),
    ),
    "matmul": (ops.matmul, product, (X, W)),
    "matmul in an accumulator": (
        lambda x, w: ops.matmul(x, w, accumulator="fp32"), product, (X, W),
    ),
    "dot_general": (
        lambda x, w: ops.dot_general(x, w, (((1,), (0,)), ((), ())), accumulator="fp32"),
        product,
        (X, W),
    ),
    "conv_general_dilated": (convolve, convolve, (X, W)),
    "accumulate": (
        lambda x: ops.accumulate(ops.Arithmetic("fp16"), x, "compensated"), sum_rows, (X,),
    ),
    **{
        f"{of.__name__}.{kind}": (partial(of, kind), formula, given)
        for of in (of_nnx, of_linen, of_equinox)
        for kind, formula, given in (
            ("LayerNorm", centre, (X, W, B)), ("RMSNorm", normalise, (X, W)),
        )
    },
}  # fmt: skip
NO_OPERATION = {"beta_high", "beta_low", "ulp_bound", "isinf_sign"}  # of no numbers, or no floats


def test_every_public_function_has_a_case():
    public = {n for n in ops.__all__ if inspect.isfunction(getattr(ops, n))} - NO_OPERATION
    assert public == {name.split()[0] for name in CASES if "." not in name}


def of_all(index, chosen=tuple(CASES)):
    """Returns a function of all arguments together: in one program, which is compiled once."""

    def call(arguments):
        of = (CASES[name][index] for name in chosen)
        return {n: f(*a) for n, f, a in zip(chosen, of, arguments, strict=True)}

    return call


def gradients(values):
    """Returns the gradients of all, in the direction of fixed numbers."""

    def total(arguments):
        leaves = jax.tree.leaves(values(arguments))
        return sum(jnp.sum(y * jnp.resize(jnp.asarray(T, y.dtype), y.shape)) for y in leaves)

    return jax.grad(total)


def arguments_in(dtype, chosen=tuple(CASES)):
    return [[jnp.asarray(x, dtype) for x in CASES[name][2]] for name in chosen]


def both(values):
    return lambda arguments: (values(arguments), gradients(values)(arguments))


def ours(transformation, *args):
    """Returns values and gradients of all, transformed, in one compiled program."""
    with jax.numpy_rank_promotion("allow"):
        return jax.jit(transformation(both(of_all(0)), *args))(arguments_in(jnp.float32))


def check(got, want, eps, roundings):
    """Compares arrays to their own largest number: differences of others may cancel."""
    paths, leaves = zip(*jax.tree.leaves_with_path(want), strict=True)
    for path, y, exact in zip(paths, jax.tree.leaves(got), leaves, strict=True):
        y, exact = (np.asarray(x, np.float64) for x in (y, exact))
        size, error = np.abs(exact).max(), np.abs(y - exact).max()
        assert error <= roundings * eps * max(size, 1), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def exactly():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return jax.jit(both(of_all(1)))(arguments_in(jnp.float64))


@pytest.mark.parametrize("fmt", nightly(FORMATS))
def test_emulated_in_a_format_each_is_one_operation(fmt, exactly):
    check(ours(sw.emulate, fmt), exactly, float(sw.format(fmt).eps), 4)


@pytest.mark.parametrize("dtype", nightly(["float16", "bfloat16"]))
def test_autocast_runs_each_in_a_dtype(dtype, exactly):
    check(ours(sw.autocast, dtype), exactly, float(jnp.finfo(dtype).eps), 4)


def test_a_norm_on_an_fp16_machine_is_in_its_arithmetic():
    """300 * 300 is beyond FP16, and so is every power of two of the norm's digits."""
    x = jnp.asarray([300.0, 400.0])
    assert float(sw.emulate(ops.l2_norm, "fp16")(x)) == 500
    assert jnp.isinf(sw.emulate(lambda x: ops.l2_norm(x, method="direct"), "fp16")(x))
    want = [[0.128, -0.096], [-0.096, 0.072]]
    np.testing.assert_allclose(jax.hessian(ops.l2_norm)(x / 100), want, rtol=1e-5)


@pytest.mark.slow
def test_an_audit_has_the_numbers_of_emulate_and_names_the_users_lines():
    chosen = ("l2_norm", "of_linen.LayerNorm")
    f, given = gradients(of_all(0, chosen)), arguments_in(jnp.float32, chosen)
    with jax.numpy_rank_promotion("allow"):
        report = sw.audit(f, "e5m2", dtypes="all", trials=0)(given)
        low, exact = sw.emulate(f, "e5m2")(given), f(given)
    operations = {row.primitive for row in report.trace()}
    assert {x for x in operations if x.startswith("ops.")}
    own = {path.name for path in Path(sw.__file__).parent.rglob("*.py")}
    assert not {row.place.split(":")[0] for row in report.trace()} & own
    pairs = zip(*map(jax.tree.leaves, (low, exact)), strict=True)
    errors = [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs]
    assert [error.relative for _, error in report.outputs] == pytest.approx(errors, rel=1e-3)


@pytest.mark.parametrize("fmt", nightly(FORMATS))
def test_every_elementary_function_is_one_operation(fmt):
    of = functions.FUNCTIONS

    def at(x, name):
        return x + 1 if name == "acosh" else x

    def values(of):
        return lambda x: {n: f(at(x, n)) for n, f in of.items()}

    def with_slopes(of):
        return lambda x: jax.jvp(values(of), (x,), (jnp.ones_like(x),))

    with jax.enable_x64(True):
        of_numbers = with_slopes({n: f.definition for n, f in of.items()})
        want = jax.jit(of_numbers)(jnp.asarray(POSITIVE))
    got = jax.jit(sw.emulate(with_slopes(of), fmt))(jnp.asarray(POSITIVE, jnp.float32))
    check(got, want, float(sw.format(fmt).eps), 1)


@pytest.mark.parametrize("name", nightly(CASES, but=["softmax in fp32", "var in fp32"]))
def test_second_derivatives_are_those_of_the_formula(name):
    """A Hessian's product with a vector, in forward mode over reverse mode, and twice reverse."""
    f, formula, given = CASES[name]
    direction = [np.resize(T, x.shape) + 0.25 for x in given]

    def products(f):
        def call(arguments, direction):
            def total(*arguments):
                y = f(*arguments)
                return jnp.sum(jnp.sin(y) * jnp.resize(jnp.asarray(T, y.dtype), y.shape))

            every = tuple(range(len(arguments)))
            slopes = jax.grad(total, every)

            def along(*arguments):
                pairs = zip(slopes(*arguments), direction, strict=True)
                return sum(jnp.sum(g * d) for g, d in pairs)

            forward = jax.jvp(slopes, tuple(arguments), tuple(direction))[1]
            return forward, jax.grad(along, every)(*arguments)

        return jax.jit(call)

    def cast(arrays, dtype):
        return [jnp.asarray(x, dtype) for x in arrays]

    with jax.numpy_rank_promotion("allow"):
        got = products(f)(cast(given, jnp.float32), cast(direction, jnp.float32))
        with jax.enable_x64(True):
            want = products(formula)(cast(given, jnp.float64), cast(direction, jnp.float64))
    check(got, want, 1e-6, 20)


@pytest.mark.parametrize("norm", [sw.ops.rms_norm, sw.ops.layer_norm])
def test_a_gradient_shares_the_steps_of_its_operation(norm):
    x = jnp.ones((2, 32), jnp.float16)
    f = lambda x: jnp.sum(norm(x))  # noqa: E731
    forward, both = (jax.jit(g).lower(x).as_text() for g in (f, jax.value_and_grad(f)))
    assert both.count("\n") < 1.1 * forward.count("\n")
