"""Roundings beside the numbers of torchao, microxcaling, fouroversix and TransformerEngine.

``proofs/reference_numbers.py`` says how the numbers were made.
"""

import pathlib

import jax
import numpy as np
import pytest

import scalewise as sw
from scalewise.formats import NVFP4
from scalewise.scaled import quantize_measured
from scalewise.training import TableStorage

FILE = pathlib.Path(__file__).parents[1] / "reference_numbers" / "numbers.npz"
X = np.random.RandomState(0).standard_normal((8, 256)).astype(np.float32)
X[3] *= 1000
X[:, 77] *= 50


@pytest.fixture(scope="module")
def theirs():
    with np.load(FILE) as arrays:
        return dict(arrays)


def ours(name):
    kind, _, option = name.partition("_")
    if name in ("rowwise", "tensorwise"):
        axis = 0 if name == "rowwise" else None
        return sw.quantize(X, "e4m3fn", scaling=sw.Mx("rceil"), axis=axis).value()
    if kind == "mxfp8":
        return sw.quantize(X, "mxfp8_e4m3", scaling=sw.Mx(option)).value()
    if kind == "microxcaling":
        return sw.quantize(X, "mx" + option.replace("fp4_e2m1", "fp4")).value()
    if name == "te_2d":
        y = jax.numpy.asarray(X.reshape(16, 128))
        return quantize_measured(y, y, NVFP4, None, 1, tile=(0, 16)).value()
    if name.endswith("four_over_six"):
        return sw.quantize(X, "nvfp4", scaling=sw.FourOverSix()).value()
    return sw.quantize(X, "nvfp4").value()


EXACT = ["rowwise", "tensorwise", "mxfp8_floor", "mxfp8_rceil", "mxfp8_ceil", "mxfp8_even"]
EXACT += [f"microxcaling_{f}" for f in ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")]


@pytest.mark.parametrize("name", EXACT)
def test_powers_of_two_give_the_same_numbers(name, theirs):
    np.testing.assert_array_equal(jax.jit(lambda: ours(name))(), theirs[name])


@pytest.mark.parametrize("name", ["nvfp4", "four_over_six", "te_1d", "te_2d", "te_four_over_six"])
def test_nvfp4_gives_the_same_numbers_but_for_the_scales_last_bit(name, theirs):
    np.testing.assert_allclose(ours(name), theirs[name], rtol=1e-6)


STATES = {
    "signed8": TableStorage(min_size=0),
    "unsigned8": TableStorage(signed=False, min_size=0),
    "signed4": TableStorage(4, block=128, min_size=0),
    "linear4": TableStorage(4, signed=False, table="linear", block=128, min_size=0),
}


@pytest.mark.parametrize("name", STATES)
def test_codes_of_tables_give_torchaos_numbers(name, theirs):
    x = X if name.startswith("signed") else X * X
    got = jax.jit(lambda x: STATES[name].store(x).value())(x)
    np.testing.assert_allclose(got, theirs[name], rtol=2e-6)
