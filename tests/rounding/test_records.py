"""The fingerprint of a proof's records covers every file that the proof executes."""

import sys
from pathlib import Path

import pytest
from proofs import casts, halves, probabilities, records

PACKAGES = ("scalewise.rounding", "scalewise.formats")


@pytest.mark.parametrize("module", [casts, halves, probabilities], ids=lambda m: m.__name__)
def test_every_module_below_the_casts_is_in_the_fingerprint(module):
    found = {str(p.relative_to(records.REPOSITORY)) for p in records.sources(Path(module.__file__))}
    loaded = {
        str(Path(m.__file__).resolve().relative_to(records.REPOSITORY))
        for name, m in sys.modules.items()
        if name.startswith(PACKAGES)
    }
    assert loaded <= found
    assert "src/scalewise/rounding/_encoded.py" in found
    assert {f"proofs/{Path(module.__file__).name}", "proofs/records.py"} <= found
    assert "src/scalewise/__init__.py" not in found  # which imports all layers


def test_the_fingerprint_changes_with_any_of_those_files(tmp_path, monkeypatch):
    (tmp_path / "proofs").mkdir()
    files = {"start": "from proofs.other import x\n", "other": "from . import deep\nx = 1"}
    for name in ("start", "other", "deep", "apart"):
        (tmp_path / "proofs" / f"{name}.py").write_text(files.get(name, ""))
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "ROOTS", (tmp_path / "src", tmp_path))
    start = tmp_path / "proofs" / "start.py"

    def now():
        records.fingerprint.cache_clear()
        return records.fingerprint(start)

    before = now()
    (tmp_path / "proofs" / "apart.py").write_text("y = 2")
    assert now() == before
    (tmp_path / "proofs" / "deep.py").write_text("y = 2")
    assert now() != before
    records.fingerprint.cache_clear()


def test_a_proof_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
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
