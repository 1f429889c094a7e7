"""Outputs of more architectures of transformers, from small configs, beside torch's own."""

import jax
import numpy as np
import pytest
import torch
import transformers

import scalewise.torch as st

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = SIZES | {"intermediate_size": 32}
TEXT = WIDE | {"vocab_size": 64, "use_cache": False}
GROUPED = TEXT | {"num_key_value_heads": 1}
IMAGE = {"image_size": 16, "patch_size": 4}
SEQUENCES = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "use_cache": False,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}  # fmt: skip
# The prefix of the classes' names, the model's suffix, the arguments of the config, the inputs.
MODELS = [
    ("ViT", "Model", WIDE | IMAGE, "image"),
    ("CLIP", "Model", {
        "text_config": WIDE | {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63},
        "vision_config": WIDE | IMAGE,
    }, "text image"),
    ("Whisper", "Model", SEQUENCES | {
        "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
        "pad_token_id": 0, "decoder_start_token_id": 1,
    }, "speech"),
    ("Bart", "ForConditionalGeneration", SEQUENCES | {"max_position_embeddings": 32}, "text"),
    ("Mamba", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
        "use_cache": False,
    }, "text"),
    ("Mixtral", "ForCausalLM", GROUPED | {"num_local_experts": 4}, "text"),
    ("Qwen3", "ForCausalLM", GROUPED | {"head_dim": 8}, "text"),
    ("Gemma2", "ForCausalLM", GROUPED | {"head_dim": 8}, "text"),
    ("Falcon", "ForCausalLM", TEXT, "text"),
    ("GPTNeo", "ForCausalLM", {
        "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "use_cache": False,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
        "window_size": 4,
    }, "text"),
    ("OPT", "ForCausalLM", SIZES | {
        "vocab_size": 64, "use_cache": False, "ffn_dim": 32, "word_embed_proj_dim": 16,
        "max_position_embeddings": 32,
    }, "text"),
    ("DebertaV2", "Model", WIDE | {
        "vocab_size": 64, "max_position_embeddings": 32, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    }, "text"),
    ("ConvNext", "Model", {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}, "photo"),
    ("ResNet", "Model", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "photo"),
    ("Swin", "Model", {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4,
    }, "image"),
    ("Wav2Vec2", "Model", WIDE | {
        "vocab_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }, "sound"),
]  # fmt: skip


def inputs(kind):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    ids = torch.randint(1, 63, (2, 7), generator=random)
    return {
        "text": {"input_ids": ids},
        "image": {"pixel_values": normal(2, 3, 16, 16)},
        "photo": {"pixel_values": normal(2, 3, 32, 32)},
        "sound": {"input_values": normal(2, 400)},
        "speech": {"input_features": normal(2, 8, 20), "decoder_input_ids": ids},
    }[kind]


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("name", "head", "config", "kinds"), MODELS, ids=[m[0] for m in MODELS])
def test_outputs(name, head, config, kinds):
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**config))
    model.eval()
    kwargs = {k: v for kind in kinds.split() for k, v in inputs(kind).items()}
    f, params = st.function(model, (), kwargs)
    got = jax.jit(f)(params, *st.to_jax(list(kwargs.values())))
    with torch.no_grad():
        want = model(**kwargs)
    compared = [key for key, x in want.items() if isinstance(x, torch.Tensor)]
    assert compared
    for key in compared:
        largest = max(want[key].abs().max().item(), 1.0)
        np.testing.assert_allclose(got[key], want[key], atol=1e-5 * largest, rtol=0)
