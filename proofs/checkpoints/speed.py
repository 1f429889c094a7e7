"""Speed and memory of casts beside a copy of the file.

    taskset -c 0 python -m proofs.checkpoints.speed FOLDER --gigabytes 2

Each command runs in a process of its own. Rates are bytes of the wide file in a second, of the
clock and of processor time: on a machine that does other work, compare the latter. Peak memory is
the resident set's anonymous part: pages of mapped files belong to the system's cache.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from scalewise.scaled import save_safetensors

CAST = """
import sys, threading, time
from scalewise import checkpoints
peak = [0]
def watch():
    while True:
        with open("/proc/self/status") as file:
            now = [int(x.split()[1]) for x in file if x.startswith("RssAnon")]
        peak[0] = max(peak[0], *now)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
time.sleep(0.05)
base, start, cpu = peak[0], time.perf_counter(), time.process_time()
source, out, to, layout = sys.argv[1:5]
checkpoints.cast(source, to, out=out, layout=layout if layout != "-" else None, keep="")
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(seconds, cpu, (peak[0] - base) / 1024)
"""


def make(path, gigabytes, side):
    rng = np.random.default_rng(0)
    count = max(2, round(gigabytes * 2**30 / (2 * side * side)))
    one = (rng.standard_normal((side, side), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    tensors = {f"model.layers.{i}.mlp.x{i}.weight": np.roll(one, i, 0) for i in range(count)}
    save_safetensors(path, tensors)
    return one.nbytes


def cast(source, out, to, layout):
    command = [sys.executable, "-c", CAST, str(source), str(out), to, layout]
    return tuple(map(float, subprocess.check_output(command, text=True).split()))


def copied(path, out):
    start, cpu = time.perf_counter(), time.process_time()
    with path.open("rb") as a, out.open("wb") as b:
        while part := a.read(1 << 22):
            b.write(part)
        os.fsync(b.fileno())
    times = time.perf_counter() - start, time.process_time() - cpu
    out.unlink()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--side", type=int, default=8192)
    given = parser.parse_args()
    folder = given.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = folder / "source.safetensors"
    tensor = make(source, given.gigabytes, given.side)
    size = source.stat().st_size
    print(f"{size:,} bytes, largest tensor {tensor / 2**20:.0f} MiB", flush=True)

    def rates(times):
        return " and ".join(f"{size / t / 1e9:.3f}" for t in times[:2]) + " GB/s"

    print(f"copy: {rates(copied(source, folder / 'copy'))}", flush=True)
    for to, layout in (("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors"),
                       ("e4m3fn", "deepseek")):  # fmt: skip
        narrow, wide = folder / f"{to}.safetensors", folder / "wide.safetensors"
        packing = cast(source, narrow, to, layout)
        print(f"{to} {layout}: packed at {rates(packing)}, {packing[2]:.0f} MiB", flush=True)
        unpacking = cast(narrow, wide, "bf16", "-")
        copy = copied(wide, folder / "copy")
        share = " and ".join(f"{b / a:.2f}" for a, b in zip(unpacking, copy, strict=False))
        print(f"{to} {layout}: unpacked at {rates(unpacking)}, {unpacking[2]:.0f} MiB; "
              f"{share} of a copy's speed", flush=True)  # fmt: skip
        wide.unlink()
        narrow.unlink()


if __name__ == "__main__":
    main()
