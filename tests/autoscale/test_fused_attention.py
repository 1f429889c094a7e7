"""cuDNN's attention under ``Recipe.attention``: what it rounds, and where its FP8 kernel is called.

Nothing here runs the kernel. Programs are lowered for CUDA, and the same rule computed by XLA's
operations is compared with the arithmetic that cuDNN documents, written with NumPy and ml_dtypes.
"""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from devices import run_on_devices
from scalewise.autoscaling import _fused_attention as fused_attention

BATCH, TIME, HEADS, GROUPS, WIDTH = 1, 128, 4, 2, 128
LATE = sw.Delayed()
CURRENT = sw.Recipe(sw.Products.short(None, None), residuals=None, attention=sw.Attention())
DELAYED = dataclasses.replace(
    sw.recipes.fp8_delayed,
    attention=sw.Attention(sw.Operand("e4m3fn", LATE), gradients=sw.Operand("e4m3fn", LATE)),
)
FP8, FP8_BACKWARD = "__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"
SIXTEEN, SIXTEEN_BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
TARGETS = (FP8, FP8_BACKWARD, SIXTEEN, SIXTEEN_BACKWARD)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """Lets JAX trace cuDNN's attention where there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def use(version):
        monkeypatch.setattr(fused, "check_cudnn_version", lambda: version)

    use(91100)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code needs it
        yield use


def given(time=TIME, width=WIDTH, dtype=jnp.bfloat16, size=1.0):
    heads = HEADS, GROUPS, GROUPS, HEADS
    shapes = [(BATCH, time, n, width) for n in heads]
    return [jnp.asarray(size * normal(i, s), dtype) for i, s in enumerate(shapes)]


def attend(q, k, v, **options):
    q, k, v = 2 * q, 2 * k, 2 * v  # computed, as attention's operands are
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def trained(q, k, v, gradient, **options):
    out, backward = jax.vjp(lambda *x: attend(*x, **options), q, k, v)
    return out, backward(gradient)


def lowered(f, *args, **options):
    """The number of calls of each of cuDNN's kernels in a program that is lowered for CUDA."""
    text = jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    counts = {t: text.count(f"@{t}(") for t in TARGETS}
    return {t: n for t, n in counts.items() if n}


# -- what is rounded -----------------------------------------------------------------------------


def e4m3(x, scale):
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def amax_scale(x):
    """The power of two that brings the largest magnitude to E4M3's last binade but one."""
    return 2.0 ** (np.floor(np.log2(np.abs(x).max())) - 7)


def by_hand(q, k, v, gradient, causal, backward):
    """cuDNN's arithmetic in float64; ``backward`` says of its scales, None for 16 bits."""
    q, k, v, gradient = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, gradient))
    q, k, v = 2 * q, 2 * k, 2 * v
    q, k, v = (e4m3(x, s) for x, s in zip((q, k, v), map(amax_scale, (q, k, v)), strict=True))
    keys, values = (np.repeat(x, HEADS // GROUPS, 1) for x in (k, v))
    root = WIDTH**-0.5
    scores = q @ keys.swapaxes(2, 3) * root
    if causal:
        scores = np.where(np.tri(TIME, dtype=bool), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(-1, keepdims=True)
    out = e4m3(e4m3(exponentials, 2.0**-8) @ values / total, 2 * amax_scale(v))
    shares = exponentials / total
    if backward:
        gradient = e4m3(gradient, amax_scale(gradient))
    slope = gradient @ values.swapaxes(2, 3) - (gradient * out).sum(-1, keepdims=True)
    slope = shares * slope * root
    if backward:
        shares, slope = e4m3(shares, 2.0**-8), e4m3(slope, amax_scale(slope))
    dk, dv = slope.swapaxes(2, 3) @ q, shares.swapaxes(2, 3) @ gradient
    dk, dv = (x.reshape(BATCH, GROUPS, -1, TIME, WIDTH).sum(2) for x in (dk, dv))
    outs = slope @ keys, dk, dv
    if backward:
        outs = [e4m3(x, amax_scale(x)) for x in outs]
    return [x.swapaxes(1, 2) for x in (out, *(2 * x for x in outs))]


def unlike(found, expected):
    """The share of numbers that are not the same to bfloat16's precision."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.mean(np.abs(found - expected) > 2.0**-7 * np.abs(expected) + 1e-9)


def documented(arrays, scales, backward, *, scale, use_causal_mask, layout, is_training=True):
    """cuDNN's kernel in float32, as the graph of cudnn-frontend has it, by the names of JAX."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    assert (layout, is_training) == (0, True)
    named = fused.fp8_params_keys_bwd if backward else fused.fp8_params_keys_fwd
    by = dict(zip(named, scales, strict=True))
    *arrays, last = arrays
    q, k, v, *others = (x.astype(jnp.float32) for x in (arrays if backward else (*arrays, last)))
    k, v = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (k, v))

    def narrow(x, factor):
        return jnp.clip(x * by[factor], -448, 448).astype(jnp.float8_e4m3fn)

    def times(spec, a, b, *factors):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return jnp.einsum(spec, a, b) * math.prod(by[n] for n in factors)

    scores = times("bqhd,bkhd->bhqk", q, k, "descale_q", "descale_k") * scale
    if use_causal_mask:
        scores = jnp.where(jnp.tri(TIME, dtype=bool), scores, -jnp.inf)
    if not backward:
        top = scores.max(-1, keepdims=True)
        exponentials = jnp.exp(scores - top)
        total = exponentials.sum(-1, keepdims=True)
        out = times("bhqk,bkhd->bqhd", narrow(exponentials, "scale_s"), v, "descale_s", "descale_v")
        out = out / total.swapaxes(1, 2)
        sizes = (jnp.abs(x).max().reshape(1, 1, 1, 1) for x in (exponentials, out))
        return [narrow(out, "scale_o"), *sizes, (top + jnp.log(total))[..., 0]]
    out, gradient = others
    shares = jnp.exp(scores - last[..., None])
    dv = times("bhqk,bqhd->bkhd", narrow(shares, "scale_s"), gradient, "descale_s", "descale_dO")
    slope = times("bqhd,bkhd->bhqk", gradient, v, "descale_dO", "descale_v")
    mean = times("bqhd,bqhd->bhq", gradient, out, "descale_dO", "descale_o")
    slope = shares * (slope - mean[..., None]) * scale
    rounded = narrow(slope, "scale_dP")
    dq = times("bhqk,bkhd->bqhd", rounded, k, "descale_dP", "descale_k")
    dk = times("bhqk,bqhd->bkhd", rounded, q, "descale_dP", "descale_q")
    dk, dv = (x.reshape(BATCH, TIME, GROUPS, -1, WIDTH).sum(3) for x in (dk, dv))
    results = [narrow(x, n) for x, n in ((dq, "scale_dQ"), (dk, "scale_dK"), (dv, "scale_dV"))]
    return [*results, *(jnp.abs(x).max().reshape(1, 1, 1, 1) for x in (dq, dk, dv, slope))]


@pytest.fixture
def with_kernel(monkeypatch):
    """Calls :func:`documented` where a GPU would have cuDNN's kernels."""
    monkeypatch.setattr(fused_attention, "fp8_attention", documented)
    for name in ("forward", "backward"):
        by_kernel = getattr(fused_attention, f"_{name}_by_kernel")
        monkeypatch.setattr(fused_attention, f"{name}_p", SimpleNamespace(bind=by_kernel))


@pytest.mark.parametrize("causal", [True, *nightly([False])])
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
@pytest.mark.parametrize("kernel", [False, True])
def test_the_documented_arithmetic_is_computed(kernel, recipe, causal, request):
    if kernel:
        request.getfixturevalue("with_kernel")
    f = sw.autoscale(lambda *x: trained(*x, is_causal=causal), recipe)
    args = given()
    if recipe is CURRENT:
        found = jax.jit(f)(*args)
    else:
        history = f.init(*args)
        _, history = jax.jit(f.step)(history, *args)
        found, _ = jax.jit(f.step)(history, *args)
    expected = by_hand(*args, causal, recipe is DELAYED)
    # sums of another order round a few numbers of E4M3 to their neighbours
    parts = [unlike(x, y) for x, y in zip(jax.tree.leaves(found), expected, strict=True)]
    assert max(parts) < 0.002, parts
    exact = jax.tree.leaves(trained_by_xla(*args, causal))
    assert all(unlike(x, y) > 0.5 for x, y in zip(exact, expected, strict=True))


def trained_by_xla(q, k, v, gradient, causal):
    def plain(*x):
        return jax.nn.dot_product_attention(*(2 * y for y in x), is_causal=causal)

    out, backward = jax.vjp(plain, q, k, v)
    return out, backward(gradient)


def distances(found, exact):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    pairs = [[np.asarray(z, np.float64) for z in pair] for pair in pairs]
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]


def test_heads_may_come_before_tokens():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def turned(*arrays):
        return [jnp.swapaxes(x, 1, 2) for x in arrays]

    def heads_first(*given):
        def attend(*given):
            q, k, v = (2 * x for x in given)
            return fused.dot_product_attention(q, k, v, scale=WIDTH**-0.5, qkv_layout="BNTH")

        q, k, v, gradient = turned(*given)
        out, backward = jax.vjp(attend, q, k, v)
        return turned(out, *backward(gradient))

    args = given()
    found = jax.jit(sw.autoscale(heads_first, CURRENT))(*args)
    expected = by_hand(*args, False, False)
    assert max(map(unlike, found, expected)) < 0.002


def test_logarithms_of_the_forward_kernel_are_not_rounded_for_the_backward_one():
    given = [jax.ShapeDtypeStruct((1, 2048, n, WIDTH), jnp.bfloat16) for n in (HEADS,) * 4]
    f = sw.autoscale(trained, dataclasses.replace(sw.recipes.fp8, device="h100"))
    assert "f16" not in str(jax.make_jaxpr(f)(*given)).replace("bf16", "")


def step(args, *, forget=False):
    """The first step's outputs, and how far they are from those of bfloat16; ``forget`` deletes the
    history of what the kernel computes, whose scales then come from bounds."""
    f = sw.autoscale(trained, DELAYED)
    history = f.init(*args)
    computed = np.array([not n.rpartition("/")[2].isdigit() for n in history.operand_ids])
    assert computed.sum() == 4
    kept = history.amaxes * ~(computed & forget)[:, None]
    found, _ = jax.jit(f.step)(dataclasses.replace(history, amaxes=kept), *args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(trained_by_xla(*args, False)), strict=True)
    pairs = [[np.asarray(z, np.float64) for z in pair] for pair in pairs]
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]


def test_bounds_are_above_what_the_kernel_computes():
    """Two of the keys share all of the probability, and have values of two signs."""
    q, k, v, gradient = (np.ones_like(x, np.float32) for x in given())
    k[:, 2:], v[:, 1::2] = -1, -0.5
    k[:, 1, :, ::2], k[:, 1, :, 1::2] = 2, 0
    args = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, 2.0**30 * v, 2.0**-40 * gradient)]
    assert max(step(args, forget=True)) < 0.07  # two roundings to E4M3


def test_the_first_history_has_the_magnitudes_under_scales_that_fit():
    """A value that no gradient reads makes the bounds 2^22 times what they bound."""
    q, k, v, gradient = given()
    args = q / 64, k, v.at[0, 0, :, 0].set(256), gradient.at[..., 0].set(0)
    assert max(step(args, forget=True)[1:3]) > 0.9
    assert max(step(args)) < 0.15


# -- where the kernel is called ------------------------------------------------------------------


def test_both_kernels_are_called_with_delayed_scales_and_one_with_current_ones():
    args = given()
    assert lowered(sw.autoscale(trained, CURRENT), *args) == {FP8: 1, SIXTEEN_BACKWARD: 1}
    assert lowered(trained, *args) == {SIXTEEN: 1, SIXTEEN_BACKWARD: 1}
    f = sw.autoscale(trained, DELAYED)
    assert lowered(f.step, jax.eval_shape(f.init, *args), *args) == {FP8: 1, FP8_BACKWARD: 1}
    assert lowered(f, *args) == {FP8: 1, SIXTEEN_BACKWARD: 1}  # without a history


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_a_forward_pass_alone_takes_other_widths(options):
    f = sw.autoscale(lambda *x: attend(*x, **options), CURRENT)
    assert lowered(f, *given(time=48, width=64)[:3]) == {FP8: 1}


def test_it_is_called_in_loops():
    def layers(q, k, v, gradient):
        def loss(q):
            def layer(x, _):
                return attend(x, k, v), None

            return jnp.vdot(jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0], gradient)

        return jax.grad(loss)(q)

    args = given()
    # forward, and once more for the backward pass
    assert lowered(sw.autoscale(layers, CURRENT), *args) == {FP8: 2, SIXTEEN_BACKWARD: 1}
    f = sw.autoscale(layers, DELAYED)
    history = f.init(*args)
    assert lowered(f.step, history, *args) == {FP8: 2, FP8_BACKWARD: 1}
    _, history = jax.jit(f.step)(history, *args)
    assert (np.asarray(history.amaxes[:, 0]) > 0).all()


OPERAND = sw.Operand("e4m3fn")
LEFT = {
    "bias": ({}, {"bias": jnp.ones((1, HEADS, TIME, TIME), jnp.bfloat16)}, {}, "no bias"),
    "window": ({}, {"local_window_size": (16, 0), "is_causal": True}, {}, "no bias"),
    "width": ({}, {}, {"width": 64}, "trains heads of 128"),
    "time": ({}, {}, {"time": 64}, "trains heads of 128"),
    "format": ({"attention": sw.Attention("e5m2")}, {}, {}, "takes E4M3"),
    "channels": (
        {"attention": sw.Attention(sw.Operand("e4m3fn", per="channel"))}, {}, {}, "takes E4M3",
    ),
    "probabilities": (
        {"attention": sw.Attention(probabilities="e4m3fn")}, {}, {}, "a constant one",
    ),
    "device": ({"device": "a100"}, {}, {}, "isn't on a100"),
    "speed": ({"device": "h100"}, {}, {}, "converting costs more"),
    "kept": ({"keep": {"attention": "bf16"}}, {}, {}, "keep"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_it_is_left_in_sixteen_bits_and_said(case):
    changes, options, shapes, why = LEFT[case]

    def f(*x):
        with jax.named_scope("attention"):
            return trained(*x, **options)

    recipe, args = dataclasses.replace(CURRENT, **changes), given(**shapes)
    with pytest.warns(UserWarning, match=rf"stays in the program's 16 bits \(left alone: .*{why}"):
        counts = lowered(sw.autoscale(f, recipe), *args)
    if options.get("bias") is None:
        assert counts == {SIXTEEN: 1, SIXTEEN_BACKWARD: 1}
    else:
        assert FP8 not in counts
    with pytest.warns(UserWarning, match="stays in"):
        rows = sw.explain(f, recipe)(*args).rows
    rows = [r for r in rows if r.kind == "contraction"]
    assert [why in r.scale for r in rows] == [True, True]
    assert {r.format for r in rows} == {"bf16 x bf16 x bf16"}


@pytest.mark.parametrize("version", [90000, 91000])
def test_a_cudnn_without_the_kernel_gets_the_same_operands_in_sixteen_bits(cudnn, version):
    cudnn(version)
    args = given()
    found = lowered(sw.autoscale(trained, CURRENT), *args)
    assert found == {SIXTEEN: 1, SIXTEEN_BACKWARD: 1}


def test_under_vmap_operands_are_those_of_sixteen_bits():
    args = [jnp.stack([x, x]) for x in given()]
    found = lowered(jax.vmap(sw.autoscale(trained, CURRENT)), *args)
    assert found == {SIXTEEN: 1, SIXTEEN_BACKWARD: 1}


def test_explain_names_formats_scales_and_routes():
    rows = sw.explain(trained, DELAYED)(*given()).rows
    rows = [(r.format, r.scale, r.direction) for r in rows if r.kind == "contraction"]
    text = "delayed; by cuDNN on CUDA, else emulated"
    four = "e4m3fn x e4m3fn x e4m3fn x e4m3fn"
    assert rows == [(four, text, "forward"), (four, text, "backward")]
    rows = sw.explain(trained, CURRENT)(*given()).rows
    assert [r.format for r in rows if r.kind == "contraction"] == [
        four, "e4m3fn x e4m3fn x e4m3fn x bf16",
    ]  # fmt: skip


SHARDED = """
from jax._src.cudnn import fused_attention_stablehlo as fused
fused.check_cudnn_version = lambda: 91100
import sys
sys.path[:0] = ["tests", "tests/autoscale"]
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import scalewise as sw
from test_fused_attention import *
mesh = jax.make_mesh((2,), ("heads",))
args = [jax.device_put(x, NamedSharding(mesh, P(None, None, "heads"))) for x in given()]
text = jax.jit(sw.autoscale(trained, CURRENT)).trace(*args).lower(
    lowering_platforms=("cuda",)).as_text()
calls = [line for line in text.splitlines() if "@CustomSPMDPartitioning" in line]
assert len(calls) == 2 and not any("f8E4M3FN" in line for line in calls), calls
spec = P(None, None, "heads")
own = jax.shard_map(sw.autoscale(trained, CURRENT), mesh=mesh, in_specs=spec, out_specs=spec)
mapped = lowered(own, *args)
assert mapped == {FP8: 1, SIXTEEN_BACKWARD: 1}, mapped
"""


def test_the_kernel_is_for_whole_arrays():
    run_on_devices(2, SHARDED)
