"""Audits a function: which operation on which line loses accuracy, why, and a tried fix."""

from typing import Any

from .._callable import make_callable
from ._audit import audit as audit
from ._deprecated import warn_renamed
from ._file import arguments as arguments
from ._file import load_function as load_function
from ._file import user_errors as user_errors
from ._monitor import Monitor as Monitor
from ._monitor import Reading as Reading
from ._monitor import readings as readings
from ._report._diff import Difference as Difference
from ._report._diff import diff as diff
from ._report._report import Report as Report
from ._report._report import writable as writable
from ._run._equation_statistics import EquationStatistics as EquationStatistics
from ._run._session import OutputError as OutputError
from ._search._findings import Finding as Finding
from ._search._literals import Literal as Literal
from ._search._literals import literals as literals
from ._tune import Tuning as Tuning
from ._tune import tune as tune

make_callable(__name__)
_RENAMED = {"Error": "OutputError", "Row": "EquationStatistics", "blamed": "user_errors"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", _RENAMED[name])
    return globals()[_RENAMED[name]]
