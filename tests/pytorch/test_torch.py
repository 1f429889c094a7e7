"""Conversions, tensor functions, the registry, and modules that aren't transformers."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import scalewise as sw
import scalewise.torch as st
from cases import refused
from scalewise.torch._graph import apply

pytestmark = pytest.mark.filterwarnings("ignore")

A = torch.ops.aten
F = torch.nn.functional
FLOATS = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.bool], ids=str)
def test_conversions_share_memory(dtype):
    x = torch.arange(64).to(dtype)
    array = st.to_jax({"x": (x, 3)})["x"][0]
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = st.to_torch(array)
    assert (back.dtype, back.data_ptr()) == (dtype, x.data_ptr())


def test_64_bits_have_to_fit_in_32():
    assert st.to_jax(torch.tensor([2**31 - 1])).dtype == jnp.int32
    with pytest.raises(OverflowError, match="numbers beyond int32; turn x64 on"):
        st.to_jax(torch.tensor([2**31]))
    with pytest.raises(TypeError, match="dense tensors"):
        st.to_jax(torch.eye(2).to_sparse())
    assert st.to_jax(torch.zeros(0, 3)).shape == (0, 3)
    assert st.to_torch(jnp.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_casts_have_torchs_dtype_and_decode_to_the_same_numbers(fmt):
    codes = np.arange(2 ** sw.format(fmt).bits)
    numbers = torch.tensor(sw.format(fmt).decode(codes), dtype=torch.float32)
    cast = st.cast(numbers, fmt)
    assert not cast.dtype.is_complex
    assert cast.dtype.is_floating_point
    ours, theirs = cast.float(), numbers.to(cast.dtype).float()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, numbers)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_casts_round_as_torchs_and_as_casts_of_arrays(fmt):
    """Between all neighbours: the middle, and the float32 before and after it."""
    numbers = sw.format(fmt).decode(np.arange(2 ** sw.format(fmt).bits))
    numbers = np.unique(numbers[np.isfinite(numbers)]).astype(np.float32)
    middles = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    x = torch.from_numpy(np.concatenate([numbers, middles, *beside]))
    cast = st.cast(x, fmt)
    for want in (x.to(cast.dtype), st.to_torch(sw.cast(st.to_jax(x), fmt))):
        assert torch.equal(cast.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(st.round_to(x, fmt), cast.float())


def test_gradients_pass_straight_through():
    x = torch.tensor([0.3, 500.0, -3.0], requires_grad=True)
    for y in (st.round_to(x, "e4m3fn", saturate=True), st.cast(x, "e4m3fn", saturate=True).float(),
              st.dequantize(st.quantize(x, "mxfp8_e4m3"))):  # fmt: skip
        (gradient,) = torch.autograd.grad(y.sum() * 2, x)
        assert gradient.tolist() == [2.0, 2.0, 2.0]
    y = st.round_to(x, "e4m3fn", saturate=True, gradient="clipped")
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 0.0, 1.0]


def test_quantized_tensors():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for fmt in ("e4m3fn", "mxfp8_e4m3", "mxfp4", "nvfp4"):
        stored = st.quantize(x, fmt)
        want = sw.quantize(st.to_jax(x), fmt)
        np.testing.assert_array_equal(st.dequantize(stored), want.value())
        assert stored.scale is not None
        assert stored.shape == stored.data.shape == (4, 64)
    random = st.round_to(x, "e2m1fn", rounding="stochastic", key=3)
    assert torch.equal(random, st.round_to(x, "e2m1fn", rounding="stochastic", key=3))


test_what_is_refused = refused(
    (lambda: st.round_to(torch.ones(1, dtype=torch.int32), "fp16"), TypeError, "int32"),
    (lambda: st.cast(1.0, "fp16"), TypeError, "takes a floating-point tensor, not float"),
    (lambda: st.cast(torch.ones(1, dtype=torch.float64), "fp16"), TypeError, "x64 on"),
    (lambda: st.round_to(torch.ones(1), "fp8"), "'fp8' is a recipe, not a format"),
    (lambda: st.round_to(torch.ones(1), "fp16", gradient="x"), "'clipped'"),
    (lambda: st.rule(A.exp), TypeError, "rule takes overloads, not aten.exp"),
    (lambda: st.function(torch.nn.ReLU(), (torch.ones(1),), granularity="x"), "gr"),
    (lambda: st.function(torch.nn.ReLU(), (), method="x"), st.ExportError, "no method 'x'"),
)  # fmt: skip


def test_all_missing_rules_are_listed_and_can_be_given():
    def f(x):
        return torch.special.erfcx(x) + torch.special.bessel_j0(x) + torch.special.erfcx(x)

    x = torch.full((2,), 0.25)
    with pytest.raises(st.MissingRuleError) as caught:
        st.function(f, (x,))
    text = str(caught.value)
    assert text.startswith("2 operations have no rule:")
    assert "aten.special_erfcx.default (2x, first at test_torch.py:" in text
    assert "aten.special_bessel_j0.default (1x" in text
    scaled, bessel = A.special_erfcx.default, A.special_bessel_j0.default
    try:
        st.rule(scaled)(lambda x: jnp.exp(x * x) * jax.scipy.special.erfc(x))
        st.rule(bessel)(lambda x: 1 - x**2 / 4 + x**4 / 64)
        g, params = st.function(f, (x,))
        np.testing.assert_allclose(g(params, st.to_jax(x)), f(x), rtol=1e-5)
    finally:
        del st.RULES[scaled], st.RULES[bessel]


@pytest.mark.parametrize(
    ("f", "name", "advice"),
    [
        (lambda x: x.nonzero(), "aten.nonzero.default", "Shapes can't depend on numbers"),
        (lambda x: torch.unique(x), "aten._unique2.default", "Shapes can't depend on numbers"),
    ],
    ids=["nonzero", "unique"],
)
def test_operations_for_which_no_rule_can_be_given(f, name, advice):
    with pytest.raises(st.MissingRuleError) as caught:
        st.function(f, (torch.ones(3),))
    assert f"  {name} (1x, first at" in str(caught.value)
    assert advice in str(caught.value)
    assert "def rule" not in str(caught.value)


def test_a_model_that_depends_on_numbers_is_refused():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(st.ExportError, match=r"refuses Model \(test_torch.py:\d+\): control"):
        st.function(Model(), (torch.ones(2),))


def test_one_operation_is_one_rounding_unless_decomposed():
    class Model(torch.nn.Module):
        def forward(self, x):
            return F.layer_norm(F.gelu(x), (64,))

    model = Model()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 30
    want = model(x.bfloat16()).float()
    whole = st.emulate(model, "bf16")(x)
    steps = st.emulate(model, "bf16", granularity="decomposed")(x)
    assert (whole - want).abs().max() <= 2**-7 * want.abs().max()
    assert (steps - want).norm() > 2 * (whole - want).norm()


class Everything(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.lstm = torch.nn.LSTM(8, 6, batch_first=True)
        layer = torch.nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1)

    def forward(self, x, scale=1.0):
        x = F.max_pool2d(F.silu(self.norm(self.conv(x))), 2)
        x, _ = self.lstm(x.flatten(2).transpose(1, 2))
        return {"features": self.encoder(x) * scale, "none": None}

    def head(self, x):
        return self.conv(x).mean()


@pytest.mark.parametrize("train", [False, True])
def test_layers_of_torch(train):
    torch.manual_seed(0)
    model = Everything().train(train)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout | torch.nn.MultiheadAttention):
            layer.p = layer.dropout = 0.0
    x = torch.randn(2, 3, 8, 8)
    f, params = st.function(model, (x,), {"scale": 2.0})
    compiled = jax.jit(f)
    got = compiled(params, st.to_jax(x))
    assert set(got) == {"features"}
    np.testing.assert_allclose(got["features"], model(x, 2.0)["features"].detach(), atol=1e-5)
    y = torch.randn(3, 3, 8, 8)  # another batch size
    got = compiled(params, st.to_jax(y))["features"]
    np.testing.assert_allclose(got, model(y, 2.0)["features"].detach(), atol=1e-5)
    with pytest.raises(TypeError, match=r"1 tensors after params, of float32\[2, 3, 8, 8\]; got 1"):
        f(params, jnp.ones((2, 3, 8, 8), jnp.int32))
    head, params = st.function(model, (x,), method="head")
    np.testing.assert_allclose(head(params, st.to_jax(x)), model.head(x).detach(), atol=1e-5)
    assert "forward" not in vars(model)


def test_dropout_keeps_its_share():
    class Model(torch.nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.25), F.dropout(x, 0.25), torch.rand_like(x), torch.randn_like(x)

    x = torch.ones(100, 100)
    f, params = st.function(Model(), (x,))
    with pytest.raises(
        ValueError, match=r"test_torch.py:\d+: dropout draws random numbers: pass key"
    ):
        f(params, st.to_jax(x))
    first, second, uniform, normal = f(params, st.to_jax(x), key=jax.random.key(0))
    again, *_ = jax.jit(f)(params, st.to_jax(x), key=jax.random.key(1))
    assert 0.3 < float(jnp.mean((first == 0) != (again == 0))) < 0.45  # 2 * 0.25 * 0.75
    assert set(np.unique(first)) == {0.0, np.float32(4 / 3)}
    assert abs(float(jnp.mean(first == 0)) - 0.25) < 0.02
    assert not np.array_equal(first, second)
    assert abs(float(uniform.mean()) - 0.5) < 0.02
    assert abs(float(normal.std()) - 1) < 0.05
    f, params = st.function(torch.nn.Dropout().eval(), (x,))
    assert not jax.make_jaxpr(f)(params, st.to_jax(x)).eqns


def test_grouped_mm():
    x = torch.randn(6, 16).bfloat16()
    weight = torch.randn(3, 16, 8).bfloat16()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    want = torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]]).float()
    args = st.to_jax((x, weight, ends))
    got = apply(A._grouped_mm.default, args, {}, [jnp.dtype(jnp.bfloat16)], "operation")
    np.testing.assert_allclose(np.float32(got), want, rtol=2**-7, atol=0.05)


def test_an_operation_transforms_like_any_function():
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)

    def f(x):
        return apply(A.gelu.default, (x,), {}, [x.dtype], "operation")

    def plain(x):
        return jax.nn.gelu(x, approximate=False)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-6)

    close(jax.vmap(f)(x), plain(x))
    close(jax.jvp(f, (x,), (x,))[1], jax.jvp(plain, (x,), (x,))[1])
    second = [jax.hessian(lambda x, g=g: g(x).sum())(x[0]) for g in (f, plain)]
    close(*second)
    close(
        jax.grad(lambda x: sw.emulate(f, "fp32")(x).sum())(x), jax.grad(lambda x: plain(x).sum())(x)
    )
    name = str(jax.make_jaxpr(f)(x).jaxpr.eqns[0].primitive)
    assert name == "gelu"
    low = x.astype(jnp.bfloat16)
    steps = jax.grad(lambda x: apply(A.gelu.default, (x,), {}, [x.dtype], "decomposed").sum())(low)
    want = jax.grad(lambda x: plain(x).sum())(x)
    np.testing.assert_allclose(np.float32(steps), want, atol=2**-5)


def test_updates_of_buffers():
    model, x = torch.nn.BatchNorm1d(3), torch.randn(5, 3)
    f, params = st.function(model, (x,), buffers=True)
    before = st.to_jax({name: b.clone() for name, b in model.named_buffers()})
    y, updated = jax.jit(f)(params | before, st.to_jax(x))
    again = f(params | updated, st.to_jax(x))[1]
    np.testing.assert_allclose(y, model(x).detach(), atol=1e-6)
    for name, buffer in model.named_buffers():
        np.testing.assert_allclose(updated[name], buffer, rtol=1e-5, atol=1e-6)
    model(x)
    for name, buffer in model.named_buffers():
        np.testing.assert_allclose(again[name], buffer, rtol=1e-5, atol=1e-6)


def test_gradients_stop_where_torchs_do():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            with torch.no_grad():
                z = self.layer(y) * 2
            return (y * z + y * y.detach()).sum()

    model, x = Model(), torch.randn(3, 4)
    model(x).backward()
    f, params = st.function(model, (x,))
    gradients = jax.grad(f)(params, st.to_jax(x))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_attention_with_dropout():
    class Model(torch.nn.Module):
        def forward(self, q, v):
            return F.scaled_dot_product_attention(q, q, v, dropout_p=0.25)

    q, v = torch.zeros(1, 1, 64, 8), torch.eye(64)[None, None]
    f, params = st.function(Model(), (q, v))
    weights = (
        np.asarray(f(params, *st.to_jax((q, v)), key=jax.random.key(0))) * 64
    )  # 0, or 1 / (1 - 0.25)
    np.testing.assert_allclose(np.unique(weights), [0, 4 / 3], rtol=1e-6)
    assert abs(np.mean(weights == 0) - 0.25) < 0.03


DRAWS = {
    "rand": lambda x: torch.rand_like(x) + torch.rand(64, dtype=x.dtype),
    "randn": lambda x: torch.randn_like(x) + torch.randn(64, dtype=x.dtype),
    "in_place": lambda x: x.clone().uniform_(0.1, 0.3) + x.clone().normal_(0.5, 0.1),
    "sample": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("f", DRAWS.values(), ids=DRAWS)
def test_audits_draw_the_same_numbers_in_both_runs(f):
    report = st.audit(f, (torch.randn(16, 64),), low="fp16", trials=0)
    assert report.error.relative < 1e-3


def test_rules_of_numbers_and_shapes():
    x = torch.arange(12.0).reshape(3, 4)
    for overload, args in [
        (A.sym_size.int, (x, 1)), (A.sym_stride.int, (x, 0)), (A.sym_numel.default, (x,)),
        (A.sym_storage_offset.default, (x,)), (A.sym_is_contiguous.default, (x,)),
        (A._local_scalar_dense.default, (x[1, 2],)),
    ]:  # fmt: skip
        assert st.RULES[overload](*st.to_jax(args)) == overload(*args)
    order = st.RULES[A.randperm.default](50)
    assert sorted(order.tolist()) == list(range(50)) != order.tolist()
    assert st.RULES[A.empty_strided.default]([2, 3], [3, 1]).shape == (2, 3)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_bags_of_embeddings(mode, last):
    weight, index = torch.randn(5, 3), torch.tensor([0, 2, 1, 4, 4, 3])
    offsets = torch.tensor([0, 2, 2, 5] + [6] * last)
    args = weight, index, offsets, False, mode, False, None, last, 3
    want = A._embedding_bag.default(*args)
    dtypes = [jnp.dtype(d) for d in (jnp.float32, jnp.int32, jnp.int32, jnp.int32)]
    got = apply(A._embedding_bag.default, st.to_jax(args), {}, dtypes, "operation")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
    if mode == 0:
        weights = torch.rand(6)
        args = weight, index, offsets, False, mode, False, weights, last, -1
        bags = A._embedding_bag_forward_only.default  # of weights without gradients
        got = apply(bags, st.to_jax(args), {}, dtypes, "operation")
        np.testing.assert_allclose(got[0], bags(*args)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("granularity", ["operation", "decomposed"])
def test_audits_compute_what_emulate_computes(granularity):
    """Also with Python numbers: the primitives of such operations aren't JAX's of the same name.

    When decomposed, the format rounds the numbers, which the reference run must not know.
    """

    class Model(torch.nn.Module):
        def forward(self, x):
            y = (x * 3.7 + 0.3 - 1.1).square() / 0.7
            return (1.5 - y).abs().sqrt(), torch.exp(-y * 0.01).cumsum(0), (y + 1e-3).log(), y > 0.4

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for low in ("bf16", "fp16"):
        report = st.audit(Model(), (x,), low=low, trials=0, granularity=granularity)
        got = st.emulate(Model(), low, granularity=granularity)(x)
        errors = [(y - z).norm() / z.norm() for y, z in zip(got[:3], Model()(x)[:3], strict=True)]
        expected = float(np.sqrt(np.mean(np.square(errors))))
        assert report.error.relative == pytest.approx(expected, rel=1e-3)
        assert not report.error.non_finite


def test_a_decomposed_audit_sees_a_constant_that_vanishes():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x / ((x * x).sqrt() + 1e-8)

    x = torch.linspace(-1, 1, 33) * 1e-3  # x * x underflows, and 1e-8 is zero in FP16
    report = st.audit(Model(), (x,), low="fp16", trials=0, granularity="decomposed")
    steps = [e for e in report.equations if e.primitive == "constant"]
    assert any(e["flushed"] for e in steps)
    assert report.error.non_finite


@pytest.mark.parametrize("subtracted", [False, True])
def test_an_added_constant_that_vanishes_is_named_and_replaced(subtracted):
    """torch adds a Python number in float32 and rounds the sum: 1e-8 is lost beside 0 alone."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return x / (x - -1e-8 if subtracted else x + 1e-8)

    x = torch.tensor([0.0, 1e-3, 1.0])
    report = st.audit(Model(), (x,), low="fp16", trials=6)
    worst = report.findings[0]
    assert worst.kind == "underflow"
    fixes = r"-?6.1e-05 in place of -?1e-08|float32 for (the (add|sub) at )?line \d+"
    assert re.match(fixes, str(worst.fix)), str(worst.fix)
    assert worst.source.startswith("return x / (")
    assert worst.non_finite_before == 1
    assert worst.non_finite_after == 0
    np.testing.assert_array_equal(st.emulate(Model(), "fp16")(x), Model()(x.half()).float())


def test_a_models_parameters_are_rounded_where_its_class_is_written():
    class Model(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    x = torch.ones(1, 4)
    report = st.audit(Model(4, 4), (x,), low="fp16", trials=0)
    lines, first = inspect.getsourcelines(Model)
    rounded = [e for e in report.equations if e.primitive == "_to_copy"]
    assert {(e.file, e.line) for e in rounded} == {(__file__, first)}
    assert {e.function for e in rounded} == {"Model"}
    product = next(e for e in report.equations if e.primitive == "linear")
    assert product.function.endswith("Model.forward")
    assert "super().forward(x)" in lines[product.line - first]


def test_a_class_without_a_file_has_the_line_of_the_call():
    names = {"torch": torch}
    exec("class Model(torch.nn.Linear):\n    pass", names)
    report = st.audit(names["Model"](4, 4), (torch.ones(1, 4),), low="fp16", trials=0)
    rounded = [e for e in report.equations if e.primitive == "_to_copy"]
    assert {e.file for e in rounded} == {__file__}


@pytest.mark.parametrize("less", [0, 1000])
def test_the_reference_run_isnt_clamped_to_the_narrow_dtypes_maximum(less):
    """Below, FP16's clamp hides an overflow; in float32 the model doesn't take this branch."""

    class Model(torch.nn.Module):
        def forward(self, x):
            y = x * x
            if y.dtype == torch.float16:
                limit = torch.finfo(y.dtype).max - less
                y = torch.clamp(y, min=-limit, max=limit)
            return y / y.abs().amax()

    x = torch.tensor([400.0, 300.0, 20.0])
    report = st.audit(Model(), (x,), low="fp16", trials=8)
    want = Model()(x)
    error = float((Model()(x.half()).float() - want).norm() / want.norm())
    assert report.error.relative == pytest.approx(error, rel=1e-3)
    worst = report.findings[0]
    assert (worst.kind, worst.source) == ("overflow", "y = x * x")
    # a line in float32 has float32's limit
    assert [edit.line - worst.line for edit in report.edits] == [0, 3]
    assert report.edits[0].after[0].endswith("y = x.float() * x")
    assert worst.error_after < 1e-3 < 0.3 < worst.error_before
    applied = worst.fix.apply(Model())(x).float()
    after = float((applied - want).norm() / want.norm())
    assert after == pytest.approx(worst.error_after, rel=1e-3)


def test_a_momentum_that_counts_batches_is_refused_by_its_layer():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=None))
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"^1: BatchNorm1d\(momentum=None\) computes"):
        st.function(model.train(), (x,))
    assert st.function(model.eval(), (x,))
