"""Graphics, robots, control, decoders of text, products of integers: parts of larger systems."""

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from failures.programs import WRITTEN, failing, normal, uniform

from .recipes import kept


@failing(
    WRITTEN, "bf16", "cancellation precision",
    "depth = 1000.0 / 999.9 * (1.0 - 0.1 / seen)",
    "return 100.0 / (1000.0 - 999.9 * depth)",
    args=lambda: (uniform(32, low=4.0, high=60.0),),
)  # fmt: skip
def reprojected_depth(seen):
    """Distances through a depth buffer from 0.1 to 1000 and back."""
    depth = 1000.0 / 999.9 * (1.0 - 0.1 / seen)
    return 100.0 / (1000.0 - 999.9 * depth)


def reprojected_depth_fixed(seen):
    """Reversed: the far plane is 0."""
    depth = (0.1 / 999.9) * (1000.0 / seen - 1.0)
    return 100.0 / (0.1 + 999.9 * depth)


@failing(
    WRITTEN, "fp16", "overflow nan",
    "return light * (1.0 + light / 16.0) / (1.0 + light)",
    args=lambda: (np.exp(uniform(8, 32, low=0.0, high=9.5)),),
)  # fmt: skip
def tone_mapping(light):
    """Reinhard's curve, where 4 becomes white."""
    return light * (1.0 + light / 16.0) / (1.0 + light)


def tone_mapping_fixed(light):
    return light / (1.0 + light) * (1.0 + light / 16.0)


@failing(
    WRITTEN, "bf16", "cancellation swamping precision",
    "table = jnp.cumsum(jnp.cumsum(image, axis=0), axis=1)",
    "total = table[6:, 6:] - table[:-6, 6:] - table[6:, :-6] + table[:-6, :-6]",
    args=lambda: (uniform(48, 48),),
)  # fmt: skip
def box_blur(image):
    """Means of 6 x 6 pixels, from a table of sums."""
    table = jnp.cumsum(jnp.cumsum(image, axis=0), axis=1)
    total = table[6:, 6:] - table[:-6, 6:] - table[6:, :-6] + table[:-6, :-6]
    return total / 36.0


def box_blur_fixed(image):
    image = image[1:, 1:]
    rows = sum(image[i : i + 42] for i in range(6)) / 6.0
    return sum(rows[:, i : i + 42] for i in range(6)) / 6.0


@failing(
    WRITTEN, "p=f32,c=bf16,o=f32", "precision",
    'cosine = jnp.einsum("nx,nx->n", normals, halfway)', "return cosine**512",
    args=lambda: nearly_normal(),
)  # fmt: skip
def specular_highlight(normals, halfway):
    cosine = jnp.einsum("nx,nx->n", normals, halfway)
    return cosine**512


def specular_highlight_fixed(normals, halfway):
    return (1.0 - 0.5 * jnp.sum((normals - halfway) ** 2, axis=-1)) ** 512


def nearly_normal():
    x = np.asarray(normal(64, 3), np.float64)
    y = x + 0.05 * np.asarray(normal(64, 3, seed=1), np.float64)
    return tuple(np.float32(z / np.linalg.norm(z, axis=1, keepdims=True)) for z in (x, y))


@failing(
    WRITTEN, "fp16", "underflow swamping precision",
    "integral = integral + 1e-4 * error",
    args=lambda: (uniform(200, 8, low=1e-4, high=4e-4),),
)  # fmt: skip
def integral_control(errors):
    """The integral of a controller that runs 10,000 times a second."""

    def body(integral, error):
        integral = integral + 1e-4 * error
        return integral, None

    return 4000.0 * jax.lax.scan(body, jnp.zeros_like(errors[0]), errors)[0]


def integral_control_fixed(errors):
    def body(integral, error):
        return integral + error, None

    return 0.4 * jax.lax.scan(body, jnp.zeros_like(errors[0]), errors)[0]


@failing(
    WRITTEN, "bf16", "cancellation",
    "return 512.0 * 0.125 / (left - right)", "left = 512.0 * (points[:, 0] + 0.0625)",
    "right = 512.0 * (points[:, 0] - 0.0625)",
    args=lambda: (uniform(32, 2, low=2.0, high=8.0),),
)  # fmt: skip
def stereo_depth(points):
    """Projects points into two cameras and measures their distance again."""
    left = 512.0 * (points[:, 0] + 0.0625) / points[:, 1]
    right = 512.0 * (points[:, 0] - 0.0625) / points[:, 1]
    return 512.0 * 0.125 / (left - right)


@failing(
    WRITTEN, "fp16", "overflow nan",
    "return 0.5 * jnp.abs(jnp.sum(x * jnp.roll(y, -1) - jnp.roll(x, -1) * y))",
    args=lambda: plot_of_land(),
)  # fmt: skip
def plot_area(x, y):
    """The area within a line, by the shoelace formula."""
    return 0.5 * jnp.abs(jnp.sum(x * jnp.roll(y, -1) - jnp.roll(x, -1) * y))


def plot_of_land():
    turn = np.linspace(0.0, 2.0 * np.pi, 24, endpoint=False)
    return np.float32(900.0 + 40.0 * np.cos(turn)), np.float32(700.0 + 60.0 * np.sin(turn))


def plot_area_fixed(x, y):
    x, y = x - x[0], y - y[0]
    return 0.5 * jnp.abs(jnp.sum(x * jnp.roll(y, -1) - jnp.roll(x, -1) * y))


@failing(
    WRITTEN, "bf16", "precision decision cancellation",
    "places = (jnp.arange(600, dtype=row.dtype) + 0.5) * 0.5 - 0.5",
    "below = jnp.clip(jnp.floor(places), 0.0, 298.0)", "part = places - below",
    args=lambda: (normal(300),), limit=0.2,
)  # fmt: skip
def upsampled_row(row):
    """A row of pixels at twice its resolution, between neighbours."""
    places = (jnp.arange(600, dtype=row.dtype) + 0.5) * 0.5 - 0.5
    below = jnp.clip(jnp.floor(places), 0.0, 298.0)
    part = places - below
    index = below.astype(jnp.int32)
    return row[index] * (1.0 - part) + row[index + 1] * part


def upsampled_row_fixed(row):
    index = jnp.clip((jnp.arange(600) - 1) // 2, 0, 298)
    part = (0.5 * (jnp.arange(600) - 2 * index) - 0.25).astype(row.dtype)
    return row[index] * (1.0 - part) + row[index + 1] * part


@failing(
    "https://arxiv.org/abs/2202.08906", "fp16", "overflow nan",
    "return 1e-3 * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)",
    args=lambda: (normal(32, 16, scale=20.0), 10.0 * normal(16, 8, seed=1)),
)  # fmt: skip
def router_z_loss(x, w):
    logits = x @ w
    return 1e-3 * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


def router_z_loss_fixed(x, w):
    return jnp.mean((0.03162278 * jax.nn.logsumexp(x @ w, axis=-1)) ** 2)


@failing(
    "https://arxiv.org/abs/1806.03198", "fp16", "underflow overflow nan",
    "return -jnp.mean(jnp.log(nearest + 1e-8))",
    args=lambda: (with_twins(),),
)  # fmt: skip
def nearest_neighbour_entropy(features):
    """Spreads features over the sphere; two of them are equal."""
    apart = jnp.sqrt(jnp.sum((features[:, None] - features) ** 2, axis=-1))
    nearest = jnp.min(jnp.where(jnp.eye(24, dtype=bool), 4.0, apart), axis=-1)
    return -jnp.mean(jnp.log(nearest + 1e-8))


def with_twins():
    x = normal(24, 8)
    x[7] = x[3]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nearest_neighbour_entropy_fixed(features):
    apart = jnp.sqrt(jnp.sum((features[:, None] - features) ** 2, axis=-1))
    nearest = jnp.min(jnp.where(jnp.eye(24, dtype=bool), 4.0, apart), axis=-1)
    return -jnp.mean(jnp.maximum(jnp.log(nearest), -18.42068))


@failing(
    WRITTEN, "bf16", "swamping precision cancellation",
    "total = total + step",
    args=lambda: (-1.5 + 0.5 * normal(120, 6),),
)  # fmt: skip
def beam_probabilities(steps):
    """How likely each of six beams is beside the others, after 120 tokens."""

    def body(total, step):
        total = total + step
        return total, None

    total = jax.lax.scan(body, jnp.zeros_like(steps[0]), steps)[0]
    return jax.nn.softmax(0.25 * total)


def beam_probabilities_fixed(steps):
    def body(total, step):
        total = total + (step - jnp.mean(step))
        return total - jnp.max(total), None

    total = jax.lax.scan(body, jnp.zeros_like(steps[0]), steps)[0]
    return jax.nn.softmax(0.25 * total)


@failing(
    "https://arxiv.org/abs/1605.08803", "bf16", "cancellation swamping precision",
    "forward = x * jnp.exp(0.5 * jnp.tanh(scale)) + shift",
    "return (forward - shift) * jnp.exp(-0.5 * jnp.tanh(scale))",
    args=lambda: (normal(32, 4, scale=0.125), normal(32, 4, seed=1),
                  normal(32, 4, seed=2, mean=6.0)),
)  # fmt: skip
def coupling_and_back(x, scale, shift):
    """A coupling layer of a flow, and its inverse."""
    forward = x * jnp.exp(0.5 * jnp.tanh(scale)) + shift
    return (forward - shift) * jnp.exp(-0.5 * jnp.tanh(scale))


def coupling_and_back_fixed(x, scale, shift):
    return x


@failing(
    WRITTEN, "fp8_current", "underflow precision",
    "hidden = sound @ w",
    args=lambda: (normal(16, 32) * np.float32(10.0 ** -(np.arange(16) % 8))[:, None],
                  normal(32, 24, seed=1, scale=0.2)),
    better=kept(sw.recipes.fp8_current, encoder="bf16"),
)  # fmt: skip
def quiet_recordings(sound, w):
    """Recordings of different loudness in one batch, normalised after the first product."""
    with jax.named_scope("encoder"):
        hidden = sound @ w
    return hidden / jnp.sqrt(jnp.mean(hidden**2, axis=-1, keepdims=True))


@failing(
    WRITTEN, "fp8_current", "precision decision",
    "places = weights @ numbers", "return table[places[:, 0].astype(jnp.int32)]",
    args=lambda: (np.eye(48, 64, k=9, dtype=np.float32), np.tile(
                  np.arange(64, dtype=np.float32)[:, None], (1, 16)), normal(64, 4)),
    better=kept(sw.recipes.fp8_current, alignment="bf16"),
)  # fmt: skip
def aligned_rows(weights, numbers, table):
    """Rows of a table, at the places that an alignment's weights name."""
    with jax.named_scope("alignment"):
        places = weights @ numbers
    return table[places[:, 0].astype(jnp.int32)]


@failing(
    WRITTEN, "p=f32,c=bf16,o=f32", "precision cancellation",
    "turned = points @ rotation",
    args=lambda: (5000.0 + normal(40, 3), rotation_of(0.7)),
)  # fmt: skip
def mapped_points(points, rotation):
    """A scan in coordinates of a map, turned and centred."""
    turned = points @ rotation
    return turned - jnp.mean(turned, axis=0)


def rotation_of(turn):
    cos, sin = np.cos(turn), np.sin(turn)
    return np.float32([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


def mapped_points_fixed(points, rotation):
    return (points - jnp.mean(points, axis=0)) @ rotation


@failing(
    WRITTEN, "c=f16", "overflow nan",
    "six = three @ three",
    args=lambda: (np.float32(uniform(40, 40) < 0.3),), better="c=bf16",
)  # fmt: skip
def paths_of_six(adjacency):
    """How alike two nodes are: the share of paths of six edges that join them."""
    two = adjacency @ adjacency
    three = two @ adjacency
    six = three @ three
    own = jnp.sqrt(jnp.diagonal(six))
    return six / (own[:, None] * own)


@failing(
    WRITTEN, "bf16", "precision swamping decision",
    "positions = jnp.cumsum(starts.astype(table.dtype)) - 1",
    args=lambda: (normal(700, 4), np.arange(900) % 5 != 3), native=True,
)  # fmt: skip
def packed_positions(table, starts):
    """Positions of tokens that aren't padding, counted in the embedding's dtype."""
    positions = jnp.cumsum(starts.astype(table.dtype)) - 1
    return table[jnp.clip(positions.astype(jnp.int32), 0, 699)]


def packed_positions_fixed(table, starts):
    positions = jnp.cumsum(starts.astype(jnp.int32)) - 1
    return table[jnp.clip(positions, 0, 699)]


@failing(
    WRITTEN, "fp16", "overflow nan",
    "sums = jnp.round(x / x_scale) @ jnp.round(w / w_scale)",
    args=lambda: (uniform(16, 64), uniform(64, 24, seed=1, high=0.2)),
)  # fmt: skip
def simulated_int8_product(x, w):
    """A product of 8-bit integers, as a simulation of quantisation computes it."""
    x_scale = jnp.max(jnp.abs(x)) / 127.0
    w_scale = jnp.max(jnp.abs(w)) / 127.0
    sums = jnp.round(x / x_scale) @ jnp.round(w / w_scale)
    return sums * (x_scale * w_scale)


def simulated_int8_product_fixed(x, w):
    x_scale = jnp.max(jnp.abs(x)) / 127.0
    w_scale = jnp.max(jnp.abs(w)) / 127.0
    return (jnp.round(x / x_scale) * x_scale) @ (jnp.round(w / w_scale) * w_scale)


@failing(
    WRITTEN, "p=f32,c=bf16,o=f32", "precision",
    "scores = query @ keys.T", "return jax.nn.softmax(256.0 * scores)",
    args=lambda: near_directions(),
)  # fmt: skip
def sharp_retrieval(query, keys):
    """Weights of keys by cosine similarity, at a temperature of 1 / 256."""
    scores = query @ keys.T
    return jax.nn.softmax(256.0 * scores)


def near_directions():
    """Rows of length 1 around one direction."""
    x = normal(32, seed=2) + normal(48, 32, scale=0.1)
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return x[:8], x[8:]


def sharp_retrieval_fixed(query, keys):
    centre = jnp.mean(keys, axis=0)
    return jax.nn.softmax(256.0 * jnp.sum(query[:, None] * (keys - centre), axis=-1))
