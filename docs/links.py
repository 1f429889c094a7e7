"""Checks the links of the README, the docs and the docstrings.

``python docs/links.py`` checks that links inside of the repository lead to files and headings that
exist, that images have alt text, and that external links are well formed. ``--list`` prints the
external links, ``--online`` also asks for each of them, with a network.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMELESS = re.compile(r"!\[\s*\]\(([^)\s]+)\)")  # images without a description
URL = re.compile(r"https?://[^\s)>\]\"'`,]+")
NAMESPACES = ("www.w3.org",)  # names of SVG and the like, no links
MADE = "docs/reference/"  # pages that exist only in the built site, whose build checks them


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def without_code(text: str) -> str:
    """Returns Markdown without its blocks of code and its inline code."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def headings(text: str) -> set[str]:
    """Returns the anchors that MkDocs and GitHub give to the headings of a page."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in found}


def internal(page: Path) -> Iterator[str]:
    """Yields a sentence for each link of a page that leads to nothing in the repository."""
    name = page.relative_to(ROOT)
    text = without_code(page.read_text(encoding="utf-8"))
    yield from (f"{name}: {target} has no alt text" for target in NAMELESS.findall(text))
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            if not str(file).startswith(str(ROOT / MADE)):
                yield f"{name}: there is no {target}"
        elif anchor and anchor not in headings(file.read_text(encoding="utf-8")):
            yield f"{name}: {path or name} has no heading #{anchor}"


def external() -> dict[str, list[str]]:
    """Returns each external link of the pages and the source, with the files that have it."""
    found: dict[str, list[str]] = {}
    sources = [p for p in (ROOT / "src").rglob("*.py") if "__pycache__" not in p.parts]
    for path in [*pages(), *sorted(sources)]:
        text = path.read_text(encoding="utf-8")
        for url in URL.findall(without_code(text) if path.suffix == ".md" else text):
            found.setdefault(url.rstrip(".;:"), []).append(str(path.relative_to(ROOT)))
    return found


def malformed(url: str) -> str | None:
    """Returns why a link can't be right; None if it can."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return str(error)
    if parts.scheme != "https" and parts.netloc not in NAMESPACES:
        return "expected https"
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc):
        return f"{parts.netloc!r} is no host"
    if parts.netloc == "arxiv.org" and not re.fullmatch(r"/abs/\d{4}\.\d{4,5}(v\d+)?", parts.path):
        return "expected https://arxiv.org/abs/ and a number"
    return None


def unreachable(url: str) -> str | None:
    """Returns why a link doesn't answer; None if it does."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.urlopen(request, timeout=20):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in (403, 405, 429) else str(error)  # robots aren't welcome there
    except OSError as error:
        return str(error)


def problems(online: bool = False) -> Iterator[str]:
    """Yields a sentence for each link that is wrong."""
    for page in pages():
        yield from internal(page)
    for url, files in external().items():
        why = malformed(url) or (unreachable(url) if online else None)
        if why:
            yield f"{files[0]}: {url}: {why}"


def main(arguments: list[str]) -> int:
    if "--list" in arguments:
        print(*sorted(external()), sep="\n")
        return 0
    found = list(problems("--online" in arguments))
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
