"""Features of JAX under every interpretation, against the plain float32 run.

An error may be six times the root mean square error of one rounding to the interpretation's widest
rounding step, since a result has gone through a few products. Beyond that it may be four times the
largest error that random errors of that size cause in the plain run, at the operands of each
product, or at each result where the interpretation rounds all: derivatives of derivatives, loops
that round a state, maxima and means of numbers that cancel are that sensitive. A program without
contractions is as exact as its residuals.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from devices import run_on_devices
from features import FEATURES, OUTSIDE
from scalewise.formats import BlockFormat, Format
from scalewise.formats import format as format_
from scalewise.interpret import CONTRACTIONS, Interpretation, all_equations, transform

UNROUNDED = "ignore:.*(can.t be transformed|no units|has no rule|complex numbers|narrow numbers)"
RECIPES = sw.recipes.CATALOGUE
# Their scales don't follow the data: numbers of other magnitudes than they expect are flushed.
WITHOUT_SCALES = {"autoscale-unit_scaling", "autoscale-mu_s"}
OTHERS = {
    "emulate-fp16": lambda f: sw.emulate(f, "fp16"),
    "emulate-bf16": lambda f: sw.emulate(f, "bf16"),
    "emulate-fp32": lambda f: sw.emulate(f, "fp32"),
    "autocast-float16": lambda f: sw.autocast(f, "float16"),
    "autocast-bfloat16": lambda f: sw.autocast(f, "bfloat16"),
}
INTERPRETATIONS = {f"autoscale-{name}": functools.partial(sw.autoscale, recipe=x)
                   for name, x in RECIPES.items()} | OTHERS  # fmt: skip
INSIDE = [name for name in FEATURES if name not in OUTSIDE]
# One of each class runs every feature. A recipe is data: ten features run under all of them.
CLASSES = ("autoscale-fp8", "autoscale-scalify", "emulate-bf16", "autocast-bfloat16")
TEN = (
    "scan_of_remat_of_cond", "custom_vjp_with_static_and_integer_arguments",
    "quantization_with_a_straight_through_gradient", "shard_map", "attention", "recurrent_network",
    "gradient_of_a_convolution", "gradients_of_indexing", "ragged_products",
    "gradients_of_examples",
)  # fmt: skip
MATRIX = dict.fromkeys([*itertools.product(FEATURES, CLASSES),
                        *itertools.product(TEN, INTERPRETATIONS)])  # fmt: skip
FEW = [
    ("scan_of_remat_of_cond", "autoscale-fp8"), ("attention", "autoscale-mxfp8"),
    ("exported_with_symbolic_shapes", "autoscale-fp8"), ("within_a_loop", "autoscale-scalify"),
    ("random_draws", "emulate-bf16"), ("gradient_of_a_mapped_gradient", "autocast-bfloat16"),
    ("weak_types", "autocast-bfloat16"),
]  # fmt: skip
# the interpretation whose roundings an audit's are
LIKE = {"bfloat16": "emulate-bf16", "fp8": "autoscale-fp8", "policy": "autocast-bfloat16"}
AUDITS = {"bfloat16": "bfloat16", "fp8": RECIPES["fp8"], "policy": "p=f32,c=bf16,o=f32"}


def _arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)]


@functools.cache
def expected(name):
    """Returns a feature's results without scalewise, whether its programs contract, and the error
    of rounding to the narrowest of their own dtypes."""
    contracts, errors = [], [0.0]

    def traced(f):
        def call(*args, **kwargs):
            if name not in OUTSIDE:
                jaxpr = jax.make_jaxpr(lambda: _arrays(f(*args, **kwargs)))()
                equations = list(all_equations(jaxpr))
                contracts.append(bool({e.primitive.name for e in equations} & CONTRACTIONS))
                errors.extend(map(own_error, equations))
            return f(*args, **kwargs)

        return call

    results = FEATURES[name](traced)
    results = list(map(np.asarray, _arrays(results)))
    return results, name in OUTSIDE or any(contracts), max(errors)


def own_error(equation):
    """Returns the error of rounding to the dtype of the results, if the program has narrow ones: a
    number near the middle of two of them becomes the other."""
    dtypes = [v.aval.dtype for v in equation.outvars if hasattr(v.aval, "dtype")]
    narrow = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize <= 2]
    return max((rounding_error(format_(d)) for d in narrow), default=0.0)


def rounding_error(fmt):
    """Returns the root mean square of the relative errors of rounding to a format."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    return 2.0 ** -(element.mantissa_bits + 1) * 0.45


def formats_of(recipe):
    if isinstance(recipe, sw.Scalify):
        return [recipe.format]
    operands = [recipe.products.formats()[0][0], recipe.products.formats()[1][0], recipe.residuals]
    for pair in recipe.products.formats() if recipe.products else ():
        operands += pair
    return [f for f in operands if isinstance(f, Format | BlockFormat)]


def tolerance(interpretation, contracts):
    kind, _, name = interpretation.partition("-")
    if kind != "autoscale":
        return 8 * rounding_error(format_(name)) + 1e-6
    recipe = RECIPES[name]
    whole = contracts or isinstance(recipe, sw.Scalify)
    formats = formats_of(recipe) if whole else [recipe.residuals]
    return 6 * max(map(rounding_error, formats))


def assert_like(got, want):
    """Asserts equal shapes, dtypes, infinities and integers; returns the relative error."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.dtype.kind not in "fcV":
        np.testing.assert_array_equal(got, want)
        return 0.0
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    return relative_error(got, want)


def relative_error(got, want):
    if want.dtype.kind not in "fcV" or not want.size:
        return 0.0
    finite = np.isfinite(want)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    got, want = np.asarray(got)[finite].astype(wide), want[finite].astype(wide)
    error = max(np.linalg.norm(got - want) - 1e-6, 0)
    return error / np.linalg.norm(want) if error else 0.0


@pytest.mark.filterwarnings(UNROUNDED)
@pytest.mark.parametrize(("name", "interpretation"), nightly(MATRIX, but=FEW))
def test_a_feature_under_an_interpretation(name, interpretation):
    want, contracts, own = expected(name)
    got = _arrays(FEATURES[name](INTERPRETATIONS[interpretation]))
    allowed = max(tolerance(interpretation, contracts), 6 * own)
    if interpretation in WITHOUT_SCALES:
        allowed = 2
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = assert_like(a, b)
        if error > allowed:
            assert error <= max(allowed, 4 * sensitivity(name, interpretation)[i])


@pytest.mark.filterwarnings(UNROUNDED)
@pytest.mark.parametrize("interpretation", ["autoscale-fp8", *nightly(["autocast-float16"])])
@pytest.mark.parametrize("name", nightly(INSIDE, but=["attention", "scan_of_layers", "sorting"]))
def test_a_feature_is_compiled_for_all_platforms(name, interpretation):
    """Its arguments are tracers then. What JAX itself can't compile for a platform is no fault."""

    def lower(f, platform, *args, **kwargs):
        jax.jit(f).trace(*args, **kwargs).lower(lowering_platforms=(platform,))

    def lowered(f):
        def call(*args, **kwargs):
            for platform in "cpu", "cuda", "tpu":
                try:
                    lower(INTERPRETATIONS[interpretation](f), platform, *args, **kwargs)
                except Exception as error:
                    with pytest.raises(type(error)):
                        lower(f, platform, *args, **kwargs)
            return f(*args, **kwargs)

        return call

    FEATURES[name](lowered)


def sensitivity(name, interpretation):
    """Returns, for each result, the largest error of three runs with random errors.

    Errors that move an operand out of a function's domain (to above 1, of an inverse of a
    distribution) say nothing of it: a sixteenth of them does, to first order.
    """
    kind, _, recipe = interpretation.partition("-")
    every = kind != "autoscale" or isinstance(RECIPES[recipe], sw.Scalify)
    size = tolerance(interpretation, contracts=True) / (8 if kind != "autoscale" else 6) / 0.45

    def errors(size, seed):
        run = _arrays(FEATURES[name](disturbance(size, every, seed)))
        return np.asarray(list(map(relative_error, run, expected(name)[0])))

    found = np.stack([errors(size, seed) for seed in range(3)])
    if np.isnan(found).any():
        less = 16 * np.stack([errors(size / 16, seed) for seed in range(3)])
        found = np.where(np.isnan(found), less, found)
    return found.max(0)


def disturbance(size, every, seed):
    return lambda f: transform(f, Disturbed(size, every, seed), name="disturbed")


@dataclasses.dataclass(frozen=True)
class Disturbed(Interpretation):
    """Multiplies elements by random numbers between 1 - size and 1 + size."""

    size: float
    every: bool
    seed: int

    def opens(self, equation):
        return True

    def apply(self, state, equation, inputs):
        if equation.name in CONTRACTIONS:
            inputs = [self._disturbed(x, i) for i, x in enumerate(inputs)]
        state, outs = super().apply(state, equation, inputs)
        return state, [self._disturbed(y, 2) for y in outs] if self.every else outs

    def _disturbed(self, x, number):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        key = jax.random.key(100 * self.seed + 10 * number + x.ndim)
        return x * (1 + self.size * jax.random.uniform(key, x.shape, x.dtype, -1, 1))


@pytest.mark.slow
def test_meshes_of_four_devices():
    run_on_devices(4, ON_A_MESH)


ON_A_MESH = """
import sys
sys.path.insert(0, "tests")
import jax
import jax.numpy as jnp
import numpy as np
import scalewise as sw
from jax import lax
from test_features import test_a_feature_is_audited as audited
from test_features import test_a_feature_under_an_interpretation as check

names = (
    "auto_axes", "auto_axes_within_a_loop", "rows_gathered_over_an_explicit_mesh", "explicit_axes",
    "sharding_constraint", "shard_map", "gradient_over_a_mesh",
)
for name in names:
    for interpretation in "autoscale-fp8", "autoscale-mxfp8", "emulate-bf16", "autocast-bfloat16":
        check(name, interpretation)
audited("auto_axes", "bfloat16")
audited("rows_gathered_over_an_explicit_mesh", "bfloat16")
audited("explicit_axes_eagerly", "fp8")

third = jax.devices()[3]
W, X = np.ones((4, 4), np.float32) / 3, np.ones((2, 4), np.float32)
loop = lambda w, x: lax.fori_loop(0, 700, lambda _, x: x @ w / 2, x)
for f in lambda w, x: jnp.tanh(x @ w), loop:
    report = sw.audit(f, "float16", trials=0)
    expected = report(W, X).error.relative
    with jax.default_device(third):
        assert report(W, X).error.relative == expected
    assert report(*jax.device_put((W, X), third)).error.relative == expected
"""


@pytest.mark.filterwarnings(UNROUNDED)
@pytest.mark.parametrize("low", ["bfloat16", *nightly(["fp8", "policy"])])
@pytest.mark.parametrize("name", nightly(INSIDE, but=["cond_differentiated", "pallas_kernel"]))
def test_a_feature_is_audited(name, low):
    def audited(f):
        def call(*args, **kwargs):
            report = sw.audit(f, AUDITS[low], trials=0)(*args, **kwargs)
            assert report.error.non_finite == 0
            allowed = {"bfloat16": 8 * 2**-9, "fp8": 0.4, "policy": 8 * 2**-9}[low]
            allowed = max(allowed, 6 * expected(name)[2])
            if report.error.relative > allowed:
                assert report.error.relative <= 4 * max(sensitivity(name, LIKE[low]))
            return f(*args, **kwargs)

        return call

    FEATURES[name](audited)
