"""The kernel for grouped products, interpreted, gives the bits of the products that it replaces."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.autoscaling import _grouped_kernel as kernel
from scalewise.autoscaling import _products as products

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
# contracted axes, the groups' axis; how ``[rows, inputs], [rows, outputs], [groups, ...]`` enter
FORMS = {
    "forward": ((((1,), (1,)), ((), ())), (0,)),
    "rows": ((((1,), (2,)), ((), ())), (0,)),
    "matrices": ((((0,), (0,)), ((), ())), ()),
}
GROUPS = {
    "unaligned": [100, 0, 57, 1, 120],  # 22 rows belong to no group
    "one": [300],
    "last": [0, 0, 300, 0],
    "none": [0, 0],
}
PAIRS = {"e4m3": (E4M3, E4M3), "e5m2": (E5M2, E4M3), "bf16": (BF16, BF16), "mx": (E4M3, E5M2)}
IN, OUT, ROWS = 200, 136, 300


def product(form: str, sizes: list[int], dtypes, blocks: bool = False):
    """A rule and operands: small integers, so that all sums are exact, by powers of two."""
    dot, groups = FORMS[form]
    rule = kernel.GroupedProduct(lax.RaggedDotDimensionNumbers(dot, (0,), groups), BF16)
    left = (ROWS, OUT if form == "rows" else IN)
    right = (ROWS, OUT) if form == "matrices" else (len(sizes), IN, OUT)
    rng, scales = np.random.default_rng(0), []
    arrays = [
        jnp.asarray(rng.integers(-8, 9, shape), d)
        for shape, d in zip((left, right), dtypes, strict=True)
    ]
    for x, (axis,) in zip(arrays, dot[0], strict=True):
        shape = [-(-n // 32) if a == axis else n for a, n in enumerate(x.shape)]
        scales.append(jnp.asarray(2.0 ** rng.integers(-2, 3, shape), jnp.float8_e8m0fnu))
    factors = jnp.array([2.0**-70, 2.0**68], jnp.float32)
    return rule, (*arrays, jnp.array(sizes, jnp.int32), factors, *(scales if blocks else ()))


def interpreted(rule: kernel.GroupedProduct):
    return jax.jit(partial(kernel.by_kernel, rule=rule, interpret=True))


@pytest.mark.parametrize("pair", ["e4m3", "e5m2", "mx", *nightly(["bf16"])])
@pytest.mark.parametrize("groups", ["unaligned", *nightly(["one", "last", "none"])])
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_gives_the_bits_of_the_products_that_it_replaces(form, groups, pair):
    rule, operands = product(form, GROUPS[groups], PAIRS[pair], pair == "mx")
    (found,), (want,) = interpreted(rule)(*operands), kernel.by_xla(*operands, rule=rule)
    (type_,) = jax.eval_shape(partial(kernel.grouped_p.bind, rule=rule), *operands)
    assert (found.shape, found.dtype) == (want.shape, want.dtype) == (type_.shape, type_.dtype)
    np.testing.assert_array_equal(found.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("pair", ["e4m3", "mx"])
@pytest.mark.parametrize("form", ["forward", "rows"])
def test_matrices_are_read_in_the_order_in_which_they_are_stored(form, pair):
    rule, operands = product(form, GROUPS["unaligned"], PAIRS[pair], pair == "mx")
    stored = dataclasses.replace(rule, exchanged=True)
    (found,), (want,) = interpreted(stored)(*operands), kernel.by_xla(*operands, rule=stored)
    np.testing.assert_array_equal(found.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_group(form):
    rule, (left, *rest) = product(form, [130, 170], (E4M3, E4M3))
    (found,) = interpreted(rule)(left.at[150, 3].set(jnp.nan), *rest)
    bad = jnp.isnan(found)
    expected = jnp.zeros_like(bad)
    expected = expected.at[1, 3].set(True) if form == "matrices" else expected.at[150].set(True)
    np.testing.assert_array_equal(bad, expected)


def routed(w, x, sizes):
    y = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x, w["up"], sizes)), w["down"], sizes)
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def experts(count: int, rows: int, width: int = 1024):
    w = {"up": normal(0, (count, width, 96)), "down": normal(1, (count, 96, width))}
    sizes = jnp.full(count, rows // count, jnp.int32)
    return *jax.tree.map(lambda a: a.astype(BF16), (w, normal(2, (rows, width)))), sizes


def named(recipe: str, device: str | None = "h100"):
    recipe_ = dataclasses.replace(sw.recipes.CATALOGUE[recipe], device=device, narrow="always")
    return sw.autoscale(jax.grad(routed, (0, 1)), recipe_)


@pytest.mark.filterwarnings("ignore:autoscale")
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_training_by_the_kernel_is_training_by_the_fallback(recipe, monkeypatch):
    """Both gradients of two layers of experts: a product that sums in another order may round to
    another bfloat16 number."""
    w, x, sizes = experts(2, 512, 64)
    sizes = jnp.array([150, 301], jnp.int32)
    want = jax.jit(named(recipe))(w, x, sizes)
    unnamed = jax.jit(named(recipe, None))(w, x, sizes)
    jax.tree.map(np.testing.assert_array_equal, want, unnamed)
    calls = []

    def by_kernel(*operands, rule):
        calls.append(rule)
        return kernel.by_kernel(*operands, rule=rule, interpret=True)[0]

    def on_a_gpu(*operands, **routes):
        return routes["cuda" if "cuda" in routes else "cpu"](*operands)

    monkeypatch.setattr(products, "has_group_kernel", lambda *_: True)
    monkeypatch.setattr(products, "grouped_product", by_kernel)
    monkeypatch.setattr(lax, "platform_dependent", on_a_gpu)
    found = named(recipe)(w, x, sizes)
    assert len(calls) == 6
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = (z.astype(jnp.float32) for z in (a, b))
        assert jnp.linalg.norm(a - b) < 0.01 * jnp.linalg.norm(b)


@pytest.mark.filterwarnings("ignore:autoscale")
@pytest.mark.parametrize("quantized", [False, True])
def test_the_kernel_knows_which_matrices_are_stored(quantized):
    w, *rest = experts(8, 2048)
    w = sw.quantize_params(w, "fp8") if quantized else w
    recipe = dataclasses.replace(sw.recipes.fp8, device="h100", narrow="always")
    text = str(jax.make_jaxpr(sw.autoscale(routed, recipe))(w, *rest))
    assert text.count(f"exchanged={quantized}") == 2


@pytest.mark.parametrize(
    ("count", "rows", "device", "used"),
    [
        (8, 2048, "h100", True),
        (8, 2048, "h200", True),
        (64, 128, "h100", False),  # a tile for each group is more than all rows by each matrix
        (1, 512, "h100", False),
        (8, 2048, "a100", False),
        (8, 2048, "b200", False),
    ],
)
@pytest.mark.filterwarnings("ignore:autoscale")
def test_the_kernel_is_used_where_its_bound_is_lower(count, rows, device, used):
    arguments = experts(count, rows)
    text = str(jax.make_jaxpr(named("fp8", device))(*arguments))
    assert ("grouped_product" in text) == used
