"""Packages that only some features need, and what to install where one is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

REPOSITORY = "git+https://github.com/scalewise/scalewise"  # another project has the name on PyPI


class MissingPackageError(ImportError):
    """Raised where a package of an extra isn't installed; the message says how to install it."""


def require(package: str, extra: str, feature: str) -> ModuleType:
    """Imports a package of one of scalewise's extras.

    Args:
        package: name of the module to import.
        extra: the extra that installs it, such as ``"train"``.
        feature: what needs it, the subject of the error's sentence.

    Raises:
        MissingPackageError: the package isn't installed.
    """
    with imported(package.partition(".")[0], feature, f'"scalewise[{extra}] @ {REPOSITORY}"'):
        return importlib.import_module(package)


@contextmanager
def imported(package: str, feature: str, distribution: str = "") -> Iterator[None]:
    """Imports of a package, within; it raises MissingPackageError if that isn't installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        message = f"{feature} needs {package}: pip install {distribution or package}"
        raise MissingPackageError(message, name=package) from None
