"""Healthy programs after Keras' public examples, with the JAX backend."""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras

from failures.programs import clean, integers, normal, uniform

EXAMPLES = "https://keras.io/examples/"
POLICY = "p=f32,c=bf16,o=f32"


@functools.cache
def dense_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4),
    ])  # fmt: skip


@functools.cache
def convnet():
    keras.utils.set_random_seed(1)
    return keras.Sequential([
        keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10),
    ])  # fmt: skip


@functools.cache
def encoder():
    keras.utils.set_random_seed(2)
    inputs = keras.layers.Input((6, 16))
    x = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    x = keras.layers.LayerNormalization()(x + inputs)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x)))


def weights(model):
    fixed = [jnp.asarray(v.value) for v in model.non_trainable_variables]
    return [jnp.asarray(v.value) for v in model.trainable_variables], fixed


def applied(model, params, fixed, x):
    return model.stateless_call(params, fixed, x)[0]


@clean(EXAMPLES + "structured_data/", "bf16", lambda: (*weights(dense_model()), normal(4, 8)))
def keras_dense(params, fixed, x):
    return applied(dense_model(), params, fixed, x)


@clean(EXAMPLES + "vision/mnist_convnet/", POLICY,
       lambda: (*weights(convnet()), uniform(4, 8, 8, 1), integers(4)))  # fmt: skip
def keras_mnist_gradients(params, fixed, x, labels):
    def loss(params):
        logs = jax.nn.log_softmax(applied(convnet(), params, fixed, x))
        return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=-1))

    return jax.grad(loss)(params)


@clean(EXAMPLES + "nlp/text_classification_with_transformer/", POLICY,
       lambda: (*weights(encoder()), normal(2, 6, 16)))  # fmt: skip
def keras_encoder(params, fixed, x):
    return applied(encoder(), params, fixed, x)
