"""The model's own run in the narrow dtype, beside what the audit predicts."""

import pytest
import torch
from torch import nn

import scalewise.torch as st
from scalewise.torch._ran import measured

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def masked(x, m):
    return x.masked_fill(~m, -1e9).softmax(-1)


def test_what_torch_raises_is_the_verdict(capsys):
    mask = torch.ones(4, 4).tril().bool()
    with pytest.raises(RuntimeError, match="without overflow"):
        masked(X.half(), mask)
    report = st.audit(masked, (X, mask), low="fp16", trials=0)
    assert report.fails
    line = masked.__code__.co_firstlineno + 1
    assert report.verdict.startswith(f"No: torch raises in float16 (test_ran.py:{line}): Runtime")
    assert "without overflow" in report.raised
    report.show()
    assert "No: torch raises in float16" in capsys.readouterr().out
    wide = st.audit(masked, (X, mask), low="bf16", trials=0)
    assert (wide.raised, wide.ran) == ("", "")


def test_an_error_that_is_as_predicted_is_not_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4), nn.Softmax(-1))
    report = st.audit(model, (X,), low="fp16", trials=0)
    assert (report.raised, report.ran) == ("", "")


def test_an_error_that_is_not_as_predicted_is_told():
    """torch's CPU rounds the number that is added to the tensor's dtype, CUDA doesn't."""
    report = st.audit(lambda x: (x + 3001.0) - 3000.0, (0 * X,), low="bf16", trials=0)
    want = (0 * X).bfloat16() + 3001.0 - 3000.0
    error = abs(float(want.double().mean()) - 1)
    assert not 1 / 1.5 < error / report.error.relative < 1.5
    assert f"torch itself on a CPU has error {error:.2g}, where" in report.verdict


def test_errors_and_numbers_that_are_not_finite_are_measured():
    wide, low = torch.tensor([3.0, 4.0]), torch.tensor([3.0, float("inf")])
    assert measured((low,), (wide,)) == (0.0, 1)
    assert measured((wide * 1.5,), (wide,)) == (pytest.approx(0.5), 0)
    assert measured((), (wide,)) is None
