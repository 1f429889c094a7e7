"""The interpretation behind a recording: the plain program, with each result's numbers kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._jax import ShapedArray, Tracer
from ...emulating import is_exact
from ...interpret import Applied, Argument, Boundary, Equation, Interpretation, Program, Value, run
from ...primitives import having

MAX_EAGER = 600  # results of a loop up to which its iterations run one by one, without compiling
SMALL = (1024, 65536)
SAMPLE = 32  # numbers of an array that are kept, of its first and of its last visit
COUNTS = ("nan", "infinite", "zeros", "subnormal", "created")  # 64 bits, in two words each
WORDS = ("visits", "first", "clock", "checksum")
FIRST, CLOCK, CHECKSUM = 1, 2, 3
NUMBERS = ("minimum", "maximum", "smallest", "mean", "rms")
NEVER = np.uint32(2**32 - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbers:
    """The statistics of n arrays up to now."""

    # uint32[n, 4], see ``WORDS``: how often each was computed; the visit, and the clock, at which
    # the first non-finite number was made of finite operands (or NEVER); the checksum of all bits
    # of all visits
    words: jax.Array
    counts: jax.Array  # uint32[n, 5, 2], see ``COUNTS``: the low and the high word
    numbers: jax.Array  # float[n, 5], see ``NUMBERS``; the mean and the RMS are summed over visits
    samples: jax.Array  # float[n, 2, SAMPLE], of the first and of the last visit
    clock: jax.Array  # uint32[], how many arrays were recorded


class Measured(NamedTuple):
    """The numbers of one visit; ``counts`` without ``created``."""

    counts: jax.Array
    numbers: jax.Array
    sample: jax.Array
    checksum: jax.Array


def padded_size(size: int) -> int:
    """At most a quarter is padding, except below 65,536 numbers, where two sizes serve all."""
    for small in SMALL:
        if size <= small:
            return small
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def wide_dtype() -> Any:
    wide: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def empty(n: int) -> Numbers:
    words = np.zeros((n, len(WORDS)), np.uint32)
    words[:, [FIRST, CLOCK]] = NEVER
    numbers = np.zeros((n, len(NUMBERS)), wide_dtype())
    numbers[:, 0], numbers[:, 1:3] = np.inf, [-np.inf, np.inf]
    return Numbers(
        jnp.asarray(words),
        jnp.zeros((n, len(COUNTS), 2), jnp.uint32),
        jnp.asarray(numbers),
        jnp.zeros((n, 2, SAMPLE), wide_dtype()),
        jnp.uint32(0),
    )


def observe(
    state: Numbers, index: Any, x: jax.Array, finite: Sequence[Any]
) -> tuple[Numbers, jax.Array]:
    parts = 2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1
    size = x.size * parts
    if not isinstance(x, Tracer):  # padded, so that few sizes are compiled
        x = _flat(x, padded_size(size))
    clean = jnp.asarray(True) if not finite else finite[0] if len(finite) == 1 else _all(finite)
    at = np.zeros(SAMPLE, np.int32)
    at[: min(size, SAMPLE)] = positions(size)
    return _add(state, index, _measure(_flat(x, None), np.uint32(size), at), clean)


@partial(jax.jit, static_argnums=1)
def _flat(x: jax.Array, length: int | None) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    x = x.reshape(-1)
    return x if length is None else jnp.pad(x, (0, length - x.size))


@jax.jit
def _all(flags: Sequence[Any]) -> jax.Array:
    return jnp.stack([jnp.asarray(flag) for flag in flags]).all()


@jax.jit
def _add(state: Numbers, index: Any, measured: Measured, clean: Any) -> tuple[Numbers, jax.Array]:
    """Adds the numbers of one visit; ``clean`` says whether the operands are finite."""
    counts, numbers, sample, checksum = measured
    non_finite = counts[0] + counts[1]
    created = jnp.where(clean, non_finite, 0)
    words = state.words[index]
    visits = words[0]
    is_first = (created > 0) & (words[FIRST] == NEVER)
    words = jnp.stack(
        [
            visits + 1,
            jnp.where(is_first, visits, words[FIRST]),
            jnp.where(is_first, state.clock, words[CLOCK]),
            words[CHECKSUM] * jnp.uint32(0x01000193) ^ checksum,
        ]
    )
    low, high = state.counts[index].T
    added = low + jnp.concatenate([counts, created[None]])
    high = high + (added < low).astype(jnp.uint32)  # carries
    old = state.numbers[index]
    numbers = jnp.concatenate(
        [
            jnp.minimum(old[:1], numbers[:1]),
            jnp.maximum(old[1:2], numbers[1:2]),
            jnp.minimum(old[2:3], numbers[2:3]),
            old[3:] + numbers[3:],
        ]
    )
    first = jnp.where(visits == 0, sample, state.samples[index, 0])
    state = Numbers(
        state.words.at[index].set(words),
        state.counts.at[index].set(jnp.stack([added, high], axis=1)),
        state.numbers.at[index].set(numbers),
        state.samples.at[index].set(jnp.stack([first, sample])),
        state.clock + jnp.uint32(1),
    )
    return state, non_finite == 0


@jax.jit
def _measure(x: jax.Array, size: Any, at: Any) -> Measured:
    """Returns the numbers of the first ``size`` elements of a flat array, sampled ``at`` some."""
    wide = wide_dtype()
    if not x.size:
        nothing = jnp.asarray([np.inf, -np.inf, np.inf, 0, 0], wide)
        return Measured(jnp.zeros(4, jnp.uint32), nothing, jnp.zeros(SAMPLE, wide), jnp.uint32(0))
    held = lax.iota(jnp.uint32, x.size) < size
    y = x.astype(wide)
    is_zero, is_subnormal = _small(x)
    nan, infinite = jnp.isnan(y), jnp.isinf(y)
    counts = [jnp.sum(held & c, dtype=jnp.uint32) for c in (nan, infinite, is_zero, is_subnormal)]
    finite = held & ~(nan | infinite)
    count = jnp.maximum(jnp.sum(finite, dtype=jnp.uint32), 1).astype(wide)
    plain = jnp.where(finite, y, 0)
    magnitude = jnp.abs(plain)
    amax = jnp.max(magnitude)
    unit = jnp.where(amax > 0, amax, 1)
    numbers = [
        jnp.min(jnp.where(finite, y, np.inf)),
        jnp.max(jnp.where(finite, y, -np.inf)),
        jnp.min(jnp.where(finite & ~is_zero, magnitude, np.inf)),
        unit * (jnp.sum(plain / unit) / count),
        unit * jnp.sqrt(jnp.sum(jnp.square(plain / unit)) / count),
    ]
    checksum = _checksum(x, nan, held)
    return Measured(jnp.stack(counts), jnp.stack(numbers), y[at], checksum)


def positions(size: int) -> np.ndarray:
    """Returns the positions of at most SAMPLE numbers of a flat array, spread over it.

    Multiples of the golden ratio: evenly spaced positions would often be those of one column.

    Example:
        >>> positions(5).tolist(), positions(1 << 20)[:4].tolist()
        ([0, 1, 2, 3, 4], [0, 36114, 72229, 94550])
    """
    if size <= SAMPLE:
        return np.arange(size)
    return np.sort((np.arange(SAMPLE) * 0.6180339887498949 % 1 * size).astype(np.int64))


def _small(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which numbers are zero, and which are subnormal in their own dtype.

    Those with float32's or float64's exponents are told by their bits, since backends flush them.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x == jnp.zeros((), x.dtype), jnp.zeros(x.shape, bool)
    info = jnp.finfo(x.dtype)
    if info.bits < 16 or x.dtype == jnp.float16:
        size = jnp.abs(x.astype(jnp.float32))
        return size == 0, (size > 0) & (size < np.float32(info.smallest_normal))
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{info.bits}"))
    magnitude = bits << bits.dtype.type(1)
    smallest = bits.dtype.type(2 << info.nmant)
    return magnitude == 0, (magnitude > 0) & (magnitude < smallest)


def _checksum(x: jax.Array, nan: jax.Array, held: jax.Array) -> jax.Array:
    """Returns a sum of the held numbers' bits, mixed with positions; all NaNs count as one."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(nan, jnp.asarray(np.nan, x.dtype), x)
        if jnp.finfo(x.dtype).bits < 8:
            x = x.astype(jnp.float32)
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(8 * x.dtype.itemsize, 32)}"))
    elif x.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
    else:
        bits = x
    bits = bits.reshape(x.size, -1).astype(jnp.uint32)  # a row for each number
    position = lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
    mixed = (bits ^ position * jnp.uint32(0x9E3779B9)) * jnp.uint32(0x85EBCA6B)
    mixed = jnp.where(held[:, None], mixed ^ mixed >> jnp.uint32(13), 0)
    return jnp.sum(mixed, dtype=jnp.uint32)


DROPS = having("drops")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """A float or complex array of the program, and whether all its numbers are finite."""

    array: Any
    finite: Any


@dataclasses.dataclass(frozen=True)
class Site:
    """One array that is recorded."""

    name: str  # the primitive, or ``"argument"`` or ``"output"``
    aval: ShapedArray  # its type
    equation: Equation | None = None  # whose result it is
    position: int = 0  # of it among the equation's results
    path: str = ""  # of an argument or output


@dataclasses.dataclass(eq=False)
class Recorder(Interpretation):
    """Runs each equation as the program has it, and observes what rounds or decides.

    Results that are operands' own numbers (a slice, a transpose) aren't recorded, nor are integers
    that are computed from integers.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)  # the recorded arrays
    # of these, by the equation's path and the result's position
    indices: dict[Any, int] = dataclasses.field(default_factory=dict)

    inline = True

    def record(self, program: Program, arrays: Sequence[ArrayLike]) -> tuple[Numbers, list[Any]]:
        avals = program.in_avals
        state = empty(len(avals) + program.results + len(program.out_avals))
        values: list[Any] = []
        for path, x, aval in zip(program.arguments, arrays, avals, strict=True):
            site = Site("argument", aval, path=path)
            x = jnp.asarray(x, aval.dtype) if _has_numbers(aval) else x
            x = self.argument(x, aval)
            state, value = self._observed(state, ("argument", path), site, x, ())
            values.append(value)
        state, values = run(program, self, state, values=values)
        outs = []
        for path, value, aval in zip(program.paths, values, program.out_avals, strict=True):
            site = Site("output", aval, path=path)
            outs.append(plain(value))
            state, _ = self._observed(state, ("output", path), site, outs[-1], (False,))
        return state, outs

    def argument(self, x: Any, aval: ShapedArray) -> Any:
        return x

    def lifts(self, aval: ShapedArray) -> bool:
        return jnp.issubdtype(aval.dtype, jnp.inexact)

    def lift(self, x: Argument, aval: ShapedArray) -> Watched:
        is_literal = isinstance(x, np.ndarray) and x.size == 1
        return Watched(x, np.isfinite(x).all() if is_literal else _is_finite(x))

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return plain(value)

    def apply(self, state: Numbers, equation: Equation, inputs: Sequence[Value]) -> Applied:
        finite = tuple(x.finite for x in inputs if isinstance(x, Watched))
        outs = equation.bind(*map(plain, inputs))
        if is_exact(equation):
            if equation.name not in DROPS and len(finite) == 1:
                return state, [self._watched(y, finite[0]) for y in outs]
            return state, [self._watched(y, None) for y in outs]
        values = []
        for i, (y, aval) in enumerate(zip(outs, equation.out_avals, strict=True)):
            # the integers of a bitcast are patterns of bits, no numbers
            if self.lifts(aval) or (finite and equation.name != "bitcast_convert_type"):
                site = Site(equation.name, aval, equation, i)
                state, y = self._observed(state, (equation.path, i), site, y, finite)
            values.append(y)
        return state, values

    unlifted = apply

    def eager_iterations(self, state: Numbers, equation: Equation) -> int:
        return 0 if isinstance(state.clock, Tracer) else MAX_EAGER // equation.inner

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Watched:
        return Watched(jnp.asarray(value.array), jnp.asarray(value.finite))

    def select(self, predicate: Value, on_true: Watched, on_false: Watched) -> Watched:
        array = jnp.where(predicate, on_true.array, on_false.array)
        return Watched(array, on_true.finite & on_false.finite)

    def unstack(self, value: Watched, aval: ShapedArray) -> Watched:
        spread = jnp.broadcast_to if isinstance(value.finite, Tracer) else np.broadcast_to
        return Watched(value.array, spread(value.finite, aval.shape[:1]))

    def stack(self, value: Watched, aval: ShapedArray) -> Watched:
        return Watched(value.array, value.finite.all())

    def _observed(
        self, state: Numbers, key: Any, site: Site, x: Any, finite: Sequence[Any]
    ) -> tuple[Numbers, Any]:
        if not _has_numbers(site.aval):
            return state, x
        index = self.indices.setdefault(key, len(self.sites))
        if index == len(self.sites):
            self.sites.append(site)
        state, own = observe(state, index, x, tuple(finite))
        return state, Watched(x, own) if self.lifts(site.aval) else x

    def _watched(self, x: Any, finite: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return Watched(x, _is_finite(x) if finite is None else finite)


def plain(value: Any) -> Any:
    return value.array if isinstance(value, Watched) else value


def _has_numbers(aval: ShapedArray) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()
