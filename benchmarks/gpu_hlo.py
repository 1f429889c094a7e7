"""``make gpu-hlo``: what training steps compile to for an H100 or a B200; no GPU is needed.

    python -m benchmarks.gpu_hlo [--device b200] [--size full] [--programs mlp] [--recipes fp8 ...]

compiles two programs (`benchmarks.programs`) ahead of time by XLA's CUDA compiler, which is in the
wheels of JAX's CUDA plugin, and prints for each variant: matrix products by dtypes and library
function, kernels, bytes that kernels outside of products move, a roofline bound, and temporary
memory. ``--fsdp N`` shards weights and batch over N devices and prints the traffic of one of
them. ``--triton`` compiles each variant with XLA's own products as well as with cuBLAS's and keeps
the one with the smaller bound. ``--check`` compares figures with `CHECKS`, of full sizes where a
small program's products stay wide, and fails with a sentence for each one that moved. docs/gpu.md
says what the figures mean.
"""

from __future__ import annotations

import os

# JAX and XLA read these when they are imported. There is no driver, so nothing can be tuned by
# running it; Triton's products can only be chosen by tuning.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0",
     "--xla_gpu_enable_triton_gemm=false"]
)  # fmt: skip

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from benchmarks import hlo
from benchmarks.expected import Expected, moved
from benchmarks.models import MODELS, without_driver
from benchmarks.programs import BY_HAND, PROGRAMS, SIZES, compiled, variant

DESCRIPTIONS = Path(__file__).parent / "devices"
# Dense rates of the data sheets (H100 SXM5, B200 SXM): bytes/s and operations/s; 32 is TF32. NVLink
# in one direction, and the eight adapters of 400 Gbit/s of a DGX, over which rings are laid.
DEVICES = {
    "h100": hlo.Device(3.35e12, {8: 1979e12, 16: 989e12, 32: 494e12}, 450e9, 400e9),
    "b200": hlo.Device(7.7e12, {4: 9000e12, 8: 4500e12, 16: 2250e12, 32: 1100e12}, 900e9, 400e9),
}
RECIPES = ("plain", "bf16", "fp16", "fp8", "fp8_delayed", "mxfp8", "hand", "flax")
NODE = 8  # devices that share a host


@dataclass(frozen=True)
class Run:
    """What is compiled: `fsdp` is the number of devices that weights are sharded over, or 0;
    `triton` says whether products may also be XLA's own, `narrow` whether a model's small products
    are narrow, too."""

    program: str
    recipe: str
    size: str = "small"
    device: str = "h100"
    fsdp: int = 0
    triton: bool = False
    narrow: str = "faster"

    @property
    def plain(self) -> Run:
        """The same program in bfloat16, without a recipe."""
        return replace(self, recipe="plain", narrow="faster")

    def __str__(self) -> str:
        shards = f", sharded over {self.fsdp}" if self.fsdp else ""
        return f"{self.program} under {self.recipe} ({self.size}, {self.device}{shards})"


@dataclass(frozen=True)
class Result:
    """Figures of one compiled run; `temporary` in bytes, `compile_s` in CPU seconds."""

    run: Run
    summary: hlo.Summary
    kernels: list[hlo.Kernel]
    temporary: int
    compile_s: float

    def record(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        s = self.summary
        return asdict(self.run) | {
            "jax": jax.__version__, "products": s.lines, "kernels": s.kernels,
            "gb_outside": round(s.bytes_outside / 1e9, 3), "ms": round(s.seconds * 1e3, 3),
            "ms_products": round(s.seconds_products * 1e3, 3),
            "ms_outside": round(s.seconds_outside * 1e3, 3),
            "temporary_gib": round(self.temporary / 2**30, 3),
            "operands_mb": megabytes(s.collectives), "sent_mb": megabytes(s.sent),
            "ms_sending": round(s.seconds_sending * 1e3, 3), "launches": dict(s.launches),
            "compile_s": round(self.compile_s, 1),
        }  # fmt: skip


def megabytes(traffic: Counter[tuple[str, str]]) -> dict[str, float]:
    return {" ".join(key): round(n / 2**20, 3) for key, n in sorted(traffic.items())}


# -- compilation ---------------------------------------------------------------------------------


def gpus(device: str, count: int = 1) -> list[Any]:
    """Described devices, as many as a mesh needs, in nodes of eight.

    Raises:
        RuntimeError: without the CUDA plugin of this JAX.
    """
    description = (DESCRIPTIONS / f"{device}.txtpb").read_text()
    nodes, each = -(-count // NODE), min(count, NODE)
    try:
        topology = topologies.get_topology_desc(
            device, "cuda", target_config=description, topology=f"1x{nodes}x{each}"
        )
    except Exception as error:
        raise RuntimeError(
            f"expected the CUDA plugin of JAX {jax.__version__} on the path, as "
            f'"make gpu-hlo" installs it: {error}'
        ) from error
    return list(topology.devices)[:count]


def measure(run: Run, dump: Path | None = None) -> Result:
    """Compiles a run and reads its figures from the optimised HLO.

    Triton's products have tiles that nobody tuned; the bound doesn't see them, since it counts each
    operand once. A device chooses products and tiles by timing them, one by one.
    """
    routes = (False, True) if run.triton else (False,)
    results = [_measured(run, triton, dump) for triton in routes]
    return min(results, key=lambda result: result.summary.seconds)


def _measured(run: Run, triton: bool, dump: Path | None) -> Result:
    devices = gpus(run.device, max(1, run.fsdp))
    began = time.process_time()  # of all threads: other work on the machine hardly counts
    program = variant(run.program, run.size, run.recipe, len(devices), run.device, run.narrow)
    executable = compiled(program, devices, "cuda", {"xla_gpu_enable_triton_gemm": triton})
    seconds = time.process_time() - began
    text = executable.as_text()
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
        name = "_".join(map(str, asdict(replace(run, triton=triton)).values()))
        (dump / f"{name}.hlo").write_text(text)
    print(f"{run}: {seconds:.1f} CPU s", file=sys.stderr)
    module = hlo.parse(text)
    figures = hlo.summary(module, DEVICES[run.device])
    temporary = executable.memory_analysis().temp_size_in_bytes
    return Result(run, figures, hlo.kernels(module), temporary, seconds)


# -- checks --------------------------------------------------------------------------------------


BLOCKS = "cudnn$blockScaledDot"
NARROW_GATHERS: Any = {"gathered": ("f8e4m3fn",), "sent": 0.76}
CHECKS: dict[Run, Expected] = {
    Run("mlp", "bf16"): Expected(narrow=0, kernels=22, outside=0.9),
    Run("mlp", "fp16"): Expected(narrow=0, kernels=22, outside=0.9),
    Run("mlp", "fp8"): Expected(narrow=8, kernels=58, outside=1.4),
    Run("mlp", "fp8_delayed"): Expected(narrow=8, kernels=50, outside=1.25),
    Run("mlp", "mxfp8"): Expected(narrow=0, kernels=56, outside=1.75),
    Run("mlp", "mxfp8", device="b200"): Expected(8, kernels=45, outside=1.35, target=BLOCKS),
    Run("mlp", "nvfp4", device="b200"): Expected(8, kernels=104, outside=1.85, target=BLOCKS),
    Run("llama_cudnn", "mxfp8", device="b200"): Expected(
        12, kernels=188, outside=1.06, target=BLOCKS, speed=1.03
    ),
    Run("llama_cudnn", "nvfp4", device="b200"): Expected(
        21, kernels=335, outside=1.17, target=BLOCKS, speed=1.04
    ),
    Run("gpt", "fp16"): Expected(narrow=0, kernels=150, outside=1.0),
    Run("gpt", "fp8"): Expected(narrow=27, kernels=270, outside=1.27),
    Run("gpt", "fp8_delayed"): Expected(narrow=27, kernels=250, outside=1.22),
    Run("llama", "fp8", "full"): Expected(narrow=37, kernels=390, outside=1.01, speed=1.32),
    Run("llama_cudnn", "fp8", "full"): Expected(narrow=37, kernels=365, outside=1.31, speed=1.34),
    Run("llama_scan", "fp8", "full"): Expected(narrow=45, kernels=535, outside=0.94, speed=1.34),
    Run("llama_cudnn", "fp8_delayed+attention", "full"): Expected(
        narrow=37, kernels=310, outside=1.15, speed=1.47, attention=4
    ),
    Run("attention_cudnn", "fp8+attention", "full"): Expected(
        narrow=0, kernels=26, outside=1.8, speed=1.12, attention=1
    ),
    Run("llama_scan_cudnn", "fp8", "full"): Expected(
        narrow=45, kernels=495, outside=1.19, speed=1.36
    ),
    Run("llama", "fp8+attention", "full", narrow="always"): Expected(
        narrow=49, kernels=480, outside=1.33, speed=1.13
    ),
    Run("accumulation", "fp8", "full"): Expected(narrow=148, kernels=1380, outside=0.9, speed=1.33),
    Run("lora", "fp8"): Expected(narrow=54, kernels=525, outside=0.86, speed=1.2),
    Run("moe_einsum", "fp8"): Expected(narrow=0, kernels=210, outside=1.01, speed=0.99),
    Run("moe_ragged", "fp8"): Expected(
        18, kernels=300, outside=0.72, target="grouped", speed=2.0, operations=0.12
    ),
    Run("vit", "fp8"): Expected(narrow=0, kernels=150, outside=0.85, speed=1.1),
    Run("resnet", "fp8"): Expected(narrow=0, kernels=160, outside=1.0, speed=1.0),
    Run("prefill", "fp8"): Expected(narrow=15, kernels=105, outside=1.04, speed=1.2),
    Run("prefill_cudnn", "fp8"): Expected(narrow=15, kernels=92, outside=1.08, speed=1.3),
    Run("decode", "fp8"): Expected(narrow=15, kernels=112, outside=0.4, speed=2.2),
    Run("decode_fp8_cache", "fp8"): Expected(narrow=19, kernels=140, outside=0.3, speed=2.6),
    Run("mlp", "fp8", fsdp=8): Expected(8, kernels=70, outside=2.4, reductions=7, **NARROW_GATHERS),
    Run("mlp", "fp8_delayed", fsdp=8): Expected(
        8, kernels=66, outside=2.1, reductions=2, **NARROW_GATHERS
    ),
}


# -- output --------------------------------------------------------------------------------------

HEADINGS = (
    "program", "recipe", "products", "kernels", "GB outside of products",
    "bound, ms (products + rest)", "of plain's speed", "temporary GiB", "sent, MB",
    "all-reduces", "with sending, ms", "of plain's speed",
)  # fmt: skip


def cells(result: Result, plain: Result | None) -> list[str]:
    """A row of the table; speeds and traffic beside the same program without a recipe."""
    s = result.summary
    parts = f"({s.seconds_products * 1e3:.3g} + {s.seconds_outside * 1e3:.3g})"
    sent = [f"{n / 2**20:.0f} {' '.join(key)}" for key, n in sorted(s.sent.items()) if n >= 2**20]
    overlapped = s.seconds_overlapped
    if sent and plain:
        sent.append(f"{s.sent.total() / plain.summary.sent.total():.2f} of plain's")
    return [
        result.run.program, result.run.recipe, "\n".join(s.lines), str(s.kernels),
        f"{s.bytes_outside / 1e9:.3g}", f"{s.seconds * 1e3:.4g} {parts}",
        f"{plain.summary.seconds / s.seconds:.2f}" if plain else "",
        f"{result.temporary / 2**30:.2f}", "\n".join(sent),
        str(s.launches["all-reduce"]) if sent else "",
        f"{s.seconds_sending * 1e3:.3g}; {overlapped * 1e3:.4g}" if sent else "",
        f"{plain.summary.seconds_overlapped / overlapped:.2f}" if sent and plain else "",
    ]  # fmt: skip


def rows(results: list[Result]) -> list[list[str]]:
    by_run = {r.run: r for r in results}
    return [cells(r, by_run.get(r.run.plain)) for r in results]


def show(results: list[Result]) -> None:
    """Prints a table for each device and number of shards."""
    for title in dict.fromkeys((r.run.size, r.run.device, r.run.fsdp) for r in results):
        table = Table(title="{}, compiled for {}".format(*title), show_lines=True)
        for heading in HEADINGS:
            table.add_column(heading)
        for row in rows([r for r in results if (r.run.size, r.run.device, r.run.fsdp) == title]):
            table.add_row(*row)
        Console(width=max(150, Console().width)).print(table)


def markdown(results: list[Result]) -> str:
    """The table for a page."""
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *rows(results)]
    return "\n".join(
        "| " + " | ".join(cell.replace("\n", "<br>") for cell in line) + " |" for line in lines
    )


def costliest(result: Result, count: int) -> Iterator[str]:
    """One line for each of the kernels with the largest bounds."""
    seconds = DEVICES[result.run.device].seconds
    for kernel in sorted(result.kernels, key=seconds, reverse=True)[:count]:
        reads, writes = (" ".join(map(str, a)) for a in (kernel.reads, kernel.writes))
        yield (
            f"{seconds(kernel) * 1e6:8.1f} us {kernel.count:3} x {kernel.name[:48]:48} "
            f"{kernel.product or ''!s:40} {reads} -> {writes}"
        )


# -- main ----------------------------------------------------------------------------------------


def given_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What training steps compile to for a GPU.")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--size", choices=sorted({s for _, s in SIZES}), default="small")
    parser.add_argument("--programs", nargs="+", choices=(*PROGRAMS, *MODELS), default=PROGRAMS)
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", default=RECIPES)
    parser.add_argument("--fsdp", type=int, default=0, metavar="N", help="shard over N devices")
    parser.add_argument("--narrow", choices=("faster", "always"), default="faster")
    parser.add_argument("--triton", action="store_true", help="XLA's own products, or cuBLAS's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line each")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the costliest")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the HLO texts there")
    parser.add_argument("--check", action="store_true", help="compare with the expected figures")
    return parser.parse_args()


def runs(given: argparse.Namespace) -> list[Run]:
    """Those that a check needs, or those asked for; what is written for the MLP only, for it."""
    if given.check:
        return list(dict.fromkeys(r for run in CHECKS for r in (run.plain, run)))
    return [
        Run(
            program,
            recipe,
            given.size,
            given.device,
            given.fsdp,
            given.triton,
            "faster" if recipe == "plain" else given.narrow,
        )
        for program in given.programs
        for recipe in given.recipes
        if program == "mlp" or recipe not in BY_HAND[1:]
    ]


def main() -> None:
    given, results = given_arguments(), []
    without_driver()
    for run in runs(given):
        result = measure(run, given.dump)
        results.append(result)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(result.record()) + "\n")
        for line in costliest(result, given.kernels):
            print(line)
    print(markdown(results)) if given.markdown else show(results)
    if given.check:
        by_run = {r.run: r for r in results}
        faults = [
            fault
            for run, expected in CHECKS.items()
            for fault in moved(str(run), by_run[run].summary, by_run[run.plain].summary, expected)
        ]
        faults += [
            f"{run}: {r.temporary} temporary bytes, expected at most plain's {most}"
            for run, r in by_run.items()
            if run.program in MODELS and r.temporary > 1.01 * (most := by_run[run.plain].temporary)
        ]
        sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
