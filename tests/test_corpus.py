"""The corpus and the training steps: their truths can be measured, and the split is as stated."""

import dataclasses
import hashlib
import re

import jax.numpy as jnp
import pytest
from failures import runner
from failures.programs import PARTS, SYNONYMS, WRITTEN, Answer, Finding, drawn, load
from failures.truth import error, measure

PROGRAMS = load("corpus") | load("trainings")
ENTRIES = {name: x for name, x in PROGRAMS.items() if x.kinds}
CLEAN = {name: x for name, x in PROGRAMS.items() if not x.kinds}


pytestmark = pytest.mark.usefixtures("users_promotion")


def test_the_corpus_is_large_and_split_by_a_hash_of_the_name():
    entries = {name for name, x in ENTRIES.items() if x.set == "corpus"}
    odd = {name for name in entries if hashlib.sha256(name.encode()).hexdigest()[-1] in "13579bdf"}
    assert {name for name in entries if drawn(name, 2) == "scored"} == odd
    assert len(entries) >= 120
    assert len(odd) >= 60
    assert len(CLEAN) + 7 >= 40  # the programs of Keras and numpyro are left out without them
    parts = {part: {x.name for x in runner.of_part("corpus", part)} for part in ("seen", "scored")}
    assert parts == {"seen": entries - odd, "scored": odd}


def test_a_third_of_the_training_steps_is_only_scored():
    steps = load("trainings")
    parts = {part: {x.name for x in runner.of_part("trainings", part)} for part in PARTS}
    third = {
        name
        for name in parts["seen"] | parts["scored"]
        if int(hashlib.sha256(name.encode()).hexdigest()[-2:], 16) % 3 == 1
    }
    assert parts["scored"] == third
    assert set().union(*parts.values()) == set(steps)
    assert all(steps[name].blind for name in third | parts["clean"])
    assert not any(steps[name].blind for name in parts["seen"])


# of authors and libraries, where the source has no thread, preprint or DOI
PAGES = {
    "https://optax.readthedocs.io/en/latest/api/transformations.html",
    "https://docs.sciml.ai/Catalyst/stable/",
    "https://www.tensorflow.org/probability/api_docs/python/tfp/math/softplus_inverse",
    "http://joschu.net/blog/kl-approx.html",
    "https://publications.aston.ac.uk/id/eprint/373/",
    "https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html",
    "https://docs.kidger.site/diffrax/further_details/faq/",
    "https://people.eecs.berkeley.edu/~wkahan/Qdrtcs.pdf",
    "https://people.eecs.berkeley.edu/~wkahan/Triangle.pdf",
    "https://github.com/google-deepmind/dm-haiku/blob/main/haiku/_src/moving_averages.py",
}


def test_each_entry_cites_a_source_and_marks_lines_that_exist():
    url = re.compile(
        r"https://(github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|arxiv\.org/abs/\d{4}\.\d{4,5}"
        r"|doi\.org/10\.\S+)"
    )
    for entry in ENTRIES.values():
        assert url.fullmatch(entry.source) or entry.source in PAGES | {WRITTEN}, entry.name
        assert set(entry.kinds) <= set(SYNONYMS), entry.name
        assert 0 < len(entry.lines()) <= len(entry.at), entry.name
        fixed = entry.fixed or entry.better
        assert fixed or entry.low in ("fp16", "bf16", "float32"), entry.name


def test_an_entry_fails_as_it_says_and_its_fix_repairs_it():
    """``python -m failures truth`` measures all entries and the clean programs."""
    assert not measure(ENTRIES["annuity"]).problems(ENTRIES["annuity"])


def test_an_entry_names_kinds_that_exist():
    entry = dataclasses.replace(ENTRIES["annuity"], kinds=("lost digits",))
    assert measure(entry).problems(entry) == ["unknown kinds of finding: lost digits"]


def test_the_error_is_relative_to_each_output_but_not_to_negligible_ones():
    want = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1e-12])}
    assert error({"a": jnp.array([3.0, 4.5]), "b": want["b"]}, want) == (0, pytest.approx(0.1))
    assert error({"a": want["a"], "b": jnp.array([1e-9])}, want)[1] < 1e-9
    assert error({"a": jnp.array([3.0, jnp.inf]), "b": want["b"]}, want) == (1, 0.0)


def test_totals_hold_no_names():
    rows = {
        "one": {"seconds": 2.0, "line": True, "kind": False, "verdict": "line"},
        "two": {"seconds": 4.0, "verdict": "failed"},
    }
    seconds = {"programs": 2, "median_seconds": 3.0, "max_seconds": 4.0}
    assert runner.totals("scored", rows) == seconds | {"line": 1, "kind": 0, "fix": 0}
    rows["one"]["verdict"] = "nothing"
    assert runner.totals("clean", rows) == seconds | {"false": 1}


def test_a_wrong_tool_is_wrong_and_a_silent_one_silent():
    program = ENTRIES["annuity"]
    silent = runner.judged(program, Answer())
    assert [silent[x] for x in runner.ASPECTS] == [False] * 3
    assert silent["verdict"] == "nothing"
    wrong = Finding("overflow", [(__file__, 1)])
    assert runner.judged(program, Answer((wrong,)))["verdict"] == "another line"
    right = Finding(program.kinds[0], sorted(program.lines()))
    found = runner.judged(program, Answer((right,), fixed=program.fixed))
    assert (found["line"], found["kind"]) == (True, True)
    assert runner.judged(program, Answer((right, wrong)))["verdict"] == "line"
    assert runner.judged(program, Answer((wrong, right)))["verdict"] == "another line"
