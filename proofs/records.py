"""Runs a proof's cases and records their results in ``.prove/``, so that a stopped proof resumes.

Each case's result is a JSON file in a folder named after a fingerprint of the code that the proof
executes. Once the code of any file that the proof imports, or the version of a library that it
compares with, changes, the proof starts again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = (REPOSITORY / "src", REPOSITORY)
LIBRARIES = ("jax", "jaxlib", "ml_dtypes", "numpy")


def sources(start: Path) -> list[Path]:
    """Returns a file and the repository's files that it imports, directly or not, sorted.

    The ``__init__.py`` of a package isn't included merely because one of the package's modules is
    imported: ``scalewise/__init__.py`` re-exports every layer, which no lower layer executes.
    """
    seen: set[Path] = set()
    todo = [start.resolve()]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imported(path)
    return sorted(seen)


def _imported(path: Path) -> Iterator[Path]:
    package = _name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    checks = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    not_executed = [node for check in checks for node in check.body]
    for node in (n for n in nodes if n not in not_executed):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            members = [f"{base}.{alias.name}" for alias in node.names]
            # `from . import _codes` needs the module _codes, not the package's __init__.py
            names = members if not node.module and node.level else [base, *members]
        else:
            continue
        yield from (found for name in names if (found := _file(name)))


def _name(path: Path) -> str:
    root = next(root for root in ROOTS if path.is_relative_to(root))
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(name: str) -> Path | None:
    for root in ROOTS:
        base = root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def code(path: Path) -> str:
    """Returns a file's syntax tree as text, without comments, docstrings and line numbers."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not _is_docstring(s)]
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


@functools.cache
def fingerprint(start: Path) -> str:
    """Returns a hash of all code that a proof executes and of the libraries' versions.

    The wording of comments and docstrings doesn't count, every other change does.
    """
    digest = hashlib.sha256()
    for path in sources(start):
        digest.update(f"{path.relative_to(REPOSITORY)}\0{code(path)}\0".encode())
    digest.update(" ".join(f"{name} {version(name)}" for name in LIBRARIES).encode())
    return digest.hexdigest()[:12]


def folder(start: Path) -> Path:
    """Returns the folder of a proof's records, which it creates."""
    path = REPOSITORY / ".prove" / fingerprint(start)
    path.mkdir(parents=True, exist_ok=True)
    return path


def run(
    start: Path,
    cases: Sequence[Hashable],
    prove: Callable[[Any], dict[str, Any]],
    name: Callable[[Any], str],
) -> int:
    """Proves the cases without a record on all cores, and prints totals and mismatches of all.

    Args:
        start: the proof's own file.
        cases: the arguments of ``prove``, one per case.
        prove: proves a case and returns at least ``{"compared": int, "wrong": list[str]}``.
        name: returns the file name of a case's record, without its suffix.

    Returns:
        The exit status: 0 without mismatches, else 1.
    """
    record = {case: folder(start) / f"{name(case)}.json" for case in cases}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        todo = {pool.submit(prove, c): c for c in cases if not record[c].exists()}
        for future in as_completed(todo):
            path = record[todo[future]]
            path.with_suffix(".part").write_text(json.dumps(future.result()))
            path.with_suffix(".part").rename(path)
            print(future.result(), flush=True)
    done = [json.loads(record[c].read_text()) for c in cases]
    wrong = [w for d in done for w in d["wrong"]]
    compared = sum(d["compared"] for d in done)
    print(f"{start.stem}: {len(done)} cases, {compared:,} comparisons, {len(wrong)} mismatches")
    print(*wrong[:40], sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0
