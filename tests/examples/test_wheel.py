"""The examples that the commands name are in the wheel, and in a checkout beside src/."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from scalewise.cli import _program

ROOT = Path(__file__).parents[2]
NAMES = {
    "cnn", "digits_equinox", "digits_haiku", "digits_keras", "digits_linen", "digits_nnx",
    "digits_numpyro", "gpt", "gpt_linen", "graph",
    "logistic", "lstm", "mlp", "moe", "pole", "resnet", "unet", "wave",
}  # fmt: skip


def test_examples_are_found_in_the_package_and_beside_it(tmp_path, monkeypatch):
    package, beside = tmp_path / "package", tmp_path / "beside"
    for folder in (package, beside):
        folder.mkdir()
        (folder / "tiny.py").write_text("def train_step(state, batch): ...\ninit = batches = print")
        (folder / "helper.py").write_text("")
    assert _program.find_examples([package, beside]) == {"tiny": package / "tiny.py"}
    assert _program.find_examples([tmp_path, beside]) == {"tiny": beside / "tiny.py"}
    assert set(_program.find_examples(_program.EXAMPLES)) == NAMES
    monkeypatch.setattr(_program, "EXAMPLES", (package, beside))
    assert _program.load_program("tiny").name == "tiny"


def test_the_wheel_has_the_examples_where_they_are_looked_for():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    assert included == {"examples": "scalewise/examples"}
    assert _program.EXAMPLES[0] == _program.PACKAGE / "examples"


@pytest.mark.slow
def test_an_installed_wheel_trains_an_example(tmp_path):
    def call(*command, **options):
        return subprocess.run(
            [*map(str, command)],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            **options,
        ).stdout

    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    (wheel,) = tmp_path.glob("*.whl")
    call(*pip, "--python", tmp_path / "env", "install", "--no-deps", wheel)
    # dependencies from this environment, where scalewise may be editable: its .pth isn't read
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    python = tmp_path / "env" / "bin" / "python"
    found = call(python, "-c", "import scalewise; print(scalewise.__file__)", env=environment)
    assert Path(found.strip()).is_relative_to(tmp_path / "env")
    said = call(
        tmp_path / "env" / "bin" / "scalewise", "compare", "mlp", "--steps", 2, "--out", "run",
        env=environment,
    )  # fmt: skip
    assert "mlp: 2 steps, ratios to float32" in said
    assert (tmp_path / "run" / "metrics.jsonl").exists()
