"""What type checkers say of a user's program: the errors that it has, and no others."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "typed" / "program.py"
EXPECTED = {n for n, s in enumerate(PROGRAM.read_text().splitlines(), 1) if s.endswith("# error")}


def test_pyright_strict(tmp_path):
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    settings = {
        "include": [PROGRAM.name], "extraPaths": [str(ROOT / "src")],
        "enableTypeIgnoreComments": False,  # they are mypy's
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "pyright", "--pythonpath", sys.executable, "-p", str(tmp_path), "--outputjson"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {x["range"]["start"]["line"] + 1 for x in found} == EXPECTED, found


@pytest.mark.slow
def test_mypy_strict(tmp_path):
    pytest.importorskip("mypy", reason="make test installs it")
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(PROGRAM)],
        capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    found = {int(n) for n in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert found == EXPECTED, done.stdout + done.stderr
