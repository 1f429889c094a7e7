"""The HTML page: escaped names, a working filter, no script errors in a browser."""

import base64
import csv
import dataclasses
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.audit._report._source import sources
from scalewise.audit._run._statistics import LOWEST

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def report():
    def f(x):
        with jax.named_scope("<script>alert(1)</script>"):
            return jnp.sum(jnp.exp(x)) / (jnp.mean(x) + 1e-8)

    f.__name__ = "<script>document.title='stolen'</script>"
    return sw.audit(f, "fp16", trials=8)(jnp.linspace(1, 13, 50))


def test_names_are_escaped_and_nothing_is_fetched(report, tmp_path):
    text = report.save(tmp_path / "a.html").read_text()
    assert text.count("<script") == 1
    assert "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=(?!\"#finding)|https?://", text)
    assert "exp" in text
    assert report.findings[0].where in text


def test_content_security_policy_allows_only_the_pages_own_script(report, tmp_path):
    text = (
        dataclasses.replace(report, function="f\u202e(x)\x1b").save(tmp_path / "a.html").read_text()
    )
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert text.index("Content-Security-Policy") < text.index("<title>")
    assert not re.search(r"\sstyle=|\son[a-z]+=", text)  # neither would be allowed
    assert "<h1>f\\u202e(x)\\x1b in " in text


def test_operations_by_scope_range_charts_and_source_lines(report, tmp_path):
    text = report.save(tmp_path / "a.html").read_text()
    heads = re.findall(r'<tr class="scope"><td colspan="14">(\S*)', text)
    assert heads == ["&lt;script&gt;alert/1/&lt;/script&gt;"]
    for title in ("argument [0]", "updates (results", "activations (results"):
        assert (title in text) == (title != "updates (results")
    assert "return jnp.sum(jnp.exp(x)) / (jnp.mean(x) + 1e-8)" in text
    worst = report.findings[0]
    (line,) = [n for n, s in enumerate(Path(__file__).read_text().splitlines(), 1)
               if s.strip().startswith("return jnp.sum(jnp.exp(x))")]  # fmt: skip
    assert worst.line == line
    ((file, lines),) = sources(report.equations, report.findings)
    assert file == __file__
    (marked,) = [shown for shown in lines if shown.finding]
    assert (marked.number, marked.finding) == (line, 1)
    assert worst.kind in marked.marks
    assert marked.forward == min(e.sqnr for e in report.equations)


def test_ranges_are_histograms_of_the_arguments(report):
    ((name, counts),) = report.ranges
    assert name == "[0]"
    exponents = np.floor(np.log2(np.linspace(1, 13, 50, dtype=np.float32))).astype(int)
    assert [counts[k - LOWEST] for k in range(4)] == np.bincount(exponents).tolist()
    assert sum(counts) == 50


def test_csv(report, tmp_path):
    with report.save(tmp_path / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [int(line["index"]) for line in read] == [e.index for e in report.equations]
    assert [float(line["introduced"]) for line in read] == [e.introduced for e in report.equations]
    assert read[0]["primitive"] == "exp"
    assert read[0]["shape"] == "50"


def test_page_of_a_thousand_operations_is_under_3_megabytes(report, tmp_path):
    equations = tuple(report.equations[i % len(report.equations)] for i in range(1000))
    large = dataclasses.replace(report, equations=equations)
    assert large.save(tmp_path / "a.html").stat().st_size < 3_000_000


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_in_a_browser(report, tmp_path):
    path = report.save(tmp_path / "a.html")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --enable-logging=stderr "
        f"--user-data-dir={tmp_path}/profile"
    )

    def opened(address):
        done = subprocess.run(
            [BROWSER, *flags.split(), "--dump-dom", address],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert not re.search(r"CONSOLE.*(OutputError|Uncaught)", done.stderr)
        return done.stdout

    dom = opened(path.as_uri())
    assert "stolen</title>" not in dom
    assert 'id="finding-1"' in dom
    assert f'<span id="shown">{len(report.equations)}</span>' in dom
    filtered = opened(path.as_uri() + "#filter=exp%20forward")
    shown = sum(r.primitive == "exp" for r in report.equations)
    assert f'<span id="shown">{shown}</span>' in filtered
    assert filtered.count('hidden=""') == len(report.equations) - shown
