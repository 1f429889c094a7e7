"""The generated page of the docs is the catalogue's."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("formats_page", DOCS / "formats_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    again = "run `python docs/formats_page.py`"
    assert (DOCS / "formats.md").read_text() == module.page(), again
    assert (DOCS / "formats.svg").read_text() == module.picture(), again
