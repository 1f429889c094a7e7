"""Programs as users of torch write them: gradients in forward, hooks, dataclasses, bad numbers."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise.torch as st
from pytorch.samples import normal

pytestmark = pytest.mark.filterwarnings("ignore")


def seeded(layer):
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(normal(*p.shape, seed=i, scale=0.5))
    return layer


class Energy(nn.Module):
    """A network, of whose gradient by its input the methods make something."""

    def __init__(self):
        super().__init__()
        self.net = seeded(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))


class Penalty(Energy):
    def forward(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


class Curvature(Energy):
    def forward(self, x):
        x = x.detach().requires_grad_()
        y = self.net(x)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (bend + slope).square().sum()


class Force(Energy):
    def forward(self, x):
        slope, energy = torch.func.grad_and_value(lambda x: self.net(x).sum())(x)
        return energy - (slope * x).sum()


class Bent(Energy):
    def energy(self, x):
        return self.net(x).sum()

    def forward(self, x):
        return torch.autograd.functional.hessian(self.energy, x, create_graph=True).square().sum()


class Pulled(Energy):
    def forward(self, x, offset: int = 1):
        y, pull = torch.func.vjp(self.net, torch.tril(x, torch.tensor(offset)))
        (slope,) = pull(torch.cos(y))
        return y.sum() + (slope * x).sum()


class Jacobians(Energy):
    def forward(self, x):
        net = self.net
        bent = torch.func.hessian(lambda row: net(row).sum())(x[0])
        both = torch.func.jacrev(net)(x[0]) + torch.func.jacfwd(net)(x[1])
        tangent = torch.func.jvp(net, (x[0],), (x[1],))[1]
        return bent.square().sum() + both.square().sum() + tangent.sum()


class PerExample(Energy):
    def forward(self, x):
        def slope(row, other):
            return torch.func.grad(lambda row: self.net(row).sum())(row) * other

        return torch.func.vmap(slope, in_dims=(0, None), out_dims=1)(x, x[0]).square().sum()


@pytest.mark.parametrize("model", [Penalty, Curvature, Force, Bent, Pulled, Jacobians, PerExample])
def test_a_model_may_differentiate(model):
    model, x = model(), normal(4, 3)
    f, params = st.function(model, (x,))
    want = model(x)
    np.testing.assert_allclose(f(params, st.to_jax(x)), want.detach(), rtol=1e-5)
    want.backward()
    gradients = jax.grad(lambda params: f(params, st.to_jax(x)))(params)
    for name, p in model.named_parameters():
        own = torch.zeros_like(p) if p.grad is None else p.grad
        np.testing.assert_allclose(gradients[name], own, rtol=1e-4, atol=1e-6)


TIES = torch.tensor([-6.0, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 20])
AT_TIES = {
    "relu": F.relu, "relu6": F.relu6, "elu": F.elu, "selu": F.selu, "celu": F.celu,
    "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-1, 1), "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: x.clamp_max(1), "softplus": F.softplus, "abs": torch.abs,
    "complex abs": lambda x: torch.complex(x, 1 + x).abs(),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "norm": lambda x: (x[:, None] * torch.ones(2)).norm(dim=1),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x[:, None], 3, -1),
    "std": lambda x: torch.stack([x, x.clamp(0, 0.5)], -1).std(-1),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_TIES)
def test_a_derivative_where_two_numbers_are_equal_is_torchs(name):
    x, function = TIES.clone().requires_grad_(), AT_TIES[name]
    (want,) = torch.autograd.grad(function(x).sum(), x)
    f, params = st.function(function, (TIES,))
    got = jax.grad(lambda x: f(params, x).sum())(st.to_jax(TIES))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_derivative_of_a_quotient_has_no_squared_reciprocal():
    """1 / y**2 exceeds FP16's largest number, x / y / y doesn't."""

    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((64,), 1e-3))

        def forward(self, x):
            return (x / self.scale).sum()

    x = normal(64, scale=1e-3)
    report = st.audit(Divided(), (x,), low="fp16", grad=True, trials=0)
    assert report.error.relative < 0.01
    assert "overflow" not in {f.kind for f in (*report.findings, *report.unfixed)}
    f, params = st.function(lambda x: (2 / x + x / (x + 3)) / x.square(), (x,))
    got = jax.grad(lambda x: f(params, x).sum())(st.to_jax(x))
    x.requires_grad_()
    (want,) = torch.autograd.grad(((2 / x + x / (x + 3)) / x.square()).sum(), x)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_hessian_in_16_bits_is_torchs(low):
    """torch computes the derivative of tanh in one kernel, which rounds once."""

    class Hessians(Energy):
        def forward(self, x):
            return torch.stack([torch.func.hessian(lambda p: self.net(p).sum())(row) for row in x])

    model, x = Hessians(), normal(6, 3)
    want = model(x).detach().double()
    got = copy.deepcopy(model).to(low)(x.to(low)).detach().double()
    ratio = (
        st.audit(model, (x,), low=low, trials=0).error.relative * want.norm() / (got - want).norm()
    )
    assert 1 / 1.5 < ratio < 1.5


class SteepPenalty(Energy):
    def forward(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum() * 4096, x, create_graph=True)
        return slope.square().sum(-1) / 4096**2


def test_its_audit_names_the_line_and_torch_computes_the_fix():
    model, x = SteepPenalty(), normal(4, 3)
    report = st.audit(model, (x,), low="fp16", trials=8)
    assert report.findings[0].kind == "overflow"
    assert report.findings[0].source.startswith("return slope.square()")
    fixed, want = report.apply_fixes(model)(x), model(x).detach()
    assert (fixed.float() - want).norm() < 0.01 * want.norm()
    assert st.audit(Penalty(), (x,), low="fp16", grad=True, trials=2).error.relative < 0.01


def test_a_zero_gradient_is_no_lost_update():
    class Balanced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = seeded(nn.Linear(3, 1))

        def forward(self, x, y):
            return self.layer(x).mean() - self.layer(y).mean()  # of which the bias has none

    batch = normal(4, 3), normal(4, 3, seed=1)
    assert st.audit(Balanced(), batch, grad=True, low="fp16").error.relative < 0.01


@dataclasses.dataclass
class Outputs:
    mean: torch.Tensor
    parts: list


class Seen(nn.Module):
    """A model with a hook that keeps what it sees, and the older weight norm."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.calls = nn.utils.weight_norm(nn.Linear(3, 4)), [], 0
        self.layer.register_forward_hook(lambda module, x, y: self.seen.append(y.abs().mean()))

    def forward(self, x):
        self.calls += 1
        self.seen.clear()
        y = self.layer(x)
        return Outputs(y.mean(0), [y, {"seen": torch.stack(self.seen)}])


def test_a_model_with_hooks_is_converted_in_place_and_restored():
    model, x = Seen(), normal(5, 3)
    model(x).mean.sum().backward()  # such a model can't be copied
    before = {name: (p.data, p.grad) for name, p in model.named_parameters()}
    report = st.audit(model, (x,), low="fp16", trials=0)
    assert 0 < report.error.relative < 0.01
    assert (model.calls, len(model.seen)) == (1, 1)
    assert not isinstance(model.seen[0], torch._subclasses.FakeTensor)
    for name, p in model.named_parameters():
        assert p.data is not None
        assert p.data.data_ptr() == before[name][0].data_ptr()
        assert p.grad is before[name][1]
    emulated = st.emulate(model, "fp16")(x)
    assert emulated["parts"][0].shape == (5, 4)


def test_complex_parameters_stay_complex():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.complex(normal(5), normal(5, seed=1)))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=8).to(x.dtype)

    report = st.audit(Spectral(), (normal(3, 8),), low="bf16", trials=0)
    assert 0 < report.error.relative < 0.01


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.distributions.Normal(x, x.abs() * 1e-9).log_prob(x),
        lambda x: torch.linalg.cholesky(torch.outer(x, x).float() + torch.eye(8) * 1e-6 * x[0]),
    ],
    ids=["distribution", "cholesky"],
)
def test_what_torch_refuses_for_its_numbers_is_a_finding(f):
    x = torch.linspace(1, 2, 8)
    report = st.audit(f, (x,), low="fp16", trials=0)
    assert report.error.non_finite or report.error.relative > 0.03


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_has_torchs_gradient(reduction):
    logits, labels = normal(9, 2, 5), torch.tensor([[1, 1, 3], [2, 4, 0]])

    def f(x):
        return F.ctc_loss(x.log_softmax(-1), labels, (9, 7), (3, 2), reduction=reduction).sum()

    g, params = st.function(f, (logits,))
    got, slope = jax.value_and_grad(lambda x: g(params, x))(st.to_jax(logits))
    given = logits.clone().requires_grad_()
    want = f(given)
    want.backward()
    np.testing.assert_allclose(got, want.detach(), rtol=1e-5)
    np.testing.assert_allclose(slope, given.grad, rtol=1e-4, atol=1e-6)


def test_draws_have_their_shapes_and_moments():
    def f(x):
        d = torch.distributions
        chances = torch.tensor([0.0, 0.7, 0.3])
        return (
            torch.multinomial(chances, 2), torch.multinomial(chances, 400, True).float().mean(),
            torch.poisson(torch.full((400,), 3.0)).mean() * x.mean(),
            d.Gamma(torch.full((400,), 2.0), 1.0).rsample().mean(),
            d.Dirichlet(torch.ones(3)).rsample().sum(), d.Binomial(8, x).sample().mean(),
            F.rrelu(-torch.ones(400), training=True).mean(), torch.bernoulli(x).mean(),
        )  # fmt: skip

    x = torch.full((400,), 0.5)
    g, params = st.function(f, (x,))
    pair, *means = g(params, st.to_jax(x), key=jax.random.key(0))
    assert sorted(pair.tolist()) == [1, 2]
    wants = 1.3, 1.5, 2.0, 1.0, 4.0, -(1 / 8 + 1 / 3) / 2, 0.5
    np.testing.assert_allclose(jnp.stack(means), wants, rtol=0.2)


def test_factors_solve():
    matrix, right = normal(4, 4), normal(4, 2, seed=1)

    def f(a, b):
        values = torch.linalg.eigvals(a)
        return torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), values.prod().real

    g, params = st.function(f, (matrix, right))
    for got, want in zip(g(params, *st.to_jax((matrix, right))), f(matrix, right), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_fix_of_a_function_is_computed_by_torch():
    def f(x): return x / torch.linalg.norm(x)  # fmt: skip

    x = normal(512, scale=4e3)
    report = st.audit(f, (x,), low="fp16", trials=4)
    fix = report.findings[0].fix
    # CUDA would cast a norm without axes back to x's dtype, which can't hold it
    (edit,) = report.edits
    assert "return x.float() / torch.linalg.norm(x.float())" in edit.after[0]
    assert (fix.apply(f)(x).float() - f(x)).norm() < 0.01 * f(x).norm()


def test_edits_leave_numbers_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 300.0

        def forward(self, x, power=2.0):
            y = self.factor * x  # a number comes first
            return torch.log1p(power * y * len(x))

    report = st.audit(Scaled(), (torch.full((64, 2), 4.0),), low="fp16", trials=8)
    text = "".join(map(str, report.edits))
    assert text
    assert not any(f"{x}.float()" in text for x in ("factor", "power", "len(x)"))
