"""The pages of the gallery and of other tools agree with what was recorded; the tools are heard."""

import pytest
from examples.failures.clean import CLEAN
from proofs import gallery, scoreboard

from pages import DOCS, page_script

NANS, INFS, CHECKIFY, *_, INFS_OP_BY_OP = scoreboard.TOOLS


PAGES = {"gallery": "gallery", "scoreboard": "scoreboard", "plan": "plan_results"}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_agrees_with_the_records(name):
    text = page_script(f"{name}_page").page()
    command = f"run `PYTHONPATH=. python docs/{name}_page.py`"
    assert (DOCS / f"{PAGES[name]}.md").read_text() == text, command


def test_every_program_is_recorded():
    programs = {*gallery.ALL, *CLEAN}
    assert set(gallery.rows()) == programs | {*gallery.ACCUMULATORS}
    recorded = set(scoreboard.recorded())
    assert {(name, tool) for name in programs for tool in scoreboard.TOOLS} <= recorded


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("Adam's epsilon", {NANS: "nothing", INFS: "line", CHECKIFY: "line"}),
        ("A mask of -1e10", {NANS: "line", INFS: "nothing", INFS_OP_BY_OP: "line"}),
        ("256 + 1", dict.fromkeys(scoreboard.TOOLS, "nothing")),
        ("LayerNorm", dict.fromkeys((NANS, INFS, CHECKIFY), "nothing")),
    ],
)
@pytest.mark.thorough(keep=1)
def test_what_the_checks_of_jax_say(program, expected):
    case = {**gallery.ALL, **CLEAN}[program]
    rows = {row["tool"]: row for row in scoreboard.rows(case, list(expected))}
    assert {tool: row["verdict"] for tool, row in rows.items()} == expected
    recorded = {tool: scoreboard.recorded()[program, tool] for tool in expected}
    assert {tool: row["where"] for tool, row in rows.items()} == {
        tool: row["where"] for tool, row in recorded.items()
    }
