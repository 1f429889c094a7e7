"""Gaussian processes, differential equations, geometry on Earth, geometry of molecules."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://github.com/SheffieldML/GPy/issues/660", "float32", "cancellation precision",
    "gram = jnp.exp(-0.5 * (x[:, None] - x) ** 2)",
    "cross = jnp.exp(-0.5 * (new[:, None] - x) ** 2)",
    "explained = cross * jnp.linalg.solve(gram", "variance = 1.0 - jnp.sum(explained, axis=-1)",
    args=lambda: (jnp.arange(12.0) / 2.0, jnp.arange(5.0) + 0.25),
)  # fmt: skip
def posterior_variance(x, new):
    """The variance of a process between dense observations, which is nearly zero."""
    gram = jnp.exp(-0.5 * (x[:, None] - x) ** 2)
    cross = jnp.exp(-0.5 * (new[:, None] - x) ** 2)
    explained = cross * jnp.linalg.solve(gram + 1e-6 * jnp.eye(12, dtype=x.dtype), cross.T).T
    variance = 1.0 - jnp.sum(explained, axis=-1)
    return variance


@failing(
    "https://github.com/pyro-ppl/pyro/issues/1863", "fp16", "underflow",
    "return 0.5 * jnp.log(jnp.linalg.det(covariance))",
    args=lambda: (0.02 * jnp.eye(12) + 0.005,),
)  # fmt: skip
def gaussian_entropy(covariance):
    return 0.5 * jnp.log(jnp.linalg.det(covariance))


def gaussian_entropy_fixed(covariance):
    return 0.5 * jnp.linalg.slogdet(covariance)[1]


@failing(
    "https://github.com/patrick-kidger/diffrax/issues/223", "bf16", "swamping precision",
    "state = state + step / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)",
    args=lambda: (normal(8, 2, mean=1.0),), change=True,
)  # fmt: skip
def runge_kutta(state):
    """An oscillator, by small steps of fourth order."""

    def slope(y):
        return jnp.stack([y[:, 1], -y[:, 0]], axis=-1)

    def body(state, _):
        step = 0.001
        k1 = slope(state)
        k2 = slope(state + 0.5 * step * k1)
        k3 = slope(state + 0.5 * step * k2)
        k4 = slope(state + step * k3)
        state = state + step / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
        return state, None

    return jax.lax.scan(body, state, None, length=100)[0]


@failing(
    "https://github.com/rtqichen/torchdiffeq/issues/72", "fp16", "underflow nan overflow",
    "scale = 1e-9 + 1e-3 * jnp.abs(y)",
    args=lambda: (jnp.where(jnp.arange(16) % 8 == 5, 0.0, 1.0) * normal(16),
                  jnp.where(jnp.arange(16) % 8 == 5, 0.0, 2.0**-10) * normal(16, seed=1)),
)  # fmt: skip
def error_ratio(y, error):
    """The error of a step beside its tolerance; two components don't move."""
    scale = 1e-9 + 1e-3 * jnp.abs(y)
    return jnp.sqrt(jnp.mean((error / scale) ** 2))


@failing(
    "https://github.com/geopy/geopy/issues/50", "float32", "cancellation precision",
    "cosine = jnp.sin(a) * jnp.sin(b) + jnp.cos(a) * jnp.cos(b) * jnp.cos(turn)",
    "return 6371.0 * jnp.arccos(cosine)",
    args=lambda: (uniform(16, low=0.5, high=1.0), uniform(16, low=0.5, high=1.0) + 2e-4,
                  uniform(16, seed=2, high=1e-4)),
)  # fmt: skip
def distance_on_earth(a, b, turn):
    """Kilometres between near places, by the law of cosines."""
    cosine = jnp.sin(a) * jnp.sin(b) + jnp.cos(a) * jnp.cos(b) * jnp.cos(turn)
    return 6371.0 * jnp.arccos(cosine)


def distance_on_earth_fixed(a, b, turn):
    half = jnp.sin(0.5 * (a - b)) ** 2 + jnp.cos(a) * jnp.cos(b) * jnp.sin(0.5 * turn) ** 2
    return 6371.0 * 2.0 * jnp.arcsin(jnp.sqrt(half))


@failing(
    "https://people.eecs.berkeley.edu/~wkahan/Triangle.pdf", "float32", "cancellation precision",
    "return jnp.sqrt(s * (s - a) * (s - b) * (s - c))", "s = 0.5 * (a + b + c)",
    args=lambda: needles(),
)  # fmt: skip
def area_of_needles(a, b, c):
    """Heron's formula, of triangles whose sides nearly add up."""
    s = 0.5 * (a + b + c)
    return jnp.sqrt(s * (s - a) * (s - b) * (s - c))


def needles():
    c = 2.0 + uniform(16)
    b = 3.0 + uniform(16, seed=1)
    return b + c - jnp.float32(2e-5) * (1.0 + uniform(16, seed=2)), b, c


def area_of_needles_fixed(a, b, c):
    """Kahan's, for a >= b >= c."""
    return 0.25 * jnp.sqrt((a + (b + c)) * (c - (a - b)) * (c + (a - b)) * (a + (b - c)))


@failing(
    "https://github.com/kornia/kornia/issues/3966", "fp16", "underflow nan overflow",
    "length = jnp.maximum(jnp.sqrt(jnp.sum(vector**2, axis=-1, keepdims=True)), 1e-8)",
    args=lambda: (jnp.abs(normal(6, 1)) + 1.0,
                  normal(6, 3, seed=1) * (jnp.arange(6) != 2)[:, None]),
)  # fmt: skip
def quaternion_logarithm(real, vector):
    length = jnp.maximum(jnp.sqrt(jnp.sum(vector**2, axis=-1, keepdims=True)), 1e-8)
    return vector * jnp.arctan2(length, real) / length


@failing(
    "https://github.com/jax-md/jax-md/issues/147", "fp16", "overflow nan",
    "repelled = inverse**12", "return 4e-3 * (repelled - inverse**6)",
    args=lambda: (uniform(40, low=0.33, high=0.9),),
)  # fmt: skip
def lennard_jones(distance):
    inverse = 0.9 / distance
    repelled = inverse**12
    return 4e-3 * (repelled - inverse**6)


def lennard_jones_fixed(distance):
    sixth = (0.9 / distance) ** 6
    return 4e-3 * sixth * (sixth - 1.0)


@failing(
    "https://github.com/astropy/astropy/issues/2563", "fp16", "cancellation swamping nan overflow",
    "return frequency**3 / (jnp.exp(frequency / temperature) - 1.0)",
    args=lambda: (uniform(32, low=0.01, high=0.05), jnp.full(32, 32.0)),
)  # fmt: skip
def planck_low_frequencies(frequency, temperature):
    """The Rayleigh-Jeans end of a black body's spectrum."""
    frequency = 4.0 * frequency
    return frequency**3 / (jnp.exp(frequency / temperature) - 1.0)


def planck_low_frequencies_fixed(frequency, temperature):
    frequency = 4.0 * frequency
    return frequency**3 / jnp.expm1(frequency / temperature)


@failing(
    "https://github.com/google-deepmind/optax/issues/1163", "float32",
    "precision swamping cancellation",
    "grown = (1.0 + rate / 525600.0) ** 525600.0",
    args=lambda: (uniform(16, low=0.02, high=0.08),),
)  # fmt: skip
def compounded_by_minute(rate):
    grown = (1.0 + rate / 525600.0) ** 525600.0
    return grown - 1.0


def compounded_by_minute_fixed(rate):
    return jnp.expm1(525600.0 * jnp.log1p(rate / 525600.0))


@failing(
    "https://github.com/jax-ml/jax/issues/27482", "float32", "cancellation",
    "return (1.0 - jnp.cos(angle)) / angle**2",
    args=lambda: (uniform(32, low=1e-3, high=4e-3),),
)  # fmt: skip
def rodrigues_factor(angle):
    """The second factor of Rodrigues' formula, for a small rotation."""
    return (1.0 - jnp.cos(angle)) / angle**2


def rodrigues_factor_fixed(angle):
    return 2.0 * (jnp.sin(0.5 * angle) / angle) ** 2


@failing(
    "https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html", "float32",
    "cancellation precision",
    "return (slope(w + step * v) - slope(w)) / step", "return jax.grad(",
    args=lambda: (normal(6, 4, scale=0.4), normal(6, 4, seed=1), normal(20, 6, seed=2)),
)  # fmt: skip
def curvature_by_differences(w, v, x):
    """A Hessian's product with a vector, from the difference of two gradients."""
    step = 2.0**-16

    def slope(w):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    return (slope(w + step * v) - slope(w)) / step


def curvature_by_differences_fixed(w, v, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))
    return jax.jvp(gradient, (w,), (v,))[1]


@failing(
    "https://github.com/lukasc-ch/pna/issues/5", "bf16", "cancellation nan",
    "spread = jnp.sqrt(jax.nn.relu(squares - mean**2) + 1e-5)",
    "squares = jax.ops.segment_sum(", "mean = jax.ops.segment_sum(",
    args=lambda: (8.0 + 0.25 * normal(64, 4), integers(64, high=8)),
)  # fmt: skip
def neighbours_deviation(features, receivers):
    """The standard deviation over neighbours of principal neighbourhood aggregation."""
    count = jax.ops.segment_sum(jnp.ones(64, features.dtype), receivers, 8)[:, None]
    mean = jax.ops.segment_sum(features, receivers, 8) / count
    squares = jax.ops.segment_sum(features**2, receivers, 8) / count
    spread = jnp.sqrt(jax.nn.relu(squares - mean**2) + 1e-5)
    return spread


def neighbours_deviation_fixed(features, receivers):
    count = jax.ops.segment_sum(jnp.ones(64, features.dtype), receivers, 8)[:, None]
    mean = jax.ops.segment_sum(features, receivers, 8) / count
    away = features - mean[receivers]
    return jnp.sqrt(jax.ops.segment_sum(away**2, receivers, 8) / count + 1e-5)
