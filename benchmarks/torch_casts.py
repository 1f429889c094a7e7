"""``python -m benchmarks.torch_casts``: ``scalewise.torch``'s casts of tensors beside torch's own.

With the Python of ``make test-torch``. Both get one float32 tensor, and return a tensor of torch's
dtype (``cast``) or a float32 tensor (``round_to``, beside ``x.to(dtype).float()``); the bits are
compared first. All runs are in one process on one core, in a random order; a ratio is torch's
median time by ours, in CPU time of all threads, which other programs disturb less. Both make their
results anew, and the kernel's zeroing of the pages for them takes most of the time, unless malloc
returns pages that were freed before. ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` makes it cheap.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2"}
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def pairs(size: int) -> dict[str, Pair]:
    """Returns by name our call and torch's."""
    import torch

    import scalewise.torch as st

    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    table: dict[str, Pair] = {}
    for fmt, name in DTYPES.items():
        dtype = getattr(torch, name)
        table[f"cast {fmt}"] = (
            lambda f=fmt: st.cast(x, f),
            lambda d=dtype: x.to(d),
        )
        table[f"round_to {fmt}"] = (
            lambda f=fmt: st.round_to(x, f),
            lambda d=dtype: x.to(d).float(),
        )
    for ours, theirs in table.values():
        a, b = ours(), theirs()
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return table


def seconds(table: dict[str, Pair], turns: int) -> dict[tuple[str, int], list[float]]:
    """Times each call in every turn, in a random order."""
    calls = [(name, who) for name in table for who in (0, 1)]
    random = np.random.default_rng(0)
    found: dict[tuple[str, int], list[float]] = {call: [] for call in calls}
    for _ in range(turns):
        for i in random.permutation(len(calls)):
            name, who = calls[i]
            begin = time.process_time()
            table[name][who]()
            found[name, who].append(time.process_time() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--numbers", type=int, default=1 << 24)
    given = parser.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # before XLA makes its threads
    import torch

    torch.set_num_threads(1)
    table = pairs(given.numbers)
    found = seconds(table, given.turns)
    print(f"torch {torch.__version__}, {given.numbers:,} float32, one core; medians, CPU ms")
    for name in table:
        ours, theirs = (float(np.median(found[name, who])) for who in (0, 1))
        text = f"{name:<16} ours {ours * 1e3:7.1f}  torch {theirs * 1e3:7.1f}"
        print(f"{text}  ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
