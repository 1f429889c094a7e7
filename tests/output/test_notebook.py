"""What a notebook shows of a result: one output, and cells by their numbers."""

import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import rich.jupyter
from rich.console import Console

import scalewise as sw
from scalewise._output import place

X = jnp.full((4, 4), 300.0)


def overflows(x):
    return jnp.sum(x * x)


@pytest.fixture
def displayed(monkeypatch):
    outputs = []
    monkeypatch.setattr(rich.jupyter, "display", lambda segments, text: outputs.append(text))
    return outputs


def results():
    report = sw.audit(overflows, "fp16", trials=0)(X)
    return report, report.sheet, sw.explain(lambda x: x @ x, "fp8")(X)


def test_show_is_one_output(displayed):
    for result in results():
        displayed.clear()
        result.show(Console(force_jupyter=True))
        assert len(displayed) == 1
        assert displayed[0].strip()


def test_the_string_of_a_result_is_no_output_and_has_no_escapes(displayed, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel sets it
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for result in results():
        assert "overflow" in str(result) or "dot_general" in str(result)
        assert "\x1b" not in str(result)
    assert not displayed


def test_a_cell_is_named_by_its_number(monkeypatch):
    cells = {"/tmp/ipykernel_7/1819469791.py": ("Cell", "In[2]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    assert place("/home/model.py", 8) == "model.py:8"
    assert place(None, None) == "unknown line"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert place("/tmp/ipykernel_7/1819469791.py", 3) == "In [2], line 3"
    assert place("/home/model.py", 8) == "model.py:8"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert place("/home/model.py", 8) == "model.py:8"
