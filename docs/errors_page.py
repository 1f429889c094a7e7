"""Writes ``docs/reference/errors.md``: each error class, and common messages as they are raised.

Each message is that of a call made here, so that the page can't say what the code doesn't.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from parts import parts_of

import scalewise as sw
from scalewise import training

HERE = Path(__file__).parent
PARTS = parts_of("errors")
SOURCE = HERE.parent / "src" / "scalewise"

PUBLIC = {  # the classes that users may want to catch, and where they are found
    "UnreadableError": "scalewise.checkpoints",
    "InputError": "",
    "TargetError": "",
    "MissingPackageError": "",
    "ParameterError": "",
    "ExportError": "scalewise.torch",
    "MissingRuleError": "scalewise.torch",
    "DerivativeError": "scalewise.torch",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that fails or warns, why, and what to do."""

    title: str
    call: Callable[[], Any]
    cause: str
    remedy: str


def _keep() -> None:
    recipe = dataclasses.replace(sw.recipes.fp8, keep={"haed": "bf16"})
    sw.autoscale(lambda x: x @ x, recipe)(jnp.ones((8, 8)))


def _format() -> None:
    sw.round_to(jnp.ones(3), "e4m3n")


def _recipe_for_format() -> None:
    sw.emulate(jnp.tanh, "fp8")(jnp.ones(3))


def _no_recipe() -> None:
    sw.autoscale(jnp.tanh, "fp9")(jnp.ones(3))


def _bad_format() -> None:
    sw.Format("e12m3", exponent_bits=12, mantissa_bits=3)


def _no_history() -> None:
    f = sw.autoscale(lambda x: x @ x, "fp8_delayed")
    f.step({}, jnp.ones((8, 8)))


def _key() -> None:
    sw.autoscale(lambda x: x @ x, "nvfp4", keyed=True)(jnp.ones((8, 8)))


def _integers() -> None:
    step = training.step(lambda p, x: jnp.sum(p["w"] * x), optax.sgd(0.1), "p=f32,c=f16,o=f32")
    step.init({"w": jnp.ones(3), "count": jnp.arange(3)})


def _policy() -> None:
    sw.autocast(jnp.tanh, "c=fp17")(jnp.ones(3))


def _lost_update() -> None:
    class Box:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_with_keys(
        Box,
        lambda b: (((jax.tree_util.GetAttrKey("x"), b.x),), None),
        lambda _, c: Box(*c),
    )

    def step(box):
        box.x = box.x @ box.x

    sw.autoscale(step, "fp8")(Box(jnp.ones((8, 8))))


def _units() -> None:
    recipe = dataclasses.replace(sw.recipes.mxfp4_forward, device="h100", narrow="always")
    jax.jit(sw.autoscale(lambda x: x @ x, recipe)).lower(jnp.ones((64, 64)))


CASES = (
    Case("A name of a format is wrong", _format, "a misspelt name", "take one of those listed, or "
         "pass a `sw.Format`; `scalewise formats` prints them"),
    Case("A recipe where a format is expected", _recipe_for_format, "`emulate`, `round_to` and "
         "casts take formats: a recipe has several", "take one of the recipe's formats; "
         "`sw.audit(f, \"fp8\")` and `sw.autoscale` take recipes"),
    Case("A name of a recipe is wrong", _no_recipe, "a misspelt name", "`scalewise recipes` prints "
         "all names"),
    Case("A policy is wrong", _policy, "a dtype that the policy's string names doesn't exist",
         "see [choose dtypes by operation](../guides/autocast.md)"),
    Case("A format can't exist", _bad_format, "a field out of range, or codes that contradict each "
         "other", "the message says which field and what is accepted"),
    Case("`keep` names nothing", _keep, "a misspelt scope; or the program has no such scope: Flax "
         "NNX and Equinox don't name their modules", "take one of the scopes that are listed, or "
         "put `with jax.named_scope(\"head\"):` around the operations"),
    Case("Delayed scaling without its history", _no_history, "`step` was called with something "
         "else as its first argument", "`history = f.init(*args)` makes the first one"),
    Case("A key is missing", _key, "`keyed=True` makes a JAX key the first argument", "call it "
         "with `jax.random.key(0)` first, and another key in each step"),
    Case("Integers among the parameters", _integers, "an integer array can't be trained", "keep "
         "counters and indices outside of the parameters"),
    Case("An update that would be lost", _lost_update, "the function changes an object of its "
         "arguments in place and gets a copy, as under `jax.jit`", "return the object"),
)  # fmt: skip
WARNINGS = (
    Case("A device without units", _units, "the named device can't multiply these formats",
         "nothing, if 16-bit products are fine; else another recipe; `scalewise formats "
         "--device h100` lists what the device multiplies"),
)  # fmt: skip


def classes() -> list[str]:
    """Returns a row for each error class of the package, from its source."""
    rows = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in PUBLIC:
                where = PUBLIC[node.name]
                name = f"`{where}.{node.name}`" if where else f"`{node.name}`"
                first = (ast.get_docstring(node) or "").split("\n")[0]
                rows.append(f"| {name} | `{ast.unparse(node.bases[0])}` | {first} |")
    return sorted(rows)


def message(case: Case) -> str:
    """Returns the class and text of the exception that a case raises, or of its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            case.call()
        except Exception as error:
            return f"{type(error).__name__}: {_anonymous(str(error))}"
    raise AssertionError(f"{case.title}: nothing was raised")


def _anonymous(text: str) -> str:
    """Returns a message without the lines of this file and temporary names, which change."""
    text = re.sub(r"\S*errors_page\.py:\d+ \([^)]*\)", "train.py:12 (f)", text)
    return text


def section(case: Case) -> str:
    body = inspect.getsource(case.call).split("\n", 1)[1]
    code = re.sub(r"^(import|from) .*\n+", "", textwrap.dedent(body), flags=re.M).strip()
    code = re.sub(r"\n\n(?=\S)", "\n\n\n", code)  # as ruff does
    said = "\n".join(textwrap.wrap(message(case), 100, break_on_hyphens=False))
    return (
        f"\n### {case.title}\n\n```py\n{code}\n```\n\n```text\n{said}\n```\n\n"
        f"*Cause*: {case.cause}.\n\n*Remedy*: {case.remedy}.\n"
    )


def page() -> str:
    """Returns the page as Markdown."""
    parts = [PARTS.HEAD, "\n".join(classes()), "\n\n"]
    parts.append(PARTS.OTHERS)
    parts += map(section, CASES)
    parts.append("\n## Warnings\n\nPython shows a warning of the same text once.\n")
    parts += map(section, WARNINGS)
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "reference").mkdir(exist_ok=True)
    (HERE / "reference" / "errors.md").write_text(page(), encoding="utf-8")
