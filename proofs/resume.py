"""Kills a run at random moments, resumes it, and compares its bits with an uninterrupted run's.

    python -m proofs.resume --kills 20

Kills are ``kill -9``, one in five SIGTERM, at moments spread over start, compilation, steps and
the writing of checkpoints (one every few steps, so that many kills fall into it).
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from scalewise.cli import main; main()", "train"]


def start(arguments: list[str], out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *arguments, "--out", str(out), "--resume"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"train ended with {process.returncode}:\n{out}")
    return out


def bits(out: Path) -> list[tuple]:
    """Returns the metrics of each step without its time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["scale"], r["skipped"]) for r in rows]


def lines(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def prove(arguments: list[str], kills: int, seed: int, folder: Path) -> dict:
    """Makes both runs and returns the figures; raises SystemExit if they differ."""
    rng = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    want = finish(start(arguments, whole)).split("state ")[1].split()[0]
    moments = []
    for number in range(kills):
        process = start(arguments, killed)
        before = lines(killed)
        if number % 4 < 3:  # three of four kills while it trains and saves, one of four before
            while process.poll() is None and lines(killed) <= before:
                time.sleep(0.02)
            time.sleep(rng.random() * 0.6)
        else:
            time.sleep(rng.random() * 8)
        process.send_signal(signal.SIGTERM if number % 5 == 4 else signal.SIGKILL)
        out, _ = process.communicate()
        if "Traceback" in out:
            raise SystemExit(f"a traceback after kill {number}:\n{out}")
        half = [p.name for p in (killed / "checkpoints").glob("*tmp*")]
        moments.append((lines(killed), bool(half)))
    got = finish(start(arguments, killed)).split("state ")[1].split()[0]
    if got != want or bits(whole) != bits(killed):
        raise SystemExit(f"bits differ after kills at {moments}: {got} instead of {want}")
    during = sum(half for _, half in moments)
    return {"state": got, "kills": kills, "within a save": during, "after lines": moments}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--method", default="five-bytes")
    parser.add_argument("program", nargs="?", default="mlp")
    given = parser.parse_args()
    arguments = [given.program, "--method", given.method, "--steps", str(given.steps)]
    with tempfile.TemporaryDirectory() as folder:
        found = prove(
            [*arguments, "--every", str(given.every)], given.kills, given.seed, Path(folder)
        )
    print(found)


if __name__ == "__main__":
    main()
