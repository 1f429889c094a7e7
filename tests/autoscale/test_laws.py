"""A law of every rule that carries a scale: a power of two moves only the scale."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw
from primitives import FLOATS
from scalewise.autoscaling import RULES, Family

NEVER = sw.Scalify(rescale="never")
CARRY = {rule.family for rule in RULES.values()} - {
    Family.FALLBACK, Family.COMPARISON, Family.INVARIANT
}  # fmt: skip
# f(2^k x, 2^k y) = 2^(degree k) f(x, y); 1 where it isn't said
DEGREES = {
    "mul": 2, "dot_general": 2, "conv_general_dilated": 2, "square": 2, "integer_pow": 3, "div": 0,
    "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "cbrt": Fraction(1, 3),
}  # fmt: skip
# Rows whose programs aren't homogeneous, for a constant or a sine in them, or go through plain
# numbers.
AFFINE = {
    "clamp", "name", "device_put", "iota", "add_any", "real", "imag", "reduce_prod"
}  # fmt: skip
ROWS = [
    name
    for name, (_, arguments) in FLOATS.items()
    if RULES[name].family in CARRY
    and RULES[name].family is not Family.CONTRACTIVE
    and name not in AFFINE
    and any(np.issubdtype(a.dtype, np.floating) for a in arguments)
]


def scaled(arguments, scale):
    return [
        sw.ScaledArray(x, scale) if np.issubdtype(x.dtype, np.floating) else x
        for x in map(jnp.asarray, arguments)
    ]


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sw.ScaledArray))


def test_most_of_the_rules_are_here():
    assert len(ROWS) > 45
    assert {RULES[name].family for name in ROWS} >= CARRY - {Family.CONTRACTIVE}


def test_a_power_of_two_moves_only_the_scale():
    @jax.jit
    def run(scale):
        return {
            name: leaves(sw.autoscale(f, NEVER)(*scaled(arguments, scale)))
            for name, (f, arguments) in FLOATS.items()
            if name in ROWS
        }

    period = math.lcm(*(Fraction(degree).denominator for degree in DEGREES.values()))
    bases = [run(jnp.float32(2.0**r)) for r in range(period)]
    for k in range(-30, 31):
        remainder = k % period
        for name, outs in run(jnp.float32(2.0**k)).items():
            degree = Fraction(DEGREES.get(name, 1))
            for y, base in zip(outs, bases[remainder][name], strict=True):
                if not isinstance(y, sw.ScaledArray):  # indices, truth values
                    np.testing.assert_array_equal(y, base, err_msg=name)
                    continue
                moved = np.log2(float(y.scale)) - np.log2(float(base.scale))
                assert moved == degree * (k - remainder), (name, k)
                np.testing.assert_array_equal(y.data, base.data, err_msg=name)


def test_largest_elements_are_found_among_slices_with_exponents_of_their_own():
    def grown(x):
        ys = lax.scan(lambda c, _: (c * 2.0**20, c * 2.0**20), x, None, length=3)[1]
        return jnp.argmax(ys, 0), jnp.argmin(ys, 0), jnp.sign(ys)

    x = jnp.array([1.0, -1.5])
    got = sw.autoscale(grown, "scalify")(sw.ScaledArray(x, 2.0**-5))
    for y, want in zip(got, grown(x * 2.0**-5), strict=True):
        y = y.value() if isinstance(y, sw.ScaledArray) else y
        np.testing.assert_array_equal(y, want)
