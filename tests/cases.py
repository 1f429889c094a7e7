"""Cases that are left to ``make nightly``, and tables of calls that are refused."""

from collections.abc import Callable, Collection, Iterable
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


def refused(*rows: tuple, error: Any = ValueError) -> Callable:
    """Returns a test that each call raises an error with a message.

    Args:
        rows: ``(call, message)``, or ``(call, error, message)`` for errors of its own.
        error: the others' type, or a tuple of types.
    """
    cases = [(call, *(() if own else (error,)), *own, message) for call, *own, message in rows]

    @pytest.mark.parametrize(("call", "error", "message"), cases)
    def test(call, error, message):
        with pytest.raises(error, match=message):
            call()

    return test
