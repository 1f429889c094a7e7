"""`scalewise diff`: compares two saved audits."""

from pathlib import Path
from typing import Annotated

import typer

from ._refusal import refusal


def diff(
    before: Annotated[Path, typer.Argument(help="A report, .json")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Show findings that are gone, new or moved between two audits, and the errors."""
    from scalewise.audit import diff as compare  # JAX takes a second to import

    with refusal(ValueError):
        compare(before, after).show()
