"""Texts of settings: the fields that differ from their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def changed_fields(
    settings: Any, *but: str, text: Callable[[object], str] = repr, **defaults: object
) -> list[str]:
    """Returns the fields of a dataclass that differ from the defaults, as arguments.

    Args:
        settings: an instance.
        but: fields that are left out.
        text: of a value.
        defaults: of fields, in place of those of the class.
    """
    fields = [f for f in dataclasses.fields(settings) if f.init and f.name not in but]
    values = [(f.name, getattr(settings, f.name), defaults.get(f.name, f.default)) for f in fields]
    return [
        f"{name}={text(value)}"
        for name, value, default in values
        if value is not default and value != default
    ]
