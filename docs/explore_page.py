"""Writes the catalogue of formats into ``docs/explore.html``; run it after a format has changed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from scalewise.formats import CATALOGUE

FILE = Path(__file__).parent / "explore.html"
WIDEST = 32  # bits: codes are numbers of JavaScript


def page() -> str:
    """Returns the page with the catalogue's formats."""
    formats = [dataclasses.asdict(f) for f in CATALOGUE.values() if f.bits <= WIDEST]
    lines = ",\n".join(json.dumps(f) for f in formats)
    block = f'<script type="application/json" id="catalogue">[\n{lines}\n]</script>'
    pattern = r'<script type="application/json" id="catalogue">.*?</script>'
    text = FILE.read_text(encoding="utf-8")
    return re.sub(pattern, lambda _: block, text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
