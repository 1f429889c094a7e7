"""``explain`` names the formats that run, with their source lines."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import scalewise as sw
from scalewise.formats import block_format

PARAMS = {"few": jnp.ones((3, 96)), "body": jnp.ones((96, 96)), "head": jnp.ones((96, 96))}
X = jax.ShapeDtypeStruct((128, 3), jnp.float32)
LINES = ["", *Path(__file__).read_text().splitlines()]


def loss(params, x):
    h = jnp.tanh(x @ params["few"])
    h, _ = jax.lax.scan(lambda h, _: (jnp.sin(h @ params["body"]), None), h, length=2)
    with jax.named_scope("last"):
        y = h @ params["head"]
    return jnp.mean(jnp.square(jnp.tanh(y)))


def step(params, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


def of_line(explanation, text, direction="forward", kind="contraction"):
    rows = [r for r in explanation.rows if (r.kind, r.direction) == (kind, direction)]
    return {r.format for r in rows if r.file == __file__ and text in LINES[r.line]}


def test_each_contraction_and_stored_value_has_a_row():
    recipe = dataclasses.replace(
        sw.recipes.fp8,
        keep={"last": "fp32"},
        state=((r"'head'", sw.Storage("fp16", root=1)),),
    )
    found = sw.explain(step, recipe)(PARAMS, X)
    assert of_line(found, "few") == {"fp16 x fp16"}
    assert of_line(found, "body") == {"e4m3fn x e4m3fn"}
    assert of_line(found, "body", "backward") == {"e5m2 x e4m3fn"}
    assert of_line(found, "head") == {"fp32 x fp32"}
    assert of_line(found, "scan", kind="carry") == {"fp32"}
    assert of_line(found, "scan", kind="stacked") == {"fp16"}
    assert "fp16" in of_line(found, "tanh", "backward", kind="residual")
    outputs = {r.name: (r.format, r.scale) for r in found.rows if r.kind == "output"}
    assert outputs["[0]['head']"] == ("fp16", "amax")
    assert outputs["[0]['body']"] == ("fp32", "none")
    assert len(json.loads(json.dumps(found.to_rows()))) == len(found.rows)


DTYPES = {"e4m3fn": "f8_e4m3fn", "e5m2": "f8_e5m2", "fp16": "f16", "bf16": "bf16", "fp32": "f32"}


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed", "mxfp8", "scalify"])
def test_the_formats_are_those_of_the_program(recipe):
    """Another route to them: the dtypes in the jaxpr that runs."""
    found = sw.explain(step, recipe)(PARAMS, X)
    formats = {name for row in found.rows for name in row.format.split(" x ")}
    elements = {n if n in DTYPES else block_format(n).element.name for n in formats}
    program = str(jax.make_jaxpr(sw.autoscale(step, recipe))(PARAMS, X))
    dtypes = set(re.findall(r"\b(f8_e4m3fn|f8_e5m2|f16|bf16|f32)\[", program))
    carried = {"bf16"} if recipe == "mxfp8" else set()  # a block's numbers times their scale
    assert {DTYPES[n] for n in elements} | carried == dtypes
    assert {r.direction for r in found.rows} == {"forward", "backward", "update"}


def test_every_result_under_every_op(capsys):
    found = sw.explain(lambda x: jnp.exp(x @ x.T) * 2, "fp16_every_op")(X)
    rows = [(r.kind, r.name, r.format, r.scale) for r in found.rows if r.name != "transpose"]
    assert rows == [
        ("contraction", "dot_general", "fp16 x fp16", "max"),
        ("result", "exp", "fp16", "max"),
        ("result", "mul", "fp16", "propagated"),
        ("output", "[]", "fp32", "none"),
    ]
    assert {r.direction for r in found.rows} == {"forward"}
    found.show()
    assert "fp16 x fp16" in capsys.readouterr().out


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="keep names 'nowhere'"):
        sw.explain(loss, dataclasses.replace(sw.recipes.fp8, keep={"nowhere": "fp32"}))(PARAMS, X)
