"""Estimators: probabilities, orbits, energies, geometry, and the steps of optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://github.com/manodeep/Corrfunc/issues/296", "float32", "cancellation",
    "cosine = 1.0 - 0.5 * jnp.sum((a - b) ** 2, axis=-1)",
    args=lambda: two_directions(2e-3),
)  # fmt: skip
def chord_separation(a, b):
    """Angles between unit vectors, from the distances between them."""
    cosine = 1.0 - 0.5 * jnp.sum((a - b) ** 2, axis=-1)
    return jnp.arccos(cosine)


def two_directions(apart):
    a = np.asarray(normal(32, 3), np.float64)
    b = a + apart * np.asarray(normal(32, 3, seed=1), np.float64)
    return tuple((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (a, b))


def chord_separation_fixed(a, b):
    return 2.0 * jnp.arcsin(0.5 * jnp.sqrt(jnp.sum((a - b) ** 2, axis=-1)))


@failing(
    "https://github.com/torchmd/torchmd-net/pull/275", "float32", "cancellation swamping",
    "total = jnp.sum(atomic[kinds] + bonds, axis=-1)", "return total - jnp.sum(atomic[kinds]",
    args=lambda: (np.float32([-13.6, -1029.9, -1485.3, -2042.6]), integers(8, 60, high=4),
                  normal(8, 60, seed=1, scale=0.02)),
)  # fmt: skip
def binding_energy(atomic, kinds, bonds):
    total = jnp.sum(atomic[kinds] + bonds, axis=-1)
    return total - jnp.sum(atomic[kinds], axis=-1)


def binding_energy_fixed(atomic, kinds, bonds):
    return jnp.sum(bonds, axis=-1)


@failing(
    "https://doi.org/10.1007/s00180-011-0232-x", "float32", "cancellation",
    "return 1.0 / jnp.tanh(concentration) - 1.0 / concentration",
    args=lambda: (uniform(24, low=2e-3, high=2e-2),),
)  # fmt: skip
def resultant_length(concentration):
    """The mean resultant length of a von Mises-Fisher distribution in three dimensions."""
    return 1.0 / jnp.tanh(concentration) - 1.0 / concentration


def resultant_length_fixed(concentration):
    square = concentration * concentration
    return concentration * (1.0 / 3.0 - square / 45.0 + square * square * (2.0 / 945.0))


@failing(
    "https://www.tensorflow.org/probability/api_docs/python/tfp/math/softplus_inverse", "fp16",
    "overflow nan",
    "return jnp.log(jnp.exp(scale) - 1.0)",
    args=lambda: (uniform(24, low=2.0, high=30.0),),
)  # fmt: skip
def inverse_softplus(scale):
    return jnp.log(jnp.exp(scale) - 1.0)


def inverse_softplus_fixed(scale):
    return scale + jnp.log(-jnp.expm1(-scale))


@failing(
    "https://docs.sciml.ai/Catalyst/stable/", "fp16", "overflow nan",
    "active = level**4 / (half**4 + level**4)",
    args=lambda: (uniform(24, low=5.0, high=60.0), uniform(24, seed=1, low=10.0, high=30.0)),
)  # fmt: skip
def hill_response(level, half):
    """Two Euler steps of a gene's expression with a steep Hill function."""

    def body(level, _):
        active = level**4 / (half**4 + level**4)
        return level + 0.1 * (20.0 * active - 0.5 * level), None

    return jax.lax.scan(body, level, None, length=2)[0]


def hill_response_fixed(level, half):
    def body(level, _):
        active = 1.0 / (1.0 + (half / level) ** 4)
        return level + 0.1 * (20.0 * active - 0.5 * level), None

    return jax.lax.scan(body, level, None, length=2)[0]


@failing(
    "https://github.com/pytorch/pytorch/pull/178123", "float32", "overflow nan",
    "variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)",
    "return gain * (x - mean) / jnp.sqrt(variance + 1e-5)",
    args=lambda: (normal(8, 32, scale=1e25, mean=1e25), normal(32, seed=1)),
)  # fmt: skip
def norm_of_astronomical(x, gain):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return gain * (x - mean) / jnp.sqrt(variance + 1e-5)


def norm_of_astronomical_fixed(x, gain):
    x = x / jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return gain * (x - mean) / jnp.sqrt(jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True))


@failing(
    "https://optax.readthedocs.io/en/latest/api/transformations.html", "fp16",
    "underflow overflow nan",
    "curvature = jnp.dot(change, turn)", "scale = curvature / jnp.dot(turn, turn)",
    "alpha = jnp.dot(change, direction) / curvature",
    args=lambda: (normal(32, seed=2), normal(32, scale=1e-4), uniform(32, seed=1, high=2.0)),
)  # fmt: skip
def secant_direction(gradient, change, hessian):
    """The direction of L-BFGS with one pair in memory, after a small step."""
    turn = hessian * change
    curvature = jnp.dot(change, turn)
    direction = gradient
    alpha = jnp.dot(change, direction) / curvature
    direction = direction - alpha * turn
    scale = curvature / jnp.dot(turn, turn)
    direction = scale * direction
    return direction + (alpha - jnp.dot(turn, direction) / curvature) * change


def secant_direction_fixed(gradient, change, hessian):
    change = change / jnp.max(jnp.abs(change))
    turn = hessian * change
    curvature = jnp.dot(change, turn)
    alpha = jnp.dot(change, gradient) / curvature
    direction = (curvature / jnp.dot(turn, turn)) * (gradient - alpha * turn)
    return direction + (alpha - jnp.dot(turn, direction) / curvature) * change


@failing(
    "https://arxiv.org/abs/2302.12022", "bf16", "swamping precision",
    "point = point - rate * gradient", "moved = jnp.max(jnp.abs(point - start))",
    args=lambda: (normal(16, mean=4.0), normal(16, seed=1, mean=4.0)),
)  # fmt: skip
def distance_over_gradients(start, target):
    """Steps whose size is the distance covered so far, which begins with very little."""

    def body(state, _):
        point, reach, norms = state
        gradient = point - target
        norms = norms + jnp.sum(gradient**2)
        rate = reach / jnp.sqrt(norms)
        point = point - rate * gradient
        moved = jnp.max(jnp.abs(point - start))
        return (point, jnp.maximum(reach, moved), norms), None

    zero = jnp.zeros((), start.dtype)
    state = jax.lax.scan(body, (start, zero + 1e-3, zero), None, length=24)[0]
    return state[0] - start


def distance_over_gradients_fixed(start, target):
    def body(state, _):
        covered, reach, norms = state
        gradient = (start - target) + covered
        norms = norms + jnp.sum(gradient**2)
        covered = covered - reach / jnp.sqrt(norms) * gradient
        return (covered, jnp.maximum(reach, jnp.max(jnp.abs(covered))), norms), None

    zero = jnp.zeros((), start.dtype)
    state = jax.lax.scan(body, (start - start, zero + 1e-3, zero), None, length=24)[0]
    return state[0]


@failing(
    "https://doi.org/10.1137/1.9780898718027", "float32", "cancellation",
    "return mass * (1.0 / jnp.sqrt(1.0 - speed * speed) - 1.0)",
    args=lambda: (uniform(24, low=1e-3, high=4e-3), uniform(24, seed=1, low=1.0, high=9.0)),
)  # fmt: skip
def kinetic_energy(speed, mass):
    """Relativistic energy of motion, at speeds in units of light's."""
    return mass * (1.0 / jnp.sqrt(1.0 - speed * speed) - 1.0)


def kinetic_energy_fixed(speed, mass):
    root = jnp.sqrt(1.0 - speed * speed)
    return mass * speed * speed / (root * (1.0 + root))


@failing(
    "https://arxiv.org/abs/1508.02699", "float32", "cancellation",
    "wrong = anomaly - eccentricity * jnp.sin(anomaly) - mean",
    "slope = 1.0 - eccentricity * jnp.cos(anomaly)",
    args=lambda: (uniform(16, low=1e-6, high=4e-6), 1.0 - uniform(16, seed=1, low=1e-6, high=1e-5)),
)  # fmt: skip
def near_parabolic_orbit(mean, eccentricity):
    """Newton's method for Kepler's equation."""

    def body(anomaly, _):
        wrong = anomaly - eccentricity * jnp.sin(anomaly) - mean
        slope = 1.0 - eccentricity * jnp.cos(anomaly)
        return anomaly - wrong / slope, None

    return jax.lax.scan(body, (6.0 * mean) ** (1.0 / 3.0), None, length=8)[0]


def near_parabolic_orbit_fixed(mean, eccentricity):
    rest = 1.0 - eccentricity

    def body(anomaly, _):
        square = anomaly * anomaly
        cubic = anomaly * square * (1.0 / 6.0 - square / 120.0 + square * square / 5040.0)
        wrong = rest * anomaly + eccentricity * cubic - mean
        half = jnp.sin(0.5 * anomaly)
        return anomaly - wrong / (rest + 2.0 * eccentricity * half * half), None

    return jax.lax.scan(body, (6.0 * mean) ** (1.0 / 3.0), None, length=8)[0]


@failing(
    "https://arxiv.org/abs/0907.4010", "float32", "cancellation nan underflow",
    "mass = jax.scipy.special.ndtr(high) - jax.scipy.special.ndtr(low)",
    args=lambda: (uniform(24, low=3.5, high=5.0), uniform(24, seed=1, low=5.5, high=7.0)),
)  # fmt: skip
def truncated_normal(low, high):
    """The logarithm of a normal distribution's mass between two points of its tail."""
    mass = jax.scipy.special.ndtr(high) - jax.scipy.special.ndtr(low)
    return jnp.log(mass)


def truncated_normal_fixed(low, high):
    return jnp.log(jax.scipy.special.ndtr(-low) - jax.scipy.special.ndtr(-high))


@failing(
    "https://arxiv.org/abs/1705.08039", "float32", "cancellation precision",
    "return jnp.arccosh(1.0 + 2.0 * apart / (inside_u * inside_v))",
    args=lambda: (normal(32, 4, scale=0.2), 1e-3 * normal(32, 4, seed=1)),
)  # fmt: skip
def hyperbolic_distance(u, step):
    """Distances of near points on the Poincare ball."""
    v = u + step
    apart = jnp.sum((u - v) ** 2, axis=-1)
    inside_u = 1.0 - jnp.sum(u * u, axis=-1)
    inside_v = 1.0 - jnp.sum(v * v, axis=-1)
    return jnp.arccosh(1.0 + 2.0 * apart / (inside_u * inside_v))


def hyperbolic_distance_fixed(u, step):
    v = u + step
    inside = (1.0 - jnp.sum(u * u, axis=-1)) * (1.0 - jnp.sum(v * v, axis=-1))
    return 2.0 * jnp.arcsinh(jnp.sqrt(jnp.sum(step * step, axis=-1) / inside))


@failing(
    "https://github.com/kscalelabs/minppo/pull/19", "fp16", "underflow nan overflow",
    "updates, _ = optimizer.update(gradients, optimizer.init(params), params)",
    args=lambda: ({"in": normal(8, 16, scale=0.3), "out": normal(16, 4, seed=1, scale=0.25)},
                  normal(16, 8, seed=2), normal(16, 4, seed=3)),
)  # fmt: skip
def belief_step(params, x, y):
    """A step of AdaBelief with the epsilons of its paper."""

    def loss(params):
        return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)

    optimizer = optax.adabelief(1e-2)
    gradients = jax.grad(loss)(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return updates


def belief_step_fixed(params, x, y):
    def loss(params):
        return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)

    optimizer = optax.adabelief(1e-2, eps=6.2e-5)
    gradients = jax.tree.map(lambda g: 64.0 * g, jax.grad(loss)(params))
    return optimizer.update(gradients, optimizer.init(params), params)[0]
