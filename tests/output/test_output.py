"""Atomic files, failing streams, pages that show control characters."""

import base64
import errno
import hashlib
import io
import os
import resource
import socket
import stat
import sys

import numpy as np
import pytest
from markupsafe import Markup
from rich.console import Console
from typer.testing import CliRunner

from scalewise._output import (
    TargetError,
    append,
    check_source,
    check_target,
    page_environment,
    print_rows,
    replacing,
    sentence,
    visible,
)
from scalewise._output._text import Text
from scalewise.cli import app
from scalewise.cli._command import run
from scalewise.scaled import save_safetensors


@pytest.fixture
def small_files():
    """No file can grow beyond 1,000 bytes: a full disk, for whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def special_files(folder):
    """A path of each kind that isn't a regular file; devices where this user may make them."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.close()
    (folder / "link").symlink_to("/dev/full")
    names = ["folder", "pipe", "socket", "link"]
    try:
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 7))
        names.append("device")
    except PermissionError:
        pass
    return [folder / name for name in names]


def test_only_regular_files_are_replaced(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"x": np.ones((1, 32), np.float32)})
    paths = special_files(tmp_path)
    before = {path: os.lstat(path) for path in paths}
    for path in paths:
        with pytest.raises(TargetError, match=r"cannot write .*: it is a .*; expected a regular"):
            check_target(path)
        with pytest.raises(TargetError, match="it is a "), replacing(path) as file:
            file.write(b"x")
        with pytest.raises(TargetError, match="it is a "):
            append(path, b"x")
        with pytest.raises(TargetError, match="it is a "):
            save_safetensors(path, {"x": np.ones(3)})
        with pytest.raises(TargetError, match="it is a "):
            check_source(path)
        if path.name != "folder":  # which a checkpoint may be
            command = ("cast", str(tmp_path / "a.safetensors"), "--to", "mxfp4", "--out", str(path))
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 2
            assert done.stderr.startswith(f"scalewise: cannot write '{path}': it exists; ")
            assert done.stderr.count("\n") == 1
    after = {path: os.lstat(path) for path in paths}
    assert [(s.st_mode, s.st_ino) for s in before.values()] == [
        (s.st_mode, s.st_ino) for s in after.values()
    ]
    assert not list(tmp_path.glob(".*"))


def test_a_file_is_replaced_atomically_and_keeps_link_and_permissions(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 3  # the temporary file is in the same folder
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        file.writelines([b"half", None])
    assert (tmp_path / "a").read_bytes() == b"new"
    with pytest.raises(TargetError, match=r"there is no folder '.*gone'"):
        check_target(tmp_path / "gone" / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "link"]


def test_a_full_disk_changes_nothing(tmp_path, small_files):
    (tmp_path / "a").write_bytes(b"old\n")
    with pytest.raises(OSError, match="File too large") as caught, replacing(tmp_path / "a") as f:
        f.write(b"x" * 5000)
    assert sentence(caught.value) == f"File too large: '{tmp_path / 'a'}'"
    append(tmp_path / "a", b"y" * 900)
    with pytest.raises(OSError, match="File too large"):
        append(tmp_path / "a", b"z" * 900)  # 96 of them fit
    assert (tmp_path / "a").read_bytes() == b"old\n" + b"y" * 900
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


class Failing(io.TextIOWrapper):
    """A standard output whose other end is gone."""

    def __init__(self, error):
        super().__init__(io.BytesIO(), encoding="ascii")
        self.error = error

    def write(self, text):
        raise self.error


def test_the_command_handles_every_failing_output(monkeypatch, capsys):
    def shown(stream, call):
        monkeypatch.setattr("sys.stdout", stream)
        try:
            run(call)
        except SystemExit as stop:
            return stop.code
        finally:
            monkeypatch.undo()
        return 0

    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert shown(ascii_only, lambda: print("2^0 × 1.5")) == 0
    assert b"2^0 x 1.5" in ascii_only.buffer.getvalue()
    full = Failing(OSError(errno.ENOSPC, "No space left on device"))
    assert shown(full, lambda: print("x")) == 1
    assert capsys.readouterr().err == (
        "scalewise: the output can't be written: No space left on device\n"
    )
    assert shown(Failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), lambda: print("x")) == 1
    assert capsys.readouterr().err == ""


def test_no_figure_is_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert "1.7977e+308" in CliRunner().invoke(app, ["formats"]).stdout
    for width in (1, 40):
        text = io.StringIO()
        headings, row = (
            ("a wide column", "another wide column"),
            ("1234567890" * 3, "0987654321" * 3),
        )
        print_rows(Console(file=text, width=width), headings, [row])
        assert "1234567890" * 3 in text.getvalue()
        assert "0987654321" * 3 in text.getvalue()


def test_control_characters_are_visible():
    assert visible("a\u202eb\u2066c\x1b[31m\n") == "a\\u202eb\\u2066c\\x1b[31m\n"
    assert Text("a\u202e", style="bold").append("\x1b[2J\n").plain == "a\\u202e\\x1b[2J\n"
    assert Text.assemble(("\u2066b", "bold"), "c").plain == "\\u2066bc"
    page = page_environment("scalewise._output").from_string("{{ name }}|{{ 3 }}")
    assert page.render(name="<\u202e>") == "&lt;\\u202e&gt;|3"


def test_a_page_allows_only_the_scripts_of_its_template(tmp_path):
    """A script that a value brings along, marked as safe by mistake, isn't in the policy."""
    template = '<meta charset="utf-8">\n<style>p { color: red }</style>{{ x }}<script>ours</script>'
    package = tmp_path / "pages_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.j2").write_text(template)
    sys.path.insert(0, str(tmp_path))
    try:
        pages = page_environment("pages_of_a_test")
    finally:
        sys.path.remove(str(tmp_path))
    html = pages.rendered("a.j2", x=Markup("<script>theirs</script><style>b {}</style>"))
    for text, allowed in (
        ("ours", True), ("theirs", False), ("p { color: red }", True), ("b {}", False),
    ):  # fmt: skip
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in html) is allowed
