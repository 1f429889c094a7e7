"""Each package imports only from packages below it; formats import no JAX."""

import ast
import functools
from pathlib import Path

import pytest

import scalewise

PACKAGES = [  # bottom to top
    "_output",
    "formats",
    "devices",
    "rounding",
    "scaled",
    "checkpoints",
    "testing",
    "ops",
    "layers",
    "primitives",
    "interpret",
    "emulating",
    "autocasting",
    "scalifying",
    "autoscaling",
    "training",
    "auditing",
    "planning",
    "torch",
    "cli",
]
SHARED = {
    "__init__.py", "__main__.py", "_check.py", "_decorator.py", "_extras.py", "_jax.py", "_repr.py",
    "_resolve.py", "_types.py", "_user_file.py",
}  # fmt: skip
AUDIT = [
    "_tape",
    "_run",
    "_sheet",
    "_search",
    "_report",
    "_record",
    "_compare",
]  # bottom to top as well
INTERPRETATIONS = {"emulating", "autocasting", "scalifying", "autoscaling"}
ROOT = Path(scalewise.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


@functools.cache
def imported_modules(path: Path, types: bool = True) -> set[str]:
    """Absolute names of every module that the file imports; without ``types``, when it runs."""
    package = ("scalewise", *path.relative_to(ROOT).parent.parts)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    checks = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    left_out = [node for check in checks for node in check.body] if not types else []
    found = set()
    for node in nodes:
        if node in left_out:
            continue
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


def test_a_file_imports_only_from_packages_below():
    wrong = []
    for path in SOURCES:
        here = path.relative_to(ROOT).parts[0]
        if here not in PACKAGES:
            assert path.name in SHARED, f"{path} is in no package"
            continue
        there = set(map(package_of, imported_modules(path))) - {None, here}
        allowed = set(PACKAGES[: PACKAGES.index(here)])
        if here in INTERPRETATIONS:  # but the last one stands on the rules of that before it
            allowed -= INTERPRETATIONS - ({"scalifying"} if here == "autoscaling" else set())
        wrong += [f"{path.relative_to(ROOT)} imports {package}" for package in there - allowed]
    assert not wrong


def test_a_package_imports_only_public_names_of_others():
    """A leading underscore is private to its package: what another one needs is published."""
    wrong = []
    for path in SOURCES:
        here = path.relative_to(ROOT).parts[0]
        for module in imported_modules(path) if here in PACKAGES else ():
            there, *rest = module.split(".")[1:] or [here]
            if there in PACKAGES and there != here and any(x.startswith("_") for x in rest):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("subpackage", AUDIT)
def test_so_does_a_subpackage_of_the_audit(subpackage):
    above = [*AUDIT[AUDIT.index(subpackage) + 1 :], "_audit"]
    for path in (ROOT / "auditing" / subpackage).glob("*.py"):
        read = {
            m.split(".")[2] for m in imported_modules(path) if m.startswith("scalewise.auditing.")
        }
        assert not read & set(above), f"{path} imports from above"


def test_formats_never_import_jax():
    for path in (ROOT / "formats").rglob("*.py"):
        read = {module.split(".")[0] for module in imported_modules(path)}
        assert not read & {"jax", "jaxlib"}, path


INTERNALS = "jax._src", "jax.core", "jax.extend", "jax.experimental", "jax.interpreters"


def test_one_file_imports_what_changes_with_releases_of_jax():
    for path in SOURCES:
        if path.name != "_jax.py":
            assert not {m for m in imported_modules(path) if m.startswith(INTERNALS)}, path
            assert "jax.__version__" not in path.read_text(), path


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
    imports = {name: imported_modules(p, types=False) & names.keys() for name, p in names.items()}
    while imports:  # removes files whose imports are all removed; a cycle remains
        free = [name for name, needs in imports.items() if not needs & imports.keys()]
        assert free, f"an import cycle among {sorted(imports)}"
        for name in free:
            del imports[name]
