"""The public names: the top level's, as its stub lists them, and those of each package."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def _top_level() -> dict[str, str]:
    """Returns each name of the top level and the subpackage that defines it."""
    stub = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or alias.name for node in imports for alias in node.names}


MODULES = _top_level()


def own_names(names: Iterable[str]) -> list[str]:
    """Returns the public names of a package, without those of the top level.

    ``help`` and the reference list each name at one place. Imports below the call are not public.
    """
    own = {"own_names", *MODULES}
    return [name for name in names if not name.startswith("_") and name not in own]
