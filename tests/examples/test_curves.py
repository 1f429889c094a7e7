"""Figures of the README and the tutorial are those of recorded runs, and show what they say."""

import json

from pages import DOCS, page_script

PAGE = page_script("curves_page")
CURVES = json.loads(PAGE.RECORD.read_text())


def last(figure, name):
    return CURVES[figure][name][-1]


def test_the_figures_are_drawn_from_the_record():
    for path, content in PAGE.figures(CURVES).items():
        assert path.read_text() == content, f"run `python docs/curves_page.py` ({path.name})"


def test_fp16_dies_and_fp8_lies_on_float32s_curve():
    float32, fp8 = CURVES["scales"]["float32"], CURVES["scales"]["FP8, autoscale"]
    assert last("scales", "FP16, constant scale") is None
    assert abs(last("scales", "FP16, dynamic scale") / float32[-1] - 1) < 0.03
    tail = [abs(a / b - 1) for a, b in zip(fp8[-50:], float32[-50:], strict=True)]
    assert sum(tail) / len(tail) < 0.03


def test_a_curve_that_ends_in_nan_ends_with_a_cross():
    for name, curves in (("mixed_precision/scales.svg", 1), ("mixed_precision/masters.svg", 0)):
        assert (DOCS / name).read_text().count("l14 14m0-14l-14 14") == curves


def test_narrow_weights_without_masters_stay_behind():
    best = last("masters", "float32")
    assert last("masters", "BF16 weights") > 1.15 * best
    for name in ("with master weights", "rounded stochastically"):
        assert abs(last("masters", name) / best - 1) < 0.01


def test_the_report_names_a_line_of_the_readme():
    shown = (DOCS / "readme" / "audit.svg").read_text().replace("&#160;", " ")
    assert "overflow in integer_pow at model.py:8" in shown
    readme = (DOCS.parent / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0].splitlines()
    assert program[7].strip().startswith("h = h / jnp.sqrt")
    assert "model.py:8" in readme
