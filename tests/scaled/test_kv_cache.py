"""KV caches against NumPy: scales by frexp, rounding by rint, attention in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.formats import BlockFormat

KINDS = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "token": (2, 3), "token_head": (3,)}
LIMITS = {
    name: ml_dtypes.finfo(f"float{bits}_{name}")
    for name, bits in {"e4m3fn": 8, "e5m2": 8, "e2m1fn": 4}.items()
}
TOP = {"e4m3fn": 448.0, "e5m2": 57344.0, "e2m1fn": 6.0}
SHAPE = (2, 8, 2, 32)


def numbers(seed, tokens, shape=SHAPE):
    """bfloat16 of many magnitudes, a token of zeros and negative zeros among them."""
    rng = np.random.default_rng(seed)
    full = (*shape[:-3], tokens, *shape[-2:])
    x = rng.standard_normal(full) * 2.0 ** rng.integers(-30, 9, full[:-1])[..., None]
    x[..., 0, :, :] *= -0.0 if tokens > 1 else 1
    return x.astype(ml_dtypes.bfloat16)


def element_of(fmt):
    return fmt.element.name if isinstance(fmt, BlockFormat) else fmt.name


def rounded(x, name):
    """Finite float64 rounded once; ml_dtypes itself rounds float64 to float32 before."""
    exponent = np.maximum(np.frexp(x)[1] - 1, LIMITS[name].minexp) - LIMITS[name].nmant
    return np.clip(np.rint(np.ldexp(x, -exponent)) * 2.0**exponent, -TOP[name], TOP[name])


def power(largest, top):
    """The power of two that brings a magnitude to the binade of a power of two."""
    return 2.0 ** (np.frexp(np.where(largest == 0, top, largest))[1] - np.frexp(top)[1])


def oracle(x, fmt, kind, stored, held):
    """Returns the numbers that a cache holds of x, by its float32 scale and the scale's own test.

    ``held`` is the scale that an earlier write has left, or None.
    """
    x, name = x.astype(np.float64), element_of(fmt)
    blocks = x.reshape(*x.shape[:-1], -1, fmt.size) if isinstance(fmt, BlockFormat) else None
    if blocks is not None and fmt.tensor_scale is None:
        scale = power(np.abs(blocks).max(-1, keepdims=True), 2.0 ** np.floor(np.log2(TOP[name])))
        return (rounded(blocks / scale, name) * scale).reshape(x.shape)
    largest = np.abs(x).max(KINDS[kind], keepdims=True)
    if blocks is None:
        scale = power(largest, 2.0 ** np.floor(np.log2(TOP[name]) - 1))
    else:
        scale = largest / 6 / 448
    scale = scale if held is None else held
    some = largest > 0
    np.testing.assert_allclose(stored[some], scale[some], rtol=0 if blocks is None else 2e-7)
    scale = stored.astype(np.float64)
    if blocks is None:
        return rounded(x / scale, name) * scale
    each = np.abs(blocks).max(-1, keepdims=True) / 6 / scale[..., None]
    each = np.maximum(rounded(each, "e4m3fn"), 2.0**-9) * scale[..., None]
    each = each.astype(np.float32).astype(np.float64)
    return (rounded(blocks / each, name) * each).reshape(x.shape)


def same(got, want):
    got, want = np.asarray(got), np.asarray(want).astype(got.dtype)
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


@functools.cache
def read():
    return jax.jit(lambda cache, pages=None: cache.read(pages))


@functools.cache
def update():
    return jax.jit(lambda cache, k, v, at, pages=None: cache.update(k, v, at, pages))


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [*(("e4m3fn", kind) for kind in KINDS), ("e5m2", "token"), ("mxfp8_e4m3", "token"),
     ("mxfp4", "tensor"), ("nvfp4", "head"), ("nvfp4", "token")],
)  # fmt: skip
def test_what_is_read_is_the_rounded_quotient_times_the_scale(fmt, kind):
    """Of two writes, at a traced position: the second has the first one's scale if that is kept."""
    cache = sw.KVCache.init(SHAPE, fmt, scales=kind, dtype="float32")
    for step, at in enumerate((2, 5)):
        new = [numbers(10 * step + i, 3) for i in range(2)]
        before = cache
        cache = update()(cache, *new, at)
        for x, old, held, got in zip(
            new, *((c.keys, c.values) for c in (before, cache)), cache.read(), strict=True
        ):
            scales = [np.asarray(scale_of(a)) for a in (old, held)]
            shared = kind in ("tensor", "head")
            kept = scales[0] if shared and step else None
            stored = scales[1] if shared else scales[1][:, at : at + 3]
            want = np.array(old.value())
            want[:, at : at + 3] = oracle(x, cache.format, kind, stored, kept)
            same(got, want)


def scale_of(a):
    return a.scale if a.tensor_scale is None else a.tensor_scale


@pytest.mark.parametrize(
    ("fmt", "kind"),
    nightly(
        [("e4m3fn", "tensor"), ("e4m3fn", "token"), ("mxfp4", "token"), ("nvfp4", "tensor")],
        but=[("e4m3fn", "tensor"), ("mxfp4", "token")],
    ),
)
def test_a_batch_with_its_own_positions_and_pages_holds_what_each_sequence_holds(fmt, kind):
    """A given scale, or one for each token: sequences in one cache don't depend on each other."""
    given = {"k_scale": 0.37, "v_scale": 2.5} if kind == "tensor" else {}
    init = functools.partial(sw.KVCache.init, format=fmt, scales=kind, **given)
    new, at = [numbers(i, 3) for i in range(2)], np.array([1, 4], np.int32)
    own = [update()(init(SHAPE[1:]), *(x[b] for x in new), at[b]) for b in range(2)]
    want = [np.stack(both) for both in zip(*map(read(), own), strict=True)]
    ragged = update()(init(SHAPE), *new, at)
    made = jax.vmap(lambda _: init(SHAPE[1:]))(jnp.arange(2))
    mapped = jax.jit(jax.vmap(lambda c, k, v, p: c.update(k, v, p)))(made, *new, at)
    table = np.array([[4, 0], [2, 3]], np.int32)  # of pages of 4 positions
    paged = update()(init((5, 4, 2, 32)), *new, at, table)
    for found in (read()(ragged), jax.jit(jax.vmap(sw.KVCache.read))(mapped), read()(paged, table)):
        for got, expected in zip(found, want, strict=True):
            same(got, expected)
    if fmt != "e4m3fn":
        return
    q, attend = numbers(7, 3, (2, 8, 4, 32)).astype(np.float32), jax.jit(sw.KVCache.attend)
    attended = [attend(cache, q[b], at[b]) for b, cache in enumerate(own)]
    for found in (attend(ragged, q, at), attend(paged, q, at, table)):
        np.testing.assert_allclose(found, np.stack(attended), rtol=1e-4, atol=1e-4)


def test_what_lies_beyond_the_pages_is_not_written():
    cache, x = sw.KVCache.init((3, 2, 1, 4), "e4m3fn"), np.ones((2, 2, 1, 4), np.float32)
    table = np.array([[2, -1], [1, 7]], np.int32)
    found = update()(cache, x, x, np.array([1, 3], np.int32), table).keys.value()
    want = np.zeros((3, 2, 1, 4))
    want[2, 1] = 1
    same(found, want)


@pytest.mark.parametrize("fmt", ["e4m3fn", "nvfp4"])
def test_a_given_scale_saturates_and_stays(fmt):
    cache = sw.KVCache.init((2, 4, 2, 16), fmt, scales="head", k_scale=[0.25, 0.5], v_scale=1e-30)
    x = np.full((2, 1, 2, 16), 3e38, np.float32) * np.array([1, -1], np.float32)[:, None]
    k, v = update()(cache, x, x, 0).read()
    top = 448.0 * (6.0 if fmt == "nvfp4" else 1.0)
    same(k[:, 0, :, 0], np.array([[0.25, -0.5], [0.25, -0.5]], np.float32) * top)
    same(v[0, 0, :, 0], (np.array([1, -1]) * (np.float32(1e-30) * np.float32(top))))


def test_scales_are_found_from_the_first_write_that_is_not_zero():
    cache = sw.KVCache.init((1, 4, 1, 4), "e4m3fn", scales="tensor")
    for at, size in enumerate((0.0, 200.0, 900.0)):
        x = np.full((1, 1, 1, 4), size, np.float32)
        cache = update()(cache, x, x, at)
    assert cache.read()[0][0, :, 0, 0].tolist() == [0.0, 192.0, 448.0, 0.0]
    assert cache.keys.scale.ravel().tolist() == [1.0]


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_nan_and_infinities_stay_beside_finite_numbers(fmt):
    x = np.ones((1, 2, 1, 64), np.float32)
    x[0, 0, 0, :2] = np.nan, np.inf
    cache = update()(sw.KVCache.init((1, 2, 1, 64), fmt, scales="token_head"), x, x, 0)
    found = np.asarray(cache.read()[0], np.float32)
    whole = "fp4" in fmt  # a block's scale is NaN
    assert np.isnan(found[0, 0, 0, : 16 if whole else 1]).all()
    assert not np.isfinite(found[0, 0, 0, 1])
    assert (found[0, 1] == 1).all()
    assert (found[0, 0, 0, 32:] == 1).all()


def test_bytes_of_the_leaves():
    def size(fmt, **options):
        cache = jax.eval_shape(lambda: sw.KVCache.init((2, 64, 8, 128), fmt, **options))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

    wide = 2 * 2 * 2 * 64 * 8 * 128  # bfloat16
    assert size("e4m3fn", scales="tensor") == wide / 2 + 2 * 4
    assert size("e5m2", scales="token") == wide * (1 / 2 + 4 / 2 / 8 / 128)
    assert size("mxfp8_e4m3") == wide * (1 / 2 + 1 / 64)
    assert size("mxfp4") == wide * (1 / 4 + 1 / 64)
    assert size("nvfp4", scales="tensor") == wide * (1 / 4 + 1 / 32) + 2 * 4


def test_a_donated_cache_is_written_in_place():
    cache = sw.KVCache.init((2, 4096, 2, 16), "nvfp4")
    x = jnp.ones((2, 1, 2, 16), jnp.bfloat16)
    write = jax.jit(lambda c, k, p: c.update(k, k, p), donate_argnums=0)
    memory = write.lower(cache, x, 3).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 100


def decoder(seed, dim=32, heads=4, groups=2, vocabulary=16, layers=2):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)  # noqa: E731
    size = dim // heads
    return {
        "embedding": draw(vocabulary, dim) * 4,
        "layers": [
            {"q": draw(dim, heads, size), "k": draw(dim, groups, size),
             "v": draw(dim, groups, size), "out": draw(heads * size, dim)}
            for _ in range(layers)
        ],
    }  # fmt: skip


def decode(params, caches, tokens, position):
    x, new = params["embedding"][tokens], []
    for layer, cache in zip(params["layers"], caches, strict=True):
        h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, layer[name]) for name in "qkv")
        cache = cache.update(k, v, position)
        new.append(cache)
        x = x + cache.attend(q, position).reshape(*x.shape) @ layer["out"]
    return x @ params["embedding"].T, new


def forward(params, tokens):
    """The same decoder in float64, without a cache."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = p["embedding"][tokens]
    for layer in p["layers"]:
        h = x / np.sqrt(np.mean(x * x, -1, keepdims=True))
        q, k, v = (np.einsum("btd,dnh->btnh", h, layer[name]) for name in "qkv")
        k, v = (np.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
        score = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        score = np.where(np.tri(score.shape[-1], dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("bnts,bsnh->btnh", weight, v).reshape(x.shape) @ layer["out"]
    return x @ p["embedding"].T


def test_decoding_by_scan_gives_the_logits_of_the_whole_sequence():
    """Errors are in proportion to the format's: a half ulp is 2^-4 in E4M3, 2^-3 in E5M2."""
    params = decoder(0)
    tokens = np.random.default_rng(1).integers(0, 16, (2, 12)).astype(np.int32)
    want = forward(params, tokens)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(caches):
        first, caches = decode(params, caches, tokens[:, :4], 0)

        def step(caches, position):
            token = jax.lax.dynamic_slice_in_dim(jnp.asarray(tokens), position, 1, 1)
            logits, caches = decode(params, caches, token, position)
            return caches, logits[:, 0]

        caches, rest = jax.lax.scan(step, caches, jnp.arange(4, 12))
        return jnp.concatenate([first, rest.swapaxes(0, 1)], 1), caches

    bounds = {"fp32": 1e-5, "bf16": 2**-7, "e4m3fn": 2**-4, "e5m2": 2**-3}
    for fmt, bound in bounds.items():
        caches = [sw.KVCache.init((2, 12, 2, 8), fmt, dtype="float32") for _ in range(2)]
        got, after = run(caches)
        assert all(x.is_deleted() for x in jax.tree.leaves(caches))  # donated
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < bound
        assert fmt == "fp32" or error > bound / 64
        assert jax.tree.structure(after) == jax.tree.structure(caches)


def test_autoscale_multiplies_the_narrow_numbers():
    """As explain shows: it doesn't round the cache's numbers again."""
    cache = sw.KVCache.init((1, 8, 2, 32), "e4m3fn", scales="tensor", dtype="float32")
    k, v = (normal(i, (1, 5, 2, 32)) for i in range(2))
    cache, q = cache.update(k, v, 0), normal(2, (1, 1, 2, 32))

    def attend(cache, q):
        return cache.attend(q, 4)

    got = jax.jit(sw.autoscale(attend, "fp8"))(cache, q)
    np.testing.assert_allclose(got, jax.jit(attend)(cache, q), atol=0.15)
    shown = str(sw.explain(attend, "fp8")(cache, q))
    assert "amax x stored" in shown
    assert "stored x amax" in shown
    with pytest.raises(ValueError, match="call update outside of autoscale"):
        sw.autoscale(lambda c: c.update(k, v, 0), "fp8")(cache)


def test_a_program_with_a_cache_is_exported():
    cache, k = sw.KVCache.init((1, 4, 2, 32), "nvfp4"), normal(0, (1, 1, 2, 32))
    program = jax.jit(lambda cache, k: cache.update(k, k, 2))
    again = export.deserialize(export.export(program)(cache, k).serialize())
    found, want = again.call(cache, k), program(cache, k)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    same(found.read()[0].astype(jnp.float32), want.read()[0].astype(jnp.float32))


def test_bad_arguments_end_in_a_sentence():
    x, init = jnp.ones((2, 1, 2, 16)), sw.KVCache.init
    cache = init((2, 4, 2, 16), "e4m3fn")
    cases = {
        "did you mean 'e4m3fn'": lambda: init((2, 4, 2, 16), "fp8"),
        "no storage dtype of whole bytes": lambda: init((2, 4, 2, 16), "e2m1fn"),
        r"shape is \(4, 2\); expected \(batch": lambda: init((4, 2), "e4m3fn"),
        "k_scale is a scale for all positions; with e4m3fn": lambda: init(
            (4, 2, 16), "e4m3fn", k_scale=1.0
        ),
        r"v_scale has the shape \(3,\)": lambda: init(
            (4, 2, 16), "e4m3fn", scales="head", v_scale=np.ones(3)
        ),
        "v_scale is -1.0; expected positive": lambda: init(
            (4, 2, 16), "e4m3fn", scales="tensor", v_scale=-1.0
        ),
        r"k has the shape \(2, 1, 2\); expected \(2, tokens, 2, 16\)": lambda: cache.update(
            x[..., 0], x, 0
        ),
        "v has the shape": lambda: cache.update(x, x[:, :0], 0),
        "position is 4; expected 0 to 3": lambda: cache.update(x, x, 4),
        "position is -1": lambda: cache.attend(x, -1),
        "position has the shape": lambda: cache.update(x, x, np.arange(3)),
        r"q has the shape .* expected \(2, tokens, query heads, 16\)": lambda: cache.attend(
            x[:, :, :1], 0
        ),
        "pages have the shape": lambda: cache.update(x, x, 0, np.arange(3)),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="position is float32; expected integers"):
        cache.update(x, x, np.float32(0))
    with pytest.raises(TypeError, match=r"KVCache\.update: k"):
        cache.update(x.astype(int), x, 0)
    with pytest.raises(TypeError, match="scale_k"):
        init((4, 2, 16), "e4m3fn", scale_k=1.0)
