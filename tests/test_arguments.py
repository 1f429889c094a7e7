"""Every public function and class refuses wrong arguments at its entrance, by name."""

import dataclasses
import importlib
import math

import jax
import numpy as np
import pytest
from hypothesis import settings
from proofs.fuzz.arguments import (
    ENTRIES,
    S,
    X,
    fault,
    random_arguments_are_taken_or_refused,
    wrong_calls,
)

import scalewise as sw
from scalewise import training
from scalewise._check import checked


@pytest.mark.parametrize("package", ENTRIES)
def test_wrong_arguments_are_refused_at_the_entrance(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = list(wrong_calls(package))
    faults = [found for call in calls if (found := fault(*call))]
    assert calls
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("package", ENTRIES)
def test_every_checked_entry_is_in_the_table(package):
    module = importlib.import_module(f"scalewise.{package}")
    public = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    found = {
        n
        for n, x in public.items()
        if hasattr(x, "__module__") and hasattr(getattr(x, "__init__", None) if isinstance(x, type)
        else x, "__wrapped__") and getattr(x, "__name__", "") == n
    }  # fmt: skip
    elsewhere = {n for names in ENTRIES.values() for n in names}
    assert found - elsewhere <= OTHERS, sorted(found - elsewhere - OTHERS)


# Wrapped for other reasons, or with arguments that only other parts of scalewise make.
OTHERS = {
    "RecordedArray",
    "Recording",
    "rescale",
    "rescale_gradient",
    "wide_value",
    "Record",
    "Step",
    "loss_scale_of",
    "widen",
    "Sharding",
    "Log",
    "accumulate",
    "user_errors",
    "register",
    "present",
}


def test_the_check_lets_tracers_and_numpy_scalars_pass():
    @checked
    def scaled(x: float, n: int = 1, exact: bool = False) -> object:
        return x * n

    assert float(jax.jit(scaled, static_argnums=1)(2.0, 3)) == 6
    assert scaled(np.float32(2), np.int64(3), np.bool_(True)) == 6
    assert scaled(2.0, n=np.int32(2**31 - 1)) == 2 * (2**31 - 1)  # a Python integer by then
    assert sw.formats.p3109(np.int64(8), np.int64(4), extended=np.True_).max == 224
    assert jax.grad(scaled)(2.0) == 1
    with pytest.raises(TypeError, match="scaled: n is True; expected an integer"):
        scaled(1.0, True)
    with pytest.raises(ValueError, match="scaled: x is nan; expected a finite number"):
        scaled(math.nan)
    with pytest.raises(TypeError, match="scaled: unexpected keyword argument 'm'; expected one of"):
        scaled(1.0, m=1)


NAMES = {
    lambda: sw.Recipe(residual="fp16"): "Recipe: .* 'residual'; did you mean 'residuals'",
    lambda: sw.Scalify(rescales="max"): "Scalify: .* 'rescales'; did you mean 'rescale'",
    lambda: sw.Recipe(colour=1): "'colour'; expected one of products, residuals, ",
    lambda: sw.Storage("e4m3fn", axes=0): "Storage: .* 'axes'; did you mean 'axis'",
    lambda: sw.ScaledArray(X, scales=2): "ScaledArray: .* 'scales'; did you mean 'scale'",
    lambda: sw.audit(jax.numpy.sin, trial=3): "audit: .* 'trial'; did you mean 'trials'",
    lambda: dataclasses.replace(sw.Recipe(), featurs=None): "did you mean 'features'",
    lambda: sw.Recipe(keep=("head",)): r"\('head',\); expected a dict from names to formats, keep=",
    lambda: sw.Recipe(state={"mu": "e4m3fn"}): r"expected pairs of .*, state=\(\('mu', sw.Storage",
    lambda: sw.Products(
        "e4m3fn", None, None
    ): r"expected a pair of formats.* \('e4m3fn', 'e4m3fn'\)",
    lambda: sw.round_to(X, "fp16", saturate="yes"): "round_to: saturate is 'yes'; expected True or",
    lambda: sw.ops.functions.exp("a"): "exp: x is 'a'; expected an array of numbers",
}


@pytest.mark.parametrize(("call", "message"), NAMES.items(), ids=NAMES.values())
def test_messages_say_what_to_write_instead(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        call()
    assert str(raised.value) == " ".join(str(raised.value).split())


@pytest.mark.parametrize("axis", [2, -3, (0, 0), 2**70, range(2)])
@pytest.mark.parametrize("function", [sw.ops.sum, sw.ops.softmax, sw.scaled.sum, sw.scaled.max])
def test_an_axis_that_cant_be_is_named(function, axis):
    x = X if function.__module__.startswith("scalewise.ops") else S
    with pytest.raises((TypeError, ValueError), match=rf"{function.__name__}: axis is "):
        function(x, axis=axis)


BEYOND = 10**400  # every dtype and every float
NUMBERS = {
    lambda: sw.scaled.abs([-1, np.uint32(1)]): "abs: .*-1 out of bounds for uint32",
    lambda: sw.cast([2**40], "fp16"): "cast: .*1099511627776 out of bounds for int32",
    lambda: sw.ops.var(X, ddof=BEYOND): "var: int too large to convert to float",
    lambda: sw.formats.ulp("fp16", BEYOND): "ulp: int too large to convert to float",
    lambda: sw.ops.layer_norm(X, eps=BEYOND): "eps is 1000.*; expected a finite number",
    lambda: sw.Amax(headroom=BEYOND): "headroom is 1000.*; expected a positive finite number",
    lambda: sw.Quest(sigmas=BEYOND): "sigmas is 1000.*; expected a positive finite number",
    lambda: sw.scaled.integer_pow(S, BEYOND): "n is 1000.*; expected an integer",
}


@pytest.mark.parametrize(("call", "message"), NUMBERS.items(), ids=NUMBERS.values())
def test_numbers_that_no_array_holds_are_refused(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert len(str(raised.value)) < 250


def test_the_largest_numbers_of_an_argument_are_taken():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert np.isnan(sw.ops.var(x, ddof=2**70))
    np.testing.assert_array_equal(sw.ops.rms_norm(x, eps=1e308), 0 * x)
    assert training.apply_updates(1.5, 0.25) == 1.75


def test_items_of_collections_are_checked_all():
    with pytest.raises(ValueError, match="scope is '\\('; expected a regular expression or None"):
        sw.autocasting.Rule("low", scope="(")
    with pytest.raises(ValueError, match="Monitor: groups"):
        sw.Monitor(groups={"a": "b", "c": "("})
    with pytest.raises(ValueError, match="quantize: axis is \\(0, 'a'\\)"):
        sw.quantize(X, "e4m3fn", axis=(0, "a"))


def test_arrays_of_other_shapes_and_dtypes_are_refused_with_type_or_value_errors():
    for call in (
        lambda: sw.ops.matmul(X, X), lambda: sw.scaled.matmul(S, X), lambda: sw.scaled.add(S, X.T),
        lambda: sw.cast(X.astype(bool), "fp16"), lambda: sw.rounding.decode(X, "e4m3fn"),
        lambda: sw.ops.cross_entropy(X, np.zeros(7, int)), lambda: sw.scaled.matmul(S, 1.0),
        lambda: sw.ops.cross_entropy(1.0, np.zeros(7, int)),
        lambda: training.apply_updates({"w": X}, {"v": X}),
        lambda: training.apply_updates({"w": "x"}, {"w": X}),
        lambda: sw.ops.functions.COMPUTE[np.dtype("int32")],
        lambda: sw.ops.functions.exp(X.astype("int32")), lambda: sw.ops.matmul(X[0], X[0], out=int),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            call()


def test_random_arguments_succeed_or_are_refused():
    with np.errstate(all="ignore"):
        settings(max_examples=100, deadline=None, derandomize=True)(
            random_arguments_are_taken_or_refused
        )()
