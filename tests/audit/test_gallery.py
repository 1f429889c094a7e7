"""Real failures, each found at the marked line and fixed by what the audit suggests."""

import inspect
from pathlib import Path

import pytest

import scalewise as sw
from examples import gallery


def marked(case):
    """The lines that ``# <- here`` marks in the function that the case calls."""
    lines = Path(gallery.__file__).read_text().splitlines()
    function = case.call
    if function.__name__ == "<lambda>":
        function = gallery.apply_update
    source, start = inspect.getsourcelines(function)
    found = [start + i for i, line in enumerate(source) if line.rstrip().endswith("# <- here")]
    assert found
    assert all("# <- here" in lines[n - 1] for n in found)
    return found


@pytest.mark.parametrize("name", gallery.GALLERY)
def test_found_at_its_line_and_fixed(name):
    case = gallery.GALLERY[name]
    report = sw.audit(case.call, case.low, trials=10)(*case.arguments())
    assert report.findings
    worst = report.findings[0]
    assert Path(worst.file).name == "gallery.py"
    assert worst.line in marked(case)
    assert worst.kind in case.kinds
    assert worst.fix
    assert worst.error_after <= 0.5 * worst.error_before or worst.broken_after < worst.broken_before
    assert report.error_fixed <= report.error
