"""Curves on the page."""

import math
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from scalewise.cli._compare import compared
from scalewise.cli._curves import ticks


class Measured:
    """Stands for a run: it has what a comparison reads."""

    def __init__(self, name, losses, first=None):
        self.method, self.finite, self.first = SimpleNamespace(name=name), losses, first

    def losses(self, steps):
        return self.finite[:steps]

    def figures(self, steps, parameters, seeds):
        return {
            "name": self.method.name, "what": "", "state_bytes": 1200, "temporary_bytes": 0,
            "final_loss": sum(self.finite) / 3, "median_seconds": 0.1, "build_seconds": 1.0,
            "bytes_per_parameter": 12.0, "non_finite_steps": 0, "final_loss_spread": math.nan,
            "loss_scales": None, "first_non_finite": self.first,
        }  # fmt: skip


def comparison(*records):
    about = {"steps_asked": 3, "interrupted": False, "failure": None, "environment": {"JAX": "<0>"}}
    return compared("<demo> & co", [[record] for record in records], 100, 3, **about)


FINE = Measured("float32", [3.0, 2.0, 1.0])
DEAD = Measured("fp<16>", [3.0, math.nan, math.nan], {"step": 2, "why": "0/0 & <why>"})


def test_the_page_is_self_contained_and_escapes_names():
    found = comparison(FINE, DEAD)
    html = found._page()
    known = html.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "http" not in known
    assert "<script" not in html
    assert "fp&lt;16&gt;" in html
    assert "fp<16>" not in html
    assert "0/0 &amp; &lt;why&gt;" in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    assert found.curves_svg() in html


def test_the_page_allows_its_own_styles_and_nothing_else():
    html = comparison(Measured("float\u2066 32", [3.0, 2.0, 1.0]), DEAD)._page()
    assert "float\\u2066 32" in html
    assert "\u2066" not in html
    assert "script-src 'none'" in html
    assert "style=" not in html
    assert html.count("'sha256-") == html.count("<style>") == 2


def test_a_loss_of_zero_has_a_picture():
    zero, other = Measured("float32", [1.0, 0.0, 0.0]), Measured("fp16", [1.0, 0.5, 0.0])
    ET.fromstring(comparison(zero, other).curves_svg())


def test_the_picture_is_wellformed_and_has_a_gap_where_the_loss_is_nan():
    root = ET.fromstring(comparison(FINE, DEAD).curves_svg())
    paths = [p.get("d", "") for p in root.iter("{http://www.w3.org/2000/svg}path")]
    assert not any("nan" in d for d in paths)
    texts = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "fp<16> (diverged)" in texts
    assert "difference of that to float32, %" in texts


@pytest.mark.parametrize("losses", [[math.nan] * 3, [2.0, 2.0, 2.0], [1.0]])
def test_odd_curves_are_drawn(losses):
    ET.fromstring(comparison(Measured("x", losses)).curves_svg())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.3, 5.7), (1, 300), (-0.4, 0.1), (0, 1e-9)])
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)
