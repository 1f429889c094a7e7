"""Every failure of examples/gallery.py: found at its marked line, and mended by what is suggested.

`python -m proofs.gallery` takes some minutes; `tests/audit/test_gallery.py` runs a handful of them.
"""

import inspect
from pathlib import Path

import scalewise as sw
from examples import gallery


def marked(case: gallery.Case) -> list[int]:
    """The lines that ``# <- here`` marks in the function that the case calls."""
    function = case.call
    if function.__name__ == "<lambda>":
        function = gallery.apply_update
    source, start = inspect.getsourcelines(function)
    return [start + i for i, line in enumerate(source) if line.rstrip().endswith("# <- here")]


def check(name: str) -> str:
    """One case audited; what was found, in a line.

    Raises:
        AssertionError: it wasn't found at its line, under its name, or no change mended it.
    """
    case = gallery.GALLERY[name]
    report = sw.audit(case.call, case.low, trials=10)(*case.arguments())
    assert report.findings, "nothing was found"
    worst = report.findings[0]
    lines = marked(case)
    assert lines, "no line is marked"
    assert worst.file is not None, "no line is named"
    assert Path(worst.file).name == "gallery.py", worst.file
    assert worst.line in lines, f"line {worst.line}, not {lines}"
    assert worst.kind in case.kinds, f"{worst.kind}, not {case.kinds}"
    assert worst.fix, "no change mended it"
    halved = worst.error_after <= 0.5 * worst.error_before
    assert halved or worst.broken_after < worst.broken_before, "the change doesn't halve the error"
    assert report.error_fixed <= report.error, "all changes together make it worse"
    return f"{worst.kind} at line {worst.line}: {worst.fix}"


def main() -> None:
    for name in gallery.GALLERY:
        print(f"{name}: {check(name)}", flush=True)


if __name__ == "__main__":
    main()
