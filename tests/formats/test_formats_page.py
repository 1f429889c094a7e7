"""docs/formats.md and its picture are those that the catalogue generates."""

from pages import DOCS, page_script


def test_the_page_is_up_to_date():
    module, again = page_script("formats_page"), "run `python docs/formats_page.py`"
    assert (DOCS / "formats.md").read_text() == module.page(), again
    assert (DOCS / "formats.svg").read_text() == module.picture(), again
