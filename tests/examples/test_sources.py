"""The list of the sources' items: names, sections and tests that it refers to exist."""

import pytest

from pages import page_script

MODULE = page_script("sources_page")
ITEMS = [(source, item) for source, items in MODULE.SOURCES.items() for item in items]


@pytest.mark.parametrize(("source", "item"), ITEMS, ids=lambda x: getattr(x, "what", ""))
def test_what_an_item_names_exists(source, item):
    assert MODULE.missing(item) == []


def test_a_name_a_section_or_a_test_that_is_missing_is_found():
    names, section = "scaled.matmull, ops.sum, cast(saturated=)", "casts.md#e9m0"
    wrong = MODULE.Item("none", names, section, "ops/test_norms.py::test_x")
    assert MODULE.missing(wrong) == [
        "scaled.matmull", "cast(saturated=)", "casts.md#e9m0", "ops/test_norms.py::test_x",
    ]  # fmt: skip
