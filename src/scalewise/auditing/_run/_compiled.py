"""Functions that an audit compiles: hundreds, most of them for small arrays and a few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._jax import is_tracing, quick_compilation

# Numbers of an array up to which compiling costs more than running: unoptimized code takes ten
# times as long, 0.3 ms for so many sums, and is compiled 50 ms sooner.
SMALL = 1 << 15


class Compiled:
    """``jax.jit(f)``, which XLA compiles without optimizations where all arrays are small.

    Args:
        f: the function.
        static_argnums: as ``jax.jit`` takes them.
        largest: the size of the largest array that ``f`` makes, if its arguments may be smaller.
    """

    def __init__(self, f: Callable, static_argnums: Sequence[int] = (), largest: float = 0):
        self._f, self._largest = f, largest
        self._static_argnums = tuple(static_argnums)
        self._optimized: Any = jax.jit(f, static_argnums=self._static_argnums)
        self._quick: Any = None  # made at the first call, since it depends on the platform

    def chosen(self, leaves: Sequence[Any]) -> Any:
        """Returns the jitted function for arguments with these leaves, arrays or their types."""
        if self._largest > SMALL or any(getattr(x, "size", 0) > SMALL for x in leaves):
            return self._optimized
        if self._quick is None:
            self._quick = jax.jit(
                self._f, static_argnums=self._static_argnums, compiler_options=quick_compilation()
            )
        return self._quick

    def __call__(self, *arguments: Any) -> Any:
        if is_tracing():  # what becomes a part of another program has no options
            return self._optimized(*arguments)
        return self.chosen(jax.tree.leaves(arguments))(*arguments)

    def clear_cache(self) -> None:
        self._optimized.clear_cache()
        if self._quick is not None:
            self._quick.clear_cache()
