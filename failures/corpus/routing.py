"""Experts, positions, masks and recurrences of sequence models."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/google/flaxformer/issues/9", "bf16", "swamping",
    "counts = counts + choice",
    args=lambda: (normal(700, 2), normal(700, seed=1)),
)  # fmt: skip
def expert_capacity(logits, values):
    """Tokens beyond an expert's capacity are left out; a loop counts in the model's dtype."""
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), 2, dtype=values.dtype)

    def body(counts, choice):
        counts = counts + choice
        return counts, choice * (counts <= 300.0)

    kept = jax.lax.scan(body, jnp.zeros(2, values.dtype), chosen)[1]
    return kept * values[:, None]


@failing(
    "https://github.com/NVIDIA/TensorRT-Model-Connect/issues/667", "bf16",
    "precision cancellation swamping",
    "bias = slopes[:, None, None] * jnp.arange(1000", "scores = jnp.einsum(",
    args=lambda: (normal(2, 1, 8), normal(2, 1000, 8, seed=1), jnp.asarray([0.5, 0.0625])),
)  # fmt: skip
def linear_biases(query, key, slopes):
    """Attention of the last query, with biases by the keys' absolute positions."""
    bias = slopes[:, None, None] * jnp.arange(1000, dtype=query.dtype)
    scores = jnp.einsum("hqd,hkd->hqk", query, key) / 2.8 + bias
    return jax.nn.softmax(scores)[:, :, -8:]


def linear_biases_fixed(query, key, slopes):
    bias = slopes[:, None, None] * (jnp.arange(1000) - 999).astype(query.dtype)
    scores = jnp.einsum("hqd,hkd->hqk", query, key) / 2.8 + bias
    return jax.nn.softmax(scores)[:, :, -8:]


@failing(
    "https://arxiv.org/abs/2407.21783", "fp16", "overflow",
    "frequencies = 1.0 / (500000.0 ** (jnp.arange(8, dtype=x.dtype) / 8.0))",
    args=lambda: (normal(24, 16),),
)  # fmt: skip
def rotary_base(x):
    frequencies = 1.0 / (500000.0 ** (jnp.arange(8, dtype=x.dtype) / 8.0))
    angles = jnp.arange(24, dtype=x.dtype)[:, None] * frequencies
    first, second = x[:, :8], x[:, 8:]
    return first * jnp.cos(angles) - second * jnp.sin(angles)


def rotary_base_fixed(x):
    frequencies = jnp.exp(-13.122363 * jnp.arange(8, dtype=x.dtype) / 8.0)
    angles = jnp.arange(24, dtype=x.dtype)[:, None] * frequencies
    first, second = x[:, :8], x[:, 8:]
    return first * jnp.cos(angles) - second * jnp.sin(angles)


@failing(
    "https://github.com/huggingface/transformers/issues/26004", "bf16", "decision precision",
    "spaced = jnp.log(distance / 16.0) / jnp.log(128.0 / 16.0) * 16.0",
    "bucket = 16 + jnp.floor(spaced).astype(jnp.int32)",
    args=lambda: (normal(64, 4), 1.0 * jnp.arange(16, 128)),
)  # fmt: skip
def relative_buckets(table, distance):
    """Buckets of relative positions, spaced evenly in the logarithm, as T5 has them."""
    spaced = jnp.log(distance / 16.0) / jnp.log(128.0 / 16.0) * 16.0
    bucket = 16 + jnp.floor(spaced).astype(jnp.int32)
    return table[bucket]


@failing(
    "https://github.com/facebookresearch/xformers/issues/96", "fp16", "underflow nan overflow",
    "raised = jnp.exp(x @ w - 0.5 * jnp.sum(x**2, axis=-1, keepdims=True))",
    "total = query @ jnp.sum(key, axis=0)", "return (query @ (key.T @ value)) / total[:, None]",
    args=lambda: (normal(16, 8, scale=3.4), normal(16, 8, seed=1, scale=3.4), normal(16, 4, seed=2),
                  normal(8, 12, seed=3)),
)  # fmt: skip
def positive_features(query, key, value, w):
    """Performer's attention, without a shift of the exponents."""

    def features(x):
        raised = jnp.exp(x @ w - 0.5 * jnp.sum(x**2, axis=-1, keepdims=True))
        return raised

    query, key = features(query), features(key)
    total = query @ jnp.sum(key, axis=0)
    return (query @ (key.T @ value)) / total[:, None]


def positive_features_fixed(query, key, value, w):
    def exponents(x):
        return x @ w - 0.5 * jnp.sum(x**2, axis=-1, keepdims=True)

    query, key = exponents(query), exponents(key)
    query = jnp.exp(query - jnp.max(query, axis=-1, keepdims=True))
    key = jnp.exp(key - jnp.max(key))
    total = query @ jnp.sum(key, axis=0)
    return (query @ (key.T @ value)) / total[:, None]


@failing(
    "https://github.com/fla-org/flash-linear-attention/issues/135", "fp16",
    "overflow nan underflow",
    "scaled = key / decay", "scores = (query * decay) @ scaled.T",
    "decay = jnp.cumprod(gates, axis=0)",
    args=lambda: (normal(64, 8), normal(64, 8, seed=1), normal(64, 4, seed=2),
                  uniform(64, 8, seed=3, low=0.6, high=0.95)),
)  # fmt: skip
def chunk_of_gated_attention(query, key, value, gates):
    decay = jnp.cumprod(gates, axis=0)
    scaled = key / decay
    scores = (query * decay) @ scaled.T
    return jnp.where(jnp.tri(64, dtype=bool), scores, 0.0) @ value


def chunk_of_gated_attention_fixed(query, key, value, gates):
    def body(state, step):
        query, key, value, gate = step
        state = gate[:, None] * state + key[:, None] * value
        return state, query @ state

    start = jnp.zeros((8, 4), query.dtype)
    return jax.lax.scan(body, start, (query, key, value, gates))[1]


@failing(
    "https://arxiv.org/abs/2206.11893", "bf16", "cancellation swamping precision",
    "gain = (jnp.exp(step * rate) - 1.0) / rate",
    args=lambda: (-uniform(16, low=0.5, high=2.0), uniform(16, seed=1, low=1e-3, high=4e-3),
                  normal(24, 16)),
)  # fmt: skip
def zero_order_hold(rate, step, inputs):
    """The inputs of a diagonal state space model, held between its steps."""
    gain = (jnp.exp(step * rate) - 1.0) / rate
    return inputs * gain


def zero_order_hold_fixed(rate, step, inputs):
    return inputs * (jnp.expm1(step * rate) / rate)


@failing(
    "https://github.com/BlinkDL/RWKV-LM/issues/15", "fp16", "overflow nan",
    "weight = jnp.exp(key)", "top = jnp.exp(-decay) * top + weight * value",
    "bottom = jnp.exp(-decay) * bottom + weight", "return (top, bottom), top / bottom",
    args=lambda: (jnp.full(8, 0.25), normal(20, 8, scale=2.0, mean=9.0), normal(20, 8, seed=1)),
)  # fmt: skip
def weighted_key_values(decay, keys, values):
    """RWKV's recurrence without the running maximum."""

    def body(carry, step):
        (top, bottom), (key, value) = carry, step
        weight = jnp.exp(key)
        top = jnp.exp(-decay) * top + weight * value
        bottom = jnp.exp(-decay) * bottom + weight
        return (top, bottom), top / bottom

    start = jnp.zeros(8, keys.dtype), jnp.zeros(8, keys.dtype)
    return jax.lax.scan(body, start, (keys, values))[1]


def weighted_key_values_fixed(decay, keys, values):
    keys = keys - jnp.max(keys, axis=0)

    def body(carry, step):
        (top, bottom), (key, value) = carry, step
        top = jnp.exp(-decay) * top + jnp.exp(key) * value
        bottom = jnp.exp(-decay) * bottom + jnp.exp(key)
        return (top, bottom), top / bottom

    start = jnp.zeros(8, keys.dtype), jnp.zeros(8, keys.dtype)
    return jax.lax.scan(body, start, (keys, values))[1]


@failing(
    "https://github.com/allenai/allennlp/issues/2163", "fp16", "underflow overflow nan",
    "return jax.nn.softmax(scores + jnp.log(mask + 1e-13)) @ values",
    args=lambda: (normal(6, 10), normal(10, 4, seed=1), padded_rows()),
)  # fmt: skip
def softmax_of_masked(scores, values, mask):
    """A mask as a logarithm; a row of padding has no key at all."""
    return jax.nn.softmax(scores + jnp.log(mask + 1e-13)) @ values


def padded_rows():
    mask = 1.0 * jnp.ones((6, 10))
    return mask.at[:, 7:].set(0.0).at[5].set(0.0)


def softmax_of_masked_fixed(scores, values, mask):
    return jax.nn.softmax(jnp.where(mask > 0.0, scores, scores - 1000.0)) @ values


@failing(
    "https://github.com/facebookresearch/ConvNeXt-V2/issues/40", "fp16", "overflow",
    "size = jnp.sqrt(jnp.sum(x**2, axis=(1, 2), keepdims=True))",
    args=lambda: (normal(2, 12, 12, 8, scale=60.0), normal(8, seed=1), normal(8, seed=2)),
)  # fmt: skip
def global_response(x, gain, bias):
    size = jnp.sqrt(jnp.sum(x**2, axis=(1, 2), keepdims=True))
    response = size / (jnp.mean(size, axis=-1, keepdims=True) + 1e-4)
    return gain * (x * response) + bias + x


@failing(
    "https://github.com/pytorch/pytorch/issues/33168", "fp16", "underflow nan overflow",
    "x = x / (jnp.sqrt(jnp.sum(x**2)) + 1e-12)",
    args=lambda: (normal(8, 16, scale=2e-4), normal(8, seed=1, scale=1e-3), normal(4, 16, seed=2)),
)  # fmt: skip
def spectral_weights(w, u, x):
    """Divides weights by their largest singular value, by one step of the power method."""

    def unit(x):
        x = x / (jnp.sqrt(jnp.sum(x**2)) + 1e-12)
        return x

    v = unit(w.T @ u)
    u = unit(w @ v)
    return x @ (w / (u @ w @ v)).T


@failing(
    "https://github.com/joe-siyuan-qiao/WeightStandardization/issues/19", "fp16",
    "underflow nan overflow",
    "return kernel / jnp.sqrt(jnp.mean(kernel**2, axis=0) + 1e-10)",
    args=lambda: (normal(32, 8), normal(32, 8, seed=1, scale=3e-4)),
)  # fmt: skip
def standardised_kernel(x, kernel):
    def standardise(kernel):
        kernel = kernel - jnp.mean(kernel, axis=0)
        return kernel / jnp.sqrt(jnp.mean(kernel**2, axis=0) + 1e-10)

    return x @ standardise(kernel).T
