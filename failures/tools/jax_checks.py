"""The checks that JAX has: ``jax_debug_nans``, ``jax_debug_infs`` and ``checkify``.

They look at the numbers that a program really computes, so each program runs in its low-precision
dtype on this machine: every operation of its jaxpr on float16 or bfloat16 arrays. Programs under a
policy or recipe run as `autocast` and `autoscale` make them; only E4M3FN, in which no CPU computes,
is emulated.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify as checks

import scalewise as sw
from scalewise.interpret._equation import LIBRARIES
from scalewise.interpret._interpret import interpret_body

from ..low_precision import Run, in_low_precision
from ..programs import Answer, Finding, Place, Program
from . import checked

HERE = Path(__file__).parent
OWN = [HERE, *HERE.parent.glob("*.py")]  # not the programs
LIBRARY = [Path(x.__file__ or "").parent for x in (jax, sw)]
INTERNAL = tuple(map(str, (*LIBRARY, *OWN)))


def finite(outs: Any) -> bool:
    floats = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return all(bool(jnp.all(jnp.isfinite(x))) for x in floats)


def places(error: BaseException) -> tuple[Place, ...]:
    """Returns the user's line at which an exception was raised, and its caller if that is a
    library's.

    Programs are interpreted; where a user's own program would have the line in its traceback, this
    one has the interpreted equation, which knows it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code is interpret_body.__code__:
            equation = frame.f_locals["step"].equation
            return tuple(x[:2] for x in (equation.source, equation.caller) if x)
    return places_in(error.__traceback__)


def places_in(frames: TracebackType | None) -> tuple[Place, ...]:
    """Returns the innermost line of a traceback that isn't JAX's, and the innermost user's."""
    stack = [(x.filename, x.lineno or 0) for x in reversed(traceback.extract_tb(frames))]
    own = [x for x in stack if not x[0].startswith(INTERNAL)]
    users = [x for x in own if not x[0].startswith(LIBRARIES)]
    return tuple(dict.fromkeys([*own[:1], *users[:1]])) if users else ()


@contextlib.contextmanager
def flag(name: str) -> Iterator[None]:
    jax.config.update(name, True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # JAX prints that it runs again
            yield
    finally:
        jax.config.update(name, False)


def fresh(f: Run) -> Run:
    """Returns a function that JAX compiles anew."""
    return lambda *arrays: f(*arrays)


def found(message: str, where: Sequence[Place]) -> Answer:
    message = message.partition(". Because ")[0].splitlines()[0][:200]
    kind = "overflow" if "inf" in message.split("encountered")[0] else "nan"
    return Answer((Finding(kind, where, message),))


def _flagged(name: str, jitted: bool) -> Callable[[Program, Any], Answer]:
    """Returns the check of a flag on a program that is compiled, or op by op.

    If an output of a compiled program isn't finite, JAX runs it again operation by operation, and
    its error has the line.
    """

    def ask(program: Program, args: Any) -> Answer:
        f, arrays = in_low_precision(program, args)
        plain = jax.jit(fresh(f))
        run = jax.jit(fresh(f)) if jitted else f

        def check() -> Answer:
            with flag(name):
                try:
                    jax.block_until_ready(run(*arrays))
                except FloatingPointError as error:
                    text = str(error)  # "encountered in" an operation, or else in an output only
                    located = not jitted or "encountered in" in text
                    return found(text, places(error) if located else ())
            return Answer()

        return checked(lambda: finite(jax.block_until_ready(plain(*arrays))), check)

    return ask


debug_nans = _flagged("jax_debug_nans", jitted=True)
debug_infs = _flagged("jax_debug_infs", jitted=True)
debug_nans_op_by_op = _flagged("jax_debug_nans", jitted=False)
debug_infs_op_by_op = _flagged("jax_debug_infs", jitted=False)


def checkify(program: Program, args: Any) -> Answer:
    """Looks for NaN and divisions by zero inside the compiled program."""
    f, arrays = in_low_precision(program, args)
    plain = jax.jit(fresh(f))
    run = jax.jit(checks.checkify(fresh(f), errors=checks.float_checks))

    def check() -> Answer:
        error = run(*arrays)[0]
        jax.block_until_ready(error)
        problem = error.get_exception()
        if problem is None:
            return Answer()
        return found(str(problem), places_in(problem.traceback_info.as_python_traceback()))

    return checked(lambda: finite(jax.block_until_ready(plain(*arrays))), check)
