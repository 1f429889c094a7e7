"""The examples of docs/torch.md and of other pages, and the table of operations."""

import doctest
import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest

import scalewise.torch as st

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_examples_run(capsys, tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / "torch.md").read_text(), re.DOTALL))
    file = tmp_path / "example.py"  # so that findings have lines
    file.write_text(code)
    before = dict(st.RULES)
    try:
        names = {}
        exec(compile(code, str(file), "exec"), names)
    finally:
        st.RULES.clear()
        st.RULES.update(before)
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed == [
        "overflow squares = x * x norm", "underflow backward True", "0.89 overflow backward"
    ]  # fmt: skip
    assert names["x"].grad.tolist() == [[1.0] * 64] * 4


def test_the_example_of_audit_runs_as_it_is_copied():
    (example,) = doctest.DocTestFinder(recurse=False).find(st.audit, "audit", globs={})
    assert doctest.DocTestRunner().run(example) == (0, 4)


@pytest.mark.parametrize("page", ["tutorials/pytorch.md", "guides/compare-programs.md"])
def test_a_page_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    spec = importlib.util.spec_from_file_location("outputs", DOCS / "outputs.py")
    outputs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = outputs  # its dataclass looks itself up
    spec.loader.exec_module(outputs)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for ran in outputs.run(DOCS / page):
            assert ran.expected is None or outputs.agrees(ran.expected, ran.printed), ran.printed


def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("page", DOCS / "torch_coverage_page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (DOCS / "torch_coverage.md").read_text() == page.page()
