"""The page of claims is that of the recorded data, and make runs its commands."""

import re

from pages import DOCS, page_script

MODULE = page_script("results_page")
ROOT = DOCS.parent
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> str:
    """Returns the commands of a target and, indirectly, of the targets that it calls."""
    own = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.M)
    assert own, f"no target {target}"
    called = re.findall(r"\$\(MAKE\) ([a-z-]+)|^\tmake ([a-z-]+)", own[1], re.M)
    return own[1] + "".join(recipe(a or b) for a, b in called)


def test_every_command_is_run_by_make_nightly_or_experiments():
    nightly = recipe("nightly") + recipe("experiments")
    for claim in MODULE.CLAIMS:
        kind, _, rest = claim.command.partition(" ")
        wanted = f"$(MAKE) {rest}" if kind == "make" else f"$(BIN)/python {rest}"
        assert wanted in nightly, f"make nightly doesn't run {claim.command}"


def test_every_page_and_file_that_it_names_exists():
    for claim in MODULE.CLAIMS:
        assert (DOCS / claim.page.split("#")[0]).is_file(), claim.page
        assert all((DOCS / name).is_file() for name in claim.data), claim.data


def test_the_readme_has_the_figure_of_programs_that_were_only_scored():
    found = MODULE.corpus()["scored"]
    assert (
        f"right line, of {found['programs']} | {found['line']} |"
        in (ROOT / "README.md").read_text()
    )


def test_the_readme_has_the_same_figure_of_parity():
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    off = MODULE.largest_difference(("fp16", "fp8", "fp16_every_op"))
    chance = MODULE.largest_difference(("float32, moved",))
    assert f"within {off * 100:.1f} %" in readme
    assert f"by up to {chance * 100:.1f} %" in readme
