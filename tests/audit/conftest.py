"""Hundreds of audits in one process share their compiled code, which takes most of their time.

`test_memory.py` audits in a process of its own, where each releases its code as for a user.
"""

import pytest

from scalewise.auditing import _audit
from scalewise.auditing._run import _session


@pytest.fixture(scope="package", autouse=True)
def shared_code():
    shared = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_session, "new_code", lambda: shared)
        patch.setattr(_audit, "release", lambda: None)
        yield
