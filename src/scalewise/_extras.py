"""Packages that only some features need, and what to install where one is missing."""

from __future__ import annotations

import importlib
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
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        if error.name != name:
            raise
        message = f'{feature} needs {name}: pip install "scalewise[{extra}] @ {REPOSITORY}"'
        raise MissingPackageError(message, name=name) from None
