"""Compares at least 100,000 sums of each instruction of the matrix units, and counts them.

    python -m proofs.matrix_unit_sums                      # with exact rational arithmetic
    python -m proofs.matrix_unit_sums --mmasim FOLDER      # with a checkout of microsoft/MMA-Sim
    python -m proofs.matrix_unit_sums --goal 200000

Each sum is a dot product of two steps of the instruction (four of one with single terms), on random
and directed operands (``proofs.matrix_units``); the formats that an instruction multiplies take
turns. Counts are written to ``docs/matrix_unit_sums.json`` after each round, from which the next
run goes on; ``docs/matrix_units_page.py`` shows them. All rounds take an hour, MMA-Sim's a
few hours.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from proofs import matrix_units as proof
from scalewise._output import replacing
from scalewise.devices import MatrixUnit

COUNTS = Path(__file__).parents[1] / "docs" / "matrix_unit_sums.json"
EXACT, MMASIM = "exact rational arithmetic", "MMA-Sim"
ROUND = 300  # sums of each mode


def instruction(unit: MatrixUnit) -> str:
    """Returns what units of one arithmetic share, whatever their operands."""
    fields = (unit.architecture, unit.instruction, unit.terms, unit.fraction_bits,
              unit.result.name, unit.method)  # fmt: skip
    return "|".join(map(str, fields))


def compare_round(
    key: str, number: int, units: list[MatrixUnit], reference: Callable
) -> tuple[int, int]:
    """Returns how many sums of one unit were compared, and how many differ."""
    unit = units[number % len(units)]
    rng = np.random.default_rng([zlib.crc32(key.encode()), number])
    compared = differ = 0
    for mode in proof.MODES:
        given = proof.operands(unit, mode, ROUND, rng)
        want = reference(unit, *given)
        if want is None:  # MMA-Sim doesn't have these operands
            return 0, 0
        wrong = proof.differing(proof.ours(unit, *given), want)
        if len(wrong):
            print(f"{proof.label(unit)}, {mode}, round {number}: rows {wrong.tolist()}")
        compared, differ = compared + ROUND, differ + len(wrong)
    return compared, differ


def compare(route: str, reference: Callable, goal: int) -> None:
    """Compares sums until each instruction has ``goal`` of them."""
    groups: dict[str, list[MatrixUnit]] = {}
    for unit in proof.all_units():
        groups.setdefault(instruction(unit), []).append(unit)
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    found = counts.setdefault(route, {})
    missing: set[str] = set()
    while short := [k for k in groups if k not in missing and _sums(found, k) < goal]:
        for key in short:
            entry = found.get(key, {"sums": 0, "differ": 0, "rounds": 0})
            compared, differ = compare_round(key, entry["rounds"], groups[key], reference)
            entry = {
                "sums": entry["sums"] + compared,
                "differ": entry["differ"] + differ,
                "rounds": entry["rounds"] + 1,
                "date": str(datetime.date.today()),
            }
            if not entry["sums"] and entry["rounds"] >= len(groups[key]):
                missing.add(key)
                continue
            found[key] = entry
            with replacing(COUNTS) as file:
                file.write((json.dumps(counts, indent=1) + "\n").encode())
        least = min(_sums(found, k) for k in groups if k not in missing)
        print(f"{route}: at least {least:,} sums of each instruction", flush=True)


def _sums(found: dict[str, dict], key: str) -> int:
    return found.get(key, {"sums": 0})["sums"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--goal", type=int, default=100_000, help="sums of each instruction")
    parser.add_argument("--mmasim", type=Path, help="a checkout of microsoft/MMA-Sim")
    options = parser.parse_args()
    if options.mmasim:
        sys.path.insert(0, str(options.mmasim))
        compare(MMASIM, proof.mmasim, options.goal)
    else:
        compare(EXACT, proof.exact, options.goal)
    counts = json.loads(COUNTS.read_text())
    for route, found in counts.items():
        for key, entry in found.items():
            print(f"{route}: {key}: {entry['sums']:,} sums, {entry['differ']} differ")
    return any(entry["differ"] for found in counts.values() for entry in found.values())


if __name__ == "__main__":
    sys.exit(main())
