"""``make tpu-hlo``: XLA's estimated cycles of a training step on a TPU; no TPU is needed.

    python -m benchmarks.tpu_hlo [--topology v6e:2x2] [--recipes plain fp8] [--size full]

The compiler is in libtpu (``pip install "jax[tpu]"``). It writes into the optimised program how
many cycles it expects of each fusion, by its own cost model; this prints their sums.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # this machine is none of Google's cloud
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import argparse
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from benchmarks import hlo
from benchmarks.programs import SIZES, compiled, variant

# Rates only serve to sum up: cycles are XLA's.
DEVICE = hlo.Device(7.4e12, {8: 4614e12, 16: 2307e12, 32: 576e12})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="XLA's estimated cycles of a training step on a TPU."
    )
    parser.add_argument("--topology", default="tpu7x:2x2x1", help="v5e:2x2, v6e:2x2, v5p:2x2x1...")
    parser.add_argument("--size", choices=sorted({s for _, s in SIZES}), default="small")
    parser.add_argument("--recipes", nargs="+", default=["plain", "fp8"])
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the HLO texts there")
    given = parser.parse_args()
    device = topologies.get_topology_desc(platform="tpu", topology_name=given.topology).devices[0]
    table = Table(title=f"MLP, {given.size}, compiled for {given.topology}, JAX {jax.__version__}")
    headings = "recipe", "products", "cycles", "of plain's speed", "temporary GiB", "compiled in, s"
    for heading in headings:
        table.add_column(heading)
    plain = 0
    for recipe in given.recipes:
        began = time.perf_counter()
        executable: Any = compiled(variant("mlp", given.size, recipe), [device], "tpu")
        seconds = time.perf_counter() - began
        text = executable.as_text()
        if given.dump:
            given.dump.mkdir(parents=True, exist_ok=True)
            (given.dump / f"{given.topology.replace(':', '_')}_{recipe}.hlo").write_text(text)
        s = hlo.summary(hlo.parse(text), DEVICE)
        plain = s.cycles if recipe == "plain" else plain
        gib = executable.memory_analysis().temp_size_in_bytes / 2**30
        speed = f"{plain / s.cycles:.2f}" if plain else ""
        table.add_row(
            recipe, "\n".join(s.lines), f"{s.cycles:,}", speed, f"{gib:.2f}", f"{seconds:.0f}"
        )
    Console(width=max(120, Console().width)).print(table)


if __name__ == "__main__":
    main()
