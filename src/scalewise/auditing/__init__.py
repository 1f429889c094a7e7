"""Audits a function: which operation on which line loses accuracy, why, and a tried fix."""

from ._audit import audit as audit
from ._compare._compare import compare as compare
from ._monitor import Monitor as Monitor
from ._readings import exponents as exponents
from ._readings import readings as readings
from ._record._record import record as record
from ._record._recording import load_recording as load_recording
from ._report._report import Report as Report
from ._search._findings import Finding as Finding
from ._search._literals import literals as literals

__all__ = ["compare", "exponents", "load_recording", "readings", "record"]

# the classes of results, for annotations
from ._compare._compare import Comparison as Comparison
from ._compare._compare import Difference as Difference
from ._compare._explain import Cause as Cause
from ._compare._gap import Gap as Gap
from ._readings import Exponents as Exponents
from ._readings import Reading as Reading
from ._record._recording import RecordedArray as RecordedArray
from ._record._recording import Recording as Recording
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
from ._compare._gap import kl as kl
from ._compare._values import Side as Side
from ._compare._values import side_of as side_of
from ._file import arguments as arguments
from ._file import as_arguments as as_arguments
from ._file import inputs as inputs
from ._file import load_function as load_function
from ._file import made_by as made_by
from ._file import name_of as name_of
from ._file import user_errors as user_errors
from ._record._recording import recordable as recordable
from ._report._edits import spliced as spliced
from ._report._edits import statement as statement
from ._run._dataflow import Origins as Origins
from ._run._dataflow import Walk as Walk
from ._run._equation_statistics import display_name as display_name
from ._search._apply import FormatChoice as FormatChoice
from ._search._fixes import Edit as Edit
from ._tape._interpretations import FP32_MAX as FP32_MAX
from ._tape._interpretations import TableEmulation as TableEmulation
