"""The README: its commands exist, its links work, its figures were measured."""

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from scalewise.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEMO = ROOT / "docs" / "demo"


def commands(program: str) -> list[list[str]]:
    """The indented lines that call the program, as lists of words, without comments."""
    lines = re.findall(rf"^    ({program} .*)$", README, re.MULTILINE)
    return [line.split("#")[0].split() for line in lines]


def figure(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)


def demo_table(summary: dict) -> list[str]:
    """The table of the demo, from the summary that it wrote."""
    heads = ("method", "final loss", "ratio", "non-finite steps", "state bytes / parameter")
    heads += ("step time, ratio", "trace + compile, ratio")
    rows = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for method in summary["methods"]:
        cells = (
            f"`{method['name']}`",
            figure(method["final_loss"], ".3f"),
            figure(method["final_loss_ratio"], ".4f"),
            str(method["non_finite_steps"]),
            figure(method["bytes_per_parameter"], ".2f"),
            figure(method["median_seconds_ratio"], ".2f"),
            figure(method["build_seconds_ratio"], ".2f"),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def test_its_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    called = commands("make")
    assert [words[1] for words in called] == ["demo", "test"]
    for _, target in called:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def test_its_calls_of_scalewise_parse():
    group = get_command(app)
    called = commands("scalewise")
    assert called
    for _, name, *arguments in called:
        command = group.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        command.make_context(name, arguments)  # raises on an option that isn't there


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_its_links_exist(target):
    assert (ROOT / target.partition("#")[0]).is_file()


def test_the_demos_figures_are_on_its_page():
    page = (ROOT / "docs" / "results" / "training.md").read_text()
    summary = json.loads((DEMO / "summary.json").read_text())
    assert "\n".join(demo_table(summary)) in page
    env = summary["environment"]
    assert f"{env['date'][:10]}, JAX {env['JAX']}, Python {env['Python']}" in page
    assert f"{summary['steps_made']} steps" in page
    plain = next(m for m in summary["methods"] if m["name"] == "fp16-plain")
    assert f"step {plain['first_non_finite']['step']}" in page
    assert plain["first_non_finite"]["why"].split(";")[0] in page.replace("\n", " ")


def test_the_demo_meets_its_targets():
    summary = json.loads((DEMO / "summary.json").read_text())
    by_name = {m["name"]: m for m in summary["methods"]}
    for name in ("fp16", "fp8", "fp8-narrow-state"):
        assert by_name[name]["non_finite_steps"] == 0
        assert abs(by_name[name]["final_loss_ratio"] - 1) <= 0.01
    assert by_name["fp8-narrow-state"]["bytes_per_parameter"] <= 5.1


def test_it_has_at_most_600_words():
    assert len(README.split()) <= 600
