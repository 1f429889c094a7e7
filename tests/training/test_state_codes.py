"""Optimizer states as codes of tables and as expanded FP8."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from arrays import normal
from cases import nightly, refused
from scalewise import Storage, quantize
from scalewise.formats import E4M3FN, FP32, BlockFormat
from scalewise.training import STATES, ExpandedStorage, TableStorage, store_state, widen

FIRST = np.asarray(normal(0, (64, 128))) * np.exp2(np.arange(128) / 8 - 20).astype(np.float32)
SECOND = FIRST**2


pytestmark = pytest.mark.usefixtures("users_promotion")


def error(storage, x):
    got = np.asarray(storage.store(x).value(), np.float64)
    return np.sqrt(np.mean((got[x != 0] / x[x != 0].astype(np.float64) - 1) ** 2))


def coat(x, steps=16):
    """COAT's programs (github.com/NVlabs/COAT, fp8_adamw_expand_cuda_kernel.cu), in float64."""
    blocks = x.astype(np.float64).reshape(-1, 128)
    size = np.abs(blocks)
    largest = size.max(1, keepdims=True) + 1e-30
    smallest = size.min(1, keepdims=True) + 1e-30
    center = np.sqrt(largest * smallest)
    power = np.floor(np.log2(448**2 / 2) / np.log2(largest / smallest) * steps) / steps
    scale = (largest / center) ** power / 448
    y = np.sign(blocks) * (size / center) ** power / scale
    y = np.clip(y, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    y = y * scale
    return (np.sign(y) * np.abs(y) ** (1 / power) * center).reshape(x.shape)


@pytest.mark.parametrize("x", [FIRST, SECOND], ids=["first", "second"])
def test_expanded_blocks_are_coats(x):
    got = np.asarray(jax.jit(lambda x: ExpandedStorage().store(x).value())(x), np.float64)
    want = coat(x)
    near = np.abs(got - want) <= 1e-4 * np.abs(want)
    assert np.mean(near) > 0.998  # the rest lie beside a tie of E4M3
    np.testing.assert_allclose(got, want, rtol=0.15)


def test_expansion_lowers_the_error_of_second_moments():
    x = np.asarray(normal(3, (64, 128))) ** 2 + np.float32(0.05)
    group = BlockFormat("group", E4M3FN, scale=FP32, size=128)
    plain = np.asarray(quantize(x, group).value(), np.float64)
    plain = np.sqrt(np.mean((plain / x - 1) ** 2))
    assert error(ExpandedStorage(), x) < 0.7 * plain


STORAGES = [
    TableStorage(min_size=0),
    TableStorage(4, block=128, min_size=0),
    TableStorage(signed=False, min_size=0),
    ExpandedStorage(min_size=0),
]


@pytest.mark.parametrize("storage", STORAGES, ids=repr)
@pytest.mark.parametrize("shape", [(3, 37), *nightly([((300,),), ((),)])])
def test_arrays_of_any_shape_come_back(storage, shape):
    x = np.abs(np.asarray(normal(1, shape))) + np.float32(0.1)
    stored = jax.jit(storage.store)(x)
    again = jax.tree.unflatten(jax.tree.structure(stored), jax.tree.leaves(stored)).value()
    assert again.shape == shape
    bound = 0.2 * x.max() if getattr(storage, "bits", 8) == 4 else 1e-3
    np.testing.assert_allclose(again, x, rtol=0.1, atol=bound)
    np.testing.assert_array_equal(storage.store(x * 0).value(), 0)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


BYTES = {"narrow_adam": 3, "fp8_lm": 3, "coat": 2.19, "adam8bit": 2.04, "adam4bit": 1.07}


@pytest.mark.parametrize("name", nightly(STATES, but=["adam8bit"]))
def test_adam_trains_with_each_state(name):
    x, w = normal(0, (128, 64)), normal(1, (64, 64)) / 8

    def loss(params):
        return jnp.mean(jnp.square(x @ params - x @ w))

    def run(optimizer):
        params, state = jnp.zeros((64, 64)), optimizer.init(jnp.zeros((64, 64)))
        start = nbytes(state)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), loss(params)

        (_, state), losses = jax.lax.scan(step, (params, state), None, length=100)
        assert nbytes(state) == start
        return losses, start

    want, wide = run(optax.adam(0.01))
    got, size = run(store_state(optax.adam(0.01), name))
    assert size / 64**2 == pytest.approx(BYTES[name], abs=0.02)
    assert wide / 64**2 == pytest.approx(8, abs=0.02)
    assert got[-1] < 0.1 * got[0]
    assert got[-1] < 2 * want[-1] + 0.02 * want[0]


def test_the_first_pattern_decides_and_small_leaves_stay():
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(64)}
    optimizer = store_state(
        optax.adam(1.0), {r"\['w'\]": TableStorage(), r"\.mu\b": "bf16", r"\.nu\b": Storage("fp16")}
    )
    (state, _) = optimizer.init(params)
    assert state.mu["w"].data.dtype == jnp.uint8
    assert (state.mu["b"].data.dtype, state.nu["b"].data.dtype) == (jnp.bfloat16, jnp.float16)
    assert widen(state).mu["w"].shape == (64, 128)
    (state, _) = store_state(optax.adam(1.0), "adam8bit").init(params)
    assert isinstance(state.mu["b"], jax.Array)


test_bad_input_is_refused = refused(
    (lambda: TableStorage(table="linear"), "the linear table is for signed=False"),
    (lambda: TableStorage(4, block=7), "block is 7; expected an even number"),
    (lambda: ExpandedStorage(0), "steps is 0; expected a positive integer"),
    (lambda: store_state(optax.adam(1.0), "adam16"), "'adam16' is no optimizer state; expected"),
    (lambda: store_state(optax.sgd(1.0), "coat").init(jnp.ones(3)), "is in no float leaf's path"),
)  # fmt: skip


@pytest.mark.parametrize("storage", [TableStorage(4, block=128), *nightly([ExpandedStorage()])])
def test_states_of_several_models_are_those_of_each(storage):
    several = jnp.stack([FIRST, 8 * FIRST[::-1]])
    want = jnp.stack([storage.store(x).value() for x in several])
    together = jax.vmap(storage.store)(several)
    np.testing.assert_allclose(together.value(), want, rtol=1e-5)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *[storage.store(x) for x in several])
    np.testing.assert_allclose(stacked.value(), want, rtol=1e-5)
