"""Training steps of small models in 16 bits as users write them, one fault each."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import failing, normal
from failures.trainings.models import (
    at_rest,
    convolutional,
    cross_entropy,
    descend,
    image_params,
    language_model,
    language_params,
    pictures,
    recurrent_cell,
    recurrent_params,
    sequences,
    text,
    weights,
    zeros,
)

failing = partial(failing, set="contact", native=True)
GITHUB = "https://github.com/"


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def wide_floats(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def last_state(params, series):
    def body(hidden, x):
        return recurrent_cell(params, hidden, x), None

    start = jnp.zeros((series.shape[0], 16), series.dtype)
    return jax.lax.scan(body, start, jnp.swapaxes(series, 0, 1))[0]


def counted_state():
    params = recurrent_params()
    square = jax.tree.map(lambda p: np.full(p.shape, 1e-3, np.float32), params)
    return {"params": params, "m": zeros(params), "v": square, "step": np.float32(256)}, sequences()


@failing(
    GITHUB + "pytorch/ao/pull/4915", "bf16", "swamping precision",
    'step = state["step"] + 1',
    args=counted_state, change=True,
)  # fmt: skip
def recurrent_step_with_counter(state, batch):
    """Adam in float32, but for its counter."""

    def loss(params):
        return cross_entropy(last_state(params, batch["series"]) @ params["head"], batch["labels"])

    step = state["step"] + 1
    gradients = wide(jax.grad(loss)(state["params"]))
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, wide(state["m"]), gradients)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, wide(state["v"]), gradients)
    first = 1.0 - 0.9 ** step.astype(jnp.float32)
    second = 1.0 - 0.999 ** step.astype(jnp.float32)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-2 * (m / first) / (jnp.sqrt(v / second) + 1e-8),
        wide(state["params"]), m, v,
    )  # fmt: skip
    return {"params": params, "m": m, "v": v, "step": step}


def recurrent_step_with_counter_fixed(state, batch):
    return recurrent_step_with_counter(state | {"step": wide(state["step"])}, batch)


def metered_state():
    return at_rest(image_params()) | {"total": np.float32(1024.0)}, pictures()


@failing(
    GITHUB + "pytorch/xla/pull/2425", "bf16", "swamping precision",
    'return {"params": params, "velocity": velocity, "total": state["total"] + value}',
    args=metered_state, change=True, limit=0.3,
)  # fmt: skip
def image_step_with_meter(state, batch):
    """Momentum in float32; the sum of the losses of an epoch stays in 16 bits."""

    def loss(params):
        return cross_entropy(convolutional(params, batch["images"]), batch["labels"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, wide(state["velocity"]), wide(gradients))
    params = descend(wide(state["params"]), velocity, 0.5)
    return {"params": params, "velocity": velocity, "total": state["total"] + value}


def image_step_with_meter_fixed(state, batch):
    return image_step_with_meter(state | {"total": wide(state["total"])}, batch)


LION = optax.lion(1e-4, weight_decay=0.1)


def lion_state():
    """With a momentum that outweighs the gradients."""
    params = language_params()
    params = jax.tree.map(lambda p: np.sign(p) * (0.25 + np.abs(p)), params)
    state = LION.init(params)
    mu = jax.tree.map(lambda p: 0.5 * np.sign(normal(*p.shape, seed=p.size)), params)
    return params, (state[0]._replace(mu=mu), *state[1:]), text()


@failing(
    GITHUB + "huggingface/transformers/pull/21312", "bf16", "swamping precision",
    "params = optax.apply_updates(params, updates)",
    args=lion_state, change=True,
)  # fmt: skip
def language_step_with_lion(params, state, batch):
    def loss(params):
        return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    gradients = jax.grad(loss)(params)
    updates, state = LION.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state


def language_step_with_lion_fixed(params, state, batch):
    return language_step_with_lion(wide(params), state, batch)


def denoiser_params():
    return weights(3, {"inputs": (17, 32), "hidden": (32, 32), "outputs": (32, 16)})


def denoise(params, x, t):
    x = jnp.concatenate([x, t[:, None].astype(x.dtype)], axis=-1)
    return jax.nn.gelu(jax.nn.gelu(x @ params["inputs"]) @ params["hidden"]) @ params["outputs"]


DIFFUSION = optax.adam(1e-3)


def early_timesteps():
    params = denoiser_params()
    batch = {"data": normal(16, 16, seed=5), "noise": normal(16, 16, seed=6), "t": np.arange(16)}
    betas = np.linspace(8.5e-4**0.5, 0.012**0.5, 1000, dtype=np.float32) ** 2
    return {"params": params, "adam": DIFFUSION.init(params)}, batch | {"betas": betas}


def kept_signal(betas, t):
    alphas = 1.0 - betas
    return jnp.cumprod(alphas)[t]


@failing(
    GITHUB + "AUTOMATIC1111/stable-diffusion-webui/issues/14071", "bf16",
    "swamping precision cancellation accumulation nan underflow overflow",
    "alphas = 1.0 - betas", "return jnp.cumprod(alphas)[t]",
    args=early_timesteps, inside=(kept_signal,), change=True,
)  # fmt: skip
def denoising_step(state, batch):
    """A weight of at most 5 for the signal-to-noise ratio; Adam in float32."""
    kept = kept_signal(batch["betas"], batch["t"])[:, None]
    noised = jnp.sqrt(kept) * batch["data"] + jnp.sqrt(1.0 - kept) * batch["noise"]
    ratio = kept / (1.0 - kept)
    weight = jnp.minimum(ratio, 5.0) / ratio

    def loss(params):
        error = denoise(params, noised.astype(batch["data"].dtype), batch["t"]) - batch["noise"]
        return jnp.mean(weight * error**2)

    gradients = wide(jax.grad(loss)(state["params"]))
    updates, adam = DIFFUSION.update(gradients, wide_floats(state["adam"]))
    return {"params": optax.apply_updates(wide(state["params"]), updates), "adam": adam}


def denoising_step_fixed(state, batch):
    return denoising_step(state, batch | {"betas": wide(batch["betas"])})


def critic(params, x):
    return jax.nn.gelu(x @ params["inputs"]) @ params["outputs"]


def gradient_norms(params, x):
    slopes = jax.grad(lambda x: jnp.sum(critic(params, x)))(x)
    return jnp.sqrt(jnp.sum(slopes**2, axis=-1))


def gradient_norms_in_units(params, x):
    slopes = jax.grad(lambda x: jnp.sum(critic(params, x)))(x)
    return jnp.sqrt(jnp.sum((4096.0 * slopes) ** 2, axis=-1)) / 4096.0


def flat_critic():
    params = weights(7, {"inputs": (8, 16), "outputs": (16, 1)})
    params["outputs"] *= 3e-5 * 16
    return params, {"real": normal(16, 8, seed=1), "made": normal(16, 8, seed=2, mean=0.5)}


@failing(
    GITHUB + "Lightning-AI/pytorch-lightning/issues/12600", "fp16", "underflow nan",
    "return jnp.sqrt(jnp.sum(slopes**2, axis=-1))",
    args=flat_critic, inside=(gradient_norms,),
)  # fmt: skip
def critic_step(params, batch, norms=gradient_norms):
    """Wasserstein GAN: the critic with a gradient penalty, early in training."""

    def loss(params):
        middle = 0.5 * batch["real"] + 0.5 * batch["made"]
        penalty = jnp.mean((norms(params, middle) - 1.0) ** 2)
        score = jnp.mean(critic(params, batch["made"])) - jnp.mean(critic(params, batch["real"]))
        return score + 10.0 * penalty

    return descend(params, jax.grad(loss)(params), 1e-3)


def critic_step_fixed(params, batch):
    return critic_step(params, batch, norms=gradient_norms_in_units)


def field(params, x):
    return jnp.tanh(x[:, None] * params["inputs"][0] + params["shift"]) @ params["outputs"]


def curvature(params, x):
    h = 0.0625
    return (field(params, x + h) - 2.0 * field(params, x) + field(params, x - h)) / h**2


def wide_curvature(params, x):
    return curvature(wide(params), x.astype(jnp.float32)).astype(x.dtype)


def heat_problem():
    params = weights(9, {"inputs": (1, 24), "outputs": (24, 1)}) | {"shift": normal(24, seed=3)}
    return params, np.arange(-16, 17, dtype=np.float32) / 16


@failing(
    GITHUB + "miniHuiHui/PINN_FP64/issues/2", "bf16", "cancellation precision",
    "return (field(params, x + h) - 2.0 * field(params, x) + field(params, x - h)) / h**2",
    args=heat_problem, inside=(curvature,), change=True, limit=0.1,
)  # fmt: skip
def physics_informed_step(params, points, second=curvature):
    """The equation u'' = -sin(3 x), with differences for the derivative."""

    def loss(params):
        residual = second(params, points)[:, 0] + jnp.sin(3.0 * points)
        return jnp.mean(residual**2)

    return descend(wide(params), wide(jax.grad(loss)(params)), 1e-3)


def physics_informed_step_fixed(params, points):
    return physics_informed_step(params, points, second=wide_curvature)


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x, noise):
        mean, log_variance = jnp.split(nn.Dense(16, dtype=x.dtype)(x), 2, axis=-1)
        code = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(x.shape[-1], dtype=x.dtype)(code), mean, log_variance


AUTOENCODER = Autoencoder()


def raw_pixels():
    x = normal(32, 256, seed=4, scale=4.0)
    noise = normal(32, 8, seed=5)
    variables = AUTOENCODER.init(jax.random.key(0), x, noise)
    return jax.tree.map(np.asarray, variables), {"x": x, "noise": noise}


def summed(errors):
    return jnp.sum(errors**2) / errors.size


def averaged(errors):
    return jnp.mean(errors**2)


@failing(
    GITHUB + "Xilinx/brevitas/pull/1496", "fp16", "overflow decision",
    "return jnp.sum(errors**2) / errors.size",
    args=raw_pixels, inside=(summed,), change=True,
)  # fmt: skip
def autoencoder_step(params, batch, reduce=summed):
    """Skips a step whose loss isn't finite."""

    def loss(params):
        seen, mean, logs = AUTOENCODER.apply(params, batch["x"], batch["noise"])
        divergence = 0.5 * jnp.mean(jnp.exp(logs) + mean**2 - 1.0 - logs)
        return reduce(seen - batch["x"]) + 1e-2 * divergence

    value, gradients = jax.value_and_grad(loss)(params)
    new = descend(wide(params), wide(gradients), 0.5)
    return jax.tree.map(lambda n, p: jnp.where(jnp.isfinite(value), n, p), new, wide(params))


def autoencoder_step_fixed(params, batch):
    return autoencoder_step(params, batch, reduce=averaged)


def classifier():
    return eqx.nn.MLP(8, 3, 16, 1, activation=jax.nn.tanh, key=jax.random.key(1))


def many_examples():
    params = jax.tree.map(np.asarray, eqx.filter(classifier(), eqx.is_array))
    x = normal(600, 8, seed=8, scale=0.1, mean=0.5)
    return params, {"x": x, "y": np.zeros(600, np.int32)}


@failing(
    GITHUB + "mlnomadpy/flaxchat/issues/6", "bf16", "swamping accumulation precision",
    "return jax.tree.map(lambda t, g: t + g, total, gradients), None",
    args=many_examples, change=True, limit=0.1,
)  # fmt: skip
def accumulating_classifier_step(params, batch, zero=jnp.zeros_like):
    """Adds the gradients of 600 examples in the dtype of the parameters."""
    static = eqx.filter(classifier(), eqx.is_array, inverse=True)

    def loss(params, x, y):
        return -jax.nn.log_softmax(eqx.combine(params, static)(x))[y]

    def body(total, example):
        gradients = jax.grad(loss)(params, example["x"], example["y"])
        return jax.tree.map(lambda t, g: t + g, total, gradients), None

    total = jax.lax.scan(body, jax.tree.map(zero, params), batch)[0]
    return jax.tree.map(lambda p, t: p - 0.1 * t / 600, wide(params), wide(total))


def accumulating_classifier_step_fixed(params, batch):
    def zero(p):
        return jnp.zeros(p.shape, jnp.float32)

    return accumulating_classifier_step(params, batch, zero=zero)


def orthogonal(g):
    """Five steps of Newton and Schulz."""
    x = g / (jnp.sqrt(jnp.sum(g * g)) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def orthogonal_in_units(g):
    return orthogonal(g / jnp.max(jnp.abs(g)))


def small_gradients():
    params = weights(5, {"inputs": (8, 16), "outputs": (16, 8)})
    x = normal(32, 8, seed=1)
    return params, {"x": x, "y": np.float32(np.tanh(x[:, ::-1])), "rate": np.float32(2.0**-12)}


@failing(
    GITHUB + "deepmodeling/deepmd-kit/pull/5130", "fp16", "underflow overflow nan",
    "x = g / (jnp.sqrt(jnp.sum(g * g)) + 1e-7)",
    args=small_gradients, inside=(orthogonal,),
)  # fmt: skip
def step_with_muon(params, batch, orthogonalize=orthogonal):
    """A regression with a small weight of its loss."""

    def loss(params):
        y = jax.nn.gelu(batch["x"] @ params["inputs"]) @ params["outputs"]
        return batch["rate"] * jnp.mean((y - batch["y"]) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.02 * orthogonalize(g), params, gradients)


def step_with_muon_fixed(params, batch):
    return step_with_muon(params, batch, orthogonalize=orthogonal_in_units)
