"""Output: atomic files, terminal streams, HTML pages.

All files that scalewise writes go through this package. It imports nothing from other packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._page import framed as framed
from ._page import visible as visible
from ._place import place as place
from ._place import place_in_library as place_in_library
from ._place import place_of as place_of
from ._progress import Tell as Tell
from ._progress import progress as progress
from ._saved import Rows as Rows
from ._saved import Saved as Saved
from ._saved import Tabular as Tabular
from ._saved import as_csv as as_csv
from ._saved import plain as plain
from ._saved import tables_page as tables_page
from ._saved import writable as writable
from ._stream import Printed as Printed
from ._stream import counted as counted
from ._stream import one_output as one_output
from ._stream import print_rows as print_rows
from ._write import PREFIX as PREFIX
from ._write import TargetError as TargetError
from ._write import append as append
from ._write import check_source as check_source
from ._write import check_target as check_target
from ._write import check_writable as check_writable
from ._write import replacing as replacing
from ._write import sentence as sentence

if TYPE_CHECKING:
    from ._templates import Pages
    from ._text import Text as Text


def __getattr__(name: str) -> object:
    """Imports ``Text`` when it is first read: arrays and transformations don't need rich."""
    if name != "Text":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._text import Text

    return Text


def page_environment(package: str) -> Pages:
    """Returns the Jinja environment of the templates beside a package's modules."""
    from ._templates import Pages  # imports jinja2, which takes 0.1 s: not for --help

    return Pages(package)
