"""A proof's fingerprint covers the code, but not the wording, of all files that it executes."""

import sys
from pathlib import Path

import pytest
from proofs import casts, halves, probabilities, records

PACKAGES = ("scalewise.rounding", "scalewise.formats")


@pytest.mark.parametrize("module", [casts, halves, probabilities], ids=lambda m: m.__name__)
def test_fingerprint_includes_every_module_of_formats_and_rounding(module):
    found = {str(p.relative_to(records.REPOSITORY)) for p in records.sources(Path(module.__file__))}
    loaded = {
        str(Path(m.__file__).resolve().relative_to(records.REPOSITORY))
        for name, m in sys.modules.items()
        if name.startswith(PACKAGES)
    }
    assert loaded <= found
    assert "src/scalewise/rounding/_encoded.py" in found
    assert {f"proofs/{Path(module.__file__).name}", "proofs/records.py"} <= found
    assert "src/scalewise/__init__.py" not in found  # it imports all layers


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """Three files that import each other and one apart; returns their folder."""
    folder = tmp_path / "proofs"
    folder.mkdir()
    files = {"start": "from proofs.other import x\n", "other": "from . import deep\nx = 1"}
    for name in ("start", "other", "deep", "apart"):
        (folder / f"{name}.py").write_text(files.get(name, ""))
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "ROOTS", (tmp_path / "src", tmp_path))
    yield folder
    records.fingerprint.cache_clear()


def fingerprint(folder):
    records.fingerprint.cache_clear()
    return records.fingerprint(folder / "start.py")


def test_fingerprint_depends_on_imported_files_only(proof):
    before = fingerprint(proof)
    (proof / "apart.py").write_text("y = 2")
    assert fingerprint(proof) == before
    (proof / "deep.py").write_text("y = 2")
    assert fingerprint(proof) != before


CODE = 'def f(x):\n    return x + 1, "text"\n\n\nclass A:\n    y = 2\n'


@pytest.mark.parametrize(
    ("new", "same"),
    [
        (f"# a comment\n\n{CODE}", True),
        (f'"""A docstring."""\n{CODE}"""Documents A."""\n', True),
        (CODE.replace("    return", '    """Returns."""\n    # adds one\n    return'), True),
        (CODE.replace("y = 2", '"""A class."""\n\n    y = (2)'), True),
        (CODE.replace("x + 1", "x + 2"), False),
        (CODE.replace("y = 2", "y = 2.0"), False),
        (CODE.replace('"text"', '"other"'), False),
        (CODE.replace("x", "z"), False),
        (CODE + "A.y = 3\n", False),
    ],
)
def test_fingerprint_ignores_wording_and_nothing_else(proof, new, same):
    (proof / "deep.py").write_text(CODE)
    before = fingerprint(proof)
    (proof / "deep.py").write_text(new)
    assert (fingerprint(proof) == before) == same


def test_a_stopped_proof_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "fingerprint", lambda start: "now")
    folder = tmp_path / ".prove" / "now"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text('{"compared": 3, "wrong": []}')
    (folder / "b.json").write_text('{"compared": 4, "wrong": ["b is wrong"]}')
    assert records.run(Path("sums.py"), ["a"], None, str) == 0
    assert records.run(Path("sums.py"), ["a", "b"], None, str) == 1
    out = capsys.readouterr()
    assert "sums: 2 cases, 7 comparisons, 1 mismatches" in out.out
    assert "b is wrong" in out.err
