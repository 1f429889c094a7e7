"""The values of a program or a recording, as :func:`compare` matches them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._extras import require
from ..._jax import ShapedArray, jex, user_positions
from ..._output import place
from ...formats import FP32
from ...formats import format as format_
from ...interpret import (
    Argument,
    Equation,
    Interpretation,
    Program,
    Value,
    is_float,
    trace,
    transformed,
)
from ...rounding import FP64_PARAMS, format_params
from ...scaled import load_safetensors
from .._file import name_of
from .._record._record import refuse_tracers
from .._record._recording import Recording, load_recording
from .._tape._arithmetic import (
    CONSTANT,
    Arithmetic,
    FormatArithmetic,
    OwnArithmetic,
    Run,
    in_float64,
    nearest,
)
from .._tape._both import TapedRun, on_host, run_both
from .._tape._cells import Cell, Entry, Leaf, Node, Operation, cell, is_key
from .._tape._forward import Forward
from ._arithmetic import Altered, Instead, formats_of

HERE = str(Path(__file__).parents[2])  # scalewise: frames that are no code of the user's
# Otherwise XLA keeps more bits than a dtype has within a kernel, on each device in other places.
AS_WRITTEN = {"xla_allow_excess_precision": False}
FEW = 33  # quantiles that tell most different arrays apart


class AsWritten(Interpretation):
    """The program in its own dtypes; operations of other libraries are run step by step."""

    def opens(self, equation: Equation) -> bool:
        return True


def _rounded(x: Any, aval: ShapedArray) -> Any:
    if not is_float(aval):
        return x
    fmt = format_(aval.dtype)
    if not fmt.zero:  # E8M0
        return np.asarray(x).astype(aval.dtype).astype(np.float64)
    return nearest(x, format_params(fmt))


@dataclasses.dataclass(eq=False)
class RoundedOnce(FormatArithmetic):
    """Each result is exact but for one rounding to its dtype: the order in which a device adds the
    terms of one sum is no difference between programs."""

    low: Any
    rounds_draws = False
    top = float(FP32.max)  # pyright: ignore[reportAssignmentType]

    def lift(self, x: Argument, aval: ShapedArray, leaf: Leaf) -> Cell:
        return cell(_rounded(in_float64(x), aval), in_float64(x), top=self.top, leaf=leaf)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> tuple[Cell, bool]:
        return self.lift(x, aval, CONSTANT), True

    def key_of(self, equation: Equation) -> Hashable:
        return None

    def operands(self, equation: Equation, nodes: Sequence[Node]) -> list[Cell]:
        return [node.cell for node in nodes]

    def results(
        self, equation: Equation, cells: Sequence[Cell], exact: Sequence[Any], run: Run
    ) -> list[tuple[Any, Any]]:
        pairs = zip(exact, equation.out_avals, strict=True)
        return [(_rounded(x, aval), None) for x, aval in pairs]

    def params_of(self, equation: Equation, value: Value = None) -> np.ndarray:
        return FP64_PARAMS


@dataclasses.dataclass(eq=False)
class Taped(Forward):
    """Keeps all operations on the tape, also those that neither round nor differ."""

    def record(self, operation: Operation, ins: Sequence[Cell], outs: Sequence[Cell]) -> None:
        self.tape.append(Entry(operation, ins, outs, self.iteration))


class Summary(NamedTuple):
    """Statistics of all numbers of a recorded array; the means are of the finite ones."""

    shape: tuple[int, ...]
    non_finite: int
    mean: float
    rms: float


@dataclasses.dataclass(eq=False)
class Array:
    """One array: an argument, a result of an operation, or an array of a recording.

    Attributes:
        array, low: in float64, and as the program's dtypes have it; of a recording the same.
        dtype: of the program or file.
        reads: the numbers of the values that it is computed from, None of a constant.
        entry: the operation on the tape.
        summary: of a sampled array, what is known of all its numbers.
    """

    name: str
    array: np.ndarray
    low: np.ndarray
    dtype: str
    where: str
    reads: Sequence[int | None] = ()
    entry: Entry | None = None
    summary: Summary | None = None

    def holding(self, array: Any) -> Array:
        return dataclasses.replace(self, array=np.asarray(array))

    @property
    def is_float(self) -> bool:
        return self.array.dtype.kind == "f"

    @property
    def is_named(self) -> bool:
        """Returns whether its name is any that an engine gave it, rather than an operation's."""
        return self.name == self.where and not self.name.startswith("argument")

    @property
    def at(self) -> str:
        return self.where if self.where.startswith(self.name) else f"{self.name} at {self.where}"

    @cached_property
    def non_finite(self) -> int:
        return self.summary.non_finite if self.summary else int(np.sum(~np.isfinite(self.low)))

    @cached_property
    def sorted(self) -> np.ndarray:
        return np.sort(np.asarray(self.array, np.float64).ravel())

    @cached_property
    def unit(self) -> float:
        """The size of the smaller numbers: a mask's -1e9 tells nothing about the others."""
        finite = np.abs(self.sorted[np.isfinite(self.sorted) & (self.sorted != 0)])
        return float(np.quantile(finite, 0.25)) if finite.size else 0.0

    @cached_property
    def calls(self) -> tuple[Any, ...]:
        """File, line and column of the operation and of the calls around it, innermost first."""
        equation, found = self.entry and self.entry.operation.equation, []
        while equation is not None:
            found += [x for x in user_positions(equation.eqn) if not x[0].startswith(HERE)]
            equation = equation.within
        return tuple(found)

    @cached_property
    def few(self) -> np.ndarray:
        positions = np.linspace(0, max(self.sorted.size - 1, 0), FEW).astype(int)
        return self.sorted[positions] if self.sorted.size else np.zeros(FEW)


@dataclasses.dataclass(eq=False)
class Side:
    """A program with its arguments, or a recording.

    Attributes:
        values: in the order in which they are computed.
        outputs: the numbers of the outputs.
        run: of a program.
        steps: its operations, each with the numbers of its operands and of its results.
        call: runs the program on its device; returns its outputs.
        arithmetic: of the program.
    """

    title: str
    values: Sequence[Array]
    outputs: Sequence[int]
    run: TapedRun | None = None
    steps: Sequence[tuple[Entry, Sequence[int | None], Sequence[int]]] = ()
    call: Callable[[], Any] | None = None
    arithmetic: Arithmetic | None = None
    sites: dict[int | None, Mapping[int, list[int]]] = dataclasses.field(default_factory=dict)

    @cached_property
    def returned(self) -> list[Any]:
        """The program's outputs on its device."""
        assert self.call is not None
        return jax.tree.leaves(self.call())

    @property
    def is_sampled(self) -> bool:
        return any(x.summary for x in self.values)

    def again(self, instead: Instead) -> Side:
        """Runs the program again with another arithmetic in some operations."""
        assert self.run is not None
        assert self.arithmetic is not None
        own = dataclasses.replace(self.arithmetic)  # the same compiled code, new histories
        return of_program(self.title, self.run.program, None, own, instead)

    def above(self, some: Iterable[int], inside: AbstractSet[int]) -> set[int]:
        """Returns the values among ``inside`` that lead to some of them by such values alone."""
        found: set[int] = set()
        waiting = list(some)
        while waiting:
            i = waiting.pop()
            if i in inside and i not in found:
                found.add(i)
                waiting += [j for j in self.values[i].reads if j is not None]
        return found

    def name_of(self, number: int) -> str:
        """Returns the argument of which a value is made without rounding, or its operation."""
        x = self.values[number]
        while x.entry is not None and not x.entry.operation.rounds and x.reads:
            if (i := x.reads[0]) is None:
                break
            x = self.values[i]
        return x.where if x.entry is None else f"{x.name} at {x.where}"

    def alike(self, i: int, depth: int | None) -> list[int]:
        """Returns the values of the same code: by the lines of so many calls, and by their place
        among the consecutive operations from there."""
        if depth not in self.sites:
            found: dict[Any, list[int]] = collections.defaultdict(list)
            before, position = None, 0
            for j, x in enumerate(self.values):
                calls = x.calls[:depth]
                position = position + 1 if calls == before else 0
                before = calls
                found[calls, x.name, position].append(j)
            self.sites[depth] = {j: some for some in found.values() for j in some}
        return self.sites[depth][i]

    def counterpart(self, i: int, u: int, j: int) -> int | None:
        """Returns the value from which ``j`` is computed as ``i`` is from ``u``."""
        seen, waiting = {i}, [(i, j)]
        for own, other in waiting:
            if own == u:
                return other
            x, y = self.values[own], self.values[other]
            for a, b in zip(x.reads, y.reads, strict=False) if x.name == y.name else ():
                if a is not None and b is not None and a not in seen:
                    seen.add(a)
                    waiting.append((a, b))
        return None


def side_of(x: Any, which: str) -> Side:
    """Returns the values of what a caller gave ``compare``.

    Raises:
        TypeError, ValueError: it is nothing that has values; the message says what is expected.
    """
    if isinstance(x, Side):
        return x
    if isinstance(x, tuple) and x:
        call, *args = x
        if not callable(call):
            raise TypeError(
                f"compare: {which} is a tuple that begins with a {type(call).__name__}; expected "
                "(function, *arguments) or (torch module, *inputs)"
            )
        if type(call).__module__.startswith("torch") or hasattr(call, "named_parameters"):
            return _of_torch(call, args)
        return of_function(call, args)
    if isinstance(x, str | os.PathLike):
        return _of_files(Path(x), which)
    if isinstance(x, Recording):
        return _of_recording(x)
    if callable(x):
        return of_function(x, ())
    raise TypeError(
        f"compare: {which} is a {type(x).__name__}; expected (function, *arguments), (torch "
        "module, *inputs), a path of recorded values, or a Recording"
    )


def _of_torch(module: Any, args: Sequence[Any]) -> Side:
    # found at run time: scalewise.torch stands above this package
    st = require("scalewise.torch", "torch", "compare: a torch module")
    f, params = st.function(module, tuple(args))
    arrays = [x for x in st.to_jax(list(args)) if isinstance(x, jax.Array)]
    return of_function(f, (params, *arrays), lambda: st.to_jax(module(*args)))


def of_function(f: Callable, args: Sequence[Any], call: Callable[[], Any] | None = None) -> Side:
    known = transformed(f)
    low = AsWritten() if known is None else known.interpretation
    own = f if known is None else known.f
    program = trace(own, low, tuple(args), {}, name="compare", as_jit=True)
    refuse_tracers(program, "compare", f)
    if known is not None:
        # as each equation's code is shared, see OwnArithmetic
        own = OwnArithmetic(low)
        return of_program(name_of(f), program, call or (lambda: jax.jit(f)(*args)), own)

    def compiled() -> Any:
        run = jax.jit(jex.jaxpr_as_fun(program.jaxpr), compiler_options=AS_WRITTEN)
        return run(*program.arrays)

    return of_program(name_of(f), program, call or compiled, RoundedOnce(low))


def of_program(
    title: str, program: Program, call: Callable[[], Any] | None, own: Arithmetic,
    instead: Instead = MappingProxyType({}),
) -> Side:  # fmt: skip
    """Runs a program in an arithmetic; some operations, by path, in another one or unrounded."""
    arithmetic: Any = Altered(own, instead) if instead else own
    with on_host():
        formats = formats_of(program, own.low)
    run = run_both(program, own.low, forward=Taped(arithmetic))
    values: list[Array] = []
    numbers: dict[int, int] = {}  # by the id of a cell

    def add(name: str, x: Cell, dtype: Any, where: str, *made: Any) -> None:
        if numbers.setdefault(id(x), len(values)) == len(values):
            pair = x.reference, x.low
            array, low = (np.zeros(0) if is_key(y) else np.asarray(y) for y in pair)
            values.append(Array(name, array, low, str(dtype), where, *made))

    for x, path, aval in zip(run.arguments, program.arguments, program.in_avals, strict=True):
        add(f"argument {path}", x.cell, aval.dtype, f"argument {path}")
    steps = []
    for entry in run.forward.tape:
        equation = entry.operation.equation
        lines = filter(None, (equation.source, equation.caller))
        where = ", from ".join(place(*x[:2]) for x in lines) or place(None, None)
        reads = [numbers.get(id(x)) for x in entry.ins]
        # a step of a loop that is no equation has other results than the loop
        avals = equation.out_avals if entry.operation.floats else ()
        for i, y in enumerate(entry.outs):
            dtype = avals[i].dtype if avals else np.asarray(y.low).dtype
            own_dtype = getattr(getattr(y.value, "data", y.value), "dtype", dtype)
            add(equation.name, y, formats.get(equation.path, own_dtype), where, reads, entry)
        steps.append((entry, reads, [numbers[id(y)] for y in entry.outs]))
    outputs = [numbers[id(x.cell)] for x in run.outputs if id(x.cell) in numbers]
    return Side(title, values, outputs, run, steps, call, own)


def _of_files(path: Path, which: str) -> Side:
    if path.is_dir():
        files = sorted(
            (f for f in path.iterdir() if f.suffix in (".npy", ".safetensors")), key=_order
        )
    elif path.suffix in (".npy", ".safetensors") and path.is_file():
        with contextlib.suppress(ValueError):
            return _of_recording(load_recording(path))
        files = [path]
    else:
        raise ValueError(
            f"compare: {which} is {str(path)!r}, which doesn't exist or holds no values; expected "
            "a .safetensors or .npy file, or a folder of them"
        )
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        npy = file.suffix == ".npy"
        found = {file.stem: np.load(file)} if npy else load_safetensors(file)
        arrays |= {name: np.asarray(x) for name, x in found.items()}
    if not arrays:
        raise ValueError(f"compare: {which}: the folder {str(path)!r} has no .npy and .safetensors")
    values = []
    for name, x in sorted(arrays.items(), key=lambda item: _order(item[0])):
        wide = x.astype(np.float64) if x.dtype.kind not in "iub" else x
        values.append(Array(name, wide, wide, str(x.dtype), name))
    return Side(path.name, values, [])


def _of_recording(x: Recording) -> Side:
    values = []
    for y in x.arrays:
        samples = y.samples if y.visits > 1 else y.samples[0]
        summary = Summary(y.shape, y.non_finite, y.mean, y.rms)
        values.append(Array(y.primitive, samples, samples, y.dtype, y.where, summary=summary))
    outputs = [i for i, y in enumerate(x.arrays) if y.primitive == "output"]
    return Side(x.function, values, outputs)


def _order(name: Any) -> list[Any]:
    """Numbers in names count as numbers: layer 10 comes after layer 2."""
    parts = re.split(r"(\d+)", str(name))
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]
