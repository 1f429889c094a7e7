"""Writes docs/gallery.md: the audit's first finding for each failure in examples/gallery.py.

Run as `python docs/gallery_page.py` from the root of the repository.
"""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import scalewise as sw  # noqa: E402
from examples import gallery  # noqa: E402
from scalewise.audit._report._terminal import alone, error  # noqa: E402

HEAD = """# Failures that people lost days over, and what the audit says

Written by `python docs/gallery_page.py`. `python -m proofs.gallery` checks that the audit finds
each marked line and a fix that at least halves the error, the relative error of the outputs against
float32, root mean square.
"""


def section(name: str, case: gallery.Case) -> str:
    """Returns the section of one case: its source, the first finding, and its fix."""
    report = sw.audit(case.call, case.low, trials=10)(*case.arguments())
    worst = report.findings[0]
    call = case.call if case.call.__name__ != "<lambda>" else gallery.apply_update
    source = inspect.getsource(call).rstrip()
    before = error(worst.error_before, worst.non_finite_before)
    after = error(worst.error_after, worst.non_finite_after) + alone(worst)
    return (
        f"\n## {name}\n\n{case.reference}; in {report.low}.\n\n```python\n{source}\n```\n\n"
        f"**{worst.kind}** at line {worst.line}, `{worst.primitive}`, {worst.direction}: "
        f"{worst.evidence}.\n\nFix that was tried: {worst.fix}; error {before} → {after}.\n"
    )


def main() -> None:
    sections = [section(name, case) for name, case in gallery.GALLERY.items()]
    (ROOT / "docs" / "gallery.md").write_text(HEAD + "".join(sections))


if __name__ == "__main__":
    main()
