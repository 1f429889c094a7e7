"""Writes docs/gallery.md: the audit's first finding for each failure in examples/gallery.py.

Run as `python docs/gallery_page.py` from the root of the repository.
"""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from proofs.gallery import ALL, ASPECTS, Score, scored, totals  # noqa: E402

from examples import gallery  # noqa: E402
from scalewise.audit._report._terminal import alone, error  # noqa: E402

HEAD = """# Failures that people lost days over, and what the audit says

Written by `python docs/gallery_page.py`. `python -m proofs.gallery` checks that the audit finds
each marked line and a fix that at least halves the error, the relative error of the outputs against
float32, root mean square.
"""
SCORES = """
## Scores

The failures above, and those of models in examples/failures/. *Line* and *kind* say whether the
first finding is right; *fix*, for a model, whether its fix is one that an expert would choose and
leaves at most three times the error that the expert's leaves. The last columns hold the errors of
the program, with the audit's fixes, and with the expert's.

{totals}.

| program | arithmetic | line | kind | fix | error | with fixes | expert's |
|---|---|---|---|---|---|---|---|
"""


def section(name: str, case: gallery.Case, score: Score) -> str:
    """Returns the section of one case: its source, the first finding, and its fix."""
    assert score.report is not None
    worst = score.findings[0]
    call = case.call if case.call.__name__ != "<lambda>" else gallery.apply_update
    source = inspect.getsource(call).rstrip()
    before = error(worst.error_before, worst.non_finite_before)
    after = error(worst.error_after, worst.non_finite_after) + alone(worst)
    return (
        f"\n## {name}\n\n{case.reference}; in {score.report.low}.\n\n```python\n{source}\n```\n\n"
        f"**{worst.kind}** at line {worst.line}, `{worst.primitive}`, {worst.direction}: "
        f"{worst.evidence}.\n\nFix that was tried: {worst.fix}; error {before} → {after}.\n"
    )


def row(name: str, score: Score) -> str:
    """Returns a program's line of the table of scores."""
    marks = ["no" if aspect in score.problems else "yes" for aspect in ASPECTS]
    report, best = score.report, score.expert
    errors = (report.error, report.error_fixed) if report else ("audit failed", "")
    expert = error(best[1], best[0]) if best else ""
    return f"| {' | '.join(map(str, [name, str(ALL[name].low), *marks, *errors, expert]))} |\n"


def main() -> None:
    scores, found = scored()
    page = HEAD + "".join(section(n, case, scores[n]) for n, case in gallery.GALLERY.items())
    page += SCORES.format(totals=totals(scores, found))
    page += "".join(row(name, score) for name, score in scores.items())
    (ROOT / "docs" / "gallery.md").write_text(page)


if __name__ == "__main__":
    main()
