"""Checks that the audit finds each failure of examples/gallery.py at its marked line and fixes it.

`python -m proofs.gallery` takes some minutes; `tests/audit/test_gallery.py` checks five of them.
"""

import inspect
from pathlib import Path

import scalewise as sw
from examples import gallery


def marked(case: gallery.Case) -> list[int]:
    """Returns the lines marked ``# <- here`` in the function that the case calls."""
    function = case.call
    if function.__name__ == "<lambda>":
        function = gallery.apply_update
    source, start = inspect.getsourcelines(function)
    return [start + i for i, line in enumerate(source) if line.rstrip().endswith("# <- here")]


def check(name: str) -> str:
    """Audits one case and returns its first finding in a line.

    Raises:
        AssertionError: the first finding has another line or kind, or its fix doesn't help.
    """
    case = gallery.GALLERY[name]
    report = sw.audit(case.call, case.low, trials=10)(*case.arguments())
    assert report.findings, "nothing was found"
    worst = report.findings[0]
    lines = marked(case)
    assert lines, "no line is marked"
    assert worst.file is not None, "the finding has no line"
    assert Path(worst.file).name == "gallery.py", worst.file
    assert worst.line in lines, f"line {worst.line}, not {lines}"
    assert worst.kind in case.kinds, f"{worst.kind}, not {case.kinds}"
    assert worst.fix, "no fix helps"
    halved = worst.error_after <= 0.5 * worst.error_before
    fewer = worst.non_finite_after < worst.non_finite_before
    assert halved or fewer, "the fix doesn't halve the error"
    assert report.error_fixed <= report.error, "all fixes together increase the error"
    return f"{worst.kind} at line {worst.line}: {worst.fix}"


def main() -> None:
    for name in gallery.GALLERY:
        print(f"{name}: {check(name)}", flush=True)


if __name__ == "__main__":
    main()
