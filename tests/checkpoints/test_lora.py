"""`examples/lora.py`: adapters learn on a quantised base as on a wide one."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import scalewise as sw
from cases import nightly


@pytest.fixture
def lora(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "lora", raising=False)
    import lora

    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
        yield lora


@pytest.mark.parametrize(
    ("to", "layout"), [("nvfp4", "compressed-tensors"), ("e4m3fn", "deepseek")]
)
@pytest.mark.slow
def test_adapters_learn_on_a_quantised_base(lora, to, layout, tmp_path):
    found = lora.run(to, layout, tmp_path, steps=150)
    before = found[f"{to} base, turned digits"]
    narrow, wide = (found[f"{name} base with adapters, turned digits"] for name in (to, "wide"))
    assert before < 0.3
    assert narrow > 0.5
    assert abs(narrow - wide) < 0.1


@pytest.mark.parametrize(
    ("to", "layout"),
    [("nvfp4", "modelopt"),
     *nightly([("mxfp8_e4m3", "modelopt"), ("e4m3fn", "compressed-tensors")])],
)  # fmt: skip
def test_gradients_through_stored_weights_are_those_of_their_values(lora, to, layout, tmp_path):
    wide = lora.init(0)
    sw.scaled.save_safetensors(tmp_path / "wide.safetensors", wide)
    out = tmp_path / "narrow.safetensors"
    sw.checkpoints.cast(tmp_path / "wide.safetensors", to, out=out, layout=layout, keep="layers.2")
    tree = sw.checkpoints.load(out)
    batch = {k: x[:32] for k, x in lora.digits(turned=False)[0].items()}
    adapters = lora.init_adapters(0, rank=4)
    stored, values = (
        jax.jit(jax.grad(lora.cross_entropy, argnums=1))(base, adapters, batch)
        for base in ({n: tree[n] for n in wide}, {n: tree.value(n) for n in wide})
    )
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
