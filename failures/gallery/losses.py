"""Norms and losses whose sums of squares, exponentials or logarithms leave the range."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.random import key, normal, split


def weights(seed, **shapes):
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def large_layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.square(centred)  # <- here
    inverse = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + 1e-3)  # <- here
    return centred * inverse


def outlier_features(params, x):
    """Two feed-forward layers with norms, whose residual stream has grown large."""
    for layer in params:
        x = x + jax.nn.gelu(large_layer_norm(x) @ layer["up"]) @ layer["down"]
    return large_layer_norm(x)


def outlier_features_arguments():
    layers = [weights(seed, up=(32, 64), down=(64, 32)) for seed in (0, 1)]
    return layers, 400.0 * normal(key(2), (8, 32))


def one_pass_moments(x):
    mean = jnp.mean(x, axis=(1, 2, 4), keepdims=True)
    square = jnp.mean(jnp.square(x), axis=(1, 2, 4), keepdims=True)  # <- here
    return mean, square - jnp.square(mean)  # <- here


def two_pass_moments(x):
    mean = jnp.mean(x, axis=(1, 2, 4), keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=(1, 2, 4), keepdims=True)


def group_norm(x, moments):
    groups = x.reshape(*x.shape[:3], 2, -1)
    mean, variance = moments(groups)
    return ((groups - mean) * jax.lax.rsqrt(variance + 1e-3)).reshape(x.shape)


def bright_images(params, x, moments=one_pass_moments):
    """A convolution and a group norm of one pass, on features whose mean isn't 0."""
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=layout)
    y = group_norm(y + params["bias"][None, None, None], moments)
    return jnp.mean(jax.nn.relu(y), axis=(1, 2)) @ params["head"]


def bright_images_arguments():
    params = weights(0, head=(8, 4)) | {"kernel": 0.1 * normal(key(1), (3, 3, 3, 8))}
    return params | {"bias": jnp.full(8, 12.0)}, normal(key(2), (2, 8, 8, 3))


def bright_images_fixed(params, x):
    return bright_images(params, x, two_pass_moments)


def rms_norm(x, gain, eps):
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * gain  # <- here


def padded_tokens(params, tokens, eps=1e-12):
    """Embeds tokens, where padding is a row of zeros, and scores them."""
    x = params["tokens"][tokens]
    x = rms_norm(x, params["gain"][None, None], eps)
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return jnp.mean(rms_norm(x, params["gain"][None, None], eps), axis=1) @ params["head"]


def padded_tokens_arguments():
    params = weights(0, up=(16, 32), down=(32, 16), head=(16, 4), tokens=(32, 16))
    params |= {"tokens": params["tokens"].at[0].set(0.0), "gain": jnp.ones(16)}
    return params, jax.random.randint(key(1), (4, 8), 1, 32).at[1:, -2:].set(0)


def padded_tokens_fixed(params, tokens):
    return padded_tokens(params, tokens, eps=1e-5)


def divergence(student, teacher):
    p, q = jax.nn.softmax(teacher), jax.nn.softmax(student)  # <- here
    return jnp.sum(p * (jnp.log(p + 1e-10) - jnp.log(q + 1e-10)), axis=-1)  # <- here


def divergence_of_logs(student, teacher):
    p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def distillation(params, teacher, x, divergence=divergence):
    """The divergence of a student's predictions from a confident teacher's."""
    student = jnp.tanh(x @ params["hidden"]) @ params["head"]
    return divergence(student, jnp.tanh(x @ teacher["hidden"]) @ teacher["head"])


def distillation_arguments():
    params = [weights(seed, hidden=(8, 16), head=(16, 10)) for seed in (0, 1)]
    student, teacher = (p | {"head": 6.0 * p["head"]} for p in params)
    return student, teacher, normal(key(2), (16, 8))


def distillation_fixed(params, teacher, x):
    return distillation(params, teacher, x, divergence_of_logs)


def focal(logits, labels):
    p = jax.nn.sigmoid(logits)  # <- here
    positive = -labels * jnp.square(1.0 - p) * jnp.log(p + 1e-8)  # <- here
    return positive - (1.0 - labels) * jnp.square(p) * jnp.log(1.0 - p + 1e-8)  # <- here


def focal_of_logits(logits, labels):
    log_p, log_q = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    positive = -labels * jnp.exp(2.0 * log_q) * log_p
    return positive - (1.0 - labels) * jnp.exp(2.0 * log_p) * log_q


def detector(params, x, labels, loss=focal):
    """The focal loss of a detector's confident predictions."""
    hidden = jax.nn.relu(x @ params["hidden"])
    return jnp.sum(loss(hidden @ params["head"], labels), axis=-1)


def detector_arguments():
    params = weights(0, hidden=(8, 32), head=(32, 6))
    labels = jax.random.bernoulli(key(2), 0.3, (16, 6)).astype(jnp.float32)
    return params | {"head": 4.0 * params["head"]}, normal(key(1), (16, 8)), labels


def detector_fixed(params, x, labels):
    return detector(params, x, labels, focal_of_logits)


def unit(x):
    return x / jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-3)


def normaliser(scores):
    return jnp.log(jnp.sum(jnp.exp(scores), axis=-1))  # <- here


def contrastive(params, images, texts, log_sum=normaliser):
    """The loss of paired embeddings at a temperature of 0.02; returns its gradient too."""

    def loss(params):
        left, right = unit(images @ params["image"]), unit(texts @ params["text"])
        scores = left @ right.T / 0.02
        return jnp.mean(log_sum(scores) - jnp.diagonal(scores))

    return jax.value_and_grad(loss)(params)


def contrastive_arguments():
    params = {"image": jnp.eye(16) + 0.05 * normal(key(0), (16, 16)), "text": jnp.eye(16)}
    images = normal(key(1), (8, 16))
    return params, images, images + 2.0 * normal(key(2), (8, 16))


def contrastive_fixed(params, images, texts):
    return contrastive(params, images, texts, partial(jax.nn.logsumexp, axis=-1))


def smoothed_cross_entropy(logits, labels):
    targets = 0.9 * jax.nn.one_hot(labels, logits.shape[-1]) + 0.1 / logits.shape[-1]
    return -jnp.mean(jnp.sum(targets * jnp.log(jax.nn.softmax(logits)), axis=-1))  # <- here


def smoothed_cross_entropy_of_logs(logits, labels):
    targets = 0.9 * jax.nn.one_hot(labels, logits.shape[-1]) + 0.1 / logits.shape[-1]
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


def smoothed_classifier(params, x, labels, loss=smoothed_cross_entropy):
    """The cross-entropy of a sure classifier with smoothed labels."""
    hidden = jax.nn.relu(x @ params["hidden"])
    return loss(hidden @ params["head"], labels)


def smoothed_classifier_arguments():
    params = weights(0, hidden=(8, 32), head=(32, 10))
    labels = jax.random.randint(key(2), (16,), 0, 10)
    return params | {"head": 6.0 * params["head"]}, normal(key(1), (16, 8)), labels


def smoothed_classifier_fixed(params, x, labels):
    return smoothed_classifier(params, x, labels, smoothed_cross_entropy_of_logs)


def critic(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def penalty(params, x):
    gradients = jax.vmap(jax.grad(lambda one: critic(params, one)))(x)
    lengths = jnp.sqrt(jnp.sum(jnp.square(gradients), axis=-1))  # <- here
    return jnp.mean(jnp.square(lengths - 1.0))


def gradient_penalty(params, real, fake, t):
    """The gradient of a Wasserstein critic's penalty early on, when the critic is flat."""
    between = t[:, None] * real + (1.0 - t[:, None]) * fake
    return jax.grad(penalty)(params, between)


def gradient_penalty_arguments():
    params = {"w1": 0.005 * normal(key(0), (8, 16)), "w2": 0.002 * normal(key(1), (16,))}
    real, fake = normal(key(2), (2, 16, 8))
    return params, real, 1.0 + fake, jax.random.uniform(key(3), (16,))


def prior_divergence(mean, log_variance):
    terms = 1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance)  # <- here
    return -0.5 * jnp.sum(terms, axis=-1)


def collapsed_autoencoder(params, x, noise):
    """The two losses of a variational autoencoder whose posterior is near the prior."""
    hidden = jnp.tanh(x @ params["encoder"])
    mean, log_variance = jnp.split(hidden @ params["latent"], 2, axis=-1)
    sample = mean + jnp.exp(0.5 * log_variance) * noise
    difference = jnp.tanh(sample @ params["hidden"]) @ params["decoder"] - x
    return jnp.mean(jnp.square(difference), axis=-1), prior_divergence(mean, log_variance)


def collapsed_autoencoder_arguments():
    params = weights(0, encoder=(8, 16), latent=(16, 8), hidden=(4, 16), decoder=(16, 8))
    params["latent"] = 0.05 * params["latent"]
    return params, normal(key(1), (8, 8)), normal(key(2), (8, 4))


def softplus(x):
    return jnp.log(1.0 + jnp.exp(x))  # <- here


def stable_softplus(x):
    return jax.nn.softplus(x)


def uncertain_regression(params, x, y, positive=softplus):
    """The likelihood of a regression that predicts its own deviation, and its gradient."""

    def loss(params):
        hidden = jax.nn.relu(x @ params["hidden"])
        mean, raw = jnp.split(hidden @ params["head"], 2, axis=-1)
        deviation = positive(raw) + 0.1
        return jnp.mean(jnp.log(deviation) + 0.5 * jnp.square((y - mean) / deviation))

    return jax.value_and_grad(loss)(params)


def uncertain_regression_arguments():
    params = weights(0, hidden=(8, 32), head=(32, 2))
    params["head"] = params["head"] * jnp.array([[1.0, -12.0]])
    return params, normal(key(1), (16, 8)), normal(key(2), (16, 1))


def uncertain_regression_fixed(params, x, y):
    return uncertain_regression(params, x, y, stable_softplus)
