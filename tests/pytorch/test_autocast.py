"""``autocast=True`` and ``loss_scale``: torch's lists, and training in mixed precision."""

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import scalewise.torch as st
from pytorch.more_samples import MORE
from pytorch.samples import SAMPLES
from scalewise.formats import FP16
from scalewise.interpret import transform
from scalewise.torch import _autocast
from scalewise.torch._audit import as_loss_scale, value_and_gradients
from scalewise.torch._convert import torch_dtype
from scalewise.torch._emulate import LowEmulation, low_function
from scalewise.torch._graph import hashable

pytestmark = pytest.mark.filterwarnings("ignore")
F = torch.nn.functional


def float_dtypes(outs):
    tensors = [x for x in jax.tree.leaves(hashable(outs)) if isinstance(x, torch.Tensor)]
    return [x.dtype for x in tensors if x.dtype.is_floating_point]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_have_the_dtypes_of_torchs_autocast(dtype):
    """Beside torch's own dispatcher, on tensors of a fake GPU."""
    compared = 0
    for overload, samples in (SAMPLES | MORE).items():
        name = str(overload).removeprefix("aten.").removesuffix(".default")
        inside = name.startswith("_") and name in _autocast.INSIDE  # called below autocast
        for sample in [] if inside else samples[:1]:
            kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
            args = sample[: len(sample) - bool(kwargs)]
            with FakeTensorMode() as mode:

                def fake(x, device, mode=mode):
                    if not isinstance(x, torch.Tensor):
                        return x
                    own = dtype if x.dtype.is_floating_point else x.dtype
                    return torch.empty(x.shape, dtype=own, device=device)

                def of(device, args=args, kwargs=kwargs, fake=fake):
                    return jax.tree.map(lambda x: fake(x, device), hashable((args, kwargs)))

                gpu_args, gpu_kwargs = of("cuda")
                if not float_dtypes((gpu_args, gpu_kwargs)):
                    continue
                torch.set_autocast_enabled("cuda", True)
                torch.set_autocast_dtype("cuda", torch.float16)
                try:
                    want = float_dtypes(overload(*gpu_args, **gpu_kwargs))
                except Exception:
                    continue  # torch has no such operation on fake tensors of a GPU
                finally:
                    torch.set_autocast_enabled("cuda", False)
                given = _autocast.autocast(
                    overload, *of("cpu"), jnp.dtype(jnp.float16), lambda x, d: x.to(torch_dtype(d))
                )
                got = float_dtypes(overload(*given[0], **given[1]))
            assert got[:1] == want[:1], overload  # further ones are a kernel's own
            compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        (F.prelu, [(3, 4), (4,)], "_prelu_kernel"),
        (torch.cdist, [(3, 4), (2, 4)], "_cdist_forward"),
        (F.pdist, [(3, 4)], "_pdist_forward"),
    ],
)
def test_operations_inside_of_listed_ones(function, shapes, name):
    with FakeTensorMode():
        args = [torch.empty(s, dtype=torch.float32, device="cuda") for s in shapes]
        torch.set_autocast_enabled("cuda", True)
        try:
            want = function(*args).dtype
        finally:
            torch.set_autocast_enabled("cuda", False)
    target, low = getattr(torch.ops.aten, name).default, np.dtype(np.float16)
    (x, *_), _ = _autocast.autocast(target, args, {}, low, lambda x, d: x.to(torch_dtype(d)))
    assert x.dtype == want


class Perceptron(torch.torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x, y):
        return F.mse_loss(self.second(F.relu(self.first(x))), y)


def perceptron(scale=1.0):
    torch.manual_seed(0)
    return Perceptron(), (torch.randn(8, 16) * scale, torch.randn(8, 4) * scale)


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_emulate_under_autocast_agrees_with_torch(fmt, dtype):
    model, args = perceptron()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):  # its lists agree on these operations
        want = model(*args)
    got = st.emulate(model, fmt, autocast=True)(*args)
    assert got.dtype == want.dtype == torch.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert abs(got - model(*args)) > 1e-6


def test_regions_without_autocast_stay_wide():
    class Model(torch.torch.nn.Module):
        def forward(self, x):
            y = x @ x.mT
            with torch.autocast("cpu", enabled=False):
                wide, square = x @ x.mT, y @ y
            return wide, y, square

    x = torch.randn(4, 8)
    wide, narrow, square = st.emulate(Model(), "bf16", autocast=True)(x)
    assert torch.equal(square, (narrow.bfloat16() @ narrow.bfloat16()).float())
    np.testing.assert_allclose(wide, x @ x.mT, atol=1e-5)
    assert torch.equal(narrow, (x.bfloat16() @ x.bfloat16().mT).float())


def test_a_model_that_turns_autocast_on_is_taken_as_it_is():
    class Model(torch.torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x.mT

    x = torch.randn(4, 8)
    f, params = st.function(Model(), (x,))
    assert f(params, st.to_jax(x)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(f(params, st.to_jax(x))), Model()(x).float())
    with pytest.raises(ValueError, match=r"Model turns torch.autocast on by itself"):
        st.audit(Model(), (x,), autocast=True)


def test_a_loss_scale_saves_small_gradients():
    model, args = perceptron()
    options = {"low": "fp16", "grad": True, "autocast": True, "trials": 0}
    options["loss"] = lambda loss: loss * 2.0**-20
    plain, scaled = (st.audit(model, args, loss_scale=s, **options) for s in (None, 2.0**16))
    assert plain.error.relative > 0.1 > 10 * scaled.error.relative
    lost = [e for e in plain.unfixed if e.kind == "underflow" and e.direction == "backward"]
    assert lost
    assert all(e.file == __file__ for e in lost)
    assert not scaled.literals  # the scale is a number of float32
    huge = st.audit(model, args, loss_scale=2.0**60, **options)
    assert huge.error.non_finite


def test_a_loss_scale_is_proposed_where_gradients_underflow_in_a_16_bit_model():
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x):
            return (self.layer(x) * 1e-2).square().mean()

    torch.manual_seed(0)
    model, x = Loss(), torch.randn(2048, 8)
    worst = st.audit(model, (x,), low="fp16", grad=True, trials=4).findings[0]
    assert worst.kind == "underflow"
    assert "(loss * 2**15).backward()" in str(worst.fix)
    model(x).backward()
    low = copy.deepcopy(model).half()
    low.zero_grad()
    (low(x.half()) * 2**15).backward()
    for a, b in zip(model.parameters(), low.parameters(), strict=True):
        assert float((b.grad.float() / 2**15 - a.grad).norm() / a.grad.norm()) < 0.01


def test_a_fix_under_autocast_is_torchs_and_computes_what_is_predicted(capsys):
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x):
            y = self.first(x * 2e5)
            return self.second(torch.tanh(y / 1e5))

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(6, 8)
    report = st.audit(model, (x,), low="fp16", autocast=True, trials=6)
    (worst,) = report.findings
    assert (worst.kind, worst.primitive) == ("overflow", "to")
    (edit,) = report.edits
    region, line = edit.after
    assert region.strip() == 'with torch.autocast("cuda", enabled=False):'
    assert line.strip() == "y = self.first((x * 200000.0).float())"
    report.show()
    assert "jnp" not in capsys.readouterr().out
    got, want = worst.fix.apply(model)(x).double(), model(x).double()
    error = float((got - want).norm() / want.norm())
    assert 0 < error == pytest.approx(worst.error_after, rel=0.5)


@pytest.mark.parametrize("scale", [2.0**8, 2.0**40])
def test_a_gradient_scaler_applies_the_gradients_that_torchs_does(scale):
    """Also in a step that it skips: then no parameter changes."""
    model, args = perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(*args)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    want = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    skipped = not any(g.any() for g in want.values())
    assert skipped == (scale > 2.0**16)
    model, args = perceptron()
    options = {"method": "forward", "granularity": "operation", "autocast": True}
    low = low_function(model, args, None, FP16, **options)
    applied = value_and_gradients(low.f, as_loss_scale(scaler))
    emulated = transform(applied, LowEmulation(FP16, False, low.dtype), name="emulate")
    value, got = jax.jit(emulated)(low.params, *st.to_jax(args))
    assert float(value) == pytest.approx(loss.item(), rel=1e-3)
    largest = max(g.abs().max().item() for g in want.values())
    for name, gradient in want.items():
        np.testing.assert_allclose(got[name], gradient, atol=1e-3 * largest)


def test_an_audit_finds_why_a_gradient_scaler_skips_a_step():
    model, args = perceptron()
    options = {"low": "fp16", "grad": True, "autocast": True}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    report = st.audit(model, args, loss_scale=scaler, trials=6, **options)
    assert not report.error.non_finite  # the gradients are zero
    assert 0.5 < report.error.relative <= 1
    found = [*report.findings, *report.unfixed]
    overflow = next(x for x in found if x.kind == "overflow")
    assert overflow.direction == "backward"
    assert overflow.file == __file__
    assert scaler.get_scale() == 2.0**40
    small = st.audit(model, args, loss_scale=torch.amp.GradScaler("cpu"), trials=0, **options)
    assert small.error.relative < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": torch.amp.GradScaler("cpu", enabled=False), "grad": True}, "disabled"),
        ({"loss_scale": 2.0}, "needs grad=True"),
        ({"loss_scale": -1.0, "grad": True}, "a number above 0, not -1.0"),
        ({"autocast": True, "low": "c=bf16"}, "needs a format as low"),
        ({"autocast": True, "low": "fp32"}, "at most 16 bits"),
        ({"autocast": True, "granularity": "decomposed"}, "granularity has to be 'operation'"),
    ],
)
def test_what_is_refused(options, message):
    model, args = perceptron()
    with pytest.raises(ValueError, match=message):
        st.audit(model, args, **options)


def unsafe(x, w):
    return torch.nn.functional.binary_cross_entropy((x @ w).sigmoid(), torch.ones(4, 4))


def unpromoted(x, w):
    y = x @ w  # in 16 bits, and its exponential in float32
    return torch.zeros_like(y).index_add(0, torch.arange(4), y.exp())


def promoted(x, w):
    y = x @ w
    return torch.zeros(4, 4, dtype=y.dtype).index_add(0, torch.arange(4), y)


def onto_float32(x, w):
    return torch.zeros(4, 4).index_add(0, torch.arange(4), x @ w)


def scattered(x, w):
    return torch.zeros(4, 4).scatter_reduce(0, torch.zeros(4, 4, dtype=torch.int64), x @ w, "sum")


@pytest.mark.parametrize(("f", "message"), [
    (unsafe, "autocast refuses binary_cross_entropy"),
    (unpromoted, "index_add of float16 and float32 raises"), (promoted, ""),
    (onto_float32, "index_add of float16 and float32 raises"),
    (scattered, "torch raises: .* Expected self.dtype to be equal to src.dtype"),
])  # fmt: skip
def test_what_torch_refuses_under_autocast(f, message):
    args = torch.randn(4, 8), torch.randn(8, 4)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        st.audit(f, args, low="fp16", autocast=True, trials=0)
