"""Counts the programs whose balance sheet has a marked line first, and how far shares add up.

``python -m failures.sheet corpus seen`` takes a set and one of its parts; names behind them choose
programs. Of the scored part and of healthy ones of the corpus only totals are printed. Each program
is traced as an audit does it, and its sheet is made; the audit itself doesn't run.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from failures.low_precision import is_emulated
from failures.programs import PARTS, Program
from failures.runner import of_part
from failures.truth import arguments
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
        return make_sheet(sheet_source(call, session, session.run())), time.process_time() - start


def row(program: Program) -> dict[str, Any]:
    """Returns the rank of the first marked line among the lines, and what the sums leave."""
    options = dict(program.options) | ({"device": program.device} if program.device else {})
    if is_emulated(program):  # so the truth was measured
        options.setdefault("dtypes", "all")
    sheet, seconds = sheet_of(program.call, program.low, arguments(program), options)
    places = [(str(Path(x.file).resolve()), x.line) for x in sheet.lines if x.file]
    marked = {(str(Path(file).resolve()), line) for file, line in program.lines()}
    rank = next((i for i, place in enumerate(places, 1) if place in marked), 0)
    unexplained = sum(abs(x.share) for x in sheet.shares if x.cause == "unexplained")
    return {
        "rank": rank, "seconds": seconds, "residual": sheet.residual, "unexplained": unexplained,
        "fails": any(x.fails for x in sheet.stages), "said": sheet.sentences()[:2],
        "lines": [f"{x.where} {x.share:.3f}" for x in sheet.lines[:4]],
    }  # fmt: skip


def measured(programs: Sequence[Program]) -> Iterator[dict[str, Any]]:
    for program in programs:
        signal.alarm(LIMIT)
        try:
            found = row(program)
        except Exception as problem:
            found = {"failed": f"{type(problem).__name__}: {str(problem)[:160]}"}
        finally:
            signal.alarm(0)
        found["marked"] = bool(program.kinds)
        right = found.get("rank") == 1 if found["marked"] else not found.get("fails", True)
        if not program.blind and not right:
            print(program.name, found)
        yield found


def distribution(shares: Sequence[float]) -> str:
    """Returns in how many programs a share of the error is below powers of ten."""
    counts = [f"{sum(x < 10.0**k for x in shares)} below 1e{k}" for k in (-12, -9, -6, -3, 0)]
    return f"{', '.join(counts)}, of {len(shares)}; largest {max(shares):.1e}"


def too_long(*_: Any) -> None:
    raise TimeoutError(f"{LIMIT} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=("corpus", "gallery", "contact", "trainings"))
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_long)
    rows = list(measured(of_part(given.set, given.part, given.names)))
    made = [x for x in rows if "failed" not in x]
    failing = [x for x in made if x["marked"]]
    first, third = (sum(1 <= x["rank"] <= n for x in failing) for n in (1, 3))
    print(
        f"marked line first in {first} of {sum(x['marked'] for x in rows)}, among three in {third}"
    )
    print(f"{len(rows) - len(made)} of {len(rows)} without a sheet")
    if clean := [x for x in made if not x["marked"]]:
        print(f"{sum(x['fails'] for x in clean)} of {len(clean)} clean ones fail")
    if made:
        seconds = sorted(x["seconds"] for x in made)
        for what in ("residual", "unexplained"):
            print(f"{what}, of the error: {distribution([x[what] for x in made])}")
        median = statistics.median(seconds)
        print(f"processor seconds of a sheet: median {median:.2f}, largest {seconds[-1]:.1f}")


if __name__ == "__main__":
    main()
