"""The built site (``make docs``): questions of newcomers lead to their pages, 28 of 35 with the
first result, and no table is wider than its column.

The index is ranked as lunr does, by BM25 over stemless words with the titles of sections weighted.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from browsers import needs_a_browser, opened

INDEX = Path(__file__).parents[2] / "site" / "search" / "search_index.json"
QUESTIONS = {
    "loss nan": ("faq", "guides/audit", "get-started/debug"),
    "own format": ("tutorials/custom-format", "faq"),
    "fsdp": ("guides/sharding", "faq"),
    "convert a checkpoint to MXFP8": ("faq", "casts", "guides/convert"),
    "cite": ("faq",),
    "loss scale": ("guides/loss-scaling", "mixed_precision", "faq"),
    "resume training": ("guides/checkpoints", "faq"),
    "inference": ("faq", "guides/inference"),
    "which recipe on an H100": ("faq", "guides/recipes", "guides/devices"),
    "last layer in BF16": ("faq", "guides/wide-parts"),
    "NNX": ("tutorials/nnx", "faq"),
    "saturate": ("casts", "faq"),
    "speed on a GPU": ("gpu", "faq"),
    "PyTorch": ("torch", "tutorials/pytorch", "faq"),
    "safetensors": ("casts", "faq"),
    "histogram": ("tutorials/gradient-histograms", "faq"),
    "master weights": ("guides/narrow-state", "mixed_precision", "faq"),
    "stochastic rounding": ("concepts/formats-and-rounding", "faq", "guides/narrow-state"),
    "why FP16 diverges": ("faq", "mixed_precision", "get-started/debug"),
    "layer norm in FP16": ("guides/norm-for-hardware", "norms", "faq"),
    "wandb": ("guides/checkpoints", "faq"),
    "maxtext": ("frameworks", "faq"),
    "colab": ("notebooks/train_nnx", "notebooks/find_the_nan", "notebooks/own_format"),
    "kv cache": ("faq", "guides/transformations"),
    "keras": ("frameworks", "faq"),
    "muon": ("guides/optimizers",),
    "recipe from yaml config": ("guides/recipes",),
    "install": ("get-started/install",),
    "tensorboard": ("tutorials/gradient-histograms", "guides/checkpoints", "guides/monitor"),
    "equinox": ("tutorials/equinox", "frameworks"),
    "fp4": ("guides/recipes", "faq"),
    "int8": ("faq", "limits"),
    "quantize checkpoint nvfp4": ("guides/convert-a-checkpoint", "checkpoints"),
    "hugging face": ("torch", "tutorials/pytorch", "faq", "guides/convert-a-checkpoint"),
    "recipe by name with mypy": ("guides/recipes",),
}
WIDE_TABLES = """() => [...document.querySelectorAll(".md-typeset table:not([class])")]
    .filter(table => table.scrollWidth > document.querySelector("article").clientWidth)
    .map(table => table.innerText.slice(0, 60))"""
STOP = {"a", "an", "the", "to", "in", "on", "is", "my", "of", "for", "with", "by", "it", "and"}


def words(text: str) -> list[str]:
    plain = re.sub(r"<[^>]+>", " ", text).lower()
    return [w.rstrip("s") for w in re.findall(r"[a-z0-9_]+", plain) if w not in STOP]


def ranked(question: str, documents: list[dict]) -> list[str]:
    """Returns the pages, best first: BM25 over sections, whose titles count ten times."""
    texts = [words(d["title"]) * 10 + words(d["text"]) for d in documents]
    counts = [Counter(t) for t in texts]
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(documents)
    for word in words(question):
        holding = sum(word in c for c in counts)
        weight = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for i, c in enumerate(counts):
            rate = c[word] * 2.2 / (c[word] + 1.2 * (0.25 + 0.75 * len(texts[i]) / mean))
            scores[i] += weight * rate * documents[i].get("boost", 1)
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    return list(dict.fromkeys(documents[i]["location"].split(".html")[0] for i in order))


@pytest.mark.skipif(not INDEX.exists(), reason="the site isn't built: make docs")
def test_questions_find_their_pages():
    documents = json.loads(INDEX.read_text())["docs"]
    assert not [d["location"] for d in documents if d["location"].startswith("source/")]
    found = {question: ranked(question, documents)[:4] for question in QUESTIONS}
    first = [q for q, pages in QUESTIONS.items() if found[q][0] in pages]
    missed = {q: found[q] for q, pages in QUESTIONS.items() if not set(pages) & set(found[q])}
    assert len(first) >= 28
    assert len(missed) <= 1, missed


def test_there_are_35_questions_whose_pages_exist():
    docs = INDEX.parents[2] / "docs"
    assert len(QUESTIONS) == 35
    assert all(
        any((docs / f"{p}{end}").is_file() for p in pages for end in (".md", ".ipynb"))
        for pages in QUESTIONS.values()
    )


@pytest.mark.slow
@pytest.mark.skipif(not INDEX.exists(), reason="the site isn't built: make docs")
@needs_a_browser
def test_no_table_is_wider_than_its_column():
    wide = {}
    with opened("about:blank") as page:
        page.set_viewport_size({"width": 1280, "height": 800})
        for path in sorted(INDEX.parents[1].rglob("*.html")):
            if "<table>" in path.read_text():
                page.goto(path.as_uri(), wait_until="domcontentloaded")
                if found := page.evaluate(WIDE_TABLES):
                    wide[path.name] = found
    assert not wide
