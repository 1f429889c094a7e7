"""`scalewise diff`: two saved audits compared."""

from pathlib import Path
from typing import Annotated

import typer

from ._refusal import refusal


def diff(
    before: Annotated[Path, typer.Argument(help="A report, .json")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Say which findings went and came between two audits, and where the error moved."""
    from scalewise.audit import diff as compare  # JAX takes a second to import

    with refusal(ValueError):
        compare(before, after).show()
