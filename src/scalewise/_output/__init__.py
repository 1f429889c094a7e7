"""Output that cannot destroy anything: atomic files, folder locks, terminal streams, HTML pages.

All writers of scalewise go through this package. It imports nothing from the other layers.
"""

from typing import Any

from ._lock import FolderInUseError as FolderInUseError
from ._lock import lock as lock
from ._page import visible as visible
from ._stream import print_table as print_table
from ._stream import printable as printable
from ._stream import tolerant as tolerant
from ._write import TargetError as TargetError
from ._write import append as append
from ._write import check_source as check_source
from ._write import check_target as check_target
from ._write import remove_temporaries as remove_temporaries
from ._write import replacing as replacing
from ._write import rescue_folder as rescue_folder
from ._write import sentence as sentence


def page_environment(package: str) -> Any:
    """The templates beside a package's modules: escaped, strict, with visible control characters.

    Returns:
        An environment whose ``rendered(name, **values)`` is a page with a Content-Security-Policy.
    """
    from ._templates import Pages  # imports jinja2, which takes 0.1 s: not for --help

    return Pages(package)
