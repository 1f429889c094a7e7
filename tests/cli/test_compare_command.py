"""`scalewise compare` as a user types it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scalewise.cli import app

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np

def init(seed):
    return {"params": jax.random.normal(jax.random.key(seed), (4,))}

def train_step(state, batch):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(state["params"])
    return {"params": state["params"] - 0.1 * g}, loss

def batches(data, seed):
    rows = np.frombuffer(data, np.uint8).astype(np.float32) / 256
    while True:
        yield rows[:8].reshape(2, 4)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "line.py").write_text(PROGRAM)
    (tmp_path / "text").write_text("some text, long enough")
    return tmp_path


def test_a_piped_comparison_prints_table_curves_and_where_its_files_are(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = ("--data", "text", "--steps", "3", "--method", "float32", "--method", "fp16")
    done = CliRunner().invoke(app, ["compare", "line.py", *options])
    assert done.exit_code == 0, done.stderr
    assert "ratios to float32" in done.stdout
    assert "\x1b" not in done.stdout
    (run,) = (folder / "runs").iterdir()
    assert f"report: runs/{run.name}/report.html" in done.stdout
    assert {p.name for p in run.iterdir()} >= {"metrics.jsonl", "summary.json", "report.html"}


def test_the_process_ends_with_exit_code_2(folder):
    command = [str(Path(sys.executable).with_name("scalewise")), "compare", "nothing.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("scalewise: no program 'nothing.py'")


@pytest.mark.slow
def test_control_c_keeps_a_readable_run(folder):
    # a shell's background job ignores SIGINT, and so would all that it starts: a gate, say
    listening = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    listening += "os.execv(sys.argv[1], sys.argv[1:])"
    program = str(Path(sys.executable).with_name("scalewise"))
    command = [sys.executable, "-c", listening, program, "compare", "line.py"]
    options = ["--data", "text", "--steps", "1000000", "--method", "float32", "--out", "run"]
    with subprocess.Popen(
        command + options,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        metrics = folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()  # or leaving the block would wait for ever
            raise
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted after" in out
    assert (folder / "run" / "summary.json").exists()
