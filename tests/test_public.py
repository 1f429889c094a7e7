"""What `import scalewise` offers, whichever way and in whichever order it is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scalewise as sw

CALLABLE = ("audit", "autocast", "autoscale", "emulate")


def in_python(code: str) -> str:
    """What a fresh interpreter prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_every_public_name_is_there_and_no_other_is_shown():
    assert dir(sw) == sorted(sw.__all__)
    assert not [name for name in dir(sw) if name.startswith("_") and name != "__version__"]
    assert all(getattr(sw, name) is not None for name in sw.__all__)


def test_a_function_and_its_package_share_a_name():
    code = """
import importlib, inspect, numpy as np, scalewise as sw
for name in {names}:
    package = importlib.import_module("scalewise." + name)
    function = getattr(package, name)
    assert package is getattr(sw, name) and inspect.isfunction(function)
    assert inspect.signature(package) == inspect.signature(function)
import scalewise.audit as a
print(a.Monitor.__name__, callable(a), sw.emulate(lambda x: x + 1, "e2m1fn")(np.float32(1.4)))
"""
    assert in_python(code.replace("{names}", repr(CALLABLE))) == "Monitor True 2.0"


def test_importing_it_imports_no_jax_and_help_neither():
    heavy = "print(*sorted({'jax', 'numpy', 'jinja2', 'scipy', 'optax'} & {*sys.modules}))"
    assert in_python(f"import sys, scalewise; scalewise.__version__; {heavy}") == ""
    ran = in_python(
        "import sys\nfrom scalewise.cli import app\nfrom typer.testing import CliRunner\n"
        f"assert 'compare' in CliRunner().invoke(app, ['--help']).stdout\n{heavy}"
    )
    assert ran == ""


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'qantize'"):
        sw.qantize  # noqa: B018  # pyright: ignore


def test_the_stub_imports_what_it_lists():
    stub = ast.parse(Path(sw.__file__).with_suffix(".pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name == alias.asname for alias in node.names)
