"""``record``: runs a function in its own arithmetic and keeps a few numbers of each result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._check import checked
from ..._decorator import Params, Pending
from ..._jax import Tracer, jex
from ..._output import progress
from ..._types import PyTree
from ...interpret import Program, State, Value, trace
from .._file import name_of
from ._recorder import Recorder
from ._recording import Recording, recorded_arrays


@checked
def record(f: Callable[Params, Any], *, fused: bool = False) -> Callable[Params, Recording]:
    """Returns a function of ``f``'s arguments that runs ``f`` and returns a :class:`Recording`.

    ``f`` runs on the device of its arguments, in the dtypes that it has: nothing is emulated. Of
    each result that rounds or decides (not of slices or transposes), of the arguments and of the
    outputs the recording keeps counts (NaNs, infinities, zeros, subnormal numbers), extremes, mean
    and root mean square, a checksum of all bits, and up to 64 numbers; never the array.
    :func:`compare` compares two recordings.

    Args:
        f: any function of pytrees made of JAX primitives: a loss, a gradient, a training step.
        fused: False to compile each equation alone, so that each result is stored in its own dtype
            and has one value; loops of more than 2,000 results, and hand-written kernels, are
            compiled as a whole. True to read the numbers within one compiled program, which is
            closer to what ``jax.jit(f)`` runs but not the same: XLA computes a value again in each
            kernel that needs it, in some of them with more bits than its dtype has (FP16's
            ``sqrt(x * x)`` may be finite though the recorded ``x * x`` is infinite), and reading a
            value changes what is fused. ``Recording.jit_difference`` says how far the outputs are
            from those of ``jax.jit(f)`` either way.

    Returns:
        A function to be called with arrays, not under ``jit``, ``grad`` or ``vmap``: put these
        inside, ``record(jax.grad(f))``.

    Raises:
        TypeError: ``f`` isn't callable, or returns something that isn't an array; an argument is a
            tracer.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> found = sw.auditing.record(norm)(jnp.full(64, 300.0, jnp.float16))
        >>> found.first_non_finite.primitive, found.first_non_finite.infinite
        ('mul', 64)
    """

    def recorded(*args: PyTree, **kwargs: PyTree) -> Recording:
        recorder = Recorder()
        program = trace(f, recorder, args, kwargs, name="record", as_jit=True)
        refuse_tracers(program, "record", f)

        def whole(arrays: Sequence[ArrayLike]) -> tuple[State, list[Value]]:
            return recorder.record(program, arrays)

        with progress(f"record {name_of(f)}"):
            state, outs = (jax.jit(whole) if fused else whole)(list(program.arrays))
            return Recording(
                function=name_of(f),
                device=_device(outs),
                versions=(("jax", version("jax")), ("jaxlib", version("jaxlib"))),
                fused=fused,
                arrays=recorded_arrays(recorder.sites, state),
                jit_difference=_jit_difference(program, outs),
            )

    return Pending(recorded, "record")


def refuse_tracers(program: Program, name: str, f: Callable) -> None:
    if any(isinstance(x, Tracer) for x in program.arrays):
        raise TypeError(
            f"{name}({name_of(f)}) was called under jit, grad or vmap; call it with arrays, and "
            f"put the transformation inside: {name}(jax.grad(f))"
        )


def _device(outs: Sequence[Value]) -> str:
    devices = set().union(*(x.devices() for x in outs if isinstance(x, jax.Array)))
    found = devices or {jax.devices()[0]}
    names = sorted({f"{device.device_kind} ({device.platform})" for device in found})
    return f"{', '.join(names)}{f' x {len(found)}' if len(found) > 1 else ''}"


def _jit_difference(program: Program, outs: Sequence[Value]) -> float | None:
    if program.calls_back:  # not called twice
        return None
    compiled = jax.jit(jex.jaxpr_as_fun(program.jaxpr))(*program.arrays)
    found = [0.0]
    for own, other, aval in zip(outs, compiled, program.out_avals, strict=True):
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        a, b = np.asarray(other), np.asarray(own)
        if a.tobytes() != b.tobytes():
            found.append(relative_difference(a, b) if a.size else 0.0)
    return math.inf if any(map(math.isnan, found)) else max(found)


def relative_difference(a: Any, b: Any) -> float:
    """Returns ``||a - b|| / max(||a||, ||b||)``, between 0 and 2.

    Over all numbers; inf if one is finite where the other is not, or both are infinite with
    opposite signs.

    Example:
        >>> relative_difference([3.0, 4.0], [3.0, 4.5]), relative_difference([1.0], [math.inf])
        (0.0924..., inf)
    """
    parts = [np.asarray(x) for x in (a, b)]
    if any(np.iscomplexobj(x) for x in parts):
        parts = [np.stack([np.real(x), np.imag(x)]) for x in parts]
    x, y = (np.ravel(part).astype(np.float64) for part in parts)
    finite = np.isfinite(x) & np.isfinite(y)
    rest = np.stack([x[~finite], y[~finite]])
    if not np.array_equal(rest[0], rest[1], equal_nan=True):
        return math.inf
    x, y = x[finite], y[finite]
    unit = max(np.abs(x).max(initial=0), np.abs(y).max(initial=0))
    if unit == 0:
        return 0.0
    x, y = x / unit, y / unit
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(x), np.linalg.norm(y)))
