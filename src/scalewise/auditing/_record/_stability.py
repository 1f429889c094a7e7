"""``stability``: how many digits agree between runs whose results are rounded at random."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._check import Range, checked
from ..._jax import ShapedArray
from ..._output import Rows, Tabular
from ..._resolve import as_format
from ..._types import PyTree
from ...emulating import is_exact
from ...formats import FP64, Format, FormatLike
from ...interpret import Applied, Argument, Equation, State, Value, is_float, rebind, trace
from ...rounding import round_to, to_float64
from .._file import name_of
from ._compare import ENDS, relative_difference
from ._record import refuse_tracers
from ._recorder import Recorder, Site, Watched
from ._recording import RecordedArray, recorded_arrays

SHOWN = 12  # lines
COLUMNS = ("where", "function", "primitive", "digits", "spread", "error")


@dataclasses.dataclass(frozen=True)
class LineStability:
    """How far runs agree about the results of one line, or about an output.

    Attributes:
        where: ``file.py:12``, or ``output [0]['w']``.
        function, primitive: of the result that the runs agree least about.
        digits: decimal digits that agree: ``-log10(spread)``, between 0 and those of the format.
        spread: the standard deviation over the runs relative to the mean, root mean square over a
            sample of the numbers; inf if some runs alone give a finite number.
        error: the relative difference between the run that rounds to nearest and the program in
            float64, over the same sample.
    """

    where: str
    function: str
    primitive: str
    digits: float
    spread: float
    error: float


@dataclasses.dataclass(frozen=True)
class Stability(Tabular):
    """How many digits agree between runs that round at random.

    Attributes:
        function: its name.
        low: the format's name.
        runs: how many runs there were.
        lines: by source line, in program order.
        outputs: by output.
    """

    function: str
    low: str
    runs: int
    lines: tuple[LineStability, ...]
    outputs: tuple[LineStability, ...]

    @property
    def title(self) -> str:
        return f"Stability of {self.function} in {self.low}"

    @property
    def heading(self) -> str:
        runs = f"{self.runs} runs that round at random"
        return f"stability  {self.function} in {self.low}, {runs}"

    def sentences(self) -> list[str]:
        return []

    def tables(self, *, everything: bool = True) -> list[Rows]:
        worst = sorted(self.lines, key=lambda x: (x.digits, -x.spread))
        shown = set(worst if everything else worst[:SHOWN])
        title = "in program order" if everything else "with the fewest digits that agree"
        rows = [_cells(x) for x in self.lines if x in shown]
        outputs = Rows("Outputs", COLUMNS, list(map(_cells, self.outputs)))
        return [outputs, Rows(f"Lines {title}", COLUMNS, rows)]


Several = Annotated[int, Range(lambda n: n >= 2, "an integer of at least 2")]


@checked
def stability(
    f: Callable,
    low: FormatLike = "float16",
    *,
    runs: Several = 5,
    seed: int = 0,
) -> Callable:
    """Returns a function of ``f``'s arguments that returns a :class:`Stability`.

    ``f`` is run several times; each run rounds each result of an equation to one of its two
    neighbours in the format, at random, with the probability that makes the expected value exact.
    Digits that differ between the runs are lost to rounding: a second measure beside
    :func:`audit`, which compares one run with a wider one. It finds errors that happen to cancel
    in that run, and none that all runs share (a constant that the format changes). The method is
    that of CESTAC (Vignes, 1993) and of Verrou's average rounding (Févotte and Lathuilière, 2016).

    Args:
        f: any function of pytrees made of JAX primitives.
        low: a format, or a name or dtype of one.
        runs: 2 or more.
        seed: of the random roundings.

    Returns:
        A function to be called with arrays, not under ``jit``. Arguments and constants are rounded
        to nearest in all runs; random draws of the program are the same in all of them.

    Raises:
        TypeError: ``f`` isn't callable, or an argument is a tracer.
        ValueError: an unknown format, or fewer than two runs.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def lost(x):
        ...     return (x / 3 + 100.0) - 100.0
        >>> found = sw.auditing.stability(lost, "bf16")(jnp.linspace(0.1, 0.2, 20))
        >>> found.outputs[0].digits < 0.5
        True
    """
    fmt = as_format(low, "stability")

    def measured(*args: PyTree, **kwargs: PyTree) -> Stability:
        program = trace(f, Recorder(), args, kwargs, name="stability", as_jit=True)
        refuse_tracers(program, "stability", f)

        def run(fmt: Format, key: jax.Array | None) -> tuple[RecordedArray, ...]:
            recorder = Perturbed(fmt=fmt, key=key)
            with recorder.context():
                state, _ = recorder.record(program, program.arrays)
                return recorded_arrays(recorder.sites, state)

        exact, nearest = run(FP64, None), run(fmt, None)
        keys = jax.random.split(jax.random.key(seed), runs)
        found = _stabilities(exact, nearest, [run(fmt, key) for key in keys], fmt)
        return Stability(name_of(f), fmt.name, runs, *found)

    return measured


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "finite"],
    meta_fields=[],
    drop_fields=["constant"],
)
@dataclasses.dataclass(frozen=True)
class Wide(Watched):
    """A float64 array; ``constant`` if it depends on no argument, so that it isn't rounded yet."""

    constant: bool = False


@dataclasses.dataclass(eq=False)
class Perturbed(Recorder):
    """Records a run that rounds each result to a format."""

    fmt: Format = FP64  # the format; FP64 for no rounding
    key: jax.Array | None = None  # of random roundings; None to round to nearest

    def context(self) -> contextlib.AbstractContextManager[object]:
        return jax.enable_x64(True)

    def argument(self, x: Any, aval: ShapedArray) -> Any:
        return self._nearest(to_float64(jnp.asarray(x))) if is_float(aval) else x

    def lift(self, x: Argument, aval: ShapedArray) -> Watched:
        if not is_float(aval):
            return super().lift(x, aval)
        x = to_float64(jnp.asarray(x))
        return Wide(x, jnp.isfinite(x).all(), constant=True)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        constant = all(x.constant for x in inputs if isinstance(x, Wide))
        constant &= not any(isinstance(x, Watched) and not isinstance(x, Wide) for x in inputs)
        finite = tuple(x.finite for x in inputs if isinstance(x, Watched))
        outs = rebind(equation, [self._operand(x, constant) for x in inputs], jnp.float64)
        values = []
        for i, (y, aval) in enumerate(zip(outs, equation.out_avals, strict=True)):
            if not is_float(aval) or constant or is_exact(equation):
                flag = self._watched(y, None)
                values.append(Wide(y, flag.finite, constant) if is_float(aval) else flag)
                continue
            y = self._rounded(y, state.clock)
            site = Site(equation.name, aval, equation, i)
            state, value = self._observed(state, (equation.path, i), site, y, finite)
            values.append(Wide(value.array, value.finite))
        return state, values

    unlifted = apply

    def _operand(self, x: Any, constant: bool) -> Any:
        """Returns an operand; a constant that meets another value is rounded first."""
        if not isinstance(x, Watched):
            return x
        return self._nearest(x.array) if isinstance(x, Wide) and x.constant > constant else x.array

    def _nearest(self, x: jax.Array) -> jax.Array:
        return x if self.fmt == FP64 else round_to(x, self.fmt)

    def _rounded(self, x: jax.Array, clock: Any) -> jax.Array:
        if self.key is None:
            return self._nearest(x)
        key = jax.random.fold_in(self.key, clock)
        return round_to(x, self.fmt, rounding="stochastic", key=key)


def _stabilities(
    exact: Sequence[RecordedArray],
    nearest: Sequence[RecordedArray],
    runs: Sequence[Sequence[RecordedArray]],
    fmt: Format,
) -> tuple[tuple[LineStability, ...], tuple[LineStability, ...]]:
    def by_key(arrays: Sequence[RecordedArray]) -> dict[Any, RecordedArray]:
        found: dict[Any, RecordedArray] = {}
        before: collections.Counter[Any] = collections.Counter()
        for x in arrays:
            place = (x.primitive, x.result, x.path, x.file, x.line, x.scope)
            found[place, before[place]] = x
            before[place] += 1
        return found

    tables = [by_key(x) for x in (exact, nearest, *runs)]
    lines: dict[Any, LineStability] = {}
    outputs = []
    for key, x in tables[0].items():
        if x.primitive == "argument" or not all(key in table for table in tables):
            continue
        right, own, *others = (table[key].samples[1] for table in tables)
        spread = _spread(others)
        digits = -math.log10(max(spread, float(fmt.eps))) if spread < 1 else 0.0
        error = relative_difference(right, own)
        found = LineStability(x.where, x.name, x.primitive, digits, spread, error)
        if x.primitive in ENDS:
            outputs.append(found)
        elif found.spread >= lines.get((x.file, x.line), found).spread:
            lines[x.file, x.line] = found
    return tuple(lines.values()), tuple(outputs)


def _spread(samples: Sequence[np.ndarray]) -> float:
    table = np.stack(samples)
    finite = np.isfinite(table)
    if (finite.any(axis=0) != finite.all(axis=0)).any():
        return math.inf
    table = table[:, finite.all(axis=0)]
    deviation, mean = table.std(axis=0, ddof=1), table.mean(axis=0)
    norm = float(np.linalg.norm(mean))
    return float(np.linalg.norm(deviation)) / norm if norm else float(bool(deviation.any()))


def _cells(x: LineStability) -> tuple[str, ...]:
    spread = f"{x.spread:.2g}" if math.isfinite(x.spread) else "not finite in some"
    error = f"{x.error:.2g}" if math.isfinite(x.error) else "not finite in one"
    return x.where, x.function, x.primitive, f"{x.digits:.1f}", spread, error
