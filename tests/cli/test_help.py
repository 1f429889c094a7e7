"""The command's help: sentences, an example for each subcommand that parses, and 80 columns."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from scalewise.cli import app

GROUP = get_command(app)


def commands(group=GROUP, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())
EXAMPLES = {
    name: (command.epilog or "").rpartition("\n  ")[2]
    for name, command in COMMANDS.items()
    if name in GROUP.commands  # of `table`, the group has an example
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_option_is_described_by_a_sentence_and_shows_no_type_of_python(name):
    for parameter in COMMANDS[name].params:
        described = parameter.help or ""
        assert described[:1].isupper() or described.startswith(("float32", "all:", "jax,")), (
            parameter.name
        )
        assert described.endswith((".", ">.")), (parameter.name, described)
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    assert set(re.findall(r"<([^>]+)>", shown)) <= {"time"}
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_help_ends_with_an_example_that_parses(name):
    program, command, *arguments = shlex.split(EXAMPLES[name])
    assert (program, command) == ("scalewise", name)
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    assert shown.rstrip().endswith(f"Example:\n    {EXAMPLES[name]}")
    assert GROUP.commands[name].make_context(name, arguments).params


def test_recipes_fit_into_80_columns():
    shown = CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "200"}).output
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "mlp", "--method", "fp9"],
        ["recipes", "fp9"],
    ],
)
def test_a_mistyped_recipe_gets_recipes_as_suggestions(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2
    assert "did you mean 'fp8'" in " ".join(ran.output.split())
    assert not list(tmp_path.iterdir())


def test_plan_prints_writes_and_exports_what_it_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import jax.numpy as jnp\n\n\ndef f(w, x):\n    return jnp.tanh(x @ w['dense'])\n\n\n"
        "def small():\n    w = jnp.linspace(-1, 1, 512).reshape(32, 16)\n"
        "    return {'dense': w}, jnp.linspace(-1, 2, 256).reshape(8, 32)\n"
    )
    command = ["plan", "net.py:f", "--args", "small", "--bits", "9", "--out", "p.html"]
    ran = CliRunner().invoke(app, [*command, "--export", "compressed-tensors"])
    assert ran.exit_code == 0, ran.output
    assert '"format": "mxfp8-quantized"' in ran.output
    assert "net.py:5" in (tmp_path / "p.html").read_text()
    refused = {
        ("--bits", "4"): "the cheapest plan of f takes 4.5 bits",
        ("--error", "1", "--bits", "4"): "expected --bits 6",
        ("--bits", "9", "--export", "onnx"): "expected one of python, compressed-tensors",
        ("--bits", "9", "--objective", "mse"): "mse",
    }
    for options, message in refused.items():
        ran = CliRunner().invoke(app, [*command[:4], *options])
        assert ran.exit_code == 2
        assert message in " ".join(ran.output.split())


@pytest.mark.parametrize("name", ["audit", "record", "plan"])
def test_a_folder_that_is_missing_is_told_before_the_function_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("raise SystemExit('the file was run')\n")
    suffix = "safetensors" if name == "record" else "json"
    ran = CliRunner().invoke(app, [name, "net.py:f", "--out", f"none/x.{suffix}"])
    assert ran.exit_code == 2
    assert "none" in ran.output
    assert "was run" not in ran.output
