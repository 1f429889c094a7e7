"""The strategies that choose scales: each fits the data, and has the properties it states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.scaled import SCALINGS

X = np.asarray(normal(0, (64, 32))) * np.float32(3e-7)
FITTING = [
    *(
        cls()
        for cls in SCALINGS.values()
        if cls.source in ("amax", "data", "history") and cls not in (sw.MsEden, sw.Quest)
    ),  # these two cut off the largest numbers
    *(cls(power_of_two=False) for cls in (sw.Amax, sw.Delayed)),
]


def error(x, **options):
    return float(np.square((sw.quantize(x, **options).value() - x) / np.abs(x).max()).sum())


@pytest.mark.parametrize("fmt", ["e4m3fn", *nightly(["e5m2", "fp16", "e2m1fn"])])
@pytest.mark.parametrize("scaling", nightly(FITTING, but=[sw.Amax(), sw.Amax(power_of_two=False)]))
def test_each_fits_the_data_in_jit_and_out(scaling, fmt):
    a = sw.quantize(X, fmt, scaling=scaling)
    b = jax.jit(lambda x: sw.quantize(x, fmt, scaling=scaling))(X)
    np.testing.assert_allclose(a.value(), b.value(), rtol=1e-6)
    eps = float(sw.format(fmt).eps)
    big = np.abs(X) > np.abs(X).max() / 4
    np.testing.assert_allclose(np.asarray(a.value())[big], X[big], rtol=eps)
    if scaling.power_of_two:
        assert np.frexp(float(a.scale))[0] == 0.5


@pytest.mark.parametrize("cls", SCALINGS.values(), ids=list(SCALINGS))
def test_every_strategy_is_public_and_known_to_recipes(cls):
    assert getattr(sw, cls.__name__) is cls
    assert cls.name.replace("_", "") == cls.__name__.lower()
    scale, inverse = cls().scale(jnp.asarray(X), sw.format("fp16"), (0, 1), True)
    assert scale.size == inverse.size == 1
    assert (scale * inverse).item() == pytest.approx(1)
    blocks = {sw.FourOverSix: 16, sw.MsEden: 16, sw.Quest: 32}.get(cls, 0)
    fmt = {16: "nvfp4", 32: "mxfp4"}.get(blocks, "e4m3fn")
    recipe = sw.Recipe(sw.Products.short(fmt, fmt, cls()), features=0)
    (row,) = sw.explain(lambda x, y: x @ y, recipe)(X, X.T).rows[:1]
    of_blocks = f"one for {blocks} elements, {cls.name}"
    assert row.scale == (of_blocks if blocks else cls.name)
    kept = dataclasses.replace(recipe, keep={"dot_general": "fp16"})
    (row,) = sw.explain(lambda x, y: x @ y, kept)(X, X.T).rows[:1]
    assert row.scale == ("amax" if cls.for_blocks else cls.name)


@pytest.mark.parametrize("special", [0.0, 3.0, -70.0, 1e-42, np.inf])
def test_the_largest_of_few_is_found_as_that_of_many(special):
    few = np.array([1.5, -2.0, special, -0.0], np.float32)
    many = np.pad(few, (0, 5000))
    for keep in (None, 0) if np.isfinite(special) else (None,):
        a, b = (sw.quantize(x, "e4m3fn", axis=keep) for x in (few, many))
        np.testing.assert_array_equal(a.scale, b.scale[:4] if keep == 0 else b.scale)


@dataclasses.dataclass(frozen=True)
class OfOtherBits(sw.scaled.Amax):
    """What XLA may find: the largest magnitude of another computation of the same differences."""

    def scale(self, x, fmt, axes, keepdims=False):
        return super().scale(jnp.where(jnp.isfinite(x), x * 1e-9, x), fmt, axes, keepdims)


@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn"])
@pytest.mark.parametrize("axis", [None, 0])
def test_what_is_finite_stays_so_where_the_largest_magnitude_was_another(fmt, axis):
    x = jnp.array([[1.0, -2.0, 0.5], [0.0, 1e-3, -1e3]])
    q = sw.quantize(x, fmt, scaling=OfOtherBits(), axis=axis)
    assert np.isfinite(np.asarray(q.value())).all()
    infinite = sw.quantize(x.at[0, 0].set(-jnp.inf), fmt, scaling=OfOtherBits(), axis=axis)
    assert not np.isfinite(np.asarray(infinite.value())[0, 0])
    assert np.isfinite(np.asarray(infinite.value())[1]).all()


def test_amax_without_powers_of_two_reaches_the_largest_number():
    a = sw.quantize(X, "e4m3fn", scaling=sw.Amax(power_of_two=False))
    assert float(jnp.max(jnp.abs(a.data.astype(jnp.float32)))) == 448


def test_unit_is_known_from_shapes():
    a = normal(0, (8, 1024))
    b = normal(1, (1024, 8))
    q = sw.quantize(a @ b, "e4m3fn", scaling=sw.Unit(1024))
    assert float(q.scale) == 32
    assert 0.5 < float(jnp.std(q.data.astype(jnp.float32))) < 2
    assert float(sw.quantize(jnp.float32(1e9), "e4m3fn", scaling=sw.Unit()).value()) == 448


def test_delayed_without_a_history_is_current_scaling():
    x = jnp.linspace(-3, 700, 9)
    got, want = (sw.quantize(x, "e4m3fn", scaling=s) for s in (sw.Delayed(2), sw.Amax()))
    assert float(got.scale) == float(want.scale)
    np.testing.assert_array_equal(got.value(), want.value())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sw.Unit(-1), "Unit: terms is -1; expected"),
        (lambda: sw.Delayed(0), "Delayed: history is 0; expected"),
        (
            lambda: sw.quantize(jnp.ones((2, 2)), "fp16", scaling=sw.Delayed(), axis=0),
            "Delayed keeps one scale for the whole array",
        ),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
