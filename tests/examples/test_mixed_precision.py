"""The tutorial on mixed precision: its code runs, and its figures are those that the code makes."""

import re

import pytest

from pages import DOCS, page_script

PAGE = "mixed_precision_page"


@pytest.mark.slow
def test_the_figures_are_made_by_the_code_of_the_page():
    for name, figure in page_script(PAGE).figures().items():
        again = f"run `python docs/{PAGE}.py`"
        assert (DOCS / "mixed_precision" / name).read_text() == figure, again


def test_every_figure_of_the_page_exists():
    page = (DOCS / "mixed_precision.md").read_text()
    shown = re.findall(r"\]\((mixed_precision/[a-z]+\.svg)\)", page)
    assert {DOCS / name for name in shown} == set((DOCS / "mixed_precision").glob("*.svg"))
