"""Calls that a CPU's program keeps: same results, one compiled function, any transformation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.interpret import by_platform, outlined

X = jnp.linspace(-2, 2, 12).reshape(3, 4)


def waved(factor, x, y):
    return [jnp.sin(x * y) * factor, jnp.sum(y)]


def thrice(x, y):
    for _ in range(3):
        x, _ = outlined(waved, 2.0, x, y)
    return x


def thrice_inline(x, y):
    for _ in range(3):
        x, _ = waved(2.0, x, y)
    return x


def lowered(platform, f=thrice):
    return jax.jit(f).trace(X, X).lower(lowering_platforms=(platform,))


def cubed(power, x, y):
    return x**power + y


def cubed_on_cpu(power, x, y):
    assert power == 3
    return x * x * x + y


def cubed_on_tpu(power, x, y):
    return x * x**2 + y


def by_parts(x, y):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return by_platform({"whole_cpu": cubed_on_cpu, "default": cubed}, 3, result, x, y)


def by_three(x, y):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    routes = {"cpu": cubed_on_cpu, "tpu": cubed_on_tpu, "default": cubed}
    return by_platform(routes, 3, result, x, y)


TRANSFORMED = {
    "eager": lambda f: f(X, X),
    "jit": lambda f: jax.jit(f)(X, X),
    "vmap": lambda f: jax.jit(jax.vmap(f, in_axes=(0, None)))(X, X[0]),
    "grad": lambda f: jax.jit(jax.grad(lambda x: f(x, X).sum()))(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c, x), None), X[0], X)[0],
    "emulate": lambda f: jax.jit(sw.emulate(f, "bf16"))(X, X),
    "x64": lambda f: f(*[np.asarray(X, np.float64)] * 2),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_outlined_functions_return_what_the_function_returns(name):
    with jax.enable_x64(name == "x64"):
        got, want = (TRANSFORMED[name](f) for f in (thrice, thrice_inline))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == want.dtype


def test_a_program_for_a_cpu_keeps_the_calls_of_one_function():
    text = lowered("cpu").as_text()
    assert text.count("func.func") == 2
    assert text.count('inlineable = "false"') == 3
    assert (lowered("cpu").compile().as_text() or "").count(" call(") == 3


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_for_other_platforms_are_inlined(platform):
    assert "inlineable" not in lowered(platform).as_text()


def test_only_the_function_of_the_platform_is_in_a_program():
    texts = {platform: lowered(platform, by_parts).as_text() for platform in ("cpu", "cuda")}
    assert ["@cubed" in text for text in texts.values()] == [False, True]
    platforms = ("cpu", "cuda", "tpu")
    texts = {platform: lowered(platform, by_three).as_text() for platform in platforms}
    assert [text.count("stablehlo.multiply") for text in texts.values()] == [2, 2, 2]
    assert not any("stablehlo.case" in text for text in texts.values())
    exported = jax.export.export(jax.jit(by_three), platforms=platforms)(X, X)
    assert "stablehlo.case" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(X, X), cubed(3, X, X), rtol=1e-6)


def test_operations_lowered_for_a_platform_have_the_line_that_asked_for_them():
    text = lowered("cpu", by_three).as_text(debug_info=True)
    assert re.search(r'loc\("[^"]*test_outline.py', text)


@pytest.mark.parametrize("f", [by_parts, by_three])
@pytest.mark.parametrize("name", ["eager", "jit", "vmap", "grad", "scan", "emulate"])
def test_functions_by_platform_return_the_same_under_transformations(name, f):
    got, want = (TRANSFORMED[name](f) for f in (f, partial(cubed, 3)))
    unit = 2.0**-7 if name == "emulate" else 1e-6  # the routes round in other places
    np.testing.assert_allclose(got, want, rtol=unit, atol=1e-6)


def test_options_that_cannot_be_hashed_are_passed_on():
    got, _ = outlined(waved, np.ones((3, 4)), X, X)
    np.testing.assert_allclose(got, waved(1.0, X, X)[0], rtol=1e-6)


def test_types_in_a_shard_map_keep_their_varying_axes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(thrice, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_allclose(jax.jit(f)(X, X), thrice_inline(X, X), rtol=1e-6)
