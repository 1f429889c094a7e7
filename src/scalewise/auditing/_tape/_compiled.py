"""Functions that an audit compiles: hundreds, most of them for small arrays and a few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..._jax import quick_compilation

# Numbers of an array up to which compiling costs more than running: unoptimized code takes ten
# times as long, 0.3 ms for so many sums, and is compiled 50 ms sooner.
SMALL = 1 << 15
# Numbers up to which half the time to compile is worth code that takes a tenth longer.
MEDIUM = 1 << 19


def compiled(f: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Returns ``jax.jit(f)``, which XLA compiles without optimizations if the largest of its arrays
    has few numbers, and with all of them if it has many."""
    level = 0 if size <= SMALL else 1 if size <= MEDIUM else None
    options = None if level is None else quick_compilation(level)
    return jax.jit(f, compiler_options=options)
