"""Real failures of low-precision programs, each in a few lines, with the line at fault marked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..programs import Program


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape)


def t5_feed_forward(x, wi, wo):
    hidden = jax.nn.relu(x @ wi)
    return x + hidden @ wo  # <- here


def residual(stream, update):
    total = stream + update  # <- here
    return total * jax.lax.rsqrt(jnp.mean(total / 1024.0 * (total / 1024.0)) + 1e-5) / 1024.0


def rms_norm(x):
    mean = jnp.sum(x * x) / x.size  # <- here
    return x * jax.lax.rsqrt(mean + 1e-3)


def adam(m, v):
    return m / (jnp.sqrt(v) + 1e-8)  # <- here


def apply_update(w, gradient):
    return w - 1e-3 * gradient  # <- here


def moving_average(average, w):
    return 0.999 * average + 0.001 * w  # <- here


def running_sum(xs):
    def add(total, x):
        return total + x, None  # <- here

    return jax.lax.scan(add, jnp.zeros((), xs.dtype), xs)[0]


def variance(x):
    return jnp.mean(x * x) - jnp.mean(x) * jnp.mean(x)  # <- here


def masked_softmax(scores, allowed):
    scores = scores + jnp.where(allowed, 0.0, -65504.0)  # <- here
    return jnp.exp(scores - jnp.max(scores)) / jnp.sum(jnp.exp(scores - jnp.max(scores)))


def mask_constant(scores, allowed):
    return jnp.sum(jax.nn.sigmoid(scores + (1.0 - allowed) * -1e10))  # <- here


def cross_entropy(logits):
    shifted = logits - jnp.max(logits)  # <- here
    return jnp.log(jnp.sum(jnp.exp(shifted))) - shifted[0]  # <- here


def small_gradients(w, x):
    def loss(w):
        return jnp.mean(jnp.square(x @ w)) * 1e-6  # <- here

    return jax.grad(loss)(w)


def mixed_precision_gradients(w, x):
    def loss(w):
        return jnp.mean(jnp.square(x @ w)) * 1e-7  # <- here

    return jax.grad(loss)(w)


def normalised_step(w, x):
    def loss(w):
        return jnp.mean(jnp.square(x @ w)) * 1e-7  # <- here

    gradient = jax.grad(loss)(w)
    return w - 1e-2 * gradient * jax.lax.rsqrt(jnp.mean(gradient * gradient))  # <- here


def hidden_overflow(x):
    return 1.0 / jnp.exp(x)  # <- here


def square_of_small(x):
    return jnp.sqrt(jnp.mean(x * x))  # <- here


def counter(n):
    return n + 1.0  # <- here


def one_plus(x):
    return (1.0 + x) - 1.0  # <- here


def difference_of_exponentials(x):
    return jnp.exp(x) - jnp.exp(x - 1.0)  # <- here


def clip_by_global_norm(gradient):
    norm = jnp.sqrt(jnp.sum(jnp.square(gradient)))  # <- here
    return gradient / jnp.maximum(norm, 1.0)


def unscaled_fp8(x, w):
    return jax.nn.relu(x @ w)  # <- here


def vae_decoder(x, kernel):
    for _ in range(3):
        y = jax.lax.conv(x, kernel, (1, 1), "SAME")  # <- here
        x = jnp.maximum(y, 0.0)
    return x / 1024.0 / 1024.0


def case(
    source: str, call: Callable, args: Callable, low: Any, kinds: tuple[str, ...], **fields: Any
) -> Program:
    """Returns a failure beside its results in float32."""
    return Program(call, args, low, kinds, source, reference="float32", **fields)


SHORT: dict[str, Program] = {
    "T5 in fp16": case(
        "transformers #5651, #9295, #11274",
        t5_feed_forward,
        lambda: (normal(4, 16), normal(16, 64, seed=1) * 40, normal(64, 16, seed=2) * 300),
        "fp16",
        ("overflow",),
    ),
    "The residual stream": case(
        "transformers #12225 (Pegasus); 58,820 + 33,760",
        residual,
        lambda: (jnp.full((2, 8), 58820.0), jnp.full((2, 8), 33760.0)),
        "fp16",
        ("overflow",),
    ),
    "Sum of squares in a norm": case(
        "pytorch #66707; rms 4 overflows at width 4096",
        rms_norm,
        lambda: (normal(4096, scale=6.0),),
        "fp16",
        ("overflow",),
    ),
    "Adam's epsilon": case(
        "optax #1754, keras #11860, chainer #6299",
        adam,
        lambda: (normal(64, scale=1e-4), normal(64, scale=1e-5) ** 2),
        "fp16",
        ("underflow", "overflow", "nan"),
    ),
    "Updates vanish": case(
        "torchtune #2254, pytorch #120376; the 2^-11 rule of arXiv 1710.03740",
        lambda w, g: apply_update(w, g) - w,
        lambda: (1.0 + jnp.arange(64.0) / 64, normal(64)),
        "bf16",
        ("swamping",),
        inside=(apply_update,),
    ),
    "A decay of 0.999 is 1": case(
        "tt-metal #55935, sd_dreambooth PR #1415",
        moving_average,
        lambda: (jnp.zeros(8) + 1.0, jnp.full(8, 3.0)),
        "bf16",
        ("precision", "swamping"),
    ),
    "A sum stalls at 256": case(
        "ml_dtypes #63, jax PR #17792",
        running_sum,
        lambda: (jnp.ones(1000),),
        "bf16",
        ("swamping",),
    ),
    "One-pass variance": case(
        "pytorch #66707; the table of one and two passes",
        variance,
        lambda: (10.0 + normal(4096),),
        "bf16",
        ("cancellation",),
    ),
    "finfo.min plus a score": case(
        "transformers PR #17306, NeMo Automodel PR #2658",
        masked_softmax,
        lambda: (jnp.full(4, -30.0), jnp.zeros(4, bool)),
        "fp16",
        ("overflow",),
    ),
    "A mask of -1e10": case(
        "flax PR #1527, #982",
        mask_constant,
        lambda: (normal(6), jnp.array([1.0, 1, 1, 0, 0, 1])),
        "fp16",
        ("overflow",),
    ),
    "Cross entropy in bf16": case(
        "flax #677, optax #1020, pytorch PR #24457",
        cross_entropy,
        lambda: (normal(1000, scale=2.0).at[0].set(15.0).astype(jnp.bfloat16).astype("float32"),),
        "bf16",
        ("precision", "swamping", "amplified"),
    ),
    "Small gradients": case(
        "arXiv 1710.03740, figure 3: loss scaling",
        small_gradients,
        lambda: (normal(16), normal(64, 16, seed=1)),
        "fp16",
        ("underflow",),
    ),
    "Small gradients under autocast": case(
        "torch.amp's GradScaler: float16 gradients without one are zero",
        mixed_precision_gradients,
        lambda: (normal(16), normal(64, 16, seed=1)),
        "c=f16",
        ("underflow",),
    ),
    "A loss scale isn't enough": case(
        "arXiv 1710.03740, section 3: a loss scale, and a float32 optimizer",
        normalised_step,
        lambda: (normal(16), normal(64, 16, seed=1)),
        "fp16",
        ("underflow", "overflow"),
    ),
    "An overflow that hides": case(
        "XLA rewrites 1/exp(x) to exp(-x): debug_nans is silent",
        hidden_overflow,
        lambda: (jnp.array([12.0, 11.5, 1.0]),),
        "fp16",
        ("overflow",),
    ),
    "The square of 1e-4": case(
        "facts on FP16 norms: below 2.4e-4 squares are 0",
        square_of_small,
        lambda: (normal(256, scale=1e-4),),
        "fp16",
        ("underflow",),
    ),
    "256 + 1": case(
        "jax #29323", counter, lambda: (jnp.array([256.0, 512.0]),), "bf16", ("swamping",)
    ),
    "(1 + x) - 1": case(
        "the reason for log1p and expm1",
        one_plus,
        lambda: (jnp.array([1e-3, 2e-3, 5e-3]),),
        "bf16",
        ("swamping", "cancellation", "precision"),
    ),
    "Infinity minus infinity": case(
        "jax #475, #5698",
        difference_of_exponentials,
        lambda: (jnp.array([12.5, 13.0]),),
        "fp16",
        ("overflow",),
    ),
    "A gradient's global norm": case(
        "fairscale PR #263: 5000^2",
        clip_by_global_norm,
        lambda: (normal(64, scale=5000.0),),
        "fp16",
        ("overflow",),
    ),
    "FP8 without a scale": case(
        "TransformerEngine #841, DeepSeek-V3 section 3.3.2",
        unscaled_fp8,
        lambda: (normal(8, 64, scale=10.0), normal(64, 8, seed=1, scale=10.0)),
        "e4m3fn",
        ("overflow",),
    ),
    "SDXL's decoder": case(
        "sdxl-vae-fp16-fix, candle #1060",
        vae_decoder,
        lambda: (normal(1, 4, 8, 8, scale=30.0), normal(4, 4, 3, 3, seed=1, scale=5.0)),
        "fp16",
        ("overflow",),
    ),
}
