"""Each package imports only from packages below it; formats import no JAX."""

import ast
from pathlib import Path

import pytest

import scalewise

PACKAGES = [  # bottom to top
    "_output",
    "formats",
    "devices",
    "rounding",
    "scaled",
    "ops",
    "layers",
    "primitives",
    "interpret",
    "emulate",
    "autocast",
    "autoscale",
    "training",
    "audit",
    "cli",
]
SHARED = {
    "__init__.py", "__main__.py", "_callable.py", "_deprecated.py", "_extras.py", "_resolve.py",
    "_types.py", "_user_file.py",
}  # fmt: skip
AUDIT = ["_run", "_search", "_reduce", "_report", "_record"]  # bottom to top as well
INTERPRETATIONS = {"emulate", "autocast", "autoscale"}
ROOT = Path(scalewise.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names of every module that the file imports, relative imports resolved."""
    package = ("scalewise", *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "scalewise" and parts[1] in PACKAGES else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_packages_below(path):
    here = path.relative_to(ROOT).parts[0]
    if here not in PACKAGES:
        assert path.name in SHARED, f"{path} is in no package"
        return
    for module in imported_modules(path):
        there = package_of(module)
        if there is None or there == here:
            continue
        assert PACKAGES.index(there) < PACKAGES.index(here), f"{path}: {here} imports {there}"
        assert not {here, there} <= INTERPRETATIONS, f"{path}: {here} imports {there}"


@pytest.mark.parametrize("subpackage", AUDIT)
def test_so_does_a_subpackage_of_the_audit(subpackage):
    above = [*AUDIT[AUDIT.index(subpackage) + 1 :], "_audit"]
    for path in (ROOT / "audit" / subpackage).glob("*.py"):
        read = {m.split(".")[2] for m in imported_modules(path) if m.startswith("scalewise.audit.")}
        assert not read & set(above), f"{path} imports from above"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.relative_to(ROOT).parts[0] == "formats"], ids=lambda p: p.name
)
def test_formats_never_import_jax(path):
    assert not {m for m in imported_modules(path) if m.split(".")[0] in ("jax", "jaxlib")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_compat_reads_jax_internals(path):
    if path.name == "_compat.py":
        return
    assert not {m for m in imported_modules(path) if m.startswith("jax._src")}
    assert "jax.__version__" not in path.read_text()


def test_every_package_is_listed():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders <= set(PACKAGES)


def test_no_import_cycle():
    """Between files, not only between packages; ``__init__`` files are left out."""
    names = {
        ".".join(("scalewise", *p.relative_to(ROOT).with_suffix("").parts)): p
        for p in SOURCES
        if p.name != "__init__.py"
    }
    imports = {name: imported_modules(p) & names.keys() for name, p in names.items()}
    while imports:  # removes files whose imports are all removed; a cycle remains
        free = [name for name, needs in imports.items() if not needs & imports.keys()]
        assert free, f"an import cycle among {sorted(imports)}"
        for name in free:
            del imports[name]
