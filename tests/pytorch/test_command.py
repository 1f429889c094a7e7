"""`scalewise audit` of torch models, which a function of a file makes."""

import json

import pytest
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(PROGRAM)
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
    ],
)
def test_what_is_refused(folder, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
