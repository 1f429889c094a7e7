"""The pages on norms and functions say what was measured, and what was measured can be again."""

import csv
import dataclasses
import json

import pytest
from proofs.function_errors import function_table
from proofs.function_tables import function_ranges
from proofs.norms import torture

from pages import DOCS
from scalewise.formats import format as format_


def test_the_torture_set_measures_the_same_again():
    with (DOCS / "norms.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    again = torture(format_("e5m2"), 16, ("auto", "direct", "blue"))
    for record in again:
        assert {key: str(value) for key, value in record.items()} in rows


@pytest.mark.slow
def test_the_table_of_functions_measures_the_same_again():
    with (DOCS / "functions.csv").open(newline="") as file:
        rows = {
            (r["format"], r["domain"], r["name"], r["arithmetic"]): r for r in csv.DictReader(file)
        }
    limits = json.loads((DOCS / "function_ranges.json").read_text())["fp16"]
    for found in function_ranges("fp16", ["exp", "reciprocal", "sinc", "relu"]):
        record = json.loads(json.dumps(dataclasses.asdict(found)))
        assert limits[record.pop("name")] == record
    for record in function_table("fp16", ["rsqrt", "sigmoid"], ["all", "normal"]):
        row = rows["fp16", record.domain, record.name, record.arithmetic]
        assert float(row["correctly_rounded"]) == pytest.approx(record.correctly_rounded, abs=1e-3)
        assert int(row["count"]) == record.count
        assert float(row["mean_absolute"]) == pytest.approx(record.mean_absolute, rel=1e-3)
