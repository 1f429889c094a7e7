"""Audits a function: which operation on which line loses accuracy, why, and a tried fix."""

from .._public import own_names
from ._audit import audit as audit
from ._monitor import Monitor as Monitor
from ._readings import exponents as exponents
from ._readings import readings as readings
from ._record._compare import compare as compare
from ._record._record import record as record
from ._record._recording import load_recording as load_recording
from ._record._stability import stability as stability
from ._report._diff import diff as diff
from ._report._report import Report as Report
from ._search._findings import Finding as Finding
from ._search._literals import literals as literals

globals()["__all__"] = own_names(dir())  # help() lists them

# the classes of results, for annotations
from ._readings import Exponents as Exponents
from ._readings import Reading as Reading
from ._readings import WhatIf as WhatIf
from ._record._compare import ArrayDifference as ArrayDifference
from ._record._compare import LineDifference as LineDifference
from ._record._compare import RecordingComparison as RecordingComparison
from ._record._recording import RecordedArray as RecordedArray
from ._record._recording import Recording as Recording
from ._record._stability import LineStability as LineStability
from ._record._stability import Stability as Stability
from ._reduce._reduction import Reduction as Reduction
from ._report._diff import Difference as Difference
from ._run._equation_statistics import EquationStatistics as EquationStatistics
from ._run._outcome import OutputError as OutputError
from ._search._fixes import Fix as Fix
from ._search._literals import Literal as Literal
from ._sheet._sheet import LineShare as LineShare
from ._sheet._sheet import Share as Share
from ._sheet._sheet import Sheet as Sheet
from ._sheet._sheet import StageError as StageError

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from .._output import writable as writable
from ._file import arguments as arguments
from ._file import load_function as load_function
from ._file import user_errors as user_errors
from ._record._recording import recordable as recordable
