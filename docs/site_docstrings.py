"""A Griffe extension: docstrings in Sphinx's notation, as Markdown shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Reads ``Example:`` as ``Examples:``, whose doctests are code, and roles as plain code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r":[a-z]+:(`[^`]+`)", r"\1", text)
