"""Every one of the 2^32 float32 inputs, rounded to each format, against two independent routes.

``make prove`` runs it; ``.prove/`` remembers what was done, so that it goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import numpy as np

from proofs.oracle import expected, mismatches
from scalewise.formats import CATALOGUE, Format
from scalewise.rounding import cast, round_to

CHUNK = 1 << 24
RECORD = Path(".prove")
USER = Format("e6m9", exponent_bits=6, mantissa_bits=9)
FORMATS = {f.name: f for f in [*CATALOGUE.values(), USER] if f.mantissa_bits < 23}
SATURATE = (False, True, "finite")


def stored(x: np.ndarray, fmt: Format) -> np.ndarray | None:
    """NumPy's or ml_dtypes' own cast, widened again; None where there is none to compare with."""
    if fmt.dtype is None or not fmt.signed or fmt.nan_code is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(fmt.dtype).astype(np.float32)


def prove(name: str) -> dict[str, object]:
    """All inputs for one format: how many were compared, and the first that differ."""
    fmt = FORMATS[name]
    rounds = {s: jax.jit(lambda x, s=s: round_to(x, fmt, saturate=s)) for s in SATURATE}
    casts = jax.jit(lambda x: cast(x, fmt))
    wrong: list[str] = []
    compared = 0
    began = time.monotonic()
    for first in range(0, 1 << 32, CHUNK):
        x = np.arange(first, first + CHUNK, dtype=np.int64).astype(np.uint32).view(np.float32)
        for saturate, f in rounds.items():
            got, want = np.asarray(f(x)), expected(fmt, first, CHUNK, saturate)
            compared += CHUNK
            wrong += [f"round_to {saturate} {x[i]!r}" for i in mismatches(got, want)[:3]]
            if saturate is False and (theirs := stored(x, fmt)) is not None:
                compared += 2 * CHUNK
                wrong += [f"round_to, {fmt.dtype} {x[i]!r}" for i in mismatches(got, theirs)[:3]]
                with np.errstate(invalid="ignore"):
                    ours = np.asarray(casts(x)).astype(np.float32)
                wrong += [f"cast, {fmt.dtype} {x[i]!r}" for i in mismatches(ours, theirs)[:3]]
        if len(wrong) > 20:
            break
    return {
        "format": name,
        "compared": compared,
        "mismatches": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    RECORD.mkdir(exist_ok=True)
    names = sys.argv[1:] or list(FORMATS)
    if unknown := [n for n in names if n not in FORMATS]:
        print(f"no format {unknown}: there are {', '.join(FORMATS)}")
        return 2
    todo = [n for n in names if not (RECORD / f"{n}.json").exists()]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for result in pool.map(prove, todo):
            path = RECORD / f"{result['format']}.json"
            path.with_suffix(".part").write_text(json.dumps(result))
            path.with_suffix(".part").rename(path)
            print(result, flush=True)
    done = [json.loads((RECORD / f"{n}.json").read_text()) for n in names]
    wrong = sum(len(d["mismatches"]) for d in done)
    print(
        f"{len(done)} formats, {sum(d['compared'] for d in done):,} comparisons, {wrong} mismatches"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
