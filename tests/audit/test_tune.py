"""Tuned formats keep the tolerance, also under autocast, and are found in few runs."""

import csv
import dataclasses
import json

import jax.numpy as jnp
import pytest

import scalewise as sw


def model(w, x):
    h = jnp.tanh(x @ w)
    return jnp.exp(jnp.sum(h * h) / 4.0) * 1e-3


def arguments():
    return jnp.full((8, 4), 0.3), jnp.linspace(0.5, 2.0, 128).reshape(16, 8)


@pytest.mark.thorough
def test_only_the_operation_that_overflows_stays_float32(tmp_path):
    found = sw.tune(model, tol=2e-2, formats=["fp16"])(*arguments())
    lowered = {primitive for _, primitive in found.formats}
    assert "exp" not in lowered  # e^15 is beyond 65504
    assert {"dot_general", "tanh"} <= lowered
    assert float(found.error) <= 2e-2
    assert 0.5 <= found.cost < 0.6
    assert found.runs <= 12
    assert found.policy is None  # autocast would round exp's result where mul reads it
    assert found.verdict == (
        f"model keeps an error of {found.error} (tolerance 0.02) with {found.cost:.0%} of "
        f"float32's bits: {len(lowered)} of {len(found.parts)} parts in fp16; no policy for "
        "autocast."
    )
    assert found.verdict in " ".join(str(found).split())
    assert [(x.format, x.function) for x in found.parts[:1]] == [("fp32", "model")]
    assert sum(x.format == "fp16" for x in found.parts) == len(found.formats)
    with found.save(tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(x["format"], x["primitive"]) for x in rows] == [
        (x.format, x.primitive) for x in found.parts
    ]
    data = json.loads(found.save(tmp_path / "a.json").read_text())
    assert data["parts"][0] == dataclasses.asdict(found.parts[0])
    assert (data["verdict"], data["error"]["non_finite"]) == (found.verdict, 0)
    page = found.save(tmp_path / "a.html").read_text()
    assert "Content-Security-Policy" in page
    assert f">{rows[0]['primitive']}</td>" in page
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match=r"expected a name that ends with .html, .json or .csv"):
        found.save("a.pdf")


def test_policy_for_autocast():
    def layer(w, x):
        return jnp.sum(jnp.tanh(x @ w), axis=0)

    found = sw.tune(layer, tol=1e-2)(*arguments())
    assert found.cost < 0.6
    got, want = sw.autocast(layer, found.policy)(*arguments()), layer(*arguments())
    assert float(jnp.linalg.norm(got - want)) <= 1e-2 * float(jnp.linalg.norm(want))


def test_a_tight_tolerance_and_two_formats():
    found = sw.tune(model, tol=1e-7, formats=["bf16"])(*arguments())
    assert "dot_general" not in {p for _, p in found.formats}


def test_no_operation_can_be_narrow():
    tuned = sw.tune(jnp.sin, tol=1e-9, formats=["bf16", "fp16"])
    found = tuned(jnp.linspace(0.1, 1.0, 8))
    assert found.formats == {}
    assert found.verdict == (
        "sin needs float32 for all operations: with any of them in bf16 or fp16 the error exceeds "
        "1e-09."
    )
    assert str(found).startswith("tune  sin   3 runs")
