"""Optimizer states in narrow formats: errors, bytes, and second moments that must not flush."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arrays import normal
from cases import nightly, refused
from scalewise import ScaledArray, SqrtStored, Storage
from scalewise.formats import E4M3FN, E5M2, FP16
from scalewise.training import NARROW_ADAM, store_state, widen

pytestmark = pytest.mark.usefixtures("users_promotion")


W = {"w": normal(0, (32, 64)), "b": jnp.ones(64)}


def gradients(seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "w": normal(keys[0], (32, 64)) * jnp.exp2(jnp.arange(64) / 4 - 20),
        "b": normal(keys[1], (64,)),
    }


OPTIMIZERS = {
    "adamw": (optax.adamw(1e-2), NARROW_ADAM),
    "amsgrad": (optax.amsgrad(1e-2), {r"\.mu\b": "bf16", r"\.nu": Storage(FP16, root=2)}),
    "lion": (optax.lion(1e-3), {r"\.mu\b": "e4m3fn"}),
    "sgd": (optax.sgd(1e-2, momentum=0.9), {"trace": "fp16"}),
    "rmsprop": (optax.rmsprop(1e-2), {r"\.nu\b": Storage(FP16, nonzero=True)}),
    "adafactor": (optax.adafactor(1e-2), {r"\.v": Storage(FP16, root=2)}),
    "blocks": (optax.adam(1e-2), {r"\.mu\b": "mxfp8_e4m3", r"\.nu\b": "mxfp8_e5m2"}),
    "channels": (optax.adam(1e-2), {r"\['w'\]": Storage(E5M2, axis=1)}),
    "chained": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(1e-2)),
        NARROW_ADAM,
    ),
    "muon": (optax.contrib.muon(1e-2), {r"muon'\].*\.mu\b": "e4m3fn"}),
}


@pytest.mark.parametrize("name", nightly(OPTIMIZERS, but=["adamw", "chained"]))
def test_any_optimizer_keeps_structure_and_trajectory(name):
    """One step from the start is the optimizer's own; later ones differ by the roundings."""
    plain, storages = OPTIMIZERS[name]
    narrow = store_state(plain, storages)
    a, b = plain.init(W), narrow.init(W)
    step, narrow_step = jax.jit(plain.update), jax.jit(narrow.update)
    for i in range(6):
        ua, a = step(gradients(i), a, W)
        ub, after = narrow_step(gradients(i), b, W)
        assert jax.tree.structure(after) == jax.tree.structure(b)
        b = after
        if i == 0:
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), ua, ub
            )
    cosine = [
        float((x * y).sum() / jnp.sqrt((x * x).sum() * (y * y).sum()))
        for x, y in zip(jax.tree.leaves(ua), jax.tree.leaves(ub), strict=True)
    ]
    assert min(cosine) > 0.98
    sizes = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in (a, b)]
    assert sizes[1] < sizes[0]
    assert any(
        isinstance(x, ScaledArray | SqrtStored)
        for x in jax.tree.leaves(b, is_leaf=lambda x: isinstance(x, ScaledArray | SqrtStored))
    )


def test_three_bytes_per_parameter_each_rounded_once():
    optimizer = store_state(optax.adam(1e-2))
    _, state = jax.jit(optimizer.update)(gradients(0), optimizer.init(W), W)
    n = sum(x.size for x in jax.tree.leaves(W))
    assert sum(x.nbytes for x in jax.tree.leaves((state[0].mu, state[0].nu))) == 3 * n + 4 * 4
    _, exact = optax.adam(1e-2).update(gradients(0), optax.adam(1e-2).init(W), W)
    mu, nu = widen(state[0].mu["w"]), widen(state[0].nu["w"])
    want_mu, want_nu = np.asarray(exact[0].mu["w"]), np.asarray(exact[0].nu["w"])
    big = np.abs(want_mu) > np.abs(want_mu).max() * 2.0**-13
    np.testing.assert_allclose(np.asarray(mu)[big], want_mu[big], rtol=2.0**-4)
    np.testing.assert_allclose(np.asarray(nu), want_nu, rtol=2.1 * 2.0**-11)


@pytest.mark.parametrize(
    "storage",
    [Storage(FP16, root=2), Storage(E4M3FN, root=2), Storage(E5M2, nonzero=True),
     Storage("mxfp8_e4m3", nonzero=True)],
    ids=["fp16 root", "fp8 root", "fp8", "blocks"],
)  # fmt: skip
def test_a_second_moment_is_never_zero_where_the_first_is_not(storage):
    """Gradients over 2^60: a plain FP8 second moment flushes, and the step is mu / epsilon."""
    g = {"w": jnp.exp2(-jnp.arange(64.0))[None] * jnp.ones((2, 1))}
    g["w"] = jnp.where(jnp.arange(64) < 60, g["w"], 0)
    plain = optax.adam(1.0, eps=1e-30)
    want, _ = plain.update(g, plain.init(g), g)

    def second_step(storages):
        optimizer = store_state(plain, storages)
        _, state = optimizer.update(g, optimizer.init(g), g)
        nothing = jax.tree.map(jnp.zeros_like, g)
        updates, _ = optimizer.update(nothing, state, g)  # all that is left are the moments
        moving = np.asarray(widen(state[0].mu["w"])) != 0
        return np.abs(np.asarray(updates["w"])), np.asarray(widen(state[0].nu["w"])), moving

    updates, nu, moving = second_step({r"\.mu\b": "fp16", r"\.nu\b": storage})
    assert np.all(nu[moving] > 0)
    assert np.all(nu[:, 60:] == 0)  # and what is zero stays so
    assert updates.max() < 2 * np.abs(np.asarray(want["w"])).max()
    updates, nu, moving = second_step({r"\.mu\b": "fp16", r"\.nu\b": "e4m3fn"})
    assert np.any(nu[moving] == 0)
    assert updates.max() > 1e10  # what the plain storage does


test_invalid_arguments_are_errors = refused(
    (lambda: store_state(optax.adam(1.0), {"nu": "fp61"}), "no format is called 'fp61'"),
    (lambda: store_state(optax.adam(1.0), {"nu": "mxfp4"}), "e2m1fn has no storage dtype"),
    (lambda: store_state(optax.sgd(1.0), {"nu": "fp16"}).init(W),
     "'nu' is in no float leaf's path; the optimizer's state has: none at all"),
    (lambda: store_state(optax.lion(1.0), {"nu": "fp16"}).init(W),
     r"state has: \[0\].mu\['b'\], \[0\].mu\['w'\]"),
)  # fmt: skip
