"""`scalewise cast` on .npy files: codes, report and errors."""

import numpy as np
import pytest
from typer.testing import CliRunner

from scalewise.cli import app
from scalewise.formats import E4M3FN
from scalewise.formats import format as format_


def invoke(*arguments):
    return CliRunner().invoke(app, ["cast", *map(str, arguments)])


def test_codes_and_report(tmp_path):
    np.save(tmp_path / "a.npy", np.float32([1, 1.0625, 500, 1e-5, -3]))
    result = invoke(tmp_path / "a.npy", "--to", "e4m3fn", "--saturate")
    assert result.exit_code == 0, result.output
    codes = np.load(tmp_path / "a.e4m3fn.npy")
    np.testing.assert_array_equal(E4M3FN.decode(codes), [1, 1, 448, 0, -3])
    # noise 52^2 + 0.0625^2, signal 500^2 + ...: 10 log10(250011.13 / 2704.004) = 19.66
    assert "5 numbers, SQNR 19.7 dB, largest relative error 1," in result.stdout
    assert "1 beyond the largest number, 1 flushed to zero" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.e4m3fn.npy", "a.npy"]


def test_a_published_rule_of_saturation(tmp_path):
    np.save(tmp_path / "a.npy", np.float32([500, np.inf]))
    for rule, want in (("onnx", [240, 240]), ("onnx-19", [240, np.nan])):
        result = invoke(tmp_path / "a.npy", "--to", "e4m3fnuz", "--rule", rule)
        assert result.exit_code == 0, result.output
        codes = np.load(tmp_path / "a.e4m3fnuz.npy")
        np.testing.assert_array_equal(format_("e4m3fnuz").decode(codes), want)
    both = invoke(tmp_path / "a.npy", "--to", "e4m3fnuz", "--rule", "onnx", "--saturate")
    assert "--saturate and --rule are given; expected one of them" in both.stderr
    other = invoke(tmp_path / "a.npy", "--to", "e3m4", "--rule", "onnx")
    assert "saturate='onnx' says nothing of e3m4" in other.stderr


@pytest.mark.parametrize("values", [[], [0, -0.0], [1, 2], [np.nan, np.inf]])
def test_exact(tmp_path, values):
    np.save(tmp_path / "a.npy", np.float64(values))
    result = invoke(tmp_path / "a.npy", "--to", "fp16", "--out", tmp_path / "b.npy")
    assert "SQNR exact, largest relative error 0," in result.stdout


def test_invalid_arguments_are_errors_and_nothing_is_written(tmp_path):
    whole = tmp_path / "a.npy"
    np.save(whole, np.ones(100, np.float32))
    (tmp_path / "cut.npy").write_bytes(whole.read_bytes()[:-5])
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "ints.npy", np.arange(3))
    np.save(tmp_path / "there.npy", np.arange(3.0))
    before = sorted(tmp_path.iterdir())
    for arguments, message in [
        ((tmp_path / "cut.npy", "--to", "fp16"), "is no complete .npy file"),
        ((tmp_path / "text.npy", "--to", "fp16"), "is no complete .npy file"),
        ((tmp_path / "none.npy", "--to", "fp16"), "No such file"),
        ((tmp_path / "ints.npy", "--to", "fp16"), "holds int64; expected float16"),
        ((whole, "--to", "e4m3fm"), "no format is called 'e4m3fm'"),
        ((whole, "--to", "fp16", "--out", whole), "is the input itself"),
        ((whole, "--to", "fp16", "--out", tmp_path / "there.npy"), "it exists"),
        (
            (whole, "--to", "fp16", "--json", "--strategy", "tensor"),
            "--strategy, --json: for check",
        ),
        ((whole, "--to", "fp16", "--rounding", "stochastic"), "a mode that needs no key"),
    ]:
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
    assert sorted(tmp_path.iterdir()) == before
    shown = CliRunner().invoke(app, ["inspect", "3", "--json", "--out", "r.json"])
    assert "--out, --json: for checkpoints only" in shown.stderr


def test_numbers_that_become_nan_are_counted(tmp_path):
    np.save(tmp_path / "a.npy", np.float32([[1, np.inf, *[2] * 30]]))
    result = invoke(tmp_path / "a.npy", "--to", "nvfp4")
    assert result.exit_code == 0, result.output
    assert "not finite any more" in result.stdout
