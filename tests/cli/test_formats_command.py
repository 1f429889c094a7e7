"""`scalewise formats` and `scalewise inspect`, against numbers worked out by hand."""

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
