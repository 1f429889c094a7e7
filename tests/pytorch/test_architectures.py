"""Outputs of more architectures of transformers, from small configs, beside torch's own."""

import jax
import numpy as np
import pytest
import torch
from experiments.torch_architectures import TRANSFORMERS, compared, of_transformers, own
from experiments.torch_models import MODELS

import scalewise.torch as st
from cases import nightly

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "row",
    nightly([(row,) for row in TRANSFORMERS], but=[(row,) for row in TRANSFORMERS[:4]]),
    ids=lambda row: row[0],
)
def test_outputs(row):
    model, _, kwargs = of_transformers(*row)
    f, params = st.function(model, (), kwargs)
    got = jax.jit(f)(params, *st.to_jax(list(kwargs.values())))
    with torch.no_grad():
        want = model(**kwargs)
    keys = [key for key, x in want.items() if isinstance(x, torch.Tensor)]
    assert keys
    for key in keys:
        largest = max(want[key].abs().max().item(), 1.0)
        np.testing.assert_allclose(got[key], want[key], atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("name", nightly(MODELS, but=[*MODELS][:1]))
def test_the_audits_error_is_torchs(name, low):
    with torch.backends.mkldnn.flags(enabled=False):  # its LSTM needs other processors in 16 bits
        assert not compared(name, lambda: own(name), low).wrong
