"""The strategies that choose scales: each fits the data, and has the properties it states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from scalewise import scaled
from scalewise.scaled import SCALINGS

X = np.asarray(normal(0, (64, 32))) * np.float32(3e-7)
FITTING = [
    *(
        cls()
        for cls in SCALINGS.values()
        if cls.source in ("amax", "data", "history") and cls not in (sw.MsEden, sw.Quest)
    ),  # these two cut off the largest numbers
    *(cls(power_of_two=False) for cls in (sw.Amax, sw.LeastSquares, sw.Delayed)),
]


def error(x, **options):
    return float(np.square((sw.quantize(x, **options).value() - x) / np.abs(x).max()).sum())


@pytest.mark.parametrize("fmt", ["e4m3fn", *nightly(["e5m2", "fp16", "e2m1fn"])])
@pytest.mark.parametrize(
    "scaling", nightly(FITTING, but=[sw.Amax(), sw.Amax(power_of_two=False), sw.LeastSquares()])
)
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


@pytest.mark.parametrize("axis", [1, *nightly([None, 0])])
@pytest.mark.parametrize("fmt", ["e2m1fn", *nightly(["e4m3fn", "e3m2fn"])])
def test_least_squares_is_the_best_of_its_candidates(fmt, axis):
    best = sw.quantize(X, fmt, scaling=sw.LeastSquares(), axis=axis)
    unit = np.abs(X).max()
    over = tuple(i for i in range(2) if i != axis) if axis is not None else (0, 1)
    got = np.square((best.value() - X) / unit).sum(over)
    first = sw.quantize(X, fmt, axis=axis).scale
    for i in range(6):
        scale = first * np.float32(2.0**-i)
        rounded = sw.round_to(X / scale, fmt, saturate="finite") * scale
        assert (got <= np.square((rounded - X) / unit).sum(over) * (1 + 1e-5)).all()


RNG = np.random.default_rng(0)
TENSORS = {
    "gaussian": RNG.standard_normal((4, 128)),
    "lognormal": np.exp(2 * RNG.standard_normal((4, 128))),
    "uniform": RNG.uniform(-1, 1, (4, 128)),
    "heavy-tailed": RNG.standard_t(2, (4, 128)),
    "bimodal": np.where(RNG.random((4, 128)) < 0.99, 1, 50) * RNG.normal(1, 0.1, (4, 128)),
}


def scanned(x, fmt, scales):
    """The smallest squared error behind one of the scales."""
    levels = np.unique(fmt.decode(np.arange(fmt.max_code + 1)))
    middles = (levels[1:] + levels[:-1]) / 2
    y = np.abs(x)[None] / scales[:, None]
    return np.square(np.abs(x) - scales[:, None] * levels[np.searchsorted(middles, y)]).sum(1).min()


@pytest.mark.parametrize(
    ("fmt", "axis", "power_of_two"),
    [("e2m1fn", 0, True), ("e4m3fn", 0, False),
     *nightly([("e4m3fn", None, True), ("e4m3fn", None, False), ("e2m1fn", None, False)])],
)  # fmt: skip
def test_least_squares_is_as_good_as_a_scan_over_scales(fmt, axis, power_of_two):
    fmt = sw.format(fmt)
    for name, x in TENSORS.items():
        x = np.float32(x)
        scaling = sw.LeastSquares(power_of_two=power_of_two)
        error = np.square(np.asarray(sw.quantize(x, fmt, scaling=scaling, axis=axis).value()) - x)
        for found, row in zip(error, x, strict=True) if axis == 0 else [(error, x.ravel())]:
            top = np.abs(row).max() / float(fmt.max)
            if power_of_two:
                scales = 2.0 ** np.arange(np.floor(np.log2(top)) - 12, np.log2(top) + 3)
            else:
                scales = top * 2.0 ** np.linspace(1, -4, 300)
            assert found.sum() <= 1.01 * scanned(np.float64(row), fmt, scales), name


def test_a_sketch_of_many_elements_finds_the_scale_of_all():
    x = np.float32(np.random.default_rng(1).standard_t(2, 10_000))
    fmt = sw.format("e2m1fn")
    got = sw.quantize(x, fmt, scaling=sw.LeastSquares(64, power_of_two=False)).value()
    top = np.abs(x).max() / float(fmt.max)
    best = scanned(np.float64(x), fmt, top * 2.0 ** np.linspace(1, -6, 40))
    assert np.square(np.asarray(got) - x).sum() <= 1.01 * best


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


test_invalid_arguments_are_rejected = refused(
    (lambda: sw.LeastSquares(0), "LeastSquares: candidates is 0; expected"),
    (lambda: sw.Unit(-1), "Unit: terms is -1; expected"),
    (lambda: sw.Delayed(0), "Delayed: history is 0; expected"),
    (lambda: sw.quantize(jnp.ones((2, 2)), "fp16", scaling=sw.Delayed(), axis=0),
     "Delayed keeps one scale for the whole array"),
)  # fmt: skip


@pytest.mark.parametrize("power_of_two", [False, *nightly([True])])
def test_the_optimal_scale_has_the_least_error_of_many(power_of_two):
    x = normal(0, (3, 64))
    for axis in ((), 0):
        found = scaled.find_optimal_scaling(x, "e2m1fn", axis=axis, power_of_two=power_of_two)
        assert found.shape == (() if axis == () else (3, 1))
        axes = None if axis == () else 1

        def error(s, axes=axes):
            rounded = np.asarray(sw.round_to(x / s, "e2m1fn", saturate="finite")) * s
            return np.sum((rounded - x) ** 2, axis=axes, keepdims=axes is not None)

        others = 2.0 ** (np.arange(-6, 4) if power_of_two else np.linspace(-6, 4, 400))
        assert (error(found) <= 1.01 * np.min([error(s) for s in others], axis=0)).all()
