"""Replays the tasks of docs/contributing.md: each on a copy, and again with one file left out.

A task's patch lists for each file the text without it and the text with it. With the whole patch
the tests named must pass; without one file at least one of them must fail.

    python -m proofs.walks [task ...]
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]


Pair: TypeAlias = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Walk:
    """One task.

    Attributes:
        task: the heading in docs/contributing.md.
        patch: for each file, pairs of the texts without and with the change. A change that the
            repository has already is taken out to leave its file out.
        tests: that fail if a file is left out.
        then: scripts that write pages, run after the change.
    """

    task: str
    patch: Mapping[str, Sequence[Pair]]
    tests: tuple[str, ...]
    then: tuple[str, ...] = ()


def after(anchor: str, added: str) -> Pair:
    """Returns the texts without and with lines behind an anchor."""
    return anchor, anchor + added


def before(anchor: str, added: str) -> Pair:
    """Returns the texts without and with lines before an anchor."""
    return anchor, added + anchor


NEAREST_ZERO = """    Rounding(
        "nearest_zero",
        goes_up=lambda rest, odd, negative: rest.above_half,
        addend=lambda dropped, odd, negative, noise: dropped >> 1,
        overflows=(True, True),
        max_error=0.5,
        underflows_to_zero=True,
        random=False,
    ),
"""
MEDIAN = '''@checked
@dataclasses.dataclass(frozen=True)
class Median(Scaling):
    """Scales by eight times the median magnitude; larger elements saturate."""

    name = "median"

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        middle = jnp.median(jnp.abs(x), axis=tuple(axes), keepdims=True)
        largest = amax(x, axes, True)
        magnitude = jnp.where(middle == 0, largest, jnp.minimum(largest, 8 * middle))
        return to_top(_kept(magnitude, axes, keepdims), fmt, True)


'''
E2M4 = 'E2M4 = Format("e2m4", 2, 4, infinities=False, nan="none")\n'
LISTED = "E2M3FN, E3M2FN, E2M1FN,", "E2M3FN, E2M4, E3M2FN, E2M1FN,"
NAMED = '"e2m3fn", "e3m2fn",', '"e2m3fn", "e2m4", "e3m2fn",'
ERF_INV = "fallback range elementwise nan=beyond_1 pole=one: erf_inv\n"
CBRT = "power range elementwise stable costly: cbrt\n"
WALKS = (
    Walk(
        "Add a rounding mode",
        {
            "src/scalewise/formats/_roundings.py": [
                before('    Rounding(\n        "toward_zero",', NEAREST_ZERO)
            ],
            "proofs/oracle.py": [
                after('    "nearest_away": False,\n', '    "nearest_zero": False,\n'),
                after(
                    '"nearest_away": (middle, always),\n',
                    '        "nearest_zero": (middle, never),\n',
                ),
            ],
            "src/scalewise/formats/_catalogue.py": [after('"nearest_away", ', '"nearest_zero", ')],
        },
        ("tests/formats/test_roundings.py", "tests/test_public.py"),
    ),
    Walk(
        "Add a format",
        {
            "src/scalewise/formats/_catalogue.py": [
                before("# Unsigned variants,", E2M4),
                LISTED,
                NAMED,
            ],
            "src/scalewise/formats/__init__.py": [
                after(
                    "from ._catalogue import E2M3FN as E2M3FN\n",
                    "from ._catalogue import E2M4 as E2M4\n",
                )
            ],
        },
        (
            "tests/examples/test_pages.py::test_a_generated_page_is_what_its_script_writes[formats]",
            "tests/test_public.py",
        ),
        then=("docs/formats_page.py",),
    ),
    Walk(
        "Add a scaling strategy",
        {
            "src/scalewise/scaled/_scaling.py": [
                before(
                    "@checked\n@dataclasses.dataclass(frozen=True)\nclass Unit(Scaling):", MEDIAN
                )
            ],
            "src/scalewise/scaled/__init__.py": [
                after(
                    "from ._scaling import Fixed as Fixed\n",
                    "from ._scaling import Median as Median\n",
                )
            ],
            "src/scalewise/__init__.pyi": [
                after(
                    "from .scaled import KVCache as KVCache\n",
                    "from .scaled import Median as Median\n",
                )
            ],
        },
        ("tests/scaled/test_scaling.py", "tests/test_public.py"),
    ),
    Walk(
        "Add a rule for a primitive",
        {
            "src/scalewise/primitives/_table.py": [("", CBRT)],
            "src/scalewise/scalifying/_rules.py": [("", '    "cbrt": root(3),\n')],
            "tests/primitives.py": [("", '"cbrt": (lax.cbrt, (X,)), ')],
        },
        (
            "tests/test_primitives.py",
            "tests/autoscale/test_coverage.py::test_no_primitive_is_missing",
            "tests/autoscale/test_coverage.py::test_every_public_primitive_has_a_row",
        ),
    ),
    Walk(
        "Add an operation on scaled arrays",
        {
            "src/scalewise/scaled/_rules.py": [("", '    "rsqrt": INVERSE_ROOT,\n')],
            "docs/scalify_page.py": [("", '    "rsqrt": "1 / sqrt(A), n = 2",\n')],
        },
        ("tests/scaled/test_operations.py",),
    ),
    Walk(
        "Add a recipe",
        {
            "src/scalewise/autoscaling/recipes.py": [
                before(
                    "CATALOGUE: ",
                    "fp8_e5m2 = Recipe(Products.short(E5M2, E5M2))\n",
                )
            ],
            "src/scalewise/autoscaling/_recipe.py": [
                ('"fp16", "bf16", ', '"fp16", "bf16", "fp8_e5m2", ')
            ],
        },
        ("tests/test_public.py", "tests/cli/test_compare.py"),
    ),
    Walk(
        "Add a subcommand",
        {"src/scalewise/cli/__init__.py": [("", "plan, ")]},
        ("tests/test_public.py::test_every_subcommand_is_registered",),
    ),
    Walk(
        "Support a new release of JAX",
        {"src/scalewise/primitives/_table.py": [("", ERF_INV)]},
        ("tests/autoscale/test_coverage.py::test_every_public_primitive_has_a_row",),
    ),
)


def main(names: list[str]) -> int:
    """Replays the tasks and prints which tests failed without each file."""
    bad = 0
    for walk in WALKS:
        if names and not any(name in walk.task for name in names):
            continue
        print(walk.task)
        for left_out, failed in replay(walk):
            right = bool(failed) == (left_out is not None)
            bad += not right
            shown = ", ".join(sorted(failed)) or "all pass"
            what = f"without {left_out}" if left_out else "whole"
            print(f"  {what}: {shown}{'' if right else '  WRONG'}", flush=True)
    return 1 if bad else 0


def replay(walk: Walk) -> list[tuple[str | None, set[str]]]:
    """Returns for each file left out, and for none, the names of the tests that fail.

    A task of one file has no such row, if that file is as it was without the change.
    """
    results: list[tuple[str | None, set[str]]] = []
    for left_out in (None, *walk.patch):
        with tempfile.TemporaryDirectory() as name:
            folder, differs = Path(name), False
            copy_of_repository(folder)
            for file, pairs in walk.patch.items():
                original = text = (folder / file).read_text(encoding="utf-8")
                for pair in pairs:
                    text = changed(text, pair, file != left_out, file)
                (folder / file).write_text(text, encoding="utf-8")
                differs |= text != original
            if left_out is None or differs:
                results.append((left_out, failures(folder, walk)))
    return results


def copy_of_repository(folder: Path) -> None:
    """Copies the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for file in filter(None, listed.stdout.split("\0")):
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, folder / file)


def changed(text: str, pair: Pair, wanted: bool, file: str) -> str:
    """Returns a text with or without a change, whichever it has now."""
    without, with_it = pair
    if with_it in text:
        return text if wanted else text.replace(with_it, without, 1)
    if without and without in text:
        return text.replace(without, with_it, 1) if wanted else text
    raise SystemExit(f"{file} has neither text of its walk: bring proofs/walks.py up to date")


def failures(folder: Path, walk: Walk) -> set[str]:
    """Returns the names of the walk's tests that fail in a copy."""
    environment = os.environ | {
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for script in walk.then:
        subprocess.run(
            [sys.executable, script],
            cwd=folder,
            env=environment | {"PYTHONPATH": f"{folder / 'src'}:{folder}"},
            capture_output=True,
            check=False,
        )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    run = subprocess.run(
        [*command, *walk.tests], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if run.returncode not in (0, 1, 2, 4):
        raise SystemExit(f"{walk.task}: pytest ended with {run.returncode}:\n{run.stdout[-2000:]}")
    found = set(re.findall(r"^(?:FAILED|ERROR) \S*?::(\w+)", run.stdout, re.M))
    return found or ({"collection"} if run.returncode else set())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
