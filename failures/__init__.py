"""A benchmark of numerical failures: programs that fail in low precision, and the truth of each.

`python -m failures score --tool NAME` scores a tool; README.md says how to add a tool or a program.
The programs and what is true of them are written down and measured before any tool sees them. A
hash of its name puts a program of the corpus into the half that is looked at, or into the half of
which only totals are printed.
"""

from .programs import Answer, Finding, Program, Widened

__all__ = ["Answer", "Finding", "Program", "Widened"]
