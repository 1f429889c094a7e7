"""Every module writes files through the package _output."""

import ast
from pathlib import Path

import scalewise

ROOT = Path(scalewise.__file__).parent
SOURCES = [p for p in sorted(ROOT.rglob("*.py")) if p.relative_to(ROOT).parts[0] != "_output"]
WRITERS = {
    *("write_text", "write_bytes", "NamedTemporaryFile", "mkstemp", "mkdtemp", "touch"),
    *("save", "savez", "savetxt", "tofile", "memmap", "open_memmap", "symlink_to", "fdopen"),
}
# Whose `save` is a method of ours, or Orbax's.
OWN = {"report", "comparison", "recording", "checkpoints", "found", "manager", "super", "writer"}
# Writes into a folder of its own, which it renames when all files are whole, so that a cast of many
# gigabytes continues where it was killed.
RESUMED = {"checkpoints/_write.py"}


def writes(call: ast.Call) -> bool:
    """Whether a call opens a file to write, or writes one at once."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = getattr(function, "value", None)
    owner = getattr(owner, "func", owner)  # of super()
    owner = getattr(owner, "attr", None) or getattr(owner, "id", "")
    if name == "memmap" and any(getattr(a, "value", "") == "r" for a in call.args):
        return False
    if name == "open":
        modes = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
        given = [m.value for m in modes if isinstance(m, ast.Constant) and isinstance(m.value, str)]
        return any(set(mode) & set("wax+") for mode in given)
    return (name in WRITERS and owner not in OWN) or (owner, name) in {("os", "replace")}


def into_replaced(tree):
    """The calls that write into a file that ``replacing`` has opened."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            opened = [i for i in node.items if getattr(i.context_expr, "func", None) is not None]
            names = {
                i.optional_vars.id
                for i in opened
                if getattr(i.context_expr.func, "id", "") == "replacing"
                and isinstance(i.optional_vars, ast.Name)
            }
            for call in ast.walk(node):
                first = call.args[0] if isinstance(call, ast.Call) and call.args else None
                if isinstance(first, ast.Name) and first.id in names:
                    found.add(call)
    return found


def test_the_search_finds_writers():
    for text in ("p.open('wb')", "open(p, mode='a')", "np.save(p, x)", "p.write_text('')",
                 "os.replace(a, b)", "tempfile.mkstemp()"):  # fmt: skip
        assert writes(ast.parse(text).body[0].value)  # pyright: ignore
    for text in ("p.open('rb')", "open(p)", "report.save(p)", "a.replace('x', 'y')"):
        assert not writes(ast.parse(text).body[0].value)  # pyright: ignore
    tree = ast.parse("with replacing(p) as file:\n  np.savez(file, x)\n  np.savez(p, x)")
    assert [call.lineno for call in into_replaced(tree)] == [2]


def test_modules_write_through_the_output_package():
    found = []
    for path in SOURCES:
        if str(path.relative_to(ROOT)) in RESUMED:
            continue
        tree = ast.parse(path.read_text())
        replaced = into_replaced(tree)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in calls
            if writes(node) and node not in replaced
        ]
    assert not found, f"files are written by {found}; use scalewise._output.replacing"
