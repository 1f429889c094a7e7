"""`scalewise audit` of torch models: a function of a file, a config or a folder of transformers."""

import json
import sys

import pytest
import torch
import transformers
from typer.testing import CliRunner

from scalewise.cli import app
from scalewise.torch._load import load

pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, scale=9000.0):
        y = self.layer(x) * scale
        return (y * y).mean()

def make():
    return Net(), (torch.ones(2, 8),)

def make_dict():
    return Net(), {"x": torch.ones(2, 8), "scale": 1.0}

def make_bare():
    return Net()

def inputs():
    return torch.ones(2, 8)

def text():
    return "no model"

def fails():
    raise RuntimeError("no weights here")
"""
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_embd": 16,
    "n_layer": 1, "n_head": 2, "n_positions": 32,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 16, "patch_size": 4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(PROGRAM)
    (tmp_path / "gpt2.json").write_text(json.dumps(GPT2))
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    (tmp_path / "other.json").write_text(json.dumps(GPT2 | {"model_type": "gpt3"}))
    (tmp_path / "class.json").write_text(json.dumps(GPT2 | {"architectures": ["GPT2Model3"]}))
    for name in ("pipeline", "GPT2Tokenizer", "logging", "__name__", "GPT2Config"):  # no models
        (tmp_path / f"{name}.json").write_text(json.dumps(GPT2 | {"architectures": [name]}))
    (tmp_path / "heads.json").write_text(json.dumps(GPT2 | {"n_head": 3}))
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "4bit.json").write_text(json.dumps(GPT2 | {"quantization_config": quantized}))
    (tmp_path / "one.json").write_text(json.dumps(GPT2 | {"architectures": "GPT2Model"}))
    (tmp_path / "types.json").write_text(json.dumps(GPT2 | {"model_type": ["gpt2"]}))
    (tmp_path / "named.json").write_text(json.dumps(GPT2 | {"quantization_config": "fp8"}))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 10**5)
    (tmp_path / "plain.json").write_text("{}")
    (tmp_path / "text.json").write_text("a text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_a_function_that_returns_a_model(folder):
    done = run("net.py:make", "--framework", "torch", "--trials", "1", "--out", "a.json")
    assert done.exit_code == 1, done.output  # not finite
    assert "overflow  net.py:11" in done.output
    found = json.loads((folder / "a.json").read_text())["findings"]
    assert found[0]["source"] == "return (y * y).mean()"
    done = run("net.py:make_bare", "--args", "inputs", "--framework", "torch", "--format", "bf16",
               "--grad", "--autocast", "--loss-scale", "256", "--trials", "0")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert load("net.py:make_dict").kwargs["scale"] == 1.0


def test_a_config_and_a_folder_of_transformers(folder):
    done = run("hf:gpt2.json", "--format", "bf16", "--trials", "0")
    assert done.exit_code == 0, done.output
    assert "GPT2LMHeadModel  bf16" in done.output
    model = load("hf:gpt2.json", seed=1, labels=True)
    assert set(model.kwargs) == {"input_ids", "labels"}
    assert load("hf:vit.json").kwargs["pixel_values"].shape == (2, 3, 16, 16)
    model.model.bfloat16().save_pretrained(folder / "saved", safe_serialization=True)
    again = load("hf:saved").model
    assert again.lm_head.weight.dtype == torch.float32
    assert torch.equal(again.lm_head.weight, model.model.lm_head.weight.float())
    assert isinstance(again, transformers.GPT2LMHeadModel)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net.py:text", "--framework", "torch"], "text() returned a str; expected a torch.nn.Mo"),
        (["net.py:make_bare", "--framework", "torch"], "a model without inputs: return a pair"),
        (["net.py:fails", "--framework", "torch"], "RuntimeError: no weights here (net.py:29)"),
        (["net.py:none", "--framework", "torch"], "defines no function 'none'"),
        (["net.py:make", "--framework", "tf"], "--framework 'tf': expected jax or torch"),
        (["net.py:make", "--framework", "torch", "--steps", "2"], "--steps: for functions of JAX"),
        (["net.py:make", "--framework", "jax", "--grad"], "--grad: for torch models (--framework "),
        (["hf:none.json"], "no file at 'none.json': expected a config of transformers"),
        (["hf:text.json"], "text.json is no config of transformers: it is no JSON"),
        (["hf:deep.json"], "deep.json is no config of transformers: it is no JSON"),
        *(([f"hf:{name}.json"], "it has no model_type") for name in ("plain", "list", "types")),
        (["hf:one.json"], "architectures is 'GPT2Model'; expected a list of names"),
        (["hf:named.json"], "has a quantization_config (some method), whose weights can't"),
        (["hf:other.json"], "has no model_type 'gpt3'; did you mean"),
        *(
            ([f"hf:{name}.json"], f"has no class of models '{name}'")
            for name in ("pipeline", "GPT2Tokenizer", "logging", "__name__", "GPT2Config")
        ),
        (["hf:class.json"], "has no class of models 'GPT2Model3'"),
        (
            ["hf:4bit.json"],
            "has a quantization_config (bitsandbytes), whose weights can't",
        ),
        (["hf:heads.json"], "heads.json: the model can't be built: ValueError:"),
        (["hf:empty"], "empty has no weights (.safetensors); for random ones"),
        (["hf:gpt2.json", "--args", "inputs"], "--args names a function of a file"),
    ],
)
def test_what_is_refused(folder, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_transformers_may_be_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("hf:gpt2.json")
    assert str(done.exception) == "hf: needs transformers: pip install transformers"
