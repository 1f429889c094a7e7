"""The failures of failures/torch/classics.py are found at their line; torch confirms fixes."""

import inspect

import numpy as np
import pytest
import torch
from failures.torch.classics import CLASSICS
from failures.torch.truth import model_of

import scalewise.torch as st
from cases import nightly

pytestmark = pytest.mark.filterwarnings("ignore")

FIXES = {  # how they begin
    "T5 in FP16": "float32 for",  # the product, the sum, and the clamp behind them
    "mT5 in FP16": "float32 for the matmul",
    "Pegasus in FP16": "float32 for the linear and add at lines",  # and the residual stream
    "Attention without a scale, FP16": "float32 for the matmul",
    "A mask of -1e9, FP16": "-32752 in place of -1e+09",
    "Adam's epsilon in FP16": "float32 for lines",  # another epsilon leaves 100 times the error
}


@pytest.mark.parametrize("name", nightly(CLASSICS, but=[*CLASSICS][:2]))
def test_the_line_is_found(name):
    program = CLASSICS[name]
    model, kwargs = model_of(program.call), program.args()
    report = st.audit(model, (), kwargs, low=program.low, trials=12)
    worst = (*report.findings, *report.unfixed)[0]
    if name == "Rotary positions in BF16":  # found where the error is amplified
        lines, first = inspect.getsourcelines(type(model))
        at = next(i for i, line in enumerate(lines, first) if line.strip() in program.at)
        assert str(at) in str(worst.fix)
    else:
        assert worst.source in program.at
    if worst.function:
        assert worst.function.endswith(".forward")
    assert worst.error_after < 0.5 * worst.error_before
    assert str(worst.fix).startswith(FIXES.get(name, ""))
    model = model_of(program.call)
    with torch.no_grad():
        outs = [numbers(m(**kwargs)) for m in (worst.fix.apply(model), model)]
    errors = [float((y - x).norm() / x.norm()) for y, x in zip(*outs, strict=True)]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(worst.error_after, rel=0.5)


def numbers(outs):
    leaves = torch.utils._pytree.tree_leaves(dict(outs) if isinstance(outs, dict) else outs)
    return [x.double() for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
