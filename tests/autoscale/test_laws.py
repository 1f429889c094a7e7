"""Laws of every rule that carries a scale: equivariance, range, and float64's numbers."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from primitives import FLOATS
from scalewise.autoscaling import RULES, Family

PLAIN = sw.Recipe(sw.Products.short(None, None), residuals=None)
CARRY = {rule.family for rule in RULES.values()} - {
    Family.FALLBACK, Family.COMPARISON, Family.INVARIANT
}  # fmt: skip
# f(2^k x, 2^k y) = 2^(degree k) f(x, y); 1 where it isn't said
DEGREES = {
    "mul": 2, "dot_general": 2, "conv_general_dilated": 2, "square": 2, "integer_pow": 3, "div": 0,
    "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "cbrt": Fraction(1, 3), "reduce_prod": 4,
}  # fmt: skip
# Rows whose programs aren't homogeneous, for a constant or a sine in them, or go through complex.
AFFINE = {"clamp", "name", "device_put", "iota", "add_any", "real", "imag"}
ROWS = [
    name
    for name, (_, arguments) in FLOATS.items()
    if RULES[name].family in CARRY
    and RULES[name].family is not Family.CONTRACTIVE
    and name not in AFFINE
    and any(np.issubdtype(a.dtype, np.floating) for a in arguments)
]


def scaled(arguments, k):
    return [
        sw.ScaledArray.from_exponent(x, k) if np.issubdtype(x.dtype, np.floating) else x
        for x in map(jnp.asarray, arguments)
    ]


def parts(y):
    """Data and exponent of an output; a float without a scale has the exponent 0."""
    if isinstance(y, sw.ScaledArray):
        return np.asarray(y.data), int(y.exponent)
    return np.asarray(y), 0


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sw.ScaledArray))


def test_most_of_the_rules_are_here():
    assert len(ROWS) > 45
    assert {RULES[name].family for name in ROWS} >= CARRY - {Family.CONTRACTIVE}


def test_a_power_of_two_moves_only_the_scale():
    """For every k from -300 to 300, all operands at once: the same bits, the exponent moved."""

    @jax.jit
    def run(k):
        return {
            name: leaves(sw.autoscale(f, PLAIN)(*scaled(arguments, k)))
            for name, (f, arguments) in FLOATS.items()
            if name in ROWS
        }

    period = math.lcm(*(Fraction(degree).denominator for degree in DEGREES.values()))
    bases = [run(jnp.int32(r)) for r in range(period)]
    for k in range(-300, 301):
        remainder = k % period
        for name, outs in run(jnp.int32(k)).items():
            degree = Fraction(DEGREES.get(name, 1))
            for y, base in zip(outs, bases[remainder][name], strict=True):
                if not isinstance(y, sw.ScaledArray):  # indices, truth values
                    np.testing.assert_array_equal(y, base, err_msg=name)
                    continue
                assert int(y.exponent) - int(base.exponent) == degree * (k - remainder), name
                if k % 10 == 0 or degree.denominator > 1:
                    np.testing.assert_array_equal(y.data, base.data, err_msg=name)


def test_a_chain_that_leaves_the_range_and_returns():
    """Products and quotients whose exponents wander through thousands of binades."""
    rng = np.random.default_rng(0)

    def chain(xs, exponents, signs):
        y = jnp.float32(1)
        for i, sign in enumerate(signs):
            x = sw.ScaledArray.from_exponent(xs[i], exponents[i])
            y = sw.autoscale(lax.mul if sign > 0 else lax.div, PLAIN)(y, x)
        return y

    signs = tuple(rng.choice([-1, 1], 12))
    run = jax.jit(lambda xs, exponents: chain(xs, exponents, signs))
    for _ in range(50):
        xs = rng.uniform(1, 2, 12).astype(np.float32)
        exponents = rng.integers(-300, 301, 12)
        y = run(jnp.asarray(xs), jnp.asarray(exponents, jnp.int32))
        want = math.prod(float(x) ** int(s) for x, s in zip(xs, signs, strict=True))
        moved = int(y.exponent) - int(np.dot(exponents, signs))
        np.testing.assert_allclose(float(y.data) * 2.0**moved, want, rtol=12 * 2.0**-23)


ELEMENTS = {
    "abs": (lax.abs, 1), "neg": (lax.neg, 1), "square": (lax.square, 1), "cbrt": (lax.cbrt, 1),
    "cube": (lambda x: x**3, 1), "reciprocal": (lambda x: x**-1, 1), "sign": (lax.sign, 1),
    "sqrt": (lambda x: lax.sqrt(lax.abs(x)), 1), "rsqrt": (lambda x: lax.rsqrt(lax.abs(x)), 1),
    "sin": (lax.sin, 1), "tanh": (lax.tanh, 1), "atan": (lax.atan, 1), "erf": (lax.erf, 1),
    "asinh": (lax.asinh, 1), "add": (lax.add, 2), "sub": (lax.sub, 2), "mul": (lax.mul, 2),
    "div": (lax.div, 2), "max": (lax.max, 2), "min": (lax.min, 2), "rem": (lax.rem, 2),
    "select": (lambda x, y: jnp.where(x > y, x, y), 2),
}  # fmt: skip
SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 2.0**-30, -(2.0**30)]


def test_elementwise_rules_give_float64s_numbers():
    """Scales far apart, special values: finite where float64 is, and within 2^-20 of it.

    Or, since all elements share one scale, within 2^-120 of the largest.
    """
    rng = np.random.default_rng(1)
    data = np.concatenate([np.float32(SPECIAL), rng.standard_normal(21).astype(np.float32)])
    pairs = [data, np.roll(data, 7)]

    def every(t):
        return jax.jit(lambda xs: {name: t(f)(*xs[:n]) for name, (f, n) in ELEMENTS.items()})

    run, exactly = every(lambda f: sw.autoscale(f, PLAIN)), every(lambda f: f)
    for exponents in ([0, 0], [-300, -280], [280, 300], [-60, 60], [60, -60], [-9, 0]):
        behind = map(
            sw.ScaledArray.from_exponent, map(jnp.asarray, pairs), map(jnp.int32, exponents)
        )
        found = run(list(behind))
        wide = [np.ldexp(x.astype(np.float64), e) for x, e in zip(pairs, exponents, strict=True)]
        with jax.enable_x64(True), np.errstate(all="ignore"):
            wanted = jax.tree.map(np.asarray, exactly([jnp.asarray(x, jnp.float64) for x in wide]))
        for name, want in wanted.items():
            if name in ("sin", "asinh") and exponents[0] > 0:
                continue  # computed on plain float32 numbers: the last bits' sine, and infinity
            got = np.ldexp(parts(found[name])[0].astype(np.float64), parts(found[name])[1])
            finite = np.isfinite(want)
            floor = 2.0**-120 * np.abs(want[finite]).max()
            assert np.isfinite(got[finite]).all(), (name, exponents)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
            error = np.abs(got[finite] - want[finite])
            assert (error <= 2.0**-20 * np.abs(want[finite]) + floor).all(), (name, exponents)


@pytest.mark.parametrize("recipe", ["fp16", "scalify"])
def test_largest_elements_are_found_among_slices_with_exponents_of_their_own(recipe):
    def grown(x):
        ys = lax.scan(lambda c, _: (c * 2.0**20, c * 2.0**20), x, None, length=3)[1]
        return jnp.argmax(ys, 0), jnp.argmin(ys, 0), jnp.sign(ys)

    x = jnp.array([1.0, -1.5])
    got = sw.autoscale(grown, recipe)(sw.ScaledArray.from_exponent(x, -5))
    for y, want in zip(got, grown(x), strict=True):
        y = y.value() if isinstance(y, sw.ScaledArray) else y
        np.testing.assert_array_equal(y, want)
