"""The HTML page: escaped names, a working filter, no script errors in a browser."""

import base64
import csv
import dataclasses
import hashlib
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from browsers import needs_a_browser, opened
from scalewise.auditing import OutputError
from scalewise.auditing._report._page import axis_of, panels, sources
from scalewise.auditing._tape._statistics import BINS, LOWEST


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
    assert not re.search(r"(?:src|href)=(?!\"#(?:finding|line)-\d)|https?://", text)
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
    heads = re.findall(r'<tr class="scope"><td colspan="15">(\S*)', text)
    assert heads == ["&lt;script&gt;alert/1/&lt;/script&gt;"]
    for title in ("argument [0]", "updates (results", "activations (results"):
        assert (title in text) == (title != "updates (results")
    assert "return jnp.sum(jnp.exp(x)) / (jnp.mean(x) + 1e-8)" in text
    worst = report.findings[0]
    (line,) = [n for n, s in enumerate(Path(__file__).read_text().splitlines(), 1)
               if s.strip().startswith("return jnp.sum(jnp.exp(x))")]  # fmt: skip
    assert worst.line == line
    (source,) = sources(report.equations, report.findings)
    assert (source.file, source.library) == (__file__, False)
    (marked,) = [shown for shown in source.lines if shown.finding]
    assert f'<a href="#line-1-{line}">{worst.where}</a>' in text
    assert f'<tr id="line-1-{line}" class="marked">' in text
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


def test_charts_have_scales_and_a_legend(report, tmp_path):
    text = report.save(tmp_path / "a.html").read_text()
    for said in ("zero (up to 2^-25)", "subnormal (below 2^-14)", "overflow (beyond 2^16)"):
        assert said in text
    *ranges, curve = panels(report)
    for _, svg in ranges:
        exponents = [int(x) for x in re.findall(r">2\^(-?\d+)</text>", svg)]
        assert len(exponents) <= 11
        assert min(exponents) >= -4  # the smallest number is 2^-0.3, the axis is 16 binades long
        assert max(exponents) <= 20
    title, svg = curve
    assert title == "relative error of each operation in program order (made here and carried in)"
    ticks = re.findall(r'y="([0-9.]+)">1e(-?\d+)</text>', svg)
    assert len(ticks) >= 2
    assert [float(y) for y, _ in ticks] == sorted((float(y) for y, _ in ticks), reverse=True)
    assert svg.count('class="unit"') == 1
    assert svg.count('class="event"') == sum(e["overflowed"] > 0 for e in report.equations) > 0


def test_axes_are_cut_to_where_numbers_are():
    counts = [0] * BINS
    counts[3 - LOWEST] = counts[30 - LOWEST] = 5
    assert axis_of([counts]) == (2, 32)
    counts[30 - LOWEST] = 0
    assert axis_of([counts]) == (-4, 12)
    assert axis_of([]) == (-7, 9)


def test_only_finite_errors_are_green_in_the_page(report, tmp_path):
    worst = dataclasses.replace(report.findings[0], non_finite_after=2)
    infinite = dataclasses.replace(
        report, error_fixed=OutputError(2, 0.0), findings=(worst, *report.findings[1:])
    )
    text = infinite.save(tmp_path / "a.html").read_text()
    assert '<b class="bad">2 not finite</b>' in text
    assert f'<span class="bad">{worst.fix}: error' in text
    assert '<b class="fix">' in report.save(tmp_path / "b.html").read_text()


@needs_a_browser
def test_in_a_browser(report, tmp_path):
    path = report.save(tmp_path / "a.html")
    with opened(path.as_uri()) as page:
        assert page.title() != "stolen"
        assert page.locator("#finding-1").count() == 1
        assert page.text_content("#shown") == str(len(report.equations))
    shown = sum(r.primitive == "exp" for r in report.equations)
    with opened(path.as_uri() + "#filter=exp%20forward") as page:
        assert page.text_content("#shown") == str(shown)
        assert page.locator("[hidden]").count() == len(report.equations) - shown


FRAMES = """<!doctype html><meta charset="utf-8">
<iframe id="wide" src="a.html" width="1280" height="900" frameborder="0"></iframe>
<iframe id="narrow" src="a.html" width="400" height="800" frameborder="0"></iframe>
<iframe id="print" src="print.html" width="718" height="900" frameborder="0"></iframe>
"""
PROBE = """async () => {
  const page = id => document.getElementById(id).contentDocument;
  const widths = id => {
    const root = page(id).documentElement, table = page(id).getElementById("operations");
    return {page: root.scrollWidth, view: root.clientWidth,
      box: table.parentElement.getBoundingClientRect().right,
      heads: [...table.tHead.rows[0].cells].map(x => x.getBoundingClientRect().right)};
  };
  const files = () => [...page("wide").querySelectorAll("details")].map(x => x.open);
  const d = page("wide"), found = {};
  for (const id of ["wide", "narrow", "print"]) found[id] = widths(id);
  found.legend = ["flushed", "over", "subnormal", "normal", "bar"].map(name =>
    getComputedStyle(d.querySelector("#legend ." + name)).fill);
  found.files = files();
  const heads = [...d.querySelectorAll("#operations th")];
  found.focused = heads.map(head => {
    const button = head.querySelector("button");
    button.focus();
    return d.activeElement === button;
  });
  const amax = heads.length - 1;
  const column = () => [...d.querySelectorAll("tr.row")].map(row => +row.cells[amax].textContent);
  found.sorted = [];
  for (const times of [1, 2]) {
    heads[amax].querySelector("button").click();
    found.sorted.push([heads.map(head => head.ariaSort), column()]);
  }
  found.links = [];
  for (const link of d.querySelectorAll(".card a")) {
    const there = new Promise(done =>
      d.defaultView.addEventListener("hashchange", done, {once: true}));
    link.click();
    await there;
    const row = d.querySelector("tr:target");
    found.links.push(row ? row.textContent : null);
  }
  found.files_after = files();
  return found;
}"""


@pytest.mark.slow
@needs_a_browser
def test_layout_sorting_and_links_in_a_browser(tmp_path):
    def f(x):
        return optax.tree.norm(x * 300.0) + jnp.sum(jnp.exp(x))

    report = sw.audit(f, "fp16", trials=0)(jnp.linspace(1, 13, 50))
    own = next(x for x in report.unfixed if x.file == __file__)
    library = next(x for x in report.unfixed if "optax" in x.file)
    # long names and large counts
    large = dict.fromkeys(("elements", "overflowed", "flushed", "subnormal", "nan"), 123_456_789.0)
    equations = [
        dataclasses.replace(
            e,
            scope="transpose(jvp(Transformer))" * 3,
            counted=types.SimpleNamespace(found=(e.numbers | large, e.histogram)),
        )
        for e in report.equations
    ]
    report = dataclasses.replace(report, findings=(own, library), equations=tuple(equations))
    text = report.save(tmp_path / "a.html").read_text()
    printed = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("@media print", "@media screen")
    (tmp_path / "print.html").write_text(printed)  # A4 with margins of 1 cm is 718 pixels wide
    frames = tmp_path / "frames.html"
    frames.write_text(FRAMES)
    with opened(frames.as_uri(), "--allow-file-access-from-files") as page:
        found = page.evaluate(PROBE)

    for frame in ("wide", "print"):  # all columns are visible, amax, the last, too
        assert len(found[frame]["heads"]) == 15
        assert max(found[frame]["heads"]) <= found[frame]["box"] + 1 <= found[frame]["view"] + 1
    for frame in ("wide", "narrow", "print"):
        assert found[frame]["page"] <= found[frame]["view"]
    assert found["narrow"]["view"] <= 400
    assert len(set(found["legend"])) == 5
    assert found["files"] == [True, False]  # the user's own file is open, optax is not
    assert all(found["focused"])
    for (state, column), way in zip(found["sorted"], ("descending", "ascending"), strict=True):
        assert state == ["none"] * 14 + [way]
        assert column == sorted(column, reverse=way == "descending")
    for finding, row in zip((own, library), found["links"], strict=True):
        assert finding.source in row
    assert found["files_after"] == [True, True]
