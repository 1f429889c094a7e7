"""Comparisons of two programs: where they part, why, and the change that makes them agree."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.auditing import compare, record
from scalewise.scaled import save_safetensors

BF16 = jnp.bfloat16
pytestmark = pytest.mark.usefixtures("users_promotion")


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


P = {
    "w1": normal(16, 24, seed=1, scale=0.3), "b1": normal(24, seed=2), "g": normal(24, seed=3),
    "w2": normal(24, 24, seed=4, scale=0.3), "b2": normal(24, seed=5), "w3": normal(24, 9, seed=6),
}  # fmt: skip
X = normal(10, 16, seed=7)


def network(p, x, *, eps=1e-5, slope=1.702, act=None, second=None, after=lambda h: h, last=None):
    h = x @ p["w1"] + p["b1"]
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps) * p["g"]
    h = h * jax.nn.sigmoid(slope * h) if act is None else act(h)
    h = after(h)
    h = jnp.tanh(second(p, h) if second else h @ p["w2"] + p["b2"])
    return last(p, h) if last else h @ p["w3"]


def perceptron(p, x):
    h = jax.nn.relu(x @ p["w1"])
    return jnp.tanh(h @ p["w2"]) @ p["w3"]


def int8(x, axis=None):
    scale = jnp.max(jnp.abs(x), axis, keepdims=True) / 127
    return jnp.round(x / scale) * scale


def chunks(p, h):
    def step(total, wh):
        return total + wh[1] @ wh[0], None

    rows = p["w2"].astype(BF16).reshape(24, 1, 24), h.astype(BF16).T.reshape(24, -1, 1)
    total = jax.lax.scan(step, jnp.zeros((10, 24), BF16), rows)[0]
    return total.astype(jnp.float32) + p["b2"]


def at_once(p, h):
    return (h.astype(BF16) @ p["w2"].astype(BF16)).astype(jnp.float32) + p["b2"]


def normed(h):
    return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


SECOND = {
    "eps": ("constant", {"eps": 1e-3}, {}),
    "fewer digits": ("rounded constant", {"slope": 1.7}, {}),
    "no bias": ("missing", {"second": lambda p, h: h @ p["w2"]}, {}),
    "a norm": ("missing", {"after": normed}, {}),
    "a residual": ("missing", {"second": lambda p, h: h @ p["w2"] + p["b2"] + h}, {}),
    "gelu": ("function", {"act": jax.nn.gelu}, {}),
    "e4m3": ("quantised", {"after": lambda h: h.astype(jnp.float8_e4m3fn).astype(jnp.float32)}, {}),
    "int8": ("quantised", {"after": int8}, {}),
    "int8 weight": ("quantised", {}, {"w2": int8(P["w2"], 0)}),
    "bf16 weight": ("quantised", {}, {"w3": P["w3"].astype(BF16).astype(jnp.float32)}),
    "transposed": ("weight", {}, {"w2": P["w2"].T}),
    "vectors swapped": ("weight", {}, {"b1": P["b2"], "b2": P["b1"]}),
    "another weight": ("weight", {}, {"w3": normal(24, 9, seed=60)}),
    "head in bf16": ("dtype",
        {"last": lambda p, h: (h.astype(BF16) @ p["w3"].astype(BF16)).astype(jnp.float32)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_planted_difference_is_named(name, swapped):
    kind, parts, weights = SECOND[name]
    sides = (network, P, X), (partial(network, **parts), P | weights, X)
    found = compare(*(sides[::-1] if swapped else sides))
    assert found.cause is not None
    assert found.cause.kind == kind
    assert found.causes[-1].after < 0.2 * found.cause.before


def test_an_order_of_sums_in_bf16():
    found = compare(
        (partial(network, second=at_once), P, X), (partial(network, second=chunks), P, X)
    )
    assert found.cause.kind == "order"
    assert found.cause.after < found.cause.before


ARITHMETICS = {
    "two recipes": (
        sw.autoscale(perceptron, "fp8"), sw.autoscale(perceptron, "nvfp4"),
        "quantised", "with nvfp4 x nvfp4 in place of e4m3fn x e4m3fn in the first's dot_general",
    ),
    "a recipe": (
        sw.autoscale(perceptron, "fp8"), perceptron,
        "quantised", "with float32 in place of e4m3fn x e4m3fn in the first's dot_general",
    ),
    "a policy": (
        perceptron, sw.autocast(perceptron, "bfloat16"),
        "dtype", "with bfloat16 in place of float32 in the first's dot_general",
    ),
    "two formats": (
        sw.emulate(perceptron, "bf16"), sw.emulate(perceptron, "fp16"),
        "dtype", "with fp16 in place of bf16 in the first's dot_general",
    ),
    "every operation": (
        sw.scalify(perceptron, "bf16"), sw.autoscale(perceptron, "fp16"),
        "dtype", "with bf16 in place of fp16 x fp16 in the second's dot_general",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARITHMETICS)
def test_two_arithmetics_of_a_program_are_told_by_their_formats(name):
    a, b, kind, change = ARITHMETICS[name]
    sides = (a, P, X), (b, P, X)
    found = compare(*sides)
    assert found.cause.change.startswith(change)
    pairs = [found, *([compare(*sides[::-1])] if name == "a policy" else [])]
    for found in pairs:
        first = perceptron.__code__.co_firstlineno + 1
        assert (found.cause.kind, found.where) == (kind, (f"test_compare.py:{first}",))
        assert found.cause.after < 0.8 * found.cause.before
        assert found.unmatched == (0, 0)


def test_an_arithmetic_is_a_cause_beside_others():
    a, b, kind, _ = ARITHMETICS["a policy"]
    assert not compare((b, P, X), (b, P, X)).causes
    other = compare((a, P, X), (b, P | {"w2": P["w2"].T}, X))
    assert {x.kind for x in other.causes} == {"weight", kind}


def narrow(dtype):
    return lambda x: (x.astype(dtype) @ x.astype(dtype).T).astype(jnp.float32)


def through(dtype, factor=1):
    return lambda x: (jnp.abs(x) * factor).astype(dtype).astype(jnp.float32) * 2


ROUNDINGS = {
    "overflow to NaN": (through(jnp.float8_e4m3fn, 1000), through(jnp.float32, 1000), "non-finite"),
    "overflow of a sum": (
        lambda x: jnp.sum((x * 3000).astype(jnp.float16) ** 2), lambda x: jnp.sum((x * 3000) ** 2),
        "non-finite",
    ),
    "E8M0": (through(jnp.float8_e8m0fnu), through(jnp.float32), "quantised"),
    "FP16 and BF16": (narrow(jnp.float16), narrow(BF16), "dtype"),
    "a constant array": (lambda x: x * 0 + 2, lambda x: x * 0 + 3, "constant"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_that_one_program_has_is_named(name):
    a, b, kind = ROUNDINGS[name]
    for found in (compare((a, X), (b, X)), compare((b, X), (a, X))):
        assert found.cause is not None
        assert found.cause.kind == kind
        assert found.cause.after < 0.8 * found.cause.before


def test_a_missing_operation_and_another_fault_are_both_named():
    without = {"second": lambda p, h: h @ p["w2"]}
    other = P | {"w3": normal(24, 9, seed=60)}
    for parts, weights, kinds in (
        (without, other, {"missing", "weight"}),
        (without | {"eps": 1e-2}, P, {"missing", "constant"}),
        ({"after": normed, "slope": 1.5}, P, {"missing", "constant"}),
    ):
        found = compare((network, P, X), (partial(network, **parts), weights, X))
        assert {x.kind for x in found.causes} == kinds
        assert found.causes[-1].after < 1e-6


def test_two_differences_are_named_one_after_the_other():
    found = compare((network, P, X), (partial(network, eps=1e-3, slope=1.5), P, X))
    assert [x.kind for x in found.causes] == ["constant", "constant"]
    assert found.causes[-1].after < 1e-6 < found.output_difference


def by_heads(w, x, *, order):
    """Attention whose heads, weights and layouts are in any order, and fused or not."""
    q, k, v = (x @ y for y in w) if order is None else jnp.split(x @ jnp.concatenate(w, 1), 3, 1)
    q, k, v = (y.reshape(10, 4, 4).transpose(1, 0, 2) for y in (q, k, v))
    if order is not None:
        q, k, v = (y[order] for y in (q / 2, k, v))
        heads = jax.nn.softmax(q @ k.transpose(0, 2, 1)) @ v
        return heads[np.argsort(order)].transpose(1, 0, 2).reshape(10, 16)
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * 0.5
    shares = jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
    return jnp.einsum("hqk,hkd->qhd", shares, v).reshape(10, 16)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_no_cause_is_named_between_programs_of_equal_meaning(dtype):
    w = tuple(normal(16, 16, seed=i, scale=0.3).astype(dtype) for i in range(3))
    orders = (np.random.default_rng(seed).permutation(4) for seed in range(3))
    x = X.astype(dtype)
    for order in orders:
        if dtype == BF16:  # the formulas round at other places, the order of heads doesn't matter
            sides = (partial(by_heads, order=np.arange(4)), partial(by_heads, order=order))
        else:
            sides = partial(by_heads, order=None), partial(by_heads, order=order)
        found = compare(*((f, w, x) for f in sides))
        assert not found.causes, found.verdict


@pytest.mark.parametrize("f", [lambda x: x > 0, lambda x: x[:0], lambda x: x.astype(int)])
def test_outputs_that_are_no_floats_or_empty_agree(f):
    found = compare((f, X), (lambda x: f(x), X))
    assert not found.causes, found.verdict


def test_sums_in_float32_have_any_order():
    def summed(x, n):
        return sum(jnp.sum(part) for part in jnp.split(x, n))

    x = normal(4096, 3)
    found = compare((partial(summed, n=1), x), (partial(summed, n=64), x))
    assert found.cause is None
    assert found.output_difference < 1e-5


def test_the_predicted_gap_is_that_of_the_compiled_programs():
    def head(p, h):
        return (h.astype(BF16) @ p["w3"].astype(BF16)).astype(jnp.float32)

    found = compare((network, P, X), (partial(network, last=head), P, X))
    outs = [jax.jit(network)(P, X), jax.jit(partial(network, last=head))(P, X)]
    p, q = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in outs)
    kl = np.mean(np.sum(np.exp(q) * (q - p), -1))
    assert found.gap.kl == pytest.approx(kl, rel=0.3)  # XLA keeps more bits by default
    assert found.predicted.kl == pytest.approx(found.gap.kl, rel=0.05)


def recorded(folder, arrays, *, names=str, safetensors=False):
    folder.mkdir()
    arrays = {f"{i}_{names(name)}": np.asarray(x) for i, (name, x) in enumerate(arrays.items())}
    if safetensors:
        save_safetensors(folder / "values.safetensors", arrays)
    for name, x in arrays.items() if not safetensors else ():
        np.save(folder / f"{name}.npy", x)
    return folder


CHANGES = {
    "constant": lambda x: 1.5 * x,
    "missing": lambda x: x + np.linspace(0.1, 0.5, 24),
    "weight": lambda x: x * np.linspace(0.5, 2, 24),
    "quantised": lambda x: np.asarray(x.astype(jnp.float8_e4m3fn), np.float32),
    "non-finite": lambda x: np.where(x > 2, np.nan, x),
    "": lambda x: x + 1e-7,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_recorded_values_are_matched_by_numbers_and_related(kind, tmp_path):
    h = X @ P["w1"]
    own = {"x": X, "h": h, "out": jnp.tanh(h) @ P["w2"]}
    changed = CHANGES[kind](np.asarray(h))
    other = {"x": X.T, "h": changed.T, "out": np.tanh(changed) @ P["w2"]}
    a = recorded(tmp_path / "a", own)
    b = recorded(tmp_path / "b", other, names=lambda x: f"layer_{len(x)}", safetensors=True)
    found = compare(a, str(b))
    assert (found.cause.kind if found.cause else "") == kind
    if kind:
        assert found.where == ("1_h", "1_layer_1")
    program = compare((lambda x, w: jnp.tanh(x @ w) @ P["w2"], X, P["w1"]), b)
    assert bool(program.causes) is bool(kind)
    assert not kind or program.where[0] == "1_layer_1"


def test_numbers_beyond_a_formats_range_are_not_those_rounded_to_it(tmp_path):
    """Two devices' sums, which E4M3FN doesn't hold."""
    x = np.linspace(1e3, 1e5, 48, dtype=np.float32).reshape(6, 8)
    y = x * (1 + 1e-3 * np.cos(np.arange(48.0))).reshape(6, 8)
    pair = (recorded(tmp_path / name, {"sums": z}) for name, z in (("a", x), ("b", y)))
    assert compare(*pair).cause.kind == "unknown"


def test_a_comparison_is_printed_and_saved(tmp_path):
    found = compare((network, P, X), (partial(network, eps=1e-3), P, X))
    assert "0.001 in place of 1e-05" in found.verdict
    assert found.json().count('"kind": "constant"') == 1
    for ending in ("html", "csv", "json"):
        assert found.save(tmp_path / f"a.{ending}").stat().st_size > 100


def test_input_that_cannot_be_compared_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    nan = X.at[0, 0].set(jnp.nan)
    wrong = [
        ((jnp.sin, X), (jnp.sin, X[:3]), ValueError, "which can't match"),
        ((jnp.sin, nan), (jnp.sin, X), ValueError, "a's argument [0] has a NaN"),
        ((jnp.sin, X), tmp_path / "empty", ValueError, "has no .npy and .safetensors"),
        ((jnp.sin, X), "none", ValueError, "doesn't exist or holds no values"),
        ((jnp.sin, X), 3, TypeError, "b is a int"),
        ((3, X), (jnp.sin, X), TypeError, "begins with a int"),
        ((jnp.sin, X), record(jnp.sin)(X), TypeError, "compare it with another one"),
        (record(jnp.sin)(X), "none.safetensors", ValueError, "doesn't exist or holds no values"),
    ]
    for a, b, kind, words in wrong:
        with pytest.raises(kind, match=re.escape(words)):
            compare(a, b)
    few, many = (recorded(tmp_path / str(n), {"x": np.ones(n)}) for n in (3, 5))
    with pytest.raises(ValueError, match="a and b have no values of the same size"):
        compare(few, many)
