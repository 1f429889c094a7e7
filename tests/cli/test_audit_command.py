"""`scalewise audit`, `record` and `compare-programs` as a user types them."""

import json
import sys

import pytest
from typer.testing import CliRunner

from scalewise.cli import app

PROGRAM = """
import jax.numpy as jnp
from jaxtyping import Array, Float

def norm(x):
    return jnp.sqrt(jnp.sum(x * x))

def big():
    return (jnp.full(4096, 16.0),)

def half():
    return {"x": jnp.full(4, 300, jnp.float16)}

def named():
    return {"x": jnp.ones(4)}

def typed(x: Float[Array, "4 n=8"], w: Float[Array, "8"]):
    return x @ w

def vague(x: Float[Array, "rows"]):
    return x

def misspelt(x: "Flaot[Array, '8']"):
    return x

def fails():
    raise RuntimeError("no data today")

def wide(x):
    return x @ jnp.ones((7, 7))

def count(x):
    return len(x)

def step(w, batch):
    return w + batch

def start():
    return (jnp.ones(4),)

def batch(n):
    return jnp.full(4, 3e4 * n)

def data():
    return start(), [batch(n) for n in range(3)]

def no_pair():
    return start()

def parts(x):
    return (x + 1e-3) - x

def single():
    return {"x": jnp.full(4, 300.0)}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_users_function_is_audited_and_the_report_written(folder):
    done = run("audit", "net.py:norm", "--args", "big", "--trials", "3",
               "--out", "a.html", "--out", "a.json")  # fmt: skip
    assert done.exit_code == 1  # not finite
    assert "overflow  net.py:6" in done.output
    assert "wrote a.json" in done.output
    assert json.loads((folder / "a.json").read_text())["findings"][0]["line"] == 6
    assert "net.py:6" in (folder / "a.html").read_text()
    assert "sheet" not in json.loads((folder / "a.json").read_text())
    balance = ("--sheet", "--trials", "0", "--out", "c.json")
    assert (
        "Line 6 makes 100 % of the error."
        in run("audit", "net.py:norm", "--args", "big", *balance).output
    )
    assert json.loads((folder / "c.json").read_text())["sheet"]["lines"][0]["line"] == 6
    good = run("audit", "net.py:norm", "--args", "big", "--format", "bf16", "--out", "b.json")
    assert good.exit_code == 0
    wrong = run("audit", "net.py:parts", "--args", "big", "--format", "bf16")
    assert wrong.exit_code == 1  # finite, and of no use
    assert "No: parts loses accuracy" in wrong.output


def test_what_a_device_computes_is_recorded_and_compared(folder):
    done = run("record", "net.py:norm", "--args", "half", "--out", "a.safetensors")
    assert done.exit_code == 1  # not finite
    assert "from mul at net.py:6 (norm): 4 of 4 numbers are infinite" in one_line(done)
    assert "wrote a.safetensors" in done.output
    good = run("record", "net.py:norm", "--args", "single", "--out", "b.safetensors", "--all")
    assert good.exit_code == 0
    both = "a.safetensors", "b.safetensors"
    found = run("compare-programs", *both, "--out", "c.csv", "--all")
    assert found.exit_code == 1
    assert "Non-finite at mul at net.py:6: only the first has" in one_line(found)
    assert "net.py:6" in (folder / "c.csv").read_text()


def test_two_programs_are_compared(folder):
    (folder / "other.py").write_text((folder / "net.py").read_text().replace("x * x", "x * x * 2"))
    (folder / "empty").mkdir()
    same = run("compare-programs", "net.py:norm", "net.py:norm", "--args", "named")
    assert same.exit_code == 0
    assert "No cause: the two compute the same" in one_line(same)
    found = run("compare-programs", "net.py:norm", "other.py:norm", "--args", "named")
    assert found.exit_code == 1
    assert "Missing at net.py:6 and other.py:6" in one_line(found)
    for wrong, words in (("net.py:gone", "defines no function 'gone'"), ("empty", "has no .npy")):
        refused = run("compare-programs", "net.py:norm", wrong, "--args", "named")
        assert refused.exit_code == 2
        assert words in one_line(refused)


def one_line(done):
    return " ".join(done.output.split())


def test_arguments_from_annotations_or_by_name(folder):
    assert run("audit", "net.py:typed", "--trials", "0").exit_code == 0
    assert run("audit", "net.py:norm", "--args", "named", "--trials", "0").exit_code == 0
    scaled = run("audit", "net.py:norm", "--args", "big", "--trials", "0", "--recipe", "fp16")
    assert scaled.exit_code == 0  # finite
    assert "audit  norm  autoscale" in scaled.output


def test_several_steps_with_their_batches(folder):
    command = ("audit", "net.py:step", "--args", "start", "--trials", "0", "--batches")
    assert run(*command, "batch", "--steps", "2").exit_code == 0
    assert run(*command, "batch", "--steps", "3").exit_code == 1  # 90,000
    assert "defines no function 'gone'" in run(*command, "gone").output
    command = ("audit", "net.py:step", "--data", "data", "--trials", "0")
    assert run(*command, "--steps", "2").exit_code == 0
    assert run(*command, "--steps", "3").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("audit", "net.py"), "'net.py' names no function: expected path/to/file.py:function"),
        (("audit", "gone.py:f"), "no file at 'gone.py': expected a Python file"),
        (("audit", "net.py:nor"), "net.py defines no function 'nor'; there are: norm, big"),
        (("audit", "broken.py:f"), "broken.py needs nothing_of_this_name, which isn't installed"),
        (("audit", "net.py:norm", "--args", "small"), "defines no factory 'small'"),
        (("audit", "net.py:norm", "--args", "fails"), "failed: RuntimeError: no data today"),
        (("audit", "net.py:fails"), "fails failed: RuntimeError: no data today (net.py:27)"),
        (("audit", "net.py:step", "--args", "big"), "step() missing 1 required"),
        (("audit", "net.py:wide", "--args", "big"), "wide failed: TypeError: dot_general requires"),
        (("audit", "net.py:norm"), "norm(x) has no annotation with a shape such as"),
        (("audit", "net.py:vague"), "vague(x) has the shape 'rows', not all numbers"),
        (("audit", "net.py:misspelt"), "annotations of misspelt can't be evaluated: NameError"),
        (("audit", "net.py:count", "--args", "big"), "count returns no float"),
        (("audit", "net.py:norm", "--args", "big", "--format", "fp17"), "is called 'fp17'"),
        (("audit", "net.py:norm", "--args", "big", "--recipe", "f8"), "no recipe is called 'f8'"),
        (("audit", "net.py:norm", "--args", "big", "--out", "a.pdf"), "with .html, .json or .csv"),
        (("audit", "net.py:norm", "--args", "big", "--out", "no/a.csv"), "there is no folder 'no'"),
        (("audit", "net.py:norm", "--args", "big", "--batches", "batch"), "leave the second"),
        (("audit", "net.py:step", "--data", "no_pair"), "returned a tuple of 1; expected"),
        (("audit", "net.py:step", "--data", "data", "--args", "start"), "no --args or --batches"),
        (("record", "net.py:norm", "--args", "big", "--out", "a.npz"), "ends with .safetensors"),
        (("record", "net.py:nor"), "net.py defines no function 'nor'"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(folder, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_torch_model_needs_torch(folder, monkeypatch):
    for name in [x for x in sys.modules if x.split(".")[:2] == ["scalewise", "torch"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("audit", "net.py:norm", "--framework", "torch")
    assert str(done.exception).startswith('scalewise.torch needs torch: pip install "scalewise[to')
