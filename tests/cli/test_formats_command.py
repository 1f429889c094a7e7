"""`scalewise formats` and `scalewise inspect`, against numbers worked out by hand."""

import pytest
from typer.testing import CliRunner

import scalewise
from scalewise.cli import app
from scalewise.formats import CATALOGUE


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


def test_the_table_has_a_row_for_each_format():
    result = invoke("formats")
    assert result.exit_code == 0
    rows = result.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(CATALOGUE)
    assert next(r for r in rows if r.startswith("e4m3fn ")).split()[1:7] == [
        *("8", "1-4-3", "7", "448", "2^-9", "2^-3"),
    ]


def test_the_version_is_that_of_the_package():
    assert invoke("--version").stdout.strip() == scalewise.__version__


def test_published_examples():
    shown = invoke("inspect", "0.15625", "-118.625", "--format", "fp32").stdout
    assert "0 01111100 01000000000000000000000" in shown
    assert "1 10000101 11011010100000000000000" in shown
    assert "-2^6 × (1 + 7159808/8388608)" in shown
    shown = invoke("inspect", "0x3c00", "--format", "fp16").stdout
    assert "0 01111 0000000000  (0x3c00)" in shown
    assert "0.99951171875  1.0009765625" in shown


def test_the_rounding_error_is_that_of_the_decimal_number():
    shown = invoke("inspect", "0.1", "--format", "e4m3fn").stdout
    assert "value      0.1015625" in shown
    assert "error      0.0015625  relative 0.0156" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "'one' is no number and no code such as 0x3c00"),
        (["no/folder"], "No such file or directory: 'no/folder'"),
        (["0x10000", "--format", "fp16"], "code 0x10000 is beyond fp16's 16 bits"),
        (["1", "--format", "e4m3fm"], "no format is called 'e4m3fm'; did you mean"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message):
    result = invoke("inspect", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_devices_formats():
    rows = {
        r.split()[0]: r.split()[1:]
        for r in invoke("formats", "--device", "h100").stdout.split("\n\n")[0].splitlines()
    }
    assert rows["e4m3fn"] == ["native", "2", "e4m3fn,", "e5m2,", "e4m3"]
    assert rows["e5m2"] == ["native", "2", "e4m3fn,", "e4m3"]
    assert rows["e4m3b11fnuz"] == ["storage", "only"]
    assert rows["mxfp8_e4m3"] == ["storage", "only"]
    assert rows["nvfp4"] == rows["dlfloat16"] == ["emulated"]
    shown = invoke("formats", "--device", "v5e").stdout
    assert "native, as e4m3b11fnuz" in shown


def test_an_unknown_device_is_an_error_that_lists_devices():
    result = invoke("formats", "--device", "h900")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "no device is called 'h900'" in result.stderr
    assert "a100, h100, h200, b200" in result.stderr
