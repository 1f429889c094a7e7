"""Distances, angles, intersections."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


def crowd(count, seed=0, spread=0.3, centre=50.0):
    return centre + normal(count, 3, seed=seed, scale=spread)


@failing(
    "https://github.com/elixir-nx/scholar/pull/354", "float32", "cancellation",
    "squared = xx[:, None] + yy[None, :] - 2.0 * (x @ y.T)", "xx, yy = jnp.sum(x * x, axis=-1)",
    args=lambda: (crowd(16, 0, 1.0, 2000.0), crowd(12, 1, 1.0, 2000.0)),
)  # fmt: skip
def expanded_distances(x, y):
    xx, yy = jnp.sum(x * x, axis=-1), jnp.sum(y * y, axis=-1)
    squared = xx[:, None] + yy[None, :] - 2.0 * (x @ y.T)
    return jnp.sqrt(jnp.maximum(squared, 0.0))


def expanded_distances_fixed(x, y):
    centre = x[0]
    x, y = x - centre, y - centre
    squared = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return jnp.sqrt(squared)


@failing(
    "https://github.com/JuliaStats/Distances.jl/pull/161",
    "bf16",
    "cancellation",
    "norms = jnp.sum(x**2, axis=1)",
    "gram = x @ x.T",
    "norms[:, None] + norms[None, :] - 2.0 * gram",
    args=lambda: (crowd(20, 2, 0.5, 4.0),),
)
def kernel_of_crowd(x):
    norms = jnp.sum(x**2, axis=1)
    gram = x @ x.T
    squared = norms[:, None] + norms[None, :] - 2.0 * gram
    return jnp.exp(-jnp.maximum(squared, 0.0))


def kernel_of_crowd_fixed(x):
    return jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, axis=-1))


@failing(
    "https://github.com/dimforge/nalgebra/issues/543", "float32", "precision cancellation",
    "angle = 2.0 * jnp.arccos(jnp.minimum(jnp.abs(w), 1.0))", "w = jnp.sum(a * b, axis=-1)",
    "a, b = (q / jnp.sqrt(",
    args=lambda: near_quaternions(),
)  # fmt: skip
def rotation_angle(a, b):
    a, b = (q / jnp.sqrt(jnp.sum(q * q, axis=-1, keepdims=True)) for q in (a, b))
    w = jnp.sum(a * b, axis=-1)
    angle = 2.0 * jnp.arccos(jnp.minimum(jnp.abs(w), 1.0))
    return angle


def rotation_angle_fixed(a, b):
    a, b = (q / jnp.sqrt(jnp.sum(q * q, axis=-1, keepdims=True)) for q in (a, b))
    return 4.0 * jnp.arcsin(0.5 * jnp.sqrt(jnp.sum((a - b) ** 2, axis=-1)))


def near_quaternions():
    a = normal(16, 4)
    return a, a + normal(16, 4, seed=1, scale=3e-4)


@failing(
    "https://github.com/NVIDIA/warp/issues/1631", "fp16", "precision cancellation",
    "return 2.0 * jnp.arccos(cosine)", "cosine = jnp.cos(0.5 * turn)",
    args=lambda: (uniform(16, low=0.005, high=0.05),),
)  # fmt: skip
def twist_angle(turn):
    """Returns the angle of a quaternion that was made of this angle."""
    cosine = jnp.cos(0.5 * turn)
    return 2.0 * jnp.arccos(cosine)


def twist_angle_fixed(turn):
    return 2.0 * jnp.arctan2(jnp.sin(0.5 * turn), jnp.cos(0.5 * turn))


@failing(
    "https://github.com/pytorch/pytorch/issues/69512", "fp16", "overflow",
    "lengths = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)",
    args=lambda: (normal(8, 512), normal(8, 512, seed=1)),
)  # fmt: skip
def cosine_similarity(a, b):
    lengths = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    return jnp.sum(a * b, axis=-1) * jax.lax.rsqrt(lengths)


def cosine_similarity_fixed(a, b):
    a = a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True))
    return jnp.sum(a * b, axis=-1) * jax.lax.rsqrt(jnp.sum(b * b, axis=-1))


@failing(
    "https://github.com/NVIDIA/apex/issues/211", "fp16", "underflow nan overflow precision",
    "top = jnp.sum(a * b)", "size = jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))",
    args=lambda: (normal(64, scale=5e-4), normal(64, seed=1, scale=5e-4)),
)  # fmt: skip
def cosine_of_small_vectors(a, b):
    top = jnp.sum(a * b)
    size = jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))
    return top / (size + 1e-12)


def cosine_of_small_vectors_fixed(a, b):
    a, b = a / jnp.max(jnp.abs(a)), b / jnp.max(jnp.abs(b))
    return jnp.sum(a * b) / jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))


@failing(
    "https://github.com/WangYueFt/dgcnn/issues/20", "fp16", "overflow",
    "lifted = jnp.sum(points * points, axis=-1)", "lifted[:, None] - 2.0 * (points @ points.T)",
    args=lambda: (normal(24, 3, scale=200.0),),
)  # fmt: skip
def point_cloud_affinities(points):
    lifted = jnp.sum(points * points, axis=-1)
    squared = lifted[:, None] - 2.0 * (points @ points.T) + lifted[None, :]
    return jax.nn.softmax(-squared / 32768.0, axis=-1)


def point_cloud_affinities_fixed(points):
    points = points / 256.0
    gaps = points[:, None] - points[None]
    return jax.nn.softmax(-2.0 * jnp.sum(gaps * gaps, axis=-1), axis=-1)
