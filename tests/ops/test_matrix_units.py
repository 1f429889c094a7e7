"""Matrix units: recorded bits of MMA-Sim, exact rational arithmetic, and products made of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from proofs import matrix_units as proof

import scalewise as sw
from cases import nightly
from scalewise import ops
from scalewise.devices import UNITS, matrix_unit
from scalewise.formats import BlockFormat

RNG = np.random.default_rng(0)
DISTINCT = [u for u in proof.all_units() if u.architecture != "rtx blackwell"]
# A B200 multiplies MXFP4 by two instructions, of which the last has the recorded numbers.
RECORDED = {proof.label(u): u for u in DISTINCT}.values()


def some(units):
    """FP8 on Hopper and blocks on Blackwell are added in ways of their own, and users have both."""
    return nightly(units, but=[matrix_unit("h100", "e4m3fn"), matrix_unit("b200", "nvfp4")])


def random_fp8(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float8_e4m3fn)


@pytest.mark.parametrize("unit", some(RECORDED), ids=proof.label)
def test_the_bits_are_those_that_mma_sim_gave(unit):
    """Recorded by `python -m proofs.matrix_units --mmasim FOLDER --record 16`."""
    recorded = np.load(proof.RECORDED)
    for mode in proof.MODES:
        key = f"{proof.label(unit)}|{mode}"
        if f"{key}|a" in recorded:
            names = ("a", "b", "c", "want")
            a, b, c, want = (recorded[f"{key}|{x}"].astype(np.float64) for x in names)
            scales = None
            if isinstance(unit.left, BlockFormat):
                sides = ("left", "right")
                scales = tuple(recorded[f"{key}|{x}"].astype(np.float64) for x in sides)
            assert not proof.differing(proof.ours(unit, a, b, c, scales), want).size, mode


@pytest.mark.parametrize("unit", some(DISTINCT), ids=proof.label)
def test_the_bits_are_those_of_exact_rational_arithmetic(unit):
    rng = np.random.default_rng(7)
    for mode in ("spread", "cancelling"):
        given = proof.operands(unit, mode, 8, rng)
        want = proof.exact(unit, *given)
        assert not proof.differing(proof.ours(unit, *given), want).size


def by_row(unit, a, b):
    """The product by dots of exact rational arithmetic."""
    rows, columns = np.asarray(a, np.float64), np.asarray(b, np.float64)
    of = [(row, column) for row in rows for column in columns.T]
    left, right = (np.stack(x) for x in zip(*of, strict=True))
    fill = ((0, 0), (0, -left.shape[1] % unit.terms))
    found = proof.exact(unit, np.pad(left, fill), np.pad(right, fill), np.zeros(len(of)), None)
    return found.reshape(len(rows), -1)


@pytest.mark.parametrize("device", ["h100", *nightly(["b200", "mi300x"])])
def test_a_product_is_made_of_dots_in_ascending_order(device):
    fmt = "e4m3fnuz" if device == "mi300x" else "e4m3fn"
    unit = matrix_unit(device, fmt)
    a, b = (random_fp8(*s).astype(jnp.float32) / 2 for s in ((3, 80), (80, 2)))
    a, b = (sw.round_to(x, fmt) for x in (a, b))
    got = ops.matmul(a, b, accumulator=unit, out=jnp.float32)
    np.testing.assert_array_equal(got, by_row(unit, a, b))


def test_promotion_and_splits_add_parts_in_float32():
    a, b = random_fp8(2, 512), random_fp8(512, 3)
    fast = matrix_unit("h100", "e4m3fn")
    parts = [by_row(fast, a[:, k : k + 128], b[k : k + 128]) for k in range(0, 512, 128)]
    want = np.zeros((2, 3), np.float32)
    for part in parts:
        want = want + part.astype(np.float32)
    for schedule in ({"promote": 128}, {"splits": 4}):
        unit = dataclasses.replace(fast, **schedule)
        got = ops.matmul(a, b, accumulator=unit, out=jnp.float32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_14_bits_lose_accuracy_over_a_long_sum_and_promotion_cures_it():
    """K = 4096, operands uniform in (0, 1): as DeepSeek-V3 found, arXiv 2412.19437, 3.3.2."""
    a, b = (jnp.asarray(RNG.random(s), jnp.float8_e4m3fn) for s in ((8, 4096), (4096, 8)))
    exact = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
    errors = {}
    for device, promote in (("h100", None), ("h100", 128), ("b200", None)):
        unit = matrix_unit(device, "e4m3fn", promote=promote)
        got = np.asarray(ops.matmul(a, b, accumulator=unit, out=jnp.float32))
        errors[device, promote] = np.abs(got / exact - 1).max()
    assert errors["h100", None] > 0.01
    assert errors["h100", 128] < 0.002
    assert errors["b200", None] < 1e-5


@pytest.mark.parametrize("name", ["nvfp4", *nightly(["mxfp8_e4m3"])])
def test_block_formats_multiply_elements_and_scales(name):
    unit = matrix_unit("b200", name)
    a, b, _, (left, right) = proof.operands(unit, "codes", 4, np.random.default_rng(3))
    arrays = (jnp.asarray(x, jnp.float32) for x in (a, b.T))
    scales = (jnp.asarray(left), jnp.asarray(right.T))
    got = ops.matmul(*arrays, accumulator=unit, scales=scales)
    for i in range(4):
        row = slice(i, i + 1)
        want = proof.exact(unit, a[row], b[row], np.zeros(1), (left[row], right[row]))
        assert got[i, i] == want[0]
    with pytest.raises(ValueError, match="scales are missing"):
        ops.matmul(jnp.ones((2, 32)), jnp.ones((32, 2)), accumulator=unit)


@pytest.mark.slow
def test_dot_general_and_convolutions_are_those_of_lax_where_sums_are_exact():
    unit = matrix_unit("b200", "bf16")  # small integers: no bit is cut off

    def integers(*shape):
        return jnp.asarray(RNG.integers(-3, 4, shape), jnp.float32)

    x, window = integers(2, 9, 8, 4), ((2, 1), ((1, 2), (0, -1)))
    for features, batch, kernel in ((2, 1, integers(3, 2, 2, 6)), (1, 2, integers(3, 2, 4, 6))):
        numbers = lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
        options = {
            "lhs_dilation": (1, 2), "rhs_dilation": (2, 1), "dimension_numbers": numbers,
            "feature_group_count": features, "batch_group_count": batch,
        }  # fmt: skip
        want = lax.conv_general_dilated(x, kernel, *window, **options)
        got = ops.conv_general_dilated(x, kernel, *window, **options, accumulator=unit)
        np.testing.assert_array_equal(got, want)
    y, numbers = integers(4, 5, 9, 2), (((1, 3), (2, 0)), ((0,), (3,)))
    want = lax.dot_general(x, y, numbers)
    np.testing.assert_array_equal(ops.dot_general(x, y, numbers, accumulator=unit), want)


@pytest.mark.parametrize("splits", [1, 3])
def test_empty_operands_give_empty_products_or_zeros(splits):
    unit = matrix_unit("h100", jnp.float8_e4m3fn, promote=32, splits=splits)
    for m, k, n in ((0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)):
        got = ops.matmul(jnp.ones((m, k)), jnp.ones((k, n)), accumulator=unit)
        np.testing.assert_array_equal(got, np.ones((m, k)) @ np.ones((k, n)))


def test_gradients_are_those_of_the_exact_product():
    unit = matrix_unit("h100", "bf16")
    a, b = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((3, 20), (20, 2)))
    got = jax.grad(lambda a, b: jnp.sum(ops.matmul(a, b, accumulator=unit) ** 2), (0, 1))(a, b)
    product = ops.matmul(a, b, accumulator=unit)
    np.testing.assert_allclose(got[0], 2 * product @ b.T, rtol=1e-5)
    np.testing.assert_allclose(got[1], a.T @ (2 * product), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h100", "e2m1fn"), "h100 has no unit for e2m1fn x e2m1fn"),
        (("v6e", "bf16"), "TPU v6e aren't modelled: nobody has published"),
        (("h10", "bf16"), "did you mean 'h100'"),
        (("h100", "bf16", "e4m3fn"), "no unit for bf16 x e4m3fn"),
        (("h100", "fp17"), "fp17"),
    ],
)
def test_units_that_are_not_known(arguments, message):
    with pytest.raises(ValueError, match=message):
        matrix_unit(*arguments)


def test_impossible_accumulators_and_schedules_are_refused():
    with pytest.raises(ValueError, match="no accumulator in fp16"):
        matrix_unit("h100", "bf16", result="fp16")
    with pytest.raises(ValueError, match="promote is 100; expected a multiple of 32"):
        matrix_unit("h100", "e4m3fn", promote=100)
    with pytest.raises(ValueError, match="splits is 0; expected a positive integer"):
        matrix_unit("h100", "e4m3fn", splits=0)


SAME = ((1, 1), "SAME")
NHWC = ("NHWC", "HWIO", "NHWC")


def loss(w, x, convolve=None, multiply=jnp.matmul):
    if convolve is None:
        hidden = lax.conv_general_dilated(x, w["kernel"], *SAME, dimension_numbers=NHWC)
    else:
        hidden = convolve(x, w["kernel"])
    y = multiply(jax.nn.relu(hidden).reshape(x.shape[0], -1), w["out"])
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@pytest.mark.slow
def test_emulate_computes_the_products_of_a_program_by_the_devices_units():
    x = jnp.asarray(RNG.standard_normal((2, 4, 4, 3)), jnp.bfloat16)
    w = {
        "kernel": jnp.asarray(RNG.standard_normal((3, 3, 3, 4)), jnp.bfloat16),
        "out": jnp.asarray(RNG.standard_normal((64, 2)), jnp.bfloat16),
    }
    unit = matrix_unit("h100", "bf16")
    numbers = lax.conv_dimension_numbers(x.shape, w["kernel"].shape, NHWC)

    def convolve(x, kernel):
        edges = [(1, 1), (1, 1)]
        return ops.conv_general_dilated(
            x, kernel, (1, 1), edges, dimension_numbers=numbers, accumulator=unit
        )

    def multiply(a, b):
        return ops.matmul(a, b, accumulator=unit)

    want = loss(w, x, convolve, multiply)
    emulated = sw.emulate(loss, device="h100")
    np.testing.assert_array_equal(emulated(w, x), want)
    np.testing.assert_array_equal(jax.jit(emulated)(w, x), want)
    gradients = sw.emulate(jax.grad(loss), device="h100")(w, x)
    exact = jax.grad(loss)(*jax.tree.map(lambda a: a.astype(jnp.float32), (w, x)))
    for name, got in gradients.items():
        assert got.dtype == jnp.bfloat16
        error = jnp.linalg.norm(got.astype(jnp.float32) - exact[name])
        assert error < 0.03 * jnp.linalg.norm(exact[name])


@pytest.mark.slow
def test_emulate_with_a_format_and_a_device():
    a, b = (jnp.asarray(RNG.random(s), jnp.float32) for s in ((4, 4096), (4096, 4)))
    on_device = sw.emulate(jnp.matmul, "e4m3fn", device="h100", saturate=True)
    rounded = (sw.round_to(x, "e4m3fn") for x in (a, b))
    by_unit = ops.matmul(*rounded, accumulator=matrix_unit("h100", "e4m3fn"))
    want = sw.round_to(by_unit, "e4m3fn", saturate=True)
    np.testing.assert_array_equal(on_device(a, b), want)
    np.testing.assert_array_equal(jax.jit(on_device)(a, b), want)  # lowered without x64
    batched = jax.vmap(jax.jit(on_device), (0, None))
    np.testing.assert_array_equal(batched(a[:, None], b)[:, 0], want)
    with pytest.raises(ValueError, match="expected a format, a device, or both"):
        sw.emulate(jnp.matmul)
    with pytest.raises(ValueError, match="no matrix units are known of 'h1000'"):
        sw.emulate(jnp.matmul, device="h1000")


def test_each_unit_of_the_table_is_listed_once():
    names = [(u.architecture, u.instruction, u.left.name, u.right.name) for u in UNITS]
    assert len(names) == len(set(names))
    assert all(u.left.element.bits <= 8 or u.left == u.right for u in UNITS)


def test_gradients_of_scaled_operands_are_those_of_the_exact_product():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.choice([0.5, 1.0, -2.0], s), jnp.float32) for s in ((2, 64), (64, 3)))
    scales = jnp.full((2, 4), 2.0), jnp.full((4, 3), 0.5)
    unit = matrix_unit("b200", "nvfp4")

    def total(a, s):
        return jnp.sum(sw.ops.matmul(a, b, accumulator=unit, scales=(s, scales[1])))

    of_a, of_scales = jax.grad(total, (0, 1))(a, scales[0])
    np.testing.assert_allclose(of_a, np.broadcast_to(np.sum(b, 1), (2, 64)))
    blocks = np.sum(np.reshape(a * np.sum(b, 1)[None], (2, 4, 16)), 2) * 0.5
    np.testing.assert_allclose(of_scales, blocks)
    with pytest.raises(ValueError, match=r"expected \(2, 4\) and \(4, 3\), one for each block"):
        sw.ops.matmul(a, b, accumulator=unit, scales=(scales[0][:, :2], scales[1]))


def test_within_a_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = jnp.full((4, 64), 0.1), jnp.full((64, 3), 0.2)
    unit = matrix_unit("h100", "e4m3fn", promote=32)
    product = functools.partial(sw.ops.matmul, accumulator=unit)
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"))
    np.testing.assert_array_equal(jax.jit(mapped)(a, b), product(a, b))


def test_a_tpu_is_refused_by_any_name():
    with pytest.raises(ValueError, match="nobody has published"):
        matrix_unit("tpu", "bf16")
