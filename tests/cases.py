"""Parameters whose cases are left to ``make nightly``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(values: Iterable[Any], but: Collection[Any] = ()) -> list:
    """Returns the values as parameters marked ``slow``, all but some that ``make test`` runs.

    Those in ``but`` are values, or names of functions, formats and rounding modes. A tuple has the
    values of several arguments.
    """
    found = []
    for value in values:
        name = getattr(value, "__name__", None) or getattr(value, "name", None)
        kept = value in but or (name is not None and name in but)
        given = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*given, id=name, marks=() if kept else pytest.mark.slow))
    kept = sum(not parameter.marks for parameter in found)
    assert kept == len(but), f"{kept} of the {len(but)} values in {but} are there"
    return found
