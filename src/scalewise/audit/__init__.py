"""The audit: which operation on which line, why, and a fix that was tried."""

from ._audit import audit as audit
from ._findings import Finding as Finding
from ._literals import Literal as Literal
from ._literals import literals as literals
from ._report import Report as Report
from ._rows import Row as Row
from ._session import Error as Error
