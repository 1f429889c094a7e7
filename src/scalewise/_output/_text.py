"""Terminal text that shows control characters."""

from __future__ import annotations

from typing import Any

import rich.text

from ._page import visible


class Text(rich.text.Text):
    """rich's text, with control characters, also bidirectional ones, as escapes.

    Source lines, paths and names are printed as they are in a program, which may come from others.
    """

    def __init__(self, text: str = "", *arguments: Any, **options: Any):
        super().__init__(visible(text), *arguments, **options)

    def append(self, text: Any, *arguments: Any, **options: Any) -> Text:
        """Adds a string, shown likewise, or another text."""
        super().append(visible(text) if isinstance(text, str) else text, *arguments, **options)
        return self
