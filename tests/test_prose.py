"""Docs, docstrings, comments and messages keep to the style of docs/prose.py; links are right."""

import pytest

from pages import page_script

PROSE, LINKS = page_script("prose"), page_script("links")


def test_no_rule_of_style_is_broken():
    found = [line for path in PROSE.files() for line in PROSE.findings(path)]
    assert not found, "\n".join(found)


def test_links_lead_to_files_and_headings_and_external_ones_are_well_formed():
    found = list(LINKS.problems())
    assert not found, "\n".join(found)
    assert len(LINKS.external()) > 30


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("What is lost becomes zero.", "concrete subject"),
        ("Loss scales. What they do is simple.", "concrete subject"),
        ("the the scale", "one of the two"),
        ("We simply round.", "leave it out"),
        ("The shadow run rounds.", "reference run"),
        ("Tables. | a | b leaves room | c |", "margin"),
        (" ".join(f"w{i}" for i in range(61)), "more than 60 words"),
    ],
)
def test_a_broken_rule_is_found(text, rule, tmp_path):
    (page := tmp_path / "page.md").write_text(f"# Title\n\n{text}\n")
    (code := tmp_path / "code.py").write_text(f'"""{text}"""\n')
    for path in (page, code):
        (found,) = PROSE.findings(path)
        assert rule in found


def test_code_headings_and_questions_are_left_out(tmp_path):
    text = "# What the audit models.\n\nWhat is it? `simply`\n\n```python\nsimply = 1\n```\n"
    (page := tmp_path / "page.md").write_text(text)
    (code := tmp_path / "code.py").write_text('"""Rounds.\n\n>>> simply\n"""\nsimply = 1\n')
    assert not [*PROSE.findings(page), *PROSE.findings(code)]


def test_messages_and_comments_are_checked(tmp_path):
    (code := tmp_path / "code.py").write_text('# We simply go.\nraise ValueError("accepted: x")\n')
    assert len(list(PROSE.findings(code))) == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://arxiv.org/abs/1710.03740", None),
        ("https://arxiv.org/abs/17103740", "a number"),
        ("http://example.org", "https"),
        ("https://nowhere", "no host"),
    ],
)
def test_malformed_links_are_found(url, why):
    said = LINKS.malformed(url)
    assert said is None if why is None else why in said


def test_images_without_alt_text_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(LINKS, "ROOT", tmp_path)
    (page := tmp_path / "a.md").write_text("![](a.md) ![text](a.md)\n")
    assert list(LINKS.internal(page)) == ["a.md: a.md has no alt text"]


def test_missing_files_and_headings_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(LINKS, "ROOT", tmp_path)
    (page := tmp_path / "a.md").write_text(
        "# One two\n\n[x](a.md#one-two) [y](a.md#no) [z](b.md)\n"
    )
    assert list(LINKS.internal(page)) == ["a.md: a.md has no heading #no", "a.md: there is no b.md"]
