"""`scalewise cast` on .safetensors files: tensors and scales are read back exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import scalewise as sw
from cases import nightly
from scalewise.cli import app
from scalewise.scaled import load_safetensors, save_safetensors


def invoke(*arguments):
    return CliRunner().invoke(app, ["cast", *map(str, arguments)])


@pytest.fixture
def checkpoint(tmp_path):
    w = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    path = tmp_path / "model.safetensors"
    save_safetensors(path, {"w": w, "b": w[0].astype(jnp.bfloat16), "step": np.int64(7)})
    return path


# a dtype, blocks without one, scales of scales, codes in more bytes than one
@pytest.mark.parametrize("to", ["nvfp4", "dlfloat16", *nightly(["e4m3fn", "mxfp6_e3m2"])])
def test_tensors_and_scales_equal_those_of_quantize(checkpoint, to):
    before = checkpoint.read_bytes()
    result = invoke(checkpoint, "--to", to)
    assert result.exit_code == 0, result.output
    told = f"model.safetensors -> model.{to}.safetensors: 3 tensors (2 quantised, 1 copied)"
    assert told in result.stdout
    assert "SQNR " in result.stdout
    got = load_safetensors(checkpoint.with_name(f"model.{to}.safetensors"))
    for name in ("w", "b"):
        want = sw.quantize(jnp.asarray(load_safetensors(checkpoint)[name]), to)
        stored = got[name]
        assert isinstance(stored, sw.ScaledArray)
        assert jax.tree.structure(stored) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert got["step"] == 7
    assert checkpoint.read_bytes() == before


def test_invalid_arguments_are_errors_and_nothing_is_written(checkpoint, tmp_path):
    cut, text = tmp_path / "cut.safetensors", tmp_path / "text.safetensors"
    cut.write_bytes(checkpoint.read_bytes()[:-5])
    text.write_text("no checkpoint at all")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    for arguments, message in [
        ((cut, "--to", "e4m3fn"), "is no complete safetensors file"),
        ((text, "--to", "e4m3fn"), "is no complete safetensors file"),
        ((tmp_path / "none.safetensors", "--to", "e4m3fn"), "No such file"),
        ((checkpoint, "--to", "mxfp9"), "no format is called 'mxfp9'"),
        ((checkpoint, "--to", "e8m0"), "e8m0 has no zero: it is for scales"),
        ((checkpoint, "--to", "e4m3fn", "--out", checkpoint), "is the input itself"),
    ]:
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_quantized_tensors_are_not_quantized_again(checkpoint):
    assert invoke(checkpoint, "--to", "e4m3fn").exit_code == 0
    result = invoke(checkpoint.with_name("model.e4m3fn.safetensors"), "--to", "e5m2")
    assert result.exit_code == 2
    assert "is quantized already; cast the original" in result.stderr
