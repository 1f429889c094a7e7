"""Hundreds of audits in one process share their compiled code, which takes most of their time."""

import pytest

from scalewise.auditing._run import _session


@pytest.fixture(scope="package", autouse=True)
def shared_code():
    shared = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_session, "new_code", lambda: shared)
        yield
