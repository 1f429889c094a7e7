"""``scalify``: what no range, mask, bound, draw or size of a number may change, beside float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

RECIPES = ["scalify", *nightly(["fp16_every_op"])]
BIG = float(jnp.finfo(jnp.float32).max)
Q, X = normal(0, (8, 16)), normal(0, (4, 6)) * 1e-6
TRIANGLE = jnp.tril(jnp.ones((8, 8), bool))
LOSSES = jnp.array([2.0, 1.5, 1.2, 1.4])


def masked(q, m, k):
    scores = (q @ q.T) * 2.0 ** (-2 * k)
    masks = -jnp.inf, float(np.finfo(np.float32).min), -1e9
    return jnp.stack([jax.nn.softmax(jnp.where(m, scores, mask)) @ q for mask in masks])


def mask_added_twice(q):
    out = (1 - TRIANGLE.astype(q.dtype)) * jnp.finfo(q.dtype).min
    return jax.nn.softmax(q @ q.T + out / 2 + out / 2) @ q


def norm(q):
    return (q - q.mean(-1, keepdims=True)) / jnp.sqrt(q.var(-1, keepdims=True) + 1e-30)


def inverse(x, w):
    """The division by zero isn't selected."""
    return w.at[1].set(jnp.where(x == 0, 0.0, 1.0 / x)) + jnp.where(x == 0, 0.0, 1 / x)


def small_results_of_a_large_branch(ok, large, x):
    chosen = jnp.where(ok, jnp.zeros_like(large), large)
    return jnp.concatenate([x, chosen * chosen]), jnp.where(ok, x, large), x - jnp.inf


def lesser(big, small):
    least = jnp.minimum(big, small), jnp.minimum(small, big), jnp.fmin(big, small)
    most = jnp.maximum(-big, -small), jnp.maximum(-small, -big), jnp.maximum(small, -big)
    clipped = jnp.clip(big, -small, small), jnp.clip(small, -big, big)
    return jnp.stack(least), -jnp.stack(most[:2]), jnp.stack([*most[2:], *clipped])


def best(first, losses):
    """Early stopping: the least loss so far."""
    return jax.lax.scan(lambda b, x: (jnp.minimum(b, x), None), first, losses)[0]


def last(first, losses):
    def next_(state):
        return jnp.minimum(state[0], losses[state[1]]), state[1] + 1

    return jax.lax.while_loop(lambda s: s[1] < losses.shape[0], next_, (first, 0))[0]


def online_softmax(scores, values):
    """The largest score so far begins with the least number."""

    def body(carry, block):
        most, total, out = carry
        s, v = block
        new = jnp.maximum(most, s.max())
        p, old = jnp.exp(s - new), jnp.exp(most - new)
        return (new, total * old + p.sum(), out * old + p @ v), None

    init = jnp.float32(-BIG), jnp.float32(0), jnp.zeros(values.shape[-1])
    (_, total, out), _ = jax.lax.scan(body, init, (scores, values))
    return out / total


def along_an_axis(x, first):
    ordered = jnp.sort(x), jax.lax.top_k(x, 3)[0]
    running = jax.lax.cummin(x, axis=1), jax.lax.cummax(x, axis=1)
    return ordered, running, x.min(1, initial=BIG), jnp.minimum(x.min(1), first)


def loss_of_flaxs_vae(logits, y):
    p = jax.nn.log_sigmoid(logits)
    return -jnp.sum(y * p + (1 - y) * jnp.log(-jnp.expm1(p)))


def bounded(x):
    """The bounds' scale is not that of the number beside them, which would round them to 2^21."""
    valid = jnp.where(jnp.abs(x) < 1e9, x, 1.0)
    several = jnp.clip(x, -2, 2), jnp.minimum(x, 6.0), jax.lax.clamp(0.0, x, 3.0), valid
    return jnp.stack([y[0] for y in several])


def transformer(w, x):
    def block(x, w):
        n = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        scores = jnp.where(TRIANGLE, (n @ w[0]) @ (n @ w[1]).T, -1e9)
        x = x + jax.nn.softmax(scores) @ (n @ w[2])
        return x + jax.nn.gelu(x @ w[3]) @ w[4]

    logits = jax.lax.scan(lambda x, w: (block(x, w), None), 0.02 * x, w)[0]
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


LARGE = {
    "sum": lambda x, c: x + c,
    "difference": lambda x, c: c - x,
    "divisor": lambda x, c: 1e6 / (x + c),
    "zeros": lambda x, c: 0 * x + c,
    "matrix": lambda x, c: c / 30 * x + c * jnp.eye(16),
}
FACTORED = {  # L's elements are at most 1 beside U's of the matrix's magnitude, in one array
    "solve": lambda a: jnp.linalg.solve(a, a[:, :2]),
    "inverse": jnp.linalg.inv,
    "lu": jax.scipy.linalg.lu,
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.T),
    "hessenberg": jax.scipy.linalg.hessenberg,
}
MATRIX = normal(0, (8, 8)) / 8 + 3 * jnp.eye(8)
EDGES = jnp.array([jnp.nan, jnp.inf, -jnp.inf, BIG]), jnp.arange(1.0, 5.0)
# function, arguments; the error allowed of each number, and of all as a share of the largest
ROWS = {
    **{f"masks 2^{k}": (functools.partial(masked, k=k), (Q * 2.0**k, TRIANGLE), 0, 5e-3)
       for k in (-40, 0, 40)},
    **{f"norm 2^{k}": (norm, (Q * 2.0**k,), 0, 5e-3) for k in (-40, 0, 40)},
    "mask added twice": (mask_added_twice, (Q,), 0, 1e-2),
    **{f"{name} {c}": (functools.partial(f, c=c), (normal(0, (16, 16)),), 0, 2e-3)
       for name, f in LARGE.items() for c in (3e6, 1e9, 1e30)},
    "17297280 I": (lambda x: jax.scipy.linalg.expm(x / 8), (normal(0, (16, 16)),), 0, 2e-3),
    "divided by 0": (inverse, (jnp.float32(0), jnp.array([3.0, 1.0, 2.0])), 0, 0),
    "divided by 4": (inverse, (jnp.float32(4), jnp.array([3.0, 1.0, 2.0])), 0, 0),
    "a large branch": (
        small_results_of_a_large_branch,
        (jnp.ones(4, bool), jnp.full(4, 1e30), jnp.arange(1.0, 5.0)), 0, 0,
    ),
    "a long sum": (
        lambda x: jnp.sqrt(jnp.sum(x[None].repeat(1000, 0) ** 2)), (jnp.full(100, 16.0),), 2e-3, 0,
    ),
    "a wide contraction": (lambda a: a @ a.T, (jnp.full((2, 70_000), 300.0),), 2e-3, 0),
    **{f"lesser of {big} and {small}": (lesser, (jnp.float32(big), jnp.float32(small)), 2e-3, 0)
       for big in (1e30, 3e38, BIG) for small in (1.19, 1e-5, 1e-30)},
    "minima of no finite numbers": (
        lambda x, y: (jnp.minimum(x, y), jnp.minimum(y, x)), EDGES, 2e-3, 0,
    ),
    "maxima of no finite numbers": (
        lambda x, y: (jnp.maximum(x, y), jnp.maximum(y, x)), EDGES, 0, 1e-3,
    ),
    **{f"{f.__name__} of a carry that begins with the largest number": (
        f, (jnp.float32(BIG), LOSSES), 1e-3, 0) for f in (best, last)},
    **{f"{f.__name__} of a constant carry": (functools.partial(f, jnp.float32(BIG)), (LOSSES,),
       1e-3, 0) for f in (best, last)},
    "online softmax": (online_softmax, (normal(0, (3, 4)) - 20, normal(1, (3, 4, 2))), 0, 0.02),
    "along an axis": (along_an_axis, (X, jnp.float32(BIG)), 1e-3, 0),
    "gradient of a minimum": (
        jax.grad(lambda x, y: jnp.sum(jnp.minimum(x, y) ** 2), (0, 1)),
        (jnp.array([1.0, 2.0, 3.0]), jnp.full(3, BIG)), 1e-3, 0,
    ),
    **{f"factor {c}": (lambda x, c=c: x * c * 1e-36, (jnp.array([3.0, -0.25]),), 2e-3, 0)
       for c in (1e36, 2e36, 8e37)},
    **{f"gradient of {c} x^2": (jax.grad(lambda x, c=c: x * x * c), (jnp.float32(1e-30),), 2e-3, 0)
       for c in (1e36, 8e37)},
    "logarithms of tiny numbers": (
        jax.value_and_grad(loss_of_flaxs_vae),
        (jnp.array([-3, 0.5, 9, 20, -20]), jnp.array([0.0, 1, 1, 1, 0])), 5e-3, 1e-6,
    ),
    "no rule, whole range": (jnp.exp, (jnp.array([8.0, 32]),), 0.05, 0),
    "beside a huge number": (bounded, (jnp.float32([1e18, 0.5, 3.0]),), 0, 0),
}  # fmt: skip
ALL = ROWS | {
    "transformer": (jax.grad(transformer), (normal(1, (3, 5, 16, 16)) / 4, Q), 0, 0.02),
    **{f"{name} 2^{k}": (f, (MATRIX * 2.0**k,), 0, 4e-3)
       for name, f in FACTORED.items() for k in (-40, 40)},
}  # fmt: skip


def compare(got, want, rtol, share):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        top = np.max(np.abs(b), initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=share * np.float64(top))


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [("scalify", ROWS), ("fp16_every_op", ROWS),
     ("fp16", {"mask": ROWS["mask added twice"]}),
     *nightly([("scalify", ALL), ("fp16_every_op", ALL)])],
)  # fmt: skip
def test_a_program_gives_what_float32_gives(recipe, rows):
    def together(t):
        run = jax.jit(lambda given: {name: t(row[0])(*given[name]) for name, row in rows.items()})
        return run({name: row[1] for name, row in rows.items()})

    got, want = together(lambda f: sw.autoscale(f, recipe)), together(lambda f: f)
    wrong = []
    for name, (*_, rtol, share) in rows.items():
        try:
            compare(got[name], want[name], rtol, share)
        except AssertionError as error:
            wrong.append((name, str(error)[:200]))
    assert not wrong


def wide(x):
    low = jnp.where(x.sum() > 0, 1, 2)  # under x64 a weakly typed int64
    clamped = jax.lax.clamp(low.astype(x.dtype), x, jnp.asarray(3, x.dtype))
    drawn = jax.random.truncated_normal(jax.random.key(0), -2, 2, x.shape, x.dtype)
    return clamped, jnp.clip(x, low, 3), drawn * x, jax.nn.softmax(x * x), jnp.sum(x) / x


def beyond_float32(x):
    return (x * 1e60) * (x * 1e100), jnp.sqrt(x * 1e-200), jnp.exp(x + 700) / jnp.exp(x + 699)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("f", [wide, beyond_float32])
def test_a_float64_program_gives_what_it_gives(f, recipe):
    with jax.enable_x64(True):
        x = jnp.arange(1.0, 5.0)
        compare(jax.jit(sw.autoscale(f, recipe))(x), f(x), 3e-3, 0)


def test_numbers_of_any_size_that_are_not_chosen_flush_nothing():
    def f(x, large):
        huge = jnp.ones_like(x)
        for _ in range(6):  # 2^600
            huge = huge * large
        return jnp.where(x < 100, x, huge)

    x = jnp.arange(1.0, 5.0)
    got = jax.jit(sw.autoscale(f, "fp16_every_op"))(x, jnp.full(4, 2.0**100))
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_of_a_minimum_numbers_too_small_for_the_scale_are_the_smallest(recipe):
    x, y = jnp.array([1e30, 2.0, 0.0, -3.0]), jnp.array([5.0, 1e30, 1e-3, 1e30])
    low, high = jax.jit(sw.autoscale(lambda x, y: (jnp.minimum(x, y), jnp.maximum(x, y)), recipe))(
        x, y
    )
    np.testing.assert_array_equal(np.sign(low), [1, 1, 0, -1])
    assert np.abs(low).max() < 1e30 * 2.0**-24
    np.testing.assert_allclose(high[jnp.array([0, 1, 3])], 1e30, rtol=2e-3)
    wild = jax.jit(sw.autoscale(lambda x: jnp.log(jnp.exp(x)) + 1 / jnp.exp(x), recipe))
    assert np.isfinite(wild(jnp.array([-80.0, 0, 80]))).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("x64", [False, *nightly([True])])
def test_the_largest_number_stays_finite(recipe, x64):
    """Rounded to the nearest number of FP16's precision it would be infinite."""

    def f(x):
        same = x, -x, x.max(), jnp.nan_to_num(x * jnp.inf), jnp.minimum(x * jnp.inf, top)
        several = jnp.stack([*map(jnp.squeeze, same), jnp.abs(-top * jnp.ones(())) + 0 * x[0]])
        return several, jnp.log(x), x * 4

    with jax.enable_x64(x64):
        top = float(jnp.finfo(jnp.float64 if x64 else jnp.float32).max)
        got, logarithm, beyond = jax.jit(sw.autoscale(f, recipe))(jnp.array([top]))
        assert got.dtype == (jnp.float64 if x64 else jnp.float32)
        np.testing.assert_allclose(got, [top, -top, top, top, top, top], rtol=1e-3)
        np.testing.assert_allclose(logarithm, np.log(top), rtol=1e-3)
        np.testing.assert_array_equal(beyond, np.inf)


def draws(key):
    """Each of them takes a uniform number near its end to infinity if that is rounded to FP16."""
    names = "normal", "gumbel", "exponential", "logistic", "laplace"
    uniform = jax.random.uniform(key, (65536,))
    return {
        **{name: getattr(jax.random, name)(key, (65536,)) for name in names},
        "truncated": jax.random.truncated_normal(key, -6.0, 6.0, (65536,)),
        "user's own": -jnp.log(-jnp.log1p(-uniform)),
    }


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8"])
def test_random_draws_are_computed_in_float32(recipe):
    key = jax.random.key(1)
    want, got = jax.jit(draws)(key), jax.jit(sw.autoscale(draws, recipe))(key)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_draw_is_rounded_where_it_meets_an_argument(recipe):
    def sample(key, mean, scale):
        def turn(key, _):
            key, own = jax.random.split(key)
            return key, mean + scale * jax.random.normal(own, (512,))

        return jax.lax.scan(turn, key, None, length=4)[1]

    key, mean, scale = jax.random.key(1), jnp.float32(1e3), jnp.float32(1.2e5)
    got = np.asarray(jax.jit(sw.autoscale(sample, recipe))(key, mean, scale))
    want = np.asarray(jax.jit(sample)(key, mean, scale))
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3 * want.std())
    mantissa, _ = np.frexp(got)
    np.testing.assert_array_equal(mantissa * 2**11, np.round(mantissa * 2**11))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_non_finite_element_leaves_the_others_as_they_are(recipe):
    """Forward and backward: the rows without it are those of float32."""

    def both(x, w):
        def several(x):
            h = jnp.tanh(x @ w) * jax.nn.softmax(x) + jnp.sqrt(jnp.abs(x)) / (1 + jnp.exp(x))
            return h - h.mean(-1, keepdims=True)

        y, pull = jax.vjp(several, x)
        return y, pull(jnp.cos(jnp.arange(12.0)).reshape(3, 4))[0]

    x, w = normal(0, (3, 4)), normal(1, (4, 4))
    f, plain = jax.jit(sw.autoscale(both, recipe)), jax.jit(both)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        given = x.at[1, 2].set(bad)
        for got, want in zip(f(given, w), plain(given, w), strict=True):
            ok = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got), ok)
            np.testing.assert_allclose(got[ok], want[ok], rtol=0.01, atol=0.01)
            assert ok[[0, 2]].all()
