"""Runs the Python of a page of the docs, and writes what each block prints below it.

``python docs/outputs.py [page ...]`` writes the outputs of the given pages, by default of the
tutorials: a block of ``text`` behind each block of ``python`` that prints. The tests run the same
code and compare what is printed with what the page says.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
RELATIVE, ABSOLUTE = 0.1, 0.02  # by which numbers may differ from one machine to another


@dataclass(frozen=True)
class Ran:
    """A block of code, the output that the page has below it, and what it printed."""

    line: int
    code: str
    expected: str | None
    printed: str


def run(page: Path) -> Iterator[Ran]:
    """Runs the blocks of a page one after the other, with one set of variables.

    Lines are numbered as in the page, so that a traceback or a finding of the audit names them.
    """
    text = page.read_text(encoding="utf-8")
    variables: dict[str, Any] = {"__name__": "page"}
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        code = compile("\n" * (line - 1) + found[1], str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, variables)
        yield Ran(line, found[1], found[2], out.getvalue())


def agrees(expected: str, printed: str) -> bool:
    """Returns whether two outputs have the same words, and numbers that are nearly the same."""
    a, b = (re.sub(r"#+|\s+", " ", text).strip() for text in (expected, printed))
    if NUMBER.sub("0", a) != NUMBER.sub("0", b):
        return False
    pairs = zip(map(float, NUMBER.findall(a)), map(float, NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= max(ABSOLUTE, RELATIVE * abs(x)) for x, y in pairs)


def with_outputs(page: Path) -> str:
    """Returns the text of a page with the outputs of its blocks as they are now."""
    ran = run(page)

    def block(found: re.Match[str]) -> str:
        printed = "\n".join(line.rstrip() for line in next(ran).printed.rstrip().splitlines())
        code = f"```python\n{found[1]}```\n"
        return f"{code}\n```text\n{printed}\n```\n" if printed else code

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def main(pages: list[Path]) -> None:
    for page in pages or sorted((HERE / "tutorials").glob("*.md")):
        text = with_outputs(page)
        page.write_text(text, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
