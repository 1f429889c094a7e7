"""Models of transformers from small configs: outputs, gradients and findings."""

import jax
import numpy as np
import pytest
import torch
import transformers

import scalewise.torch as st

# Of torch and transformers themselves, in what torch.export runs.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False,
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, use_cache=False,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        use_cache=False, decoder_start_token_id=0, feed_forward_proj="relu",
    ),
}  # fmt: skip
HEADS = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


def made(name):
    torch.manual_seed(1)
    model = getattr(transformers, HEADS[name])(CONFIGS[name]()).eval()
    ids, labels = torch.randint(1, 64, (2, 7)), torch.randint(1, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return made(request.param)


def test_outputs_and_gradients(model):
    model, kwargs = model
    f, params = st.function(model, (), kwargs)
    tensors = st.to_jax(list(kwargs.values()))
    want = model(**kwargs)
    got = jax.jit(f)(params, *tensors)
    np.testing.assert_allclose(got["logits"], want.logits.detach(), atol=1e-5)
    gradients = jax.jit(jax.grad(lambda p: f(p, *tensors)["loss"]))(params)
    model.zero_grad()
    want.loss.backward()
    wanted = dict(model.named_parameters())
    assert set(gradients) == set(wanted)  # tied parameters once
    largest = max(p.grad.abs().max().item() for p in wanted.values())
    for name, parameter in wanted.items():
        np.testing.assert_allclose(gradients[name], parameter.grad, atol=1e-4 * largest)


def test_the_line_of_t5_that_overflows_in_fp16():
    """The layer that transformers keeps in float32 (``_keep_in_fp32_modules``)."""
    model, kwargs = made("t5")
    with torch.no_grad():
        layer = model.encoder.block[1].layer[-1].DenseReluDense
        layer.wi.weight *= 30
        layer.wo.weight *= 30000
    report = st.audit(model, (), kwargs, low="fp16", loss=lambda out: out["loss"], trials=6)
    worst = report.findings[0]
    assert (worst.kind, worst.source) == ("overflow", "hidden_states = self.wo(hidden_states)")
    assert worst.file.endswith("modeling_t5.py")
    assert worst.scope == "encoder/block.1/layer.1/DenseReluDense/wo"
    assert worst.error_after < worst.error_before


def test_explicit_float32_is_kept():
    class Norm(torch.nn.Module):
        def forward(self, x):
            wide = x.to(torch.float32)
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)

    x = torch.full((2, 8), 300.0)
    found = st.audit(Norm(), (x,), low="fp16", trials=0).unfixed
    assert "overflow" not in {finding.kind for finding in found}
    assert st.emulate(Norm(), "fp16")(x).tolist() == [[1.0] * 8] * 2


def test_gradients_are_audited_at_the_lines_of_the_forward_pass():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.linspace(1, 2, 8))

        def forward(self, x):
            return (x @ self.w).square().mean() * 2.0**-22

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    report = st.audit(Model(), (x,), low="fp16", grad=True, trials=4)
    found = [*report.findings, *report.unfixed]
    backward = [e for e in found if e.direction == "backward"]
    assert backward
    assert backward[0].kind == "underflow"
    assert {e.source for e in backward} == {"return (x @ self.w).square().mean() * 2.0**-22"}
