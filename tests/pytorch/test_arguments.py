"""Arguments and results of audited models, which stay as they were."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import scalewise.torch as st

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Frozen(dict):
    """As the configurations of diffusers."""

    def refuse(self, *args, **kwargs):
        raise TypeError("a frozen configuration")

    __setitem__ = update = clear = pop = setdefault = refuse


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.config = nn.Linear(4, 4), Frozen(width=4)
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return {"logits": self.layer(x), "n": 3, "name": "model", "pair": (None, 2.5)}

    def training_step(self, batch):
        return (self(batch.x)["logits"] - batch.y).square().mean()

    def fails(self, x):
        return self.layer(x)[x.sum() > 0].nonzero()


@pytest.mark.parametrize("method", ["forward", "fails"])
def test_a_model_is_as_it_was_whatever_happens(method):
    model, x = Model(), X.clone()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    try:
        st.audit(model, (x,), method=method, trials=0)
    except (ValueError, NotImplementedError):
        assert method == "fails"
    assert model.calls == []
    assert "forward" not in vars(model)
    assert model.config == {"width": 4}
    for name, p in model.state_dict().items():
        assert p.dtype == torch.float32
        assert torch.equal(p, before[name])


def test_inputs_that_a_model_writes_to_stay():
    x = X.clone()
    st.audit(lambda x: x.mul_(2).sum(), (x,), low="fp32", trials=0)
    assert torch.equal(x, X)


def test_a_method_may_call_the_model_with_a_dataclass():
    model = Model()
    report = st.audit(model, (Batch(X, X + 1),), method="training_step", grad=True, trials=0)
    assert 0 < report.error.relative < 1e-2


def test_results_that_are_not_tensors():
    f, params = st.function(Model(), (X,))
    found = f(params, st.to_jax(X))
    assert (int(found["n"]), "name" in found, found["pair"][0]) == (3, False, None)
    assert float(found["pair"][1]) == 2.5
    np.testing.assert_allclose(found["logits"], X @ params["layer.weight"].__array__().T
                               + params["layer.bias"].__array__(), rtol=1e-5)  # fmt: skip


def test_a_tensor_that_is_given_twice_is_two_arguments():
    f, params = st.function(lambda a, b: a + 10 * b, (X, X))
    a, b = st.to_jax((X, X + 1))
    np.testing.assert_allclose(f(params, a, b), a + 10 * b, rtol=1e-6)


def test_a_parallel_model_is_audited_as_the_one_in_it():
    model = nn.Linear(4, 4)
    got = st.audit(nn.DataParallel(model), (X,), trials=0).error
    assert got == st.audit(model, (X,), trials=0).error


@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda y: nn.functional.mse_loss(y, X)])
def test_a_loss_of_torch_is_refused(loss):
    with pytest.raises(TypeError, match="audit a module whose forward returns it"):
        st.audit(nn.Linear(4, 4), (X,), loss=loss, trials=0)


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([X, X[:1]])
    with pytest.raises(TypeError, match="pass it padded"):
        st.audit(nn.Linear(4, 4), (nested,), trials=0)


def squared(x):
    return (x.half() * x.half()).to(x.dtype)


def widened(x):
    y = x.bfloat16()
    return (y * y).sum().log()


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x) + 300
        return (h.half() * h.half()).float()


@pytest.mark.parametrize(
    ("f", "low", "options", "finite"),
    [(squared, "bf16", {}, False), (widened, "fp16", {}, True),
     (Cached(), "bf16", {"autocast": True}, False)],
)  # fmt: skip
def test_a_dtype_that_the_program_names_is_that_dtype(f, low, options, finite):
    x = torch.full((2, 4), 300.0)
    report = st.audit(f, (x,), low=low, trials=0, **options)
    assert (report.error.non_finite == 0) == finite
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[low]
    if options:
        with torch.autocast("cpu", dtype):
            want = f(x)
    else:
        want = f(x.to(dtype))
    assert bool(torch.isfinite(want).all()) == finite
    got = st.emulate(f, low, **options)(x)
    assert torch.equal(got, want.float())


def sorted_shares(x):
    y = x * x
    v = y.sort(-1)[0]
    return v / v.sum(-1, keepdim=True)


def best_shares(x):
    y = x * x
    v = y.topk(4, -1)[0]
    return v / v.sum(-1, keepdim=True)


def shares_of_largest(x):
    y = x * x
    return y / y.max(-1, keepdim=True)[0]


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        y = self.gain.exp() * x
        return y / y.norm()


@pytest.mark.parametrize("f", [sorted_shares, best_shares, shares_of_largest, Gain()])
def test_an_applied_fix_has_the_error_that_is_promised(f):
    x = 400 * torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    report = st.audit(f, (x,), low="fp16")
    fixed = report.findings[0]
    want, model = f(x), copy.deepcopy(fixed.fix.apply(f))
    error = float((model(x).float() - want).norm() / want.norm())
    assert error == pytest.approx(fixed.error_after, rel=0.05)
    if isinstance(f, Gain):
        assert "y = self.gain.exp() * x.float()" in report.edits[0].after[0]


def test_a_fix_in_float64_computes_in_float64():
    def f(x):
        y = x + 1e15
        return y - 1e15

    x = 1e8 * X
    report = st.audit(f, (x,), low="fp32")
    finding = report.findings[0]
    assert "y = x.double() + 1e15" in report.edits[0].after[0]
    want, got = f(x.double()), finding.fix.apply(f)(x)
    assert float((got - want).norm() / want.norm()) == pytest.approx(finding.error_after, rel=0.05)
