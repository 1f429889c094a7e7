"""Errors in a user's input or output: one sentence, no traceback, no result lost."""

import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from scalewise._output import replacing
from scalewise._user_file import InputError
from scalewise.cli import app
from scalewise.cli._program import load_program
from scalewise.scaled import save_safetensors

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, resource

class Stop(BaseException):
    pass

def init(seed):
    return {"params": jax.random.normal(jax.random.key(seed), (4,))}

def train_step(state, batch):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(state["params"])
    return {"params": state["params"] - 0.1 * g}, loss

def batches(data, seed):
    if len(data) < 4:
        raise ValueError("at least 4 bytes are needed")
    for number in range(100):
        if number == 8 and b"full" in data:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        if number == 3 and b"stops" in data:
            raise Stop("enough")
        yield np.ones((2, 4), np.float32)

def norm(x):
    return jnp.sqrt(jnp.sum(x * x))

def stops(x):
    raise Stop("no more")

def small():
    return (jnp.ones(4),)

def factory():
    raise Stop("nothing made")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(PROGRAM)
    (tmp_path / "importing.py").write_text(PROGRAM + "\nimport sklearnn.datasets\n")
    (tmp_path / "stopping.py").write_text(PROGRAM + "\nraise Stop('at once')\n")
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def sentence(done, code=2):
    """The one line on stderr."""
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("scalewise: ")
    return done.stderr


class Report:
    """The attributes of a report that the command reads."""

    error = SimpleNamespace(non_finite=0)

    def show(self, *, everything):
        print("the findings")

    def save(self, path):
        with replacing(path) as file:
            if str(path) == "full.json":
                raise OSError(28, "No space left on device", str(path))
            if str(path) == "odd.json":
                raise RuntimeError("a bug")
            file.write(b"the report")
        return path


def test_an_audit_that_cannot_be_saved_is_shown(folder, monkeypatch):
    monkeypatch.setattr("scalewise.audit", lambda *_, **__: lambda *_, **__: Report())
    out = [x for name in ("full", "b", "odd") for x in ("--out", f"{name}.json")]
    done = run("audit", "net.py:norm", "--args", "small", *out)
    assert done.exit_code == 2
    assert done.stdout == "the findings\nwrote b.json\n"
    assert done.stderr.splitlines() == [
        "scalewise: No space left on device: 'full.json'",
        "scalewise: odd.json is not written: RuntimeError: a bug",
    ]
    assert (folder / "b.json").read_text() == "the report"
    assert not [x.name for x in folder.iterdir() if x.name.startswith((".", "tmp"))]


def test_an_unwritable_target_is_refused_before_the_run(folder, monkeypatch):
    monkeypatch.setattr("scalewise.audit", lambda *_, **__: pytest.fail("the audit ran"))
    done = run("audit", "stopping.py:norm", "--args", "small", "--out", "/proc/a.json")
    assert sentence(done).endswith(": '/proc/a.json'\n")  # permission denied, for root no such file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("audit", "net.py:norm", "--args", "small", "--out", "dir.json"), "it is a folder"),
        (("audit", "net.py:norm", "--args", "small", "--out", "pipe.html"), "it is a pipe"),
        (("audit", "net.py:stops", "--args", "small"), "stops failed: Stop: no more (net.py:"),
        (("audit", "net.py:norm", "--args", "factory"), "failed: Stop: nothing made (net.py:"),
        (("audit", "stopping.py:norm", "--args", "small"), "doesn't run: Stop: at once"),
        (("compare", "stopping.py"), "stopping.py doesn't run: Stop: at once"),
        (("compare", "net.py", "--steps", "1", "--method", "float32", "--out", "/proc/run"),
         "'/proc/run'"),
        (("compare", "importing.py"), "importing.py needs sklearnn, which isn't installed: pip"),
        (("compare", "/dev/null"), "no program '/dev/null'"),
        (("compare", "short"), "no program at 'short'"),
        (("compare", "bare.py"), "defines no init(seed) -> state and no train_step(state, batch)"),
        (("compare", "broken.py"), "broken.py doesn't run: SyntaxError"),
        (("compare", "net.py", "--data", "nowhere"), "no data at 'nowhere'; expected a text file"),
        (("compare", "net.py", "--data", "short"), "net.batches: at least 4 bytes are needed"),
        (("compare", "net.py", "--method", "fp61"), "no method of training is called 'fp61'"),
        (("compare", "net.py", "--out", "net.py"), "'net.py' isn't empty; expected a new or an"),
        (("compare", "net.py", "--method", "fp8", "--method", "fp8"), "one is given twice: fp8"),
        (("check", "dir.json"), "holds no .safetensors file"),
        (("cast", "dir.json", "--to", "fp16"), "holds no .safetensors file"),
        (("cast", "pipe.html", "--to", "fp16"), "it is a pipe; expected a regular file"),
        (("cast", "gone.safetensors", "--to", "fp16"), "directory: 'gone.safetensors'"),
    ],
)  # fmt: skip
def test_unreadable_and_unwritable_files_are_errors_of_one_sentence(folder, arguments, message):
    (folder / "dir.json").mkdir()
    os.mkfifo(folder / "pipe.html")
    (folder / "bare.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "short").write_text("ab")
    done = run(*arguments)
    assert message in sentence(done)
    assert done.stdout.count("\n") <= 1  # what is compared, before a folder is made
    assert not list(folder.glob(".*"))
    assert not (folder / "runs").exists()


def test_a_full_disk_ends_a_comparison_with_its_report(folder, monkeypatch):
    """metrics.jsonl can't grow beyond 1,000 bytes after step 8, and report.html doesn't fit."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / "full.txt").write_text("full")
    done = run("compare", "net.py", "--data", "full.txt", "--steps", 60, "--method", "float32",
               "--out", "run")  # fmt: skip
    said = sentence(done, code=1)
    assert "metrics.jsonl can't be written after step " in said
    assert "File too large: 'run/metrics.jsonl'" in said
    made = int(said.split("after step ")[1].split(":")[0])
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, made + 1))
    assert "final" in done.stdout  # the table
    assert f"net: {made} steps" in done.stdout
    assert not list(folder.glob("scalewise-*"))  # no room for the report there either


def test_a_comparison_whose_program_fails_keeps_what_was_measured(folder):
    (folder / "stops.txt").write_text("stops")
    done = run("compare", "net.py", "--data", "stops.txt", "--steps", 60, "--method", "float32",
               "--out", "run")  # fmt: skip
    assert "net.batches failed: Stop: enough (net.py:" in sentence(done, code=1)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["steps_made"], summary["failure"][:11]) == (3, "net.batches")
    assert "Ended early: net.batches failed" in (folder / "run" / "report.html").read_text()


MISTYPED = [
    ["audit", "none.py:f"], ["record", "none.py:f"], ["check", "none.json"],
    ["compare", "none.py"], ["compare", "mlp", "--data", "none.txt"],
    ["cast", "none.safetensors", "--to", "fp16"],
]  # fmt: skip


def test_a_mistyped_path_is_found_before_jax_is_imported(tmp_path):
    code = f"""
import sys
from scalewise.cli import app
for arguments in {MISTYPED!r}:
    try:
        app(arguments)
    except SystemExit as error:
        print(error.code, "jax" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["2 False"] * len(MISTYPED)
    said = done.stderr.splitlines()
    assert len(said) == len(MISTYPED)
    assert all(line.startswith("scalewise: ") and "none." in line for line in said)


def test_formats_and_optimizers_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_safetensors("x.safetensors", {"w": np.ones((2, 4), np.float32)})
    done = CliRunner().invoke(app, ["cast", "x.safetensors", "--to", "fp64"])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    source = PROGRAM + "\nimport optax\nOPTIMIZER = optax.adam\n"
    (tmp_path / "adam.py").write_text(source)
    with pytest.raises(InputError, match=r"adam.py: OPTIMIZER is <function adam"):
        load_program("adam.py")


@pytest.mark.parametrize("closing", ["sys.stdout.close()", "os.close(1)"])
@pytest.mark.slow
def test_a_users_file_that_closes_stdout_gives_one_sentence_and_the_report(tmp_path, closing):
    (tmp_path / "net.py").write_text(
        f"import os, sys\nimport jax.numpy as jnp\n{closing}\n"
        "def norm(x):\n    return jnp.sqrt(jnp.sum(x * x))\n"
        "def small():\n    return (jnp.full(64, 300.0),)\n"
    )
    code = "from scalewise.cli import main; main()"
    command = [sys.executable, "-c", code, "audit", "net.py:norm", "--args", "small"]
    done = subprocess.run(
        [*command, "--out", "a.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("scalewise: ")
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "a.json").read_text())["findings"]


@pytest.mark.parametrize("arguments", [["-h"], ["audit", "-h"], ["plan", "-h"]])
def test_h_is_help(arguments):
    done = run(*arguments)
    assert done.exit_code == 0
    assert "Usage: " in done.output
    assert "-h" in done.output


def test_pytests_way_of_naming_a_function_is_taken(folder):
    assert run("audit", "net.py::norm", "--args", "small", "--trials", 0).exit_code == 0


def test_a_plan_without_a_budget(folder):
    assert "plan: expected --bits 6" in sentence(run("plan", "net.py:norm"))
