"""``make tpu-hlo``: XLA's estimated cycles of a training step on a TPU; no TPU is needed.

    python -m benchmarks.tpu_hlo [--topology v6e:2x2] [--recipes plain fp8] [--size full]
    python -m benchmarks.tpu_hlo --topology tpu7x:4x4x8 --shard [--program gpt]

The compiler is in libtpu (``pip install "jax[tpu]"``). It writes into the optimised program how
many cycles it expects of each fusion, by its own cost model; this prints their sums. With
``--shard`` weights and batch are sharded over all devices of the topology, and the table has what
one of them sends in a step. Flags of the compiler are given in ``LIBTPU_INIT_ARGS``.
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
from benchmarks.models import MODELS
from benchmarks.programs import PROGRAMS, SIZES, compiled, variant

# A TensorCore of a TPU7x chip, which has two: half of the chip's rates (Google Cloud's page on
# TPU7x: 7380 GB/s, 4614 and 2307 TFLOP/s, 1200 GB/s to other chips in both directions together).
DEVICE = hlo.Device(3.69e12, {8: 2307e12, 16: 1153.5e12, 32: 288e12}, link=300e9, network=300e9)
HEADINGS = (
    "recipe", "products", "cycles", "of plain's speed", "temporary GiB", "compiled in, s",
    "sent, MB", "sending, ms",
)  # fmt: skip


def given_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="XLA's estimated cycles of a training step on a TPU."
    )
    parser.add_argument("--topology", default="tpu7x:2x2x1", help="v5e:2x2, v6e:2x2, v5p:2x2x1...")
    parser.add_argument("--size", choices=sorted({s for _, s in SIZES}), default="small")
    parser.add_argument("--program", choices=(*PROGRAMS, *MODELS), default="mlp")
    parser.add_argument("--recipes", nargs="+", default=["plain", "fp8"])
    parser.add_argument("--shard", action="store_true", help="over all devices of the topology")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the HLO texts there")
    return parser.parse_args()


def cells(recipe: str, s: hlo.Summary, plain: hlo.Summary | None, temporary: int, seconds: float):
    """A row of the table; cycles and traffic beside the same program without a recipe."""
    sent = [f"{n / 2**20:.0f} {' '.join(key)}" for key, n in sorted(s.sent.items()) if n >= 2**20]
    if sent and plain:
        sent.append(f"{s.sent.total() / plain.sent.total():.2f} of plain's")
    return [
        recipe, "\n".join(s.lines), f"{s.cycles:,}",
        f"{plain.cycles / s.cycles:.2f}" if plain else "",
        f"{temporary / 2**30:.2f}", f"{seconds:.0f}", "\n".join(sent),
        f"{s.seconds_sending * 1e3:.3g}" if sent else "",
    ]  # fmt: skip


def main() -> None:
    given = given_arguments()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=given.topology).devices
    devices = list(devices) if given.shard else [devices[0]]
    generation = given.topology.partition(":")[0]  # as in scalewise.devices
    table = Table(
        title=f"{given.program}, {given.size}, compiled for {len(devices)} of {given.topology}, "
        f"JAX {jax.__version__}",
        show_lines=True,
    )
    for heading in HEADINGS:
        table.add_column(heading)
    plain: hlo.Summary | None = None
    for recipe in given.recipes:
        began = time.perf_counter()
        program = variant(given.program, given.size, recipe, len(devices), generation)
        executable: Any = compiled(program, devices, "tpu")
        seconds = time.perf_counter() - began
        text = executable.as_text()
        if given.dump:
            given.dump.mkdir(parents=True, exist_ok=True)
            name = f"{given.topology.replace(':', '_')}_{given.program}_{len(devices)}_{recipe}.hlo"
            (given.dump / name).write_text(text)
        s = hlo.summary(hlo.parse(text), DEVICE)
        plain = s if recipe == "plain" else plain
        temporary = executable.memory_analysis().temp_size_in_bytes
        table.add_row(*cells(recipe, s, plain, temporary, seconds))
    Console(width=max(150, Console().width)).print(table)


if __name__ == "__main__":
    main()
