"""The pages of the docs: their Python runs, and prints what they say."""

import linecache
from pathlib import Path

import jax
import pytest

from cases import nightly
from pages import DOCS, page_script

ROOT = DOCS.parent
OUTPUTS = page_script("outputs")
ELSEWHERE = {  # pages whose code other tests run
    "docs/mixed_precision.md": "examples/test_mixed_precision.py",
    "docs/gallery.md": "audit/test_gallery.py",  # the sources of the gallery
    "docs/torch.md": "pytorch/test_docs.py",
    "docs/guides/compare-programs.md": "pytorch/test_docs.py",
    "docs/tutorials/pytorch.md": "pytorch/test_docs.py",
}
QUICK = ("README.md",)


# The files that scripts write, where their names say another thing; torch's is tested with torch.
WRITTEN = {
    "errors": "reference/errors.md", "explore": "explore.html", "plan": "plan_results.md",
    "matrix_units": "concepts/matrix-units.md",
}  # fmt: skip
SCRIPTS = {p.stem.removesuffix("_page"): p.read_text("utf-8") for p in DOCS.glob("*_page.py")}
GENERATED = sorted(name for name, text in SCRIPTS.items() if "\ndef page() -> str:" in text)
GENERATED.remove("torch_coverage")


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_what_its_script_writes(name):
    script, file = page_script(f"{name}_page"), DOCS / WRITTEN.get(name, f"{name}.md")
    again = f"run `PYTHONPATH=. python docs/{name}_page.py`"
    assert file.read_text("utf-8") == script.page(), again
    if hasattr(script, "picture"):
        assert file.with_suffix(".svg").read_text("utf-8") == script.picture(), again


def pages() -> list[str]:
    """Returns the pages that have Python, and that no other test runs."""
    found = ["README.md", *(p.relative_to(ROOT).as_posix() for p in sorted(DOCS.rglob("*.md")))]
    with_code = [p for p in found if "\n```python\n" in (ROOT / p).read_text(encoding="utf-8")]
    return [p for p in with_code if p not in ELSEWHERE]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:haiku")
@pytest.mark.parametrize("page", nightly(pages(), but=QUICK))
def test_its_python_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    linecache.checkcache()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for ran in OUTPUTS.run(ROOT / page):
            again = f"{page}:{ran.line} prints\n{ran.printed}; run `python docs/outputs.py {page}`"
            assert ran.expected is None or OUTPUTS.agrees(ran.expected, ran.printed), again


def test_the_tests_of_other_pages_exist():
    tests = Path(__file__).parents[1]
    assert all((ROOT / p).is_file() and (tests / t).is_file() for p, t in ELSEWHERE.items())


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("loss 1.00\n", "loss 1.05", True),
        ("loss 1.00", "loss 1.2", False),
        ("loss 1.00", "error 1.00", False),
        ("40 % ####", "41 % #####", True),
        ("a 1", "a 1 2", False),
    ],
)
def test_outputs_agree_if_words_do_and_numbers_nearly(expected, printed, same):
    assert OUTPUTS.agrees(expected, printed) is same
