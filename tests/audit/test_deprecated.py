"""Old names warn and return what the new ones do; reports saved under old keys are read."""

import json

import jax.numpy as jnp
import pytest

import scalewise as sw
from scalewise.audit import Fix, diff
from scalewise.audit._deprecated import KEYS


@pytest.fixture(scope="module")
def report():
    return sw.audit(jnp.exp, "fp16", trials=1)(jnp.array([12.0, 1.0]))


def test_attributes(report):
    finding, error, equation = report.findings[0], report.error, report.equations[0]
    for owner, old in (
        (report, "rows"), (report, "shadow"), (report, "idle"), (report, "error_wide"),
        (error, "broken"), (finding, "rows"), (finding, "broken_before"),
        (finding, "broken_after"), (finding, "broken_alone"),
    ):  # fmt: skip
        message = f"{type(owner).__name__}.{old} is deprecated and will be removed: use {KEYS[old]}"
        with pytest.warns(DeprecationWarning, match=message):
            assert getattr(owner, old) == getattr(owner, KEYS[old])
    for old in ("bad", "shadow2", "shadow_max", "shadow_min_inverse"):
        with pytest.warns(DeprecationWarning, match=f"'{old}' is deprecated.*'{KEYS[old]}'"):
            assert equation[old] == equation[KEYS[old]]
    with pytest.raises(KeyError, match="nothing"):
        equation["nothing"]


def test_keyword_and_exports():
    with pytest.warns(DeprecationWarning, match=r"audit\(shadow=...\) is deprecated.*reference="):
        audited = sw.audit(jnp.sin, "fp16", shadow="float64", trials=0)
    assert audited(jnp.ones(2)).reference == "float64"
    for old, new in (("Error", "OutputError"), ("Row", "EquationStatistics"),
                     ("blamed", "user_errors")):  # fmt: skip
        with pytest.warns(DeprecationWarning, match=f"scalewise.audit.{old} is deprecated.*{new}"):
            exec(f"from scalewise.audit import {old} as old, {new} as new; assert old is new")
    with pytest.raises(ImportError, match="nothing"):
        exec("from scalewise.audit import nothing")


def test_a_fix_was_a_string():
    fix = Fix("float32 for line 3", lambda now: now)
    with pytest.warns(DeprecationWarning, match=r"use str\(finding.fix\).startswith"):
        assert fix.startswith("float32")
    with pytest.warns(DeprecationWarning, match=r"use str\(finding.fix\)"):
        assert fix == "float32 for line 3"
    assert str(fix) == f"{fix}" == "float32 for line 3"


def test_json_keys(report, tmp_path):
    data = report.as_dict()
    with pytest.warns(DeprecationWarning, match="'rows' is deprecated.*'equations'"):
        assert data["rows"] == data["equations"]
    old = {new: old for old, new in KEYS.items()}

    def with_old_keys(x):
        if isinstance(x, dict):
            return {old.get(key, key): with_old_keys(value) for key, value in x.items()}
        return [with_old_keys(value) for value in x] if isinstance(x, list) else x

    saved = report.save(tmp_path / "new.json")
    (tmp_path / "old.json").write_text(json.dumps(with_old_keys(json.loads(saved.read_text()))))
    assert '"shadow2"' in (tmp_path / "old.json").read_text()
    found = diff(tmp_path / "old.json", saved)
    assert found.errors[0] == found.errors[1] == (1, report.error.relative)
    assert (found.gone, found.new, found.moved) == ((), (), ())
    assert len(found.kept) == 1
