"""Some of the figures that papers have published; ``python -m proofs.published`` computes all."""

import pytest
from proofs import published

from cases import nightly

SAMPLE = {
    "quartet2": lambda: published.quartet2(512),
    "averages": lambda: published.averages(16),
    "crest_factors": published.crest_factors,
    "harmonic": published.harmonic,
    "unit_scaling": published.unit_scaling,
    "requantised": lambda: published.requantised(512),
}


@pytest.mark.parametrize("name", nightly(sorted(SAMPLE), but=["crest_factors", "harmonic"]))
def test_our_figure_is_the_published_one(name):
    figures = list(SAMPLE[name]())
    assert figures
    assert [f for f in figures if not f.agrees] == []


def test_a_figure_beyond_its_tolerance_differs():
    assert not published.Figure("error", 9.0, 9.3, 0.02).agrees
