"""The text of a generated page: ``templates/PAGE.markdown``, in named parts.

A line ``<!-- part NAME -->`` begins a part; its text is what the page's script fills in and puts
between its tables. A part ends with a line break unless ``<!-- joined -->`` follows it.
"""

import re
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).parent / "templates"


def parts_of(page: str) -> SimpleNamespace:
    """Returns the parts of a page's template, as attributes."""
    text = (FOLDER / f"{page}.markdown").read_text(encoding="utf-8")
    _, *found = re.split(r"^<!-- part (\w+) -->\n", text, flags=re.MULTILINE)
    joined = (body.removesuffix("\n<!-- joined -->\n") for body in found[1::2])
    return SimpleNamespace(**dict(zip(found[::2], joined, strict=True)))
