"""docs/contributing.md names files and tests that are there."""

import re
from pathlib import Path

import pytest
from proofs.walks import WALKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
HEADED = re.findall(r"^## (Add|Support) (.*)\n([^#]*)", PAGE, re.M)
TASKS = [(task, text) for _, task, text in HEADED]
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))


def test_each_file_that_it_names_exists():
    named = re.findall(r"`((?:src|tests|proofs|failures|experiments|examples|docs)/[\w./]*)", PAGE)
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists() and "_name" not in name]


def test_each_test_that_it_names_exists():
    for path, name in re.findall(r"`(tests/[\w./]*)::(\w+)`", PAGE):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in TESTS, name


@pytest.mark.parametrize(("task", "text"), TASKS, ids=[task for task, _ in TASKS])
def test_a_task_names_at_most_three_files_and_a_test_that_fails(task, text):
    steps = re.findall(r"^(\d)\. `\S+`", text, re.M)
    assert steps == ["1", "2", "3"][: len(steps)]
    assert steps
    assert re.search(r"`(tests/\S*::)?test_\w+`", text)


def test_the_tasks_of_the_page_are_found():
    assert len(TASKS) >= 8


def test_the_walks_change_the_files_that_their_tasks_name():
    texts = {f"{verb} {task}": text for verb, task, text in HEADED}
    for walk in WALKS:
        named = set(re.findall(r"`((?:src|tests|proofs|docs)/[\w./]*)`", texts[walk.task]))
        assert set(walk.patch) <= named, walk.task
    assert (
        len(texts) - len(WALKS) <= 1
    )  # of a finding's kind the tests check each that is registered
