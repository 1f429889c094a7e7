"""Checks the prose of docs, docstrings, comments and messages against the project's style.

``python docs/prose.py [file ...]`` lists what it finds, by default in the whole repository, and
ends with 1 if that isn't nothing. Code is left out: fenced and indented blocks, inline code,
doctests.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "src", "tests", "docs", "proofs", "failures", "experiments", "benchmarks", "examples"
)  # fmt: skip
DOCTEST = re.compile(r"^\s*>>>.*(?:\n(?!\s*$).*)*", re.MULTILINE)
COMMENT = re.compile(r"(?:^\s*|  )# (.*)$")
LONGEST = 60  # words in a sentence
LONGEST_PARAGRAPH = 90  # words, in Markdown
LISTS = ("references.md",)  # whose long items are lists of casts


@dataclass(frozen=True)
class Rule:
    """A pattern that prose must not have, and what to write.

    Attributes:
        pattern: searched in each paragraph, where code is ``X``.
        advice: what to write.
        headings: whether it is for headings too.
    """

    pattern: re.Pattern[str]
    advice: str
    headings: bool = True


def words(*names: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(names)})\b", re.IGNORECASE)


RULES = (
    Rule(words("low lane", "shadow run", "the shadow"), "low-precision run, reference run"),
    Rule(words("at rest", "awake", "wakes?", "woken"), "stored, loaded"),
    Rule(words("marred"), "tainted or non-finite"),
    Rule(words("mended", "in vain"), "fixed, failed"),
    Rule(words("heeds?", "heeded"), "says what is checked"),
    Rule(words("leaves? room", "of room", "lanes?", "ledgers?"), "a margin; run, accumulator"),
    Rule(words("comes of it", "also here", "helps less"), "results, more, worse"),
    Rule(re.compile(r"(?<!there )\b(?:is|are) none\b(?! of)"), "what there is instead"),
    Rule(words("by the dozen", "this morning", "nowadays"), "a number, a date"),
    Rule(words("lost days over", "for free", "under the hood"), "plain words"),
    Rule(re.compile(r"\baccepted: "), "expected one of"),
    Rule(words("utili[sz]e[sd]?", "leverages?", "leveraging"), "use"),
    Rule(words("simply", "obviously", "of course", "trivially"), "leave it out"),
    Rule(words("in order to"), "to"),
    Rule(words("a lot of", "lots of"), "many, or the number"),
    Rule(re.compile(r"\b(?:e\.?g|i\.?e)\. "), "for example, that is"),
    Rule(words("whilst", "amongst"), "while, among"),
    Rule(words("today", "currently", "at the moment", "recently"), "a date or a version"),
    Rule(re.compile(r"\b([a-z]{2,}) \1\b(?!-)"), "one of the two words"),
    Rule(
        re.compile(r"(?:^|[.!:] )What (?!if)[a-z][^?.:]*\.(?: |$)"),
        "a sentence with a concrete subject, not 'What ... is ...'",
        headings=False,
    ),
    Rule(re.compile(r"\w ,|\( (?=\w)|(?<!\.)\.\. "), "no space or dot there"),
)


@dataclass(frozen=True)
class Paragraph:
    """Prose of a file, with the number of its first line."""

    line: int
    text: str
    heading: bool = False


def markdown(text: str, first: int = 1) -> Iterator[Paragraph]:
    """Yields the paragraphs, list items, cells of tables and headings of a text in Markdown."""
    fence: str | None = None
    lines: list[str] = []
    start = first

    def done() -> Iterator[Paragraph]:
        if lines:
            yield Paragraph(start, plain(" ".join(lines)))
            lines.clear()

    for number, line in enumerate(text.splitlines(), first):
        bare = line.strip()
        if fence or bare.startswith(("```", "~~~")):
            yield from done()
            fence = None if fence and bare.startswith(fence) else fence or bare[:3]
        elif not bare or (not lines and line.startswith("    ")):
            yield from done()
        elif bare.startswith("|"):
            yield from done()
            yield from (Paragraph(number, plain(cell)) for cell in re.split(r"(?<!\\)\|", bare))
        elif bare.startswith("#"):
            yield from done()
            yield Paragraph(number, plain(bare.lstrip("#")), heading=True)
        else:
            if re.match(r"[-*] |\d+\. ", bare):
                yield from done()
                bare = re.sub(r"^(?:[-*]|\d+\.) ", "", bare)
            start = number if not lines else start
            lines.append(bare)
    yield from done()


def plain(text: str) -> str:
    """Returns Markdown without its marks: code is ``X``, a link is its text."""
    text = re.sub(r"``.+?``|`[^`]*`|:[a-z]+:`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text).strip()


def python(text: str) -> Iterator[Paragraph]:
    """Yields the docstrings, comments and messages of errors and warnings of a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield from docstring(doc, node.body[0].lineno)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from messages(node.exc)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
            yield from messages(node)
    yield from comments(text)


def docstring(text: str, line: int) -> Iterator[Paragraph]:
    text = DOCTEST.sub(lambda found: "\n" * found[0].count("\n"), text)
    lines = [re.sub(r"^ {4}(?=\S)|^ {8}(?=\S)", "", t) for t in text.splitlines()]
    yield from markdown("\n".join(lines), line)


def messages(call: ast.Call) -> Iterator[Paragraph]:
    parts = [n for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    yield from (Paragraph(n.lineno, plain(str(n.value))) for n in parts)


def comments(text: str) -> Iterator[Paragraph]:
    """Yields the comments, those of adjacent lines as one."""
    lines: list[str] = []
    start = last = 0
    for number, line in enumerate(text.splitlines(), 1):
        found = COMMENT.search(line)
        if not found:
            continue
        alone = line[: found.start()].strip() == ""
        if lines and (number != last + 1 or not alone):
            yield Paragraph(start, plain(" ".join(lines)))
            lines = []
        start = number if not lines else start
        lines.append(found[1])
        last = number if alone else 0
    if lines:
        yield Paragraph(start, plain(" ".join(lines)))


def findings(path: Path) -> Iterator[str]:
    """Yields a line for each place in a file where a rule matches."""
    text = path.read_text(encoding="utf-8")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for paragraph in python(text) if path.suffix == ".py" else markdown(text):
        for rule in RULES:
            found = rule.pattern.search(paragraph.text)
            if found and (rule.headings or not paragraph.heading):
                yield f"{shown}:{paragraph.line}: {found[0].strip()!r}: write {rule.advice}"
        long = len(paragraph.text.split()) > LONGEST_PARAGRAPH and path.suffix == ".md"
        if long and path.name not in LISTS:
            yield f"{shown}:{paragraph.line}: a paragraph of more than {LONGEST_PARAGRAPH} words"
        for sentence in re.split(r"(?<=[.?!:;]) ", paragraph.text):
            if len(sentence.split()) > LONGEST:
                yield f"{shown}:{paragraph.line}: a sentence of more than {LONGEST} words"


def files() -> list[Path]:
    """Returns the files of the repository that have prose."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".md", ".py")]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def main(names: Iterable[str]) -> int:
    paths = [Path(name).resolve() for name in names] or files()
    found = [line for path in paths for line in findings(path)]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
