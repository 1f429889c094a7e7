"""Recordings of what a device computes, their files, and comparisons of two of them."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from scalewise.auditing import compare, load_recording, record
from scalewise.auditing._record._recorder import positions


def by_name(recording, name):
    return [x for x in recording.arrays if x.primitive == name]


def network(w, x):
    """A scan, a branch, a mask, a while loop, complex numbers and an index."""

    def layer(c, w):
        return jnp.tanh(c @ w), jnp.sum(c)

    h, sums = jax.lax.scan(layer, x, w)
    h = jax.lax.cond(jnp.sum(h) > 1e4, lambda h: h * 2, lambda h: h * 3, h)
    p = jnp.exp(jnp.where(h > 0, h, -jnp.inf))
    z = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 60), (0, jnp.max(p)))[1]
    spectrum = jnp.abs(jnp.fft.fft(h.astype(jnp.float32))).astype(h.dtype)
    return jnp.sum(p) + z, sums, spectrum, jnp.argmax(h)


def arguments(dtype):
    w, x = jax.random.split(jax.random.key(0))
    w = jax.random.normal(w, (3, 8, 8), jnp.float32) / 2
    return w.astype(dtype), jax.random.normal(x, (4, 8), jnp.float32).astype(dtype)


@pytest.fixture(scope="module")
def recordings():
    with jax.numpy_dtype_promotion("standard"):
        return [record(network)(*arguments(t)) for t in (jnp.float32, jnp.float16)]


def test_numbers_are_those_of_numpy():
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    x[0, :4] = np.nan, np.inf, -np.inf, 0.0
    x[1, :3] = 1e-42, -3e-45, -0.0
    with np.errstate(all="ignore"):
        y = x * np.float32(3)

    def three(x):
        return x * 3

    recording = record(three)(jnp.asarray(x))
    given, got, out = recording.arrays
    finite = x[np.isfinite(x)].astype(np.float64)
    assert (given.nan, given.infinite, given.zeros, given.subnormal) == (1, 2, 2, 2)
    assert given.created == 3  # of an argument: no operand explains it
    assert (given.minimum, given.maximum) == (finite.min(), finite.max())
    assert given.mean == pytest.approx(finite.mean(), rel=1e-5)
    assert given.rms == pytest.approx(np.sqrt(np.mean(finite**2)), rel=1e-6)
    assert (got.primitive, got.created, got.non_finite) == ("mul", 0, 3)
    np.testing.assert_array_equal(got.samples[0], y.ravel()[positions(300)])
    np.testing.assert_array_equal(got.samples[0], got.samples[1])
    assert out.checksum == got.checksum != given.checksum
    assert recording.jit_difference == 0.0
    assert recording.first_non_finite is given


@pytest.mark.parametrize(("dtype", "tiny"), [("float16", 6e-8), *nightly([
    ("bfloat16", 1e-40), ("float8_e5m2", 2.0**-16), ("float8_e4m3fn", 2.0**-9)])])  # fmt: skip
def test_subnormal_numbers_of_narrow_dtypes(dtype, tiny):
    x = jnp.asarray(np.array([tiny, -tiny, 0, 1], np.float32).astype(dtype))
    (given, *_) = record(lambda x: -x)(x).arrays
    assert (given.subnormal, given.zeros) == (2, 1)
    assert given.dtype == dtype


@pytest.mark.slow
def test_loops_branches_and_complex_numbers(recordings):
    wide, _ = recordings
    (product,) = by_name(wide, "dot_general")
    assert (product.visits, product.shape, product.size) == (3, (4, 8), 96)
    assert not np.array_equal(product.samples[0], product.samples[1])  # first and last iteration
    (tanh,) = by_name(wide, "tanh")
    assert tanh.where.startswith("test_record.py:")
    assert tanh.function == "network.<locals>.layer"
    taken = [x for x in by_name(wide, "mul") if x.function == "network.<locals>.<lambda>"]
    assert [x.visits for x in taken] == [1, 5]  # one branch, and the loop
    (spectrum,) = by_name(wide, "fft")
    assert (spectrum.dtype, spectrum.size, spectrum.samples.shape) == ("complex64", 64, (2, 32))
    assert [x.dtype for x in by_name(wide, "argmax")] == ["int32"]
    assert wide.jit_difference < 1e-5


@pytest.mark.slow
def test_the_first_infinity_is_where_it_is_made(recordings):
    wide, narrow = recordings
    assert wide.first_non_finite is None
    assert by_name(wide, "exp")[0].non_finite == 0  # of the mask's -inf
    first = narrow.first_non_finite
    assert (first.primitive, first.function) == ("mul", "network.<locals>.<lambda>")
    assert 0 < first.first < 5
    assert first.created == 1 < first.infinite + (first.first == 4)
    assert "in visit" in str(narrow)
    assert "the first number" in str(narrow).lower()


@pytest.mark.slow
def test_time_orders_what_loops_repeat():
    def growing(x):
        def body(i, c):
            a, b = c
            return a * 10, b * 1000  # b overflows first

        return jax.lax.fori_loop(0, 9, body, (x, x))

    first = record(growing)(jnp.float16(1)).first_non_finite
    (a, b) = by_name(record(growing)(jnp.float16(1)), "mul")
    assert (first.clock, first.first) == (b.clock, b.first)
    assert b.clock < a.clock
    assert b.first < a.first


@pytest.mark.slow
def test_one_compiled_program_records_the_same_places():
    def small(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x).sum()

    x = jnp.linspace(0, 1, 40)
    apart, fused = record(small)(x), record(small, fused=True)(x)
    assert [(a.primitive, a.visits) for a in apart.arrays] == [
        (b.primitive, b.visits) for b in fused.arrays
    ]
    assert fused.fused
    assert not apart.fused
    assert compare(apart, fused).output_difference < 1e-6


@pytest.mark.slow
def test_gradients_maps_and_custom_derivatives():
    @jax.custom_vjp
    def own(x):
        return jnp.exp(x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * jnp.cos(x),))

    def loss(w, x):
        return jnp.sum(own(w * x) + 0.5)

    grad = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    recording = record(grad)(jnp.float32(0.5), jnp.arange(4.0))
    (cosine,) = by_name(recording, "cos")
    assert (cosine.direction, cosine.shape) == ("backward", (4,))


@pytest.mark.slow
def test_a_long_loop_is_compiled_and_keeps_no_arrays():
    def long(x):
        return jax.lax.fori_loop(0, 5000, lambda _, c: c * 1.001, x)

    (x,) = by_name(record(long)(jnp.ones(7)), "mul")
    assert (x.visits, x.size) == (5000, 35000)
    assert x.samples.shape == (2, 7)
    assert x.maximum == pytest.approx(1.001**5000, rel=1e-2)


def test_it_is_not_called_under_transformations():
    with pytest.raises(TypeError, match=r"record\(sin\) was called under jit.*record\(jax.grad"):
        jax.jit(lambda x: record(jnp.sin)(x).device)(1.0)


def test_files(recordings, tmp_path):
    _, narrow = recordings
    path = narrow.save(tmp_path / "a.safetensors")
    again = load_recording(path)
    assert str(again) == str(narrow)
    found = compare(path, narrow)
    assert (found.causes, found.unmatched) == ((), (0, 0))
    with pytest.raises(ValueError, match=r"ends with .safetensors"):
        narrow.save(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        load_recording(path)
    sw.scaled.save_safetensors(path, {"x": np.ones(3)})
    with pytest.raises(ValueError, match=r"is no recording: expected a file that Recording.save"):
        load_recording(path)


def test_two_dtypes_are_compared(recordings, tmp_path):
    found = compare(*recordings)
    assert {x.dtype for x in found.values} >= {"float32 -> float16", "complex64"}
    tanh = next(x for x in found.values if x.a == "tanh")
    assert (tanh.b, tanh.where_a) == ("tanh", tanh.where_b)
    assert 1e-4 < tanh.difference < 1e-2
    first = recordings[1].first_non_finite  # of the visit; the first operation in program order
    assert found.cause.kind == "non-finite"
    assert "only the second" in found.cause.change
    assert found.where == (f"mul at {first.where}",)
    assert found.unmatched[0] == 0 < found.unmatched[1]  # float16 is summed in float32
    saved = json.loads(found.save(tmp_path / "c.json").read_text())
    assert saved["verdict"] in " ".join(str(found).split())
    assert saved["output_difference"] == "inf"


def test_two_narrow_dtypes_differ_by_their_roundings():
    def f(x):
        return jnp.sum(jnp.tanh(x * 3))

    x = jnp.linspace(0, 1, 50)
    narrow = [record(f)(x.astype(t)) for t in (jnp.float16, jnp.bfloat16)]
    for sides in (narrow, narrow[::-1], [record(f)(x), narrow[1]]):
        found = compare(*sides)
        assert (found.cause.kind, found.where) == ("dtype", ("argument [0]",))


def test_another_version_of_a_program_is_aligned():
    def before(x):
        y = jnp.sin(x)
        return jnp.sum(jnp.cos(y))

    def after(x):
        y = jnp.sin(x)
        y = y * 1.5
        return jnp.sum(jnp.cos(y))

    a, b = (record(f)(jnp.linspace(0, 1, 9)) for f in (before, after))
    line = after.__code__.co_firstlineno + 2
    found = compare(a, b)
    assert [(x.a, x.b) for x in found.values] == [
        (name, name) for name in ("argument", "sin", "cos", "reduce_sum", "output")
    ]
    assert found.unmatched == (0, 1)
    for other in (found, compare(b, a)):
        assert (other.cause.kind, other.where) == ("missing", (f"mul at test_record.py:{line}",))
    differences = [x.difference for x in found.values]
    assert max(differences[:2]) == 0 < min(differences[2:])
    assert found.output_difference > 1e-3


@pytest.mark.slow
def test_discrete_values_and_visits():
    def steps(x):
        n = jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + x, c[1] + 1), (0.0 * x, 0))[1]
        return n, jnp.floor(x * 10).astype(jnp.int32)

    found = compare(record(steps)(jnp.float32(0.3)), record(steps)(jnp.float32(0.2)))
    count = next(x for x in found.values if x.where_a == "output [1]")
    assert count.difference == pytest.approx(1 / 3)


def test_a_difference_beyond_the_sample_is_told_by_means():
    at = next(i for i in range(4096) if i not in positions(4096))
    x = jnp.ones(4096)
    same = compare(record(jnp.sin)(x), record(jnp.sin)(x))
    far = compare(record(jnp.sin)(x), record(jnp.sin)(x.at[at].set(jnp.pi)))
    assert not same.causes
    assert far.where == ("argument [0]",)
    assert 1e-5 < far.output_difference < 1e-3
    assert math.isinf(compare(record(jnp.log)(x), record(jnp.log)(0 * x)).output_difference)


def test_recordings_of_other_shapes_are_refused():
    x = jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"\[0\] has the shape \(4, 3\) in a and \(2, 3\)"):
        compare(record(jnp.sin)(x), record(jnp.sin)(x[:2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", 7), ("dtype", "float17"), ("file", 5), ("shape", "abc"), ("shape", [-1]),
        ("shape", [1.5]), ("line", "3"), ("line", -1), ("primitive", None), ("result", True),
        ("visits", -1), ("rms", None),
    ],
)  # fmt: skip
def test_recordings_with_fields_of_other_types_are_refused(recordings, tmp_path, field, value):
    path = recordings[1].save(tmp_path / "a.safetensors")
    tensors = sw.scaled.load_safetensors(path)
    header = json.loads(bytes(np.asarray(tensors["recording"])))
    header["arrays"][0][field] = value
    tensors["recording"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    sw.scaled.save_safetensors(path, tensors)
    with pytest.raises(ValueError, match=rf"is no recording.*RecordedArray: {field} is"):
        load_recording(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lengths", lambda x: -x), ("lengths", lambda x: x * 2), ("samples", lambda x: x[:1]),
        ("recording", lambda x: np.frombuffer(b"[" * 200_000, np.uint8)),
        ("recording", lambda x: np.frombuffer(b"[]", np.uint8)),
    ],
)  # fmt: skip
def test_recordings_with_other_tables_are_refused(recordings, tmp_path, name, change):
    path = recordings[1].save(tmp_path / "a.safetensors")
    tensors = sw.scaled.load_safetensors(path)
    tensors[name] = np.array(change(np.asarray(tensors[name])))
    sw.scaled.save_safetensors(path, tensors)
    with pytest.raises(ValueError, match="is no recording"):
        load_recording(path)


def perceptron_loss(p, x, y):
    h = jax.nn.relu(x @ p["up"])
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ p["down"]), y, axis=-1).mean()


def perceptron_step(p, x, y):
    loss, gradients = jax.value_and_grad(perceptron_loss)(p, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), loss


@pytest.fixture(scope="module")
def two_devices():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    args = {"up": draw(64, 32), "down": draw(32, 8)}, draw(16, 64), jnp.arange(16)[:, None] % 8
    return [
        record(sw.autoscale(perceptron_step, "fp8", emulate=name))(*args)
        for name in ("h100", "b200")
    ]


@pytest.mark.slow
def test_two_devices_are_compared(two_devices):
    """A product of a matrix unit is one result, not the thousands of steps that compute it."""
    a, b = two_devices
    assert [len(by_name(x, "matrix_unit")) for x in two_devices] == [5, 5]
    found = compare(a, b)
    assert found.unmatched == (0, 0)
    first = perceptron_loss.__code__.co_firstlineno + 1
    assert found.where == (f"matrix_unit at test_record.py:{first}",)
    product = next(x for x in found.values if x.a == "matrix_unit")
    assert 0 < product.difference < 2**-10


@pytest.mark.slow
def test_recorded_results_have_the_lines_of_the_program(two_devices):
    """Also those that a recipe computes later, and those of functions that JAX has jitted."""
    arrays = [x for x in two_devices[0].arrays if x.file]
    assert {x.where.split(":")[0] for x in arrays} == {"test_record.py"}
    backward = [x for x in arrays if x.primitive == "matrix_unit" and x.direction == "backward"]
    start = perceptron_loss.__code__.co_firstlineno
    assert [x.line - start for x in backward] == [2, 2, 1]
