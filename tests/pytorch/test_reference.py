"""The audit's error is torch's own: the model in 16 bits against the model in float32."""

import copy
import warnings

import jax
import numpy as np
import pytest
import torch
from experiments.torch_architectures import FloatScalars
from torch import nn
from torch.nn import functional as F

import scalewise.torch as st
from cases import refused
from pytorch.samples import normal
from scalewise.torch._arguments import as_module

pytestmark = pytest.mark.filterwarnings("ignore")

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Buffer(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.register_buffer("held", numbers)

    def forward(self, x):
        return x * self.held


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_var.fill_(1e-8)  # zero in FP16
        self.norm.running_mean.copy_(normal(4))

    def forward(self, x):
        return self.norm(x)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 8, 2).float() / 8))

    def forward(self, x):
        position = torch.arange(x.shape[0]).to(self.inv_freq.dtype)
        return x * (position[:, None] * self.inv_freq).cos()


class Constant(nn.Module):
    def forward(self, x):
        return torch.tensor([3e-8, 0.1, 1000.7]).to(x.dtype) * x


class Range(nn.Module):
    def forward(self, x):
        return torch.arange(3000, 3000 + x.shape[-1], dtype=x.dtype) * x


class Filled(nn.Module):
    def forward(self, x):
        return torch.full(x.shape, 0.1, dtype=x.dtype) + x + torch.full_like(x, 1e-8)


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.tensor([0.1, 1e-9, 3.3])  # `half()` leaves it as it is

    def forward(self, x):
        return x + self.table.to(x.dtype)


class Branch(nn.Module):
    def forward(self, x):
        if x.dtype != torch.float32:
            x = (x * 0.5).clamp(-1, 1)
        return x + 1


class Epsilon(nn.Module):
    def forward(self, x):
        eps = 1e-8 if x.dtype == torch.float32 else 1e-3
        return x / (x.abs() + eps)


class ClampsThenWidens(nn.Module):
    """As T5 does: the branch's result is read in float32."""

    def forward(self, x):
        y = x * 300
        if y.dtype == torch.float16:
            limit = torch.where(torch.isinf(y).any(), torch.finfo(y.dtype).max - 1000, 6e4)
            y = torch.clamp(y, min=-limit, max=limit)
        size = y.to(torch.float32).square().mean(-1, keepdim=True)
        return (y * torch.rsqrt(size)).to(x.dtype)


class Limit(nn.Module):
    def forward(self, x):
        return (x * 1e-3 + torch.finfo(x.dtype).tiny * 1e3).log()


class Keeps(nn.Module):
    def forward(self, x):
        y = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(y + 1e-6)).to(x.dtype) * 1.1


class Mask(nn.Module):
    def forward(self, x):
        mask = torch.triu(torch.full((3, 3), torch.finfo(x.dtype).min, dtype=x.dtype), 1)
        return torch.softmax(x[:, None] * x[None] + mask, -1)


class PaddingMask(nn.Module):
    """The dtype's lowest number times a mask, of which an example is empty: in 16 bits its sum with
    the scores keeps their differences, or overflows."""

    def forward(self, x):
        mask = (x[:, :1] < x.amin() + 1e-6).to(x.dtype) * torch.finfo(x.dtype).min
        return torch.softmax(x * 30 + mask, -1)


class Numbers(nn.Module):
    """Numbers that torch rounds to the tensor's dtype."""

    def forward(self, x):
        return torch.stack([0.999 ** (512 * x), x**0.7, x % 0.7, torch.fmod(x, 0.3)])


class WholeNumbers(nn.Module):
    """Whole numbers that the format can't hold, with which torch computes in float32."""

    def forward(self, x):
        below = (x.clamp(max=1) * 100).clamp(max=4097 / 64).clamp_min(-4097)
        return torch.stack([x * 70000, x / 100003, 4097 - x, torch.where(x > 1, x, 5001), below])


MODELS = [
    (PaddingMask(), torch.linspace(-1, 1, 18).reshape(3, 6)),
    (WholeNumbers(), normal(64)), (Numbers(), normal(64).abs()),
    (Buffer(torch.tensor([7e4, 1e-9, 0.1])), normal(3)), (Statistics(), normal(5, 4)),
    (Rotary(), normal(300, 4)), (Constant(), normal(3)), (Range(), normal(5)),
    (Filled(), normal(3)), (Attribute(), normal(3)), (Branch(), normal(16)),
    (Epsilon(), normal(16, scale=1e-3)), (Limit(), normal(16).abs()), (Keeps(), normal(4, 8)),
    (Mask(), normal(3)), (ClampsThenWidens(), normal(4, 8, scale=300.0)),
]  # fmt: skip


def torchs_error(model, x, dtype):
    """Returns how many numbers torch makes non-finite, and the relative error of the others."""
    with torch.no_grad():
        want = model(x).double()
        got = copy.deepcopy(model).to(dtype)(x.to(dtype)).double()
    finite = got.isfinite()
    return int((~finite).sum()), float((got - want)[finite].norm() / want[finite].norm())


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(("model", "x"), MODELS, ids=lambda v: type(v).__name__)
def test_the_error_is_torchs(model, x, low):
    model = copy.deepcopy(model).eval()
    non_finite, relative = torchs_error(model, x, LOW[low])
    error = st.audit(model, (x,), low=low, trials=0).error
    assert error.non_finite == non_finite
    assert error.relative == pytest.approx(relative, rel=0.02, abs=1e-6)


def test_a_16_bit_model_is_compared_with_float32():
    model = Rotary().bfloat16()
    x = normal(300, 4).bfloat16()
    wide = copy.deepcopy(model).float()
    want, got = wide(x.float()).double(), model(x).double()
    report = st.audit(model, (x,), low="bf16", trials=0)
    assert report.error.relative == pytest.approx(
        float((got - want).norm() / want.norm()), rel=0.02
    )


@pytest.mark.parametrize("low", LOW)
def test_a_number_is_compared_in_the_tensors_dtype(low):
    def compared(x):
        found = [x == 0.1, x != 0.7, x > 0.1, x >= 0.3, x < 0.3, x <= 0.7, x == 4099]
        return torch.stack([*(y.to(x.dtype) for y in found), F.hardshrink(x, 0.3)])

    x = torch.tensor([0.1, 0.3, 0.7, 4099]).to(LOW[low])
    np.testing.assert_array_equal(st.emulate(compared, low)(x.float()), compared(x).float())


def test_a_number_is_added_in_float32_as_by_cuda():
    """torch on a CPU rounds it to the tensor's dtype first."""

    def moved(x):
        return torch.stack([x + 3e3, x - 0.1, 0.1 - x, torch.add(x, x.abs(), alpha=0.1)]) - 3e3

    x = normal(4, 16, scale=200.0)
    with FloatScalars():
        _, relative = torchs_error(as_module(moved), x, torch.bfloat16)
    error = st.audit(moved, (x,), low="bf16", trials=0).error
    assert error.relative == pytest.approx(relative, rel=1e-3)


def test_a_factor_that_the_format_cannot_hold_is_float32s():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 1e5, x / 1e-7, x * 1e-9 * 1e5

    x = torch.tensor([0.25, 1e-3])
    emulated = st.emulate(Scale(), "fp16")(x)
    for got, want in zip(emulated, Scale()(x.half()), strict=True):
        np.testing.assert_array_equal(got, want.float())


@pytest.mark.parametrize("granularity", ["operation", "decomposed"])
def test_an_operation_in_several_steps_has_a_line_and_a_fix(granularity):
    def loss(x, y):
        summed = nn.functional.mse_loss(x, y, reduction="sum")
        return summed / x.numel() + torch.logsumexp(y, -1).mean()

    given = normal(50, 60, scale=8.0), normal(50, 60, scale=8.0, seed=1)
    report = st.audit(loss, given, low="fp16", granularity=granularity)
    first = loss.__code__.co_firstlineno
    assert {e.line for e in report.equations} == {first, first + 1, first + 2}
    worst = report.findings[0]
    assert (worst.kind, worst.line) == ("overflow", first + 1)
    assert float(worst.fix.apply(loss)(*given)) == pytest.approx(float(loss(*given)), rel=1e-2)


with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
    JITTED = torch.jit.script(nn.Linear(4, 3))


class DynamicCache:
    """As transformers' class."""


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        loss = self.layer(x).square().mean()
        loss.backward()
        return loss


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.code = nn.Linear(4, 1)

    def forward(self, x):
        return (x @ self.code.weight.T).add_(1)  # what is written in place is decomposed


def linear(dtype=torch.float32):
    return nn.Linear(4, 3, dtype=dtype)


test_what_torch_or_the_audit_refuses = refused(
    (lambda: st.audit(linear(torch.half), (normal(2, 4),)), "mat1 and mat2 must have the same"),
    (lambda: st.audit(linear(), (torch.ones(2, 4, dtype=torch.int64),)), "torch can't run Lin"),
    (lambda: st.audit(linear(), (normal(2, 5),)), "shapes cannot be multiplied"),
    (lambda: st.audit(linear(), normal(2, 4)), "args is a Tensor; expected a tuple of inputs"),
    (lambda: st.audit(linear().double(), (normal(2, 4).double(),)), "weight has float64"),
    (lambda: st.audit(linear().to("meta"), (normal(2, 4),)), "weight is on the meta device"),
    (lambda: st.audit(linear(), (normal(2, 4),), method="go"), "Linear has no method 'go'"),
    (lambda: st.audit(linear(), (np.ones((2, 4)),)), "input 0 is a NumPy array"),
    (lambda: st.audit(linear(), (DynamicCache(),)), "pass whole sequences, without past_key_v"),
    (lambda: st.audit(JITTED, (normal(2, 4),)), "pass the module that torch.jit compiled"),
    (lambda: st.audit(Step(), (normal(2, 4),)), "let it return the loss, and pass grad=True"),
    (lambda: st.audit(torch.cov, (normal(2, 4),)), "write a covariance as y @ y.T / "),
    (lambda: st.audit(Coded(), (normal(2, 4),)), "torch.fx has an attribute of this name: ren"),
    (lambda: st.audit(3, (normal(2, 4),)), "a torch.nn.Module or a function, not int"),
    error=(TypeError, ValueError),
)  # fmt: skip


def test_plain_functions_and_torchs_dtypes():
    def product(x, y):
        return x * y

    report = st.audit(product, (normal(4), normal(4, seed=1)), low=torch.bfloat16, trials=0)
    assert report.function == "product"
    assert 0 < report.error.relative < 2**-8
    report = st.audit(lambda x: 3 * x, (normal(4),), low="bf16", trials=0)
    assert report.function.startswith("<lambda> at test_reference.py:")
    np.testing.assert_array_equal(st.emulate(product, "bf16")(*[torch.ones(4)] * 2), np.ones(4))


def factorizations(x, y):
    square = x @ x.mT + 4 * torch.eye(4)
    values, vectors = torch.linalg.eigh(square)
    left, sizes, right = torch.linalg.svd(x, full_matrices=False)
    orthogonal, upper = torch.linalg.qr(x)
    solved = torch.linalg.solve(square, y), torch.linalg.solve(square, y[:, 0])
    inverses = torch.linalg.pinv(x[:, :3]), torch.linalg.pinv(x, rtol=0.2, atol=0.1)
    whole = (vectors * values) @ vectors.mT, (left * sizes) @ right, orthogonal @ upper
    return (*whole, *solved, *inverses, torch.linalg.det(square), *torch.linalg.slogdet(square),
            torch.linalg.svdvals(x), torch.linalg.eigvalsh(square))  # fmt: skip


def spectra(x, y):
    rotated = torch.view_as_complex(x.reshape(4, 2, 2)) * torch.polar(y[:, :2].abs(), y[:, 1:])
    window = torch.hann_window(8)
    signal = torch.cat((x.flatten(), y.flatten()))
    spectrum = torch.stft(signal, 8, 4, window=window, return_complex=True)
    again = torch.fft.ifft(torch.fft.fft(x) * torch.conj(torch.fft.fft(y[:, :1])))
    parts = torch.view_as_real(rotated).flatten(-2)
    return parts, spectrum.abs(), again.real, torch.fft.fft2(x).imag


@pytest.mark.parametrize("f", [factorizations, spectra], ids=lambda f: f.__name__)
def test_linear_algebra_and_complex_numbers(f):
    x, y = normal(4, 4), normal(4, 3, seed=1)
    function, params = st.function(f, (x, y))
    for got, want in zip(function(params, *st.to_jax((x, y))), f(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_pass_through_complex_numbers(dtype):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(normal(8, seed=1))

        def forward(self, x):
            spectrum = torch.fft.rfft((x * self.w).float())
            turned = spectrum * torch.polar(torch.ones(5), torch.arange(5.0))
            return torch.fft.irfft(turned * turned, n=8).pow(2).sum() + spectrum.abs().sum()

    model, x = Turned().to(dtype), normal(8).to(dtype)
    model(x).backward()
    f, params = st.function(model, (x,))
    got = jax.grad(f)(params, st.to_jax(x))["w"]
    want = model.w.grad.float()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2}
    np.testing.assert_allclose(np.float32(got), want, **tolerance)
    report = st.audit(Turned(), (normal(8),), low="bf16", grad=True, trials=0)
    assert 0 < report.error.relative < 0.05


def test_an_overflow_before_a_lost_constant_is_not_its_effect():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, x, mask):
            total = (x * mask.unsqueeze(-1)).sum(1)
            return self.head(total / mask.sum(1, keepdim=True).clamp(min=1e-9))

    given = normal(2, 3000, 8).abs() * 20 + 30, torch.ones(2, 3000)
    worst = st.audit(Mean(), given, low="fp16", trials=10).findings[0]
    assert (worst.kind, worst.source) == ("overflow", "total = (x * mask.unsqueeze(-1)).sum(1)")


def test_a_buffer_is_kept_in_float32_where_it_is_read():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.linspace(0.9997, 0.98, 8))

        def forward(self, x):
            kept = self.kept * 1
            return x / (1 - kept).sqrt()

    model, x = Noise(), normal(8)
    worst = st.audit(model, (x,), low="fp16", trials=10).findings[0]
    assert worst.source == "kept = self.kept * 1"
    assert "keep kept in float32" in str(worst.fix)
    assert (worst.fix.apply(model)(x) - model(x)).norm() < 2e-3 * model(x).norm()


def test_a_mask_of_a_dtypes_lowest_number_is_float32s_in_the_reference():
    """The floor of outputs without digits, too, is found by a run with float32's number."""

    def attention(scores, attended):
        mask = (1 - attended) * torch.finfo(scores.dtype).min
        weights = scores + mask[:, None, :]
        return torch.softmax(weights, -1)

    scores, attended = normal(2, 6, 6, scale=60.0), torch.ones(2, 6)
    attended[1] = 0
    report = st.audit(attention, (scores, attended), low="fp16", trials=10)
    want, got = attention(scores, attended), attention(scores.half(), attended.half()).float()
    torchs = float((got - want).norm() / want.norm())
    assert 0.9 < report.error.relative / torchs < 1.1
    worst = report.findings[0]
    assert "torch.finfo(torch.float32).min" in str(report.edits[0])
    fixed = worst.fix.apply(attention)(scores, attended)
    assert (fixed - want).norm() < 2e-3 * want.norm()
