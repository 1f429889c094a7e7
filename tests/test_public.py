"""What `import scalewise` offers, whichever way and in whichever order it is imported."""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from cases import nightly, refused
from scalewise import cli
from scalewise._resolve import KINDS, resolve
from scalewise.autoscaling import RecipeName
from scalewise.formats import (
    ALIASES,
    BLOCK_FORMATS,
    CATALOGUE,
    SATURATE,
    BlockFormatName,
    FormatName,
    RoundingMode,
    Saturation,
)
from scalewise.rounding import SATURATION_RULES

# Each transformation is a function; the package beside it has what else belongs to it.
PACKAGES = {
    "audit": "auditing",
    "autocast": "autocasting",
    "autoscale": "autoscaling",
    "emulate": "emulating",
    "scalify": "scalifying",
}


def in_python(code: str) -> str:
    """Returns the output of a fresh interpreter."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_every_public_name_is_there_and_no_other_is_shown():
    assert dir(sw) == sorted(sw.__all__)
    assert not [name for name in dir(sw) if name.startswith("_") and name != "__version__"]
    assert all(getattr(sw, name) is not None for name in sw.__all__)


def test_the_transformations_are_functions_in_whatever_order_packages_are_imported():
    code = """
import importlib, inspect, numpy as np, scalewise as sw
for name, package in {names}.items():
    imported = importlib.import_module("scalewise." + package)
    assert inspect.isfunction(getattr(sw, name)) and getattr(imported, name) is getattr(sw, name)
print(sw.auditing.Monitor.__name__, sw.emulate(lambda x: x + 1, "e2m1fn")(np.float32(1.4)))
"""
    assert in_python(code.replace("{names}", repr(PACKAGES))) == "Monitor 2.0"


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


def function(x):
    return x


test_a_name_of_another_kind_is_said_to_be_one = refused(
    (lambda: sw.emulate(function, "fp8"), "not a format; did you mean 'e4m3fn' or 'e5m2'"),
    (lambda: sw.emulate(function, "mxfp4"), "not a format; did you mean 'e2m1fn'"),
    (lambda: sw.literals(function, "c=bf16"), "literals: 'c=bf16' is a policy, not a format"),
    (lambda: sw.quantize(1.0, "fp8"), "quantize: 'fp8' is a recipe, not a format"),
    (lambda: sw.quantize(1.0, "mxfp8_e4"), "called 'mxfp8_e4'; did you mean 'mxfp8_e4m3'"),
    (lambda: sw.Products.short("fp8"), "'fp8' is a recipe, not a format"),
    (lambda: sw.cast(1.0, "fp8_blockwise"), "not a format; did you mean 'e4m3fn'"),
    (lambda: sw.autoscale(function, "e4m3fn"), "'e4m3fn' is a format, not a recipe"),
    (lambda: sw.autocast(function, "fp8"), "'fp8' is a recipe, no dtype to compute in"),
    (lambda: sw.audit(function, "fp17"), "audit: no policy, format or recipe is called"),
    (lambda: sw.training.step(function, optax.sgd(1.0), "e5m2"), "step: 'e5m2' is a format"),
)  # fmt: skip


def test_a_string_has_one_meaning():
    names = {kind: set(KINDS[kind].names()) for kind in KINDS}
    for kind, found in names.items():
        for name in found:
            assert resolve(name, kind, where="test") is KINDS[kind].names()[name]
    assert names["format"] & names["recipe"] == {"fp16", "bf16"}  # as _resolve says
    assert names["block format"] & names["recipe"] == {"mxfp4", "nvfp4"}


def test_types_of_arguments_list_what_there_is():
    assert set(get_args(RoundingMode)) == set(sw.formats.ROUNDINGS)
    names = {x for x in SATURATE if isinstance(x, str)} | set(SATURATION_RULES)
    assert set(get_args(get_args(Saturation)[1])) == names
    recipes, formats, blocks = (
        get_args(get_args(x)[0]) for x in (RecipeName, FormatName, BlockFormatName)
    )
    assert set(recipes) == set(sw.recipes.CATALOGUE)
    assert set(blocks) == set(BLOCK_FORMATS)
    assert {*CATALOGUE, *ALIASES} <= set(formats)
    assert {sw.format(name).name for name in formats} == set(CATALOGUE)


def test_every_format_and_recipe_has_its_name():
    for table, module in ((CATALOGUE, sw.formats), (BLOCK_FORMATS, sw.formats)):
        for name, fmt in table.items():
            assert getattr(module, name.upper()) is fmt
    assert "fp8" in sw.recipes.CATALOGUE
    for name, recipe in sw.recipes.CATALOGUE.items():
        assert getattr(sw.recipes, name) is recipe


def test_every_subcommand_is_registered():
    """A public function of ``cli/`` whose example begins with ``scalewise`` is a subcommand."""
    found = set()
    for path in Path(cli.__file__).parent.glob("_[a-z]*.py"):
        module = importlib.import_module(f"scalewise.cli.{path.stem}")
        functions = [x for x in vars(module).values() if inspect.isfunction(x)]
        own = [x for x in functions if x.__module__ == module.__name__ and x.__doc__]
        found |= {x.__name__ for x in own if f"\n        scalewise {x.__name__} " in x.__doc__}
    assert len(found) >= 9
    assert found <= {x.name for x in cli.app.registered_commands}


@pytest.mark.parametrize(("transformation", "options"), [
    (sw.autoscale, {"recipe": "fp16"}), (sw.autocast, {"policy": "bf16"}),
    (sw.emulate, {"fmt": "e4m3fn"}),
])  # fmt: skip
def test_a_transformation_is_a_decorator_too(transformation, options):
    def double(x):
        return x + x

    decorated = functools.partial(transformation, **options)(double)
    assert decorated.__name__ == "double"
    assert decorated(np.float32(1.5)) == transformation(double, **options)(np.float32(1.5)) == 3.0
    with pytest.raises(TypeError, match=transformation.__name__):
        transformation(None, **options)


@pytest.mark.parametrize("value", [*CATALOGUE.values(), *BLOCK_FORMATS.values(),
    sw.autocasting.policy("p=f32,c=bf16,o=f32"),
    sw.Policy("fp16", low=sw.autocasting.LOW | {"exp"}, full=sw.autocasting.FULL - {"exp"}),
    *sw.recipes.CATALOGUE.values(),
], ids=str)  # fmt: skip
def test_a_setting_is_shown_as_short_code_that_makes_it(value):
    modules = sw.formats, sw.autocasting, sw.autoscaling, sw.scaled, sw.scalifying
    names = dict(itertools.chain(*(vars(module).items() for module in modules)))
    assert eval(repr(value), names) == value


def test_a_step_is_shown_short():
    step = sw.training.step(function, optax.sgd(0.1))
    assert repr(step) == "<Step of function: init(model), then a call for each batch>"


def test_notebooks_show_results_as_text_or_in_a_frame():
    report = sw.audit(lambda x: jnp.sum(x * x), "fp16", trials=0)(jnp.full(64, 300.0))
    assert report._repr_html_().startswith("<iframe sandbox=")
    assert "300" in report._repr_html_()
    found = sw.explain(lambda w, x: x @ w, "fp8")(jnp.ones((32, 32)), jnp.ones((32, 32)))
    assert "dot_general" in found._repr_html_()
    assert repr(found).startswith("<Explanation of 2 values")


MAIN = [sw.autoscale, sw.audit, sw.autocast, sw.emulate, sw.cast, sw.round_to, sw.plan, sw.Recipe,
        sw.Format, sw.Monitor, sw.training.step]  # fmt: skip


@pytest.mark.parametrize("x", nightly(MAIN, but=["autoscale", "cast", "Recipe", "Format"]))
def test_examples_of_the_main_names_run_as_they_are_copied(x):
    (example,) = doctest.DocTestFinder(recurse=False).find(x, x.__name__, globs={})
    assert example.examples
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    with jax.numpy_dtype_promotion("standard"):
        assert doctest.DocTestRunner(optionflags=flags).run(example).failed == 0


@pytest.mark.parametrize(
    ("package", "name"),
    [("checkpoints", "load"), ("scaled", "matmul"), ("training", "step"), ("auditing", "record"),
     ("formats", "bits"), ("devices", "device"), ("ops", "l2_norm"),
     ("rounding", "encode"), ("testing", "assert_allclose")],
)  # fmt: skip
def test_the_help_of_a_package_lists_its_functions(package, name):
    module = importlib.import_module(f"scalewise.{package}")
    shown = pydoc.plain(pydoc.render_doc(module))
    functions = shown.partition("\nFUNCTIONS")[2]
    assert f"\n    {name}" in functions
    assert not any(n.startswith("_") for n in module.__all__)


@pytest.mark.parametrize("file", sorted(Path(sw.__file__).parent.glob("*/__init__.py")), ids=str)
def test_names_for_other_packages_stand_apart_from_those_of_the_reference(file):
    """A sorter of imports joins two blocks that only a comment parts."""
    public, found, _ = file.read_text().partition("# for other packages of scalewise")
    last = public.rstrip().splitlines()[-1]
    assert not found or last.startswith(("_DOCUMENTED = dir()", "__all__ = ", "]"))


@pytest.mark.parametrize("package", ["checkpoints", "training"])
def test_errors_of_functions_name_the_argument_before_the_commands_option(package):
    files = (Path(sw.__file__).parent / package).rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in texts if re.search(r"(?<!\()(?<!, )--[a-z]", text)]
