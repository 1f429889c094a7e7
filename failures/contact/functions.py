"""Losses, layers and schedules in 16 bits as users write them, one fault each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from failures.programs import failing, integers, normal, uniform

failing = partial(failing, set="contact", native=True)
GITHUB = "https://github.com/"


def tanh_gelu(x):
    return 0.5 * x * (1.0 + jnp.tanh(0.79788456 * (x + 0.044715 * x**3)))


def clipped_gelu(x):
    inner = jnp.clip(x, -10.0, 10.0)
    return 0.5 * x * (1.0 + jnp.tanh(0.79788456 * (inner + 0.044715 * inner**3)))


@failing(
    GITHUB + "facebookresearch/fairseq/issues/2235", "fp16", "overflow nan",
    "0.044715 * x**3",
    args=lambda: (normal(16, 8, scale=1.0), normal(32, 16, seed=1, scale=30.0)),
    inside=(tanh_gelu,),
)  # fmt: skip
def feed_forward_gradient(w, x, activation=tanh_gelu):
    def loss(w):
        return jnp.mean(activation(x @ w))

    return jax.grad(loss)(w)


def feed_forward_gradient_fixed(w, x):
    return feed_forward_gradient(w, x, activation=clipped_gelu)


@failing(
    GITHUB + "tenstorrent/tt-metal/issues/56517", "bf16", "cancellation precision swamping",
    "return 0.5 * x * (1.0 + jnp.tanh(inner))",
    args=lambda: (np.linspace(-5.0, -2.5, 41, dtype=np.float32),),
)  # fmt: skip
def gelu_of_negative_inputs(x):
    inner = 0.79788456 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def gelu_of_negative_inputs_fixed(x):
    return x * jax.nn.sigmoid(1.5957691 * (x + 0.044715 * x * x * x))


def boxes_of_a_batch():
    low = 2.0 * integers(24, 2, high=1700)
    low[12:] = low[:12] + 2.0 * integers(12, 2, seed=1, high=6)
    labels = np.tile(np.arange(12, dtype=np.int32) + 6, 2)
    return np.float32(np.concatenate([low, low + 24.0], -1)), labels


def overlaps_of_boxes(boxes):
    low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    areas = jnp.prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
    return common / (areas[:, None] + areas[None, :] - common + 1.0)


@failing(
    GITHUB + "MultimediaTechLab/YOLO/pull/234", "fp16", "swamping precision overflow nan",
    "shifted = boxes + offsets[:, None]", "offsets = labels * (jnp.max(boxes) + 1.0)",
    args=boxes_of_a_batch,
)  # fmt: skip
def overlaps_by_class(boxes, labels):
    """Shifts the boxes of each class, so that only those of a class overlap."""
    offsets = labels * (jnp.max(boxes) + 1.0)
    shifted = boxes + offsets[:, None]
    return overlaps_of_boxes(shifted)


def overlaps_by_class_fixed(boxes, labels):
    return jnp.where(labels[:, None] == labels[None], overlaps_of_boxes(boxes), 0.0)


@failing(
    GITHUB + "ml-explore/mlx-lm/pull/1912", "bf16", "decision precision swamping nan",
    "kept = jnp.cumsum(jnp.exp(logs[order])) > 1.0 - top_p",
    args=lambda: (normal(256, scale=3.0), np.float32(2.0**-10)),
)  # fmt: skip
def filtered_by_top_p(logits, top_p):
    """Cumulates from the least likely token up; with a small top_p one token is left."""
    logs = jax.nn.log_softmax(logits)
    order = jnp.argsort(logs)
    kept = jnp.cumsum(jnp.exp(logs[order])) > 1.0 - top_p
    return jax.nn.softmax(jnp.where(kept, logs[order], -jnp.inf))


def filtered_by_top_p_fixed(logits, top_p):
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    order = jnp.argsort(logs)
    above = jnp.cumsum(jnp.exp(logs[order])[::-1])[::-1] - jnp.exp(logs[order])
    return jax.nn.softmax(jnp.where(above < top_p, logs[order], -jnp.inf)).astype(logits.dtype)


def small_boxes():
    """Boxes of a few pixels in an image of 1024, beside boxes that overlap them."""
    middle = np.round(uniform(24, 2, low=600.0, high=1000.0))
    size = np.round(uniform(24, 2, seed=1, low=4.0, high=9.0) * 32) / 32
    shift = integers(24, 2, seed=2, high=3) - 1.0
    first = np.concatenate([middle, size], -1)
    return first, np.float32(np.concatenate([middle + shift, size[::-1]], -1))


@failing(
    GITHUB + "Megvii-BaseDetection/YOLOX/pull/1592", "fp16", "cancellation precision swamping",
    "low = jnp.maximum(", "high = jnp.minimum(",
    args=small_boxes,
)  # fmt: skip
def overlap_of_small_boxes(first, second):
    """Boxes given by their middle and size."""
    low = jnp.maximum(first[:, :2] - first[:, 2:] / 2, second[:, :2] - second[:, 2:] / 2)
    high = jnp.minimum(first[:, :2] + first[:, 2:] / 2, second[:, :2] + second[:, 2:] / 2)
    common = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    areas = jnp.prod(first[:, 2:], axis=-1) + jnp.prod(second[:, 2:], axis=-1)
    return common / (areas - common)


def overlap_of_small_boxes_fixed(first, second):
    shift = first[:, :2]
    first, second = (x.at[:, :2].add(-shift) for x in (first, second))
    return overlap_of_small_boxes(first, second)


def large_boxes():
    low = np.float32(integers(12, 2, high=256))
    return (np.concatenate([low, low + 200 + integers(12, 2, seed=1, high=700)], -1),)


@failing(
    GITHUB + "pytorch/vision/pull/3383", "fp16", "overflow nan",
    "areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])",
    "common = jnp.prod(",
    args=large_boxes,
)  # fmt: skip
def overlaps(boxes):
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    return common / (areas[:, None] + areas[None, :] - common)


def overlaps_fixed(boxes):
    return overlaps(boxes / 64.0)


def equal_boxes():
    first = np.float32([[1.43, 0.256, 3.78, 7.37], [2.0, 3.0, 4.0, 2.0], [5.0, 5.0, 2.0, 3.0]])
    second = np.float32([[1.43, 0.256, 3.78, 7.37], [2.5, 3.0, 4.5, 2.0], [5.0, 5.0, 2.0, 3.0]])
    return first, second


@failing(
    GITHUB + "ultralytics/yolov5/issues/2376", "fp16", "underflow nan swamping precision",
    "weight = shape / (1.0 + 1e-9 - iou + shape)",
    args=equal_boxes,
)  # fmt: skip
def complete_iou_loss(boxes, targets):
    low = jnp.maximum(boxes[:, :2] - boxes[:, 2:] / 2, targets[:, :2] - targets[:, 2:] / 2)
    high = jnp.minimum(boxes[:, :2] + boxes[:, 2:] / 2, targets[:, :2] + targets[:, 2:] / 2)
    common = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    union = jnp.prod(boxes[:, 2:], -1) + jnp.prod(targets[:, 2:], -1) - common
    iou = common / union
    turn = jnp.arctan2(targets[:, 2], targets[:, 3]) - jnp.arctan2(boxes[:, 2], boxes[:, 3])
    shape = 0.405 * turn**2
    weight = shape / (1.0 + 1e-9 - iou + shape)
    return jnp.mean(1.0 - iou + weight * shape)


def complete_iou_loss_fixed(boxes, targets):
    low = jnp.maximum(boxes[:, :2] - boxes[:, 2:] / 2, targets[:, :2] - targets[:, 2:] / 2)
    high = jnp.minimum(boxes[:, :2] + boxes[:, 2:] / 2, targets[:, :2] + targets[:, 2:] / 2)
    common = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
    union = jnp.prod(boxes[:, 2:], -1) + jnp.prod(targets[:, 2:], -1) - common
    iou = common / union
    turn = jnp.arctan2(targets[:, 2], targets[:, 3]) - jnp.arctan2(boxes[:, 2], boxes[:, 3])
    shape = 0.405 * turn**2
    return jnp.mean(1.0 - iou + shape / (1.0 - iou + shape + 1e-3) * shape)


@failing(
    GITHUB + "databricks/megablocks/pull/133", "fp16", "overflow",
    "z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))",
    args=lambda: (normal(32, 16), normal(16, 8, seed=1, scale=2.0)),
)  # fmt: skip
def router_z_loss(tokens, router):
    logits = tokens @ router
    z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return jnp.mean(z**2)


def router_z_loss_fixed(tokens, router):
    return jnp.mean(jax.nn.logsumexp(tokens @ router, axis=-1) ** 2)


@failing(
    GITHUB + "Tencent-Hunyuan/UniRL/pull/438", "bf16", "precision amplified",
    "sigma = 5.0 * steps / (1.0 + 4.0 * steps)", "times = 1000.0 * sigma",
    "angles = times[:, None] * frequencies",
    args=lambda: (np.arange(10, 0, -1, dtype=np.float32),),
)  # fmt: skip
def embedded_timesteps(steps):
    """Timesteps of a flow with a shift of 5, and their embedding."""
    steps = steps / 10.0
    sigma = 5.0 * steps / (1.0 + 4.0 * steps)
    times = 1000.0 * sigma
    frequencies = jnp.exp(-jnp.arange(8) / 8.0 * np.log(1e4)).astype(steps.dtype)
    angles = times[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def embedded_timesteps_fixed(steps):
    return embedded_timesteps(steps.astype(jnp.float32)).astype(steps.dtype)


@failing(
    GITHUB + "tensorflow/tensorflow/issues/38457", "fp16",
    "underflow swamping precision nan overflow cancellation",
    "p = jnp.clip(p, 1e-7, 1.0 - 1e-7)", "return -jnp.mean(",
    args=lambda: (np.linspace(-12.0, 12.0, 24, dtype=np.float32), np.arange(24) % 2 * 1.0),
)  # fmt: skip
def binary_cross_entropy(logits, labels):
    labels = labels.astype(logits.dtype)
    p = jax.nn.sigmoid(logits)
    p = jnp.clip(p, 1e-7, 1.0 - 1e-7)
    return -jnp.mean(labels * jnp.log(p) + (1.0 - labels) * jnp.log(1.0 - p))


def binary_cross_entropy_fixed(logits, labels):
    return jnp.mean(jax.nn.softplus(logits) - labels.astype(logits.dtype) * logits)


def with_padding():
    x, y = normal(8, 16), normal(8, 16, seed=1)
    x[-2:] = y[-2:] = 0.0
    return x, y


@failing(
    GITHUB + "tracel-ai/burn/issues/5584", "fp16", "underflow nan",
    "return jnp.sum(x * y, axis=-1) / (length(x) * length(y))",
    args=with_padding,
)  # fmt: skip
def cosines(x, y):
    def length(x):
        return jnp.maximum(jnp.linalg.norm(x, axis=-1), 1e-4)

    return jnp.sum(x * y, axis=-1) / (length(x) * length(y))


def cosines_fixed(x, y):
    def direction(x):
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-4)

    return jnp.sum(direction(x) * direction(y), axis=-1)


@failing(
    GITHUB + "NVIDIA/Model-Optimizer/pull/381", "fp16", "overflow nan",
    "scale = 448.0 / jnp.max(jnp.abs(x), axis=-1, keepdims=True)",
    args=lambda: (normal(8, 32) * np.float32(10.0) ** -np.arange(8)[:, None] * 2.0**6,),
)  # fmt: skip
def through_fp8(x):
    """Rows of activations through FP8 with a scale each."""
    scale = 448.0 / jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    codes = (x * scale).astype(jnp.float8_e4m3fn)
    return codes.astype(x.dtype) / scale


def through_fp8_fixed(x):
    return through_fp8(x.astype(jnp.float32)).astype(x.dtype)


@failing(
    GITHUB + "Lightning-AI/torchmetrics/issues/1380", "fp16", "overflow",
    "return jnp.sum(jnp.abs(queries[:, None] - keys[None]), axis=-1) / keys.shape[-1]",
    args=lambda: (normal(4, 16384, scale=8.0), normal(6, 16384, seed=1, scale=8.0)),
)  # fmt: skip
def manhattan_distances(queries, keys):
    return jnp.sum(jnp.abs(queries[:, None] - keys[None]), axis=-1) / keys.shape[-1]


def manhattan_distances_fixed(queries, keys):
    return jnp.mean(jnp.abs(queries[:, None] - keys[None]), axis=-1)


def close_vectors():
    base = np.round(normal(1, 32, scale=2.0) * 16) / 16
    return (base + np.float32(integers(12, 32, high=3)) / 16,)


@failing(
    GITHUB + "NVIDIA/cuvs/issues/991", "fp16", "cancellation precision nan",
    "squared = norms[:, None] + norms[None, :] - 2.0 * x @ x.T",
    args=close_vectors,
)  # fmt: skip
def neighbour_distances(x):
    norms = jnp.sum(x * x, axis=-1)
    squared = norms[:, None] + norms[None, :] - 2.0 * x @ x.T
    return jnp.sqrt(squared + 1e-3)


def neighbour_distances_fixed(x):
    return jnp.sqrt(jnp.sum((x[:, None] - x[None, :]) ** 2, axis=-1) + 1e-3)


@failing(
    GITHUB + "google-research/last/pull/43", "fp16", "overflow",
    "return jnp.log(jnp.sum(jnp.exp(weights - largest))) + largest",
    args=lambda: (uniform(2**17, low=-0.5, high=0.0),),
)  # fmt: skip
def log_semiring_sum(weights):
    largest = jnp.max(weights)
    return jnp.log(jnp.sum(jnp.exp(weights - largest))) + largest


def log_semiring_sum_fixed(weights):
    return log_semiring_sum(weights.astype(jnp.float32)).astype(weights.dtype)


@failing(
    GITHUB + "vllm-project/vllm/issues/13466", "bf16", "precision swamping",
    "decay = jnp.exp(-jnp.exp(log_rates) * 2.0**-9)", "state = decay * state + 2.0**-9 * x",
    args=lambda: (uniform(8, low=-0.5, high=0.5), uniform(1024, 8, seed=1)),
)  # fmt: skip
def selective_scan(log_rates, inputs):
    """A state-space layer with steps of 1/512 and rates of about 1."""
    decay = jnp.exp(-jnp.exp(log_rates) * 2.0**-9)

    def body(state, x):
        state = decay * state + 2.0**-9 * x
        return state, None

    return jax.lax.scan(body, jnp.zeros_like(log_rates), inputs)[0]


def selective_scan_fixed(log_rates, inputs):
    log_rates, inputs = log_rates.astype(jnp.float32), inputs.astype(jnp.float32)
    return selective_scan(log_rates, inputs)


@failing(
    GITHUB + "erf-model/ERF/pull/3161", "bf16", "swamping precision accumulation",
    "t = t + dt",
    args=lambda: (np.float32([1.0, 0.5, -0.25]), np.float32(0.015625)),
)  # fmt: skip
def driven_oscillator(x, dt):
    """400 steps of 1/64 of a relaxation to a slow drive."""

    def body(_, carry):
        x, t = carry
        x = x + 8.0 * dt * (jnp.sin(t) - x)
        t = t + dt
        return x, t

    return jax.lax.fori_loop(0, 400, body, (x, jnp.zeros_like(dt)))


def driven_oscillator_fixed(x, dt):
    def body(i, x):
        t = i * dt.astype(jnp.float32)
        return x + 8.0 * dt * (jnp.sin(t).astype(x.dtype) - x)

    return jax.lax.fori_loop(0, 400, body, x), 400 * dt


@failing(
    GITHUB + "jax-ml/jax/issues/40409", "fp16", "overflow nan",
    "return jnp.sum(jax.nn.log_softmax(scores))",
    args=lambda: (normal(70000),),
)  # fmt: skip
def gradient_of_all_logs(scores):
    def total(scores):
        return jnp.sum(jax.nn.log_softmax(scores))

    return jax.grad(total)(scores)


def gradient_of_all_logs_fixed(scores):
    return gradient_of_all_logs(scores.astype(jnp.float32)).astype(scores.dtype)
