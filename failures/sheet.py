"""Counts the programs whose balance sheet has a marked line first, and how far shares add up.

`python -m proofs.sheet seen` takes the corpus's half on which the sheet was developed, `scored` the
other one, of which it prints totals alone, `clean` its healthy programs, and `gallery` the failures
and clean programs of examples/. Other names choose single programs. Each is traced as an audit does
it, and its sheet is made; the audit itself doesn't run.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from proofs.corpus.entries import CLEAN, ENTRIES, Entry, half, load
from proofs.corpus.score import arguments
from scalewise._jax import unchecked
from scalewise.auditing._audit import low_interpretation, on_device, sheet_source, traced
from scalewise.auditing._sheet._make import make_sheet
from scalewise.interpret import with_state

LIMIT = 120  # seconds of a program


def sheet_of(call: Any, low: Any, args: Any, options: Mapping[str, Any]) -> tuple[Any, float]:
    """Returns the sheet of the program that an audit would run, without the audit."""
    low_run = low_interpretation(low, options.get("saturate", False))
    if "device" in options:
        low_run = on_device(low_run, options["device"])
    steps, batches = options.get("steps", 1), options.get("batches")
    per_step = [jax.tree.leaves(batches(i)) for i in range(steps)] if batches else ()
    if steps > 1:
        call, args = with_state(call, args)
    start = time.process_time()
    with unchecked():
        session = traced(call, args, {}, low_run, None, steps, per_step, options.get("dtypes"))
        return make_sheet(sheet_source(call, session)), time.process_time() - start


def row(call: Any, low: Any, args: Any, options: Any, lines: Any) -> dict[str, Any]:
    """Returns the rank of the first marked line among the lines, and what the sums leave."""
    sheet, seconds = sheet_of(call, low, args, options)
    places = [(str(Path(x.file).resolve()), x.line) for x in sheet.lines if x.file]
    marked = {(str(Path(file).resolve()), line) for file, line in lines}
    rank = next((i for i, place in enumerate(places, 1) if place in marked), 0)
    unexplained = sum(abs(x.share) for x in sheet.shares if x.cause == "unexplained")
    return {
        "rank": rank, "seconds": seconds, "residual": sheet.residual, "unexplained": unexplained,
        "fails": any(x.fails for x in sheet.stages), "said": sheet.sentences()[:2],
        "lines": [f"{x.where} {x.share:.3f}" for x in sheet.lines[:4]],
    }  # fmt: skip


def corpus(which: str) -> Iterator[tuple[str, Any]]:
    load()
    for name, program in {**ENTRIES, **CLEAN}.items():
        kind = "clean" if name in CLEAN else half(name)
        if which in (name, kind):
            lines = program.lines() if isinstance(program, Entry) else ()
            yield name, (program.call, program.low, arguments(program), program.options, lines)


def gallery() -> Iterator[tuple[str, Any]]:
    from proofs.experts import marked
    from proofs.gallery import ALL
    from proofs.gallery import CLEAN as UNMARKED

    for name, case in ALL.items():
        yield (
            name,
            (case.call, case.low, case.arguments(), {"reference": case.reference}, marked(case.at)),
        )
    for name, case in UNMARKED.items():
        yield name, (case.call, case.low, case.arguments(), {"reference": case.reference}, ())


def measured(which: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, program in gallery() if which == "gallery" else corpus(which):
        signal.alarm(LIMIT)
        try:
            found = row(*program)
        except Exception as problem:
            found = {"failed": f"{type(problem).__name__}: {str(problem)[:160]}"}
        finally:
            signal.alarm(0)
        yield name, found | {"marked": bool(program[-1])}


def too_long(*_: Any) -> None:
    raise TimeoutError(f"{LIMIT} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="+", help="seen, scored, clean, gallery, or programs")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_long)
    for which in parser.parse_args().which:
        rows = dict(measured(which))
        for name, x in rows.items() if which != "scored" else ():
            if "failed" in x or (x["rank"] != 1 if x["marked"] else x["fails"]):
                print(name, x)
        made = [x for x in rows.values() if "failed" not in x]
        failing = [x for x in made if x["marked"]]
        first, third = (sum(1 <= x["rank"] <= n for x in failing) for n in (1, 3))
        marked = sum(x["marked"] for x in rows.values())
        print(f"{which}: marked line first in {first} of {marked}, among three in {third}")
        print(f"{which}: {len(rows) - len(made)} of {len(rows)} without a sheet")
        if clean := [x for x in made if not x["marked"]]:
            print(f"{which}: {sum(x['fails'] for x in clean)} of {len(clean)} clean ones fail")
        if made:
            worst = max(x["residual"] for x in made)
            shown = sum(x["unexplained"] > 1e-6 for x in made)
            seconds = sorted(x["seconds"] for x in made)
            print(
                f"{which}: sums' worst residual {worst:.1e}; more than 1e-6 unexplained in {shown}"
            )
            print(
                f"{which}: processor seconds of a sheet: median {statistics.median(seconds):.2f}, "
                f"largest {seconds[-1]:.1f}"
            )


if __name__ == "__main__":
    main()
