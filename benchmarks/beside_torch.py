"""``python -m benchmarks.beside_torch [TURNS [NUMBERS]]``: casts beside torch's, memory apart.

What :mod:`benchmarks.casts` can't tell: whether a cast is slow, or the memory of its result.
Each cast runs twice, with a result made anew and into memory at hand (XLA: donated), in random
order, and the page faults of each are counted. Changing a float32's sign stands beside them: the
pace at which a runtime reads and writes without computing anything. To be run as ``make bench``
is, with ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` and the Python of ``.venv-bench``. Other sizes
tell malloc's luck from a slower loop: results of over 32 MB are mapped anew for everybody. With
``OMP_WAIT_POLICY=ACTIVE`` torch's threads spin into their neighbours' times, as they do by default.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.peers import TORCH, Run
from scalewise import cast
from scalewise import format as format_
from scalewise.rounding._codes import nearest_codes


def routes(x: np.ndarray) -> dict[tuple[str, str], Run]:
    """Returns the timed calls by (operation, library)."""
    import torch

    there, tensor = jnp.asarray(x), torch.from_numpy(x)

    def fresh(f: Callable[[jax.Array], jax.Array]) -> Run:
        compiled = jax.jit(f)
        return lambda: jax.block_until_ready(compiled(there))

    def into(f: Callable[[jax.Array], jax.Array]) -> Run:
        compiled = jax.jit(lambda v, memory: f(v), donate_argnums=1, keep_unused=True)
        result = [jnp.zeros(x.shape, jax.eval_shape(f, there).dtype)]

        def run() -> None:
            result[0] = jax.block_until_ready(compiled(there, result[0]))

        return run

    changed = torch.empty_like(tensor)
    table: dict[tuple[str, str], Run] = {
        ("sign changed", "XLA, into"): into(lax.neg),
        ("sign changed", "torch, into"): lambda: torch.neg(tensor, out=changed),
    }
    for name, attribute in TORCH.items():
        fmt, dtype = format_(name), getattr(torch, attribute)
        ours: dict[str, Callable[[jax.Array], jax.Array]] = {
            "scalewise": lambda v, f=fmt: cast(v, f),
            "our codes": lambda v, f=fmt: lax.bitcast_convert_type(
                nearest_codes(v, f, saturate=False), f.dtype
            ),
            "XLA": lambda v, f=fmt: lax.convert_element_type(v, f.dtype),
        }
        for who, f in ours.items():
            table[name, who] = fresh(f)
            table[name, f"{who}, into"] = into(f)
        table[name, "torch"] = lambda d=dtype: tensor.to(d)
        memory = torch.empty(x.shape, dtype=dtype)
        table[name, "torch, into"] = lambda o=memory: o.copy_(tensor)
    return table


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 24
    x = np.random.default_rng(0).standard_normal(size, np.float32)
    table = routes(x)
    for run in table.values():
        run()  # compiles
    seconds: dict[Any, list[float]] = {what: [] for what in table}
    faults: dict[Any, list[int]] = {what: [] for what in table}
    names, shuffled = list(table), np.random.default_rng(0)
    for _ in range(turns):
        for i in shuffled.permutation(len(names)):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            began = time.perf_counter()
            table[names[i]]()
            seconds[names[i]].append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            faults[names[i]].append(after - before)
    print(f"{x.size:,} float32, {turns} turns: median (quartiles) in M elements/s, page faults")
    for (what, who), taken in sorted(seconds.items()):
        low, middle, high = (x.size / s / 1e6 for s in np.percentile(taken, [75, 50, 25]))
        page = statistics.median(faults[what, who])
        print(f"{what:<14}{who:<18}{middle:8.0f}  ({low:.0f} to {high:.0f})  {page:.0f}")


if __name__ == "__main__":
    main()
