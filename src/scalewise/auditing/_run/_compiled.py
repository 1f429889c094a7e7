"""Functions that an audit compiles: hundreds, most of them for small arrays and a few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._jax import is_tracing, quick_compilation

# Numbers of an array up to which compiling costs more than running: unoptimized code takes ten
# times as long, 0.3 ms for so many sums, and is compiled 50 ms sooner.
SMALL = 1 << 15
# Numbers up to which half the time to compile is worth code that takes a tenth longer.
MEDIUM = 1 << 19


class Compiled:
    """``jax.jit(f)``, which XLA compiles without optimizations where all arrays are small, and with
    all of them where one is large.

    Args:
        f: the function.
        size: the size of the largest array, or what returns it for the arguments.
        static_argnums: as ``jax.jit`` takes them.
        often: whether many equations call it. It is compiled with some optimizations, then.
    """

    def __init__(
        self,
        f: Callable,
        size: float | Callable[..., float],
        static_argnums: Sequence[int] = (),
        often: bool = False,
    ):
        self._f, self._size, self._least = f, size, int(often)
        self._static_argnums = tuple(static_argnums)
        # by level, made at the first call, since options depend on the platform; None: without any
        self._jitted: dict[int | None, Any] = {}

    def _compiled(self, level: int | None) -> Any:
        if level not in self._jitted:
            options = None if level is None else quick_compilation(level)
            self._jitted[level] = jax.jit(
                self._f, static_argnums=self._static_argnums, compiler_options=options
            )
        return self._jitted[level]

    def chosen(self, *arguments: Any) -> Any:
        """Returns the jitted function for these arguments, or for such with their types."""
        size = self._size(*arguments) if callable(self._size) else self._size
        return self._compiled(self._least if size <= SMALL else 1 if size <= MEDIUM else None)

    def __call__(self, *arguments: Any) -> Any:
        if is_tracing():  # what becomes a part of another program has no options
            return self._compiled(None)(*arguments)
        return self.chosen(*arguments)(*arguments)

    def clear_cache(self) -> None:
        for jitted in self._jitted.values():
            jitted.clear_cache()
