"""Features of JAX under every interpretation, against the plain float32 run.

An error may be six times the root mean square error of one rounding to the interpretation's widest
rounding step, since a result has gone through a few products; more where `DEEP` says so. A program
without contractions is as exact as its residuals.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from devices import run_on_devices
from features import FEATURES, OUTSIDE
from scalewise.formats import BlockFormat, Format
from scalewise.formats import format as format_
from scalewise.interpret import CONTRACTIONS, all_equations

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
AUDITS = {"bfloat16": "bfloat16", "fp8": RECIPES["fp8"], "policy": "p=f32,c=bf16,o=f32"}
# Features whose errors are larger multiples of a rounding's: derivatives of derivatives, loops that
# round a state at each iteration, long products, and means of numbers that cancel.
DEEP = {
    "gradient_of_gradient": 4, "gradient_of_gradient_inside": 6, "hessian": 4, "hessian_inside": 4,
    "hessian_vector_product": 4, "gradient_of_a_mapped_gradient": 4,
    "cumulative_products_and_sums_backwards": 2,
    "polynomials_and_interpolation": 2,  # a cubic's relative condition number is 3
    "statistics_of_haiku": 4,
    "reductions": 2,  # a product of 32 rounded numbers
    "transformed_twice": 2,  # the outer transformation rounds what the inner one has rounded
}  # fmt: skip


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
    operands = [recipe.forward, recipe.backward, recipe.residuals]
    for pair in recipe.products.formats() if recipe.products else ():
        operands += pair
    return [f for f in operands if isinstance(f, Format | BlockFormat)]


def tolerance(interpretation, contracts):
    kind, _, name = interpretation.partition("-")
    if kind != "autoscale":
        return 8 * rounding_error(format_(name)) + 1e-6
    recipe = RECIPES[name]
    formats = formats_of(recipe) if contracts else [recipe.residuals]
    return 6 * max(map(rounding_error, formats))


def assert_like(got, want, allowed):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.dtype.kind not in "fcV":
        np.testing.assert_array_equal(got, want)
    elif want.size:
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        got, want = got[finite].astype(wide), want[finite].astype(wide)
        assert np.linalg.norm(got - want) <= allowed * np.linalg.norm(want) + 1e-6


def skip_unavailable(name, interpretation):
    if name == "matrix_exponential" and interpretation in ("autocast-float16", "emulate-fp16"):
        pytest.skip(
            "its coefficients, up to 6e16, are beyond FP16's range, which has no scales here"
        )
    if name == "optimizer_step" and interpretation.startswith("emulate"):
        pytest.skip("Adam's 1 - 0.999 is 0 in BF16, and its epsilon in FP16, if all is rounded")


@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|no units|has no rule)")
@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.thorough(keep=12, gate=24)
def test_a_feature_under_an_interpretation(name, interpretation):
    skip_unavailable(name, interpretation)
    want, contracts, own = expected(name)
    got = _arrays(FEATURES[name](INTERPRETATIONS[interpretation]))
    allowed = max(tolerance(interpretation, contracts), 6 * own) * DEEP.get(name, 1)
    if interpretation in WITHOUT_SCALES:
        allowed = 2
    for a, b in zip(got, want, strict=True):
        assert_like(a, b, allowed)


@pytest.mark.thorough
def test_meshes_of_four_devices():
    run_on_devices(4, ON_A_MESH)


ON_A_MESH = """
import sys
sys.path.insert(0, "tests")
from test_features import test_a_feature_under_an_interpretation as check

names = "auto_axes", "explicit_axes", "sharding_constraint", "shard_map", "gradient_over_a_mesh"
for name in names:
    for interpretation in "autoscale-fp8", "autoscale-mxfp8", "emulate-bf16", "autocast-bfloat16":
        check(name, interpretation)
"""


@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|no units|has no rule)")
@pytest.mark.parametrize("low", AUDITS)
@pytest.mark.parametrize("name", [n for n in FEATURES if n not in OUTSIDE])
@pytest.mark.thorough(keep=2, gate=6)
def test_a_feature_is_audited(name, low):
    if name == "optimizer_step" and low == "bfloat16":
        pytest.skip("Adam's 1 - 0.999 is 0 in BF16")
    if name == "explicit_axes":
        pytest.skip(
            "it calls jax.jit on the transformed function, and an audit refuses traced arguments"
        )

    def audited(f):
        def call(*args, **kwargs):
            report = sw.audit(f, AUDITS[low], trials=0)(*args, **kwargs)
            assert report.error.non_finite == 0
            allowed = {"bfloat16": 8 * 2**-9, "fp8": 0.4, "policy": 8 * 2**-9}[low]
            allowed = max(allowed, 6 * expected(name)[2])
            assert report.error.relative <= allowed * DEEP.get(name, 1)
            return f(*args, **kwargs)

        return call

    FEATURES[name](audited)
