"""Runs the checks that JAX has on the failures and clean programs that the audit is scored on.

    python -m proofs.scoreboard                      # continues where it stopped
    python -m proofs.scoreboard "T5 in fp16" --again

``jax_debug_nans``, ``jax_debug_infs`` and ``checkify`` look at the numbers that a program really
computes. So each program runs in its low-precision dtype on this machine: every operation of its
jaxpr on float16 or bfloat16 arrays, where the audit emulates it. Programs under a policy or recipe
run as `autocast` and `autoscale` make them; only E4M3FN, in which no CPU computes, is emulated.

What a check says is recorded in docs/scoreboard.jsonl: nothing, an operation without a line, or a
line, which is right if it is marked in the program's source. ``proofs/scoreboard_torch.py`` does
the same for the checks of PyTorch, Hugging Face and Paddle.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from examples.failures import Failure
from examples.failures.clean import CLEAN, Clean
from jax.core import Tracer
from jax.experimental import checkify

import scalewise as sw
from proofs.experts import marked
from proofs.gallery import ALL
from scalewise.interpret import Equation, is_float, run, trace
from scalewise.interpret._equation import LIBRARIES
from scalewise.interpret._interpret import interpret_body
from scalewise.interpret._rebind import InDtype

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "scoreboard.jsonl"
DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16}
INTERNAL = (str(Path(jax.__file__).parent), str(Path(sw.__file__).parent), str(ROOT / "proofs"))
REPEATS = 5  # calls of a compiled program whose median time is taken
NOTHING, LINE, OTHER, OPERATION, FAILED = "nothing", "line", "another line", "operation", "failed"

Place = tuple[str, int]
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class InLow(InDtype):
    """Runs every equation on floats of one dtype; converts literals with NumPy, as JAX does.

    A conversion that is an operation would be one more for a check to look at.
    """

    def lift(self, x: Any, aval: Any) -> Any:
        if isinstance(x, Tracer) or getattr(x, "dtype", None) == self.dtype:
            return super().lift(x, aval)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a number that overflows
            return np.asarray(x).astype(self.dtype)

    def apply(self, state: Any, equation: Equation, inputs: Sequence[Any]) -> Any:
        if equation.name == "convert_element_type" and isinstance(
            inputs[0], np.ndarray | np.generic
        ):
            return state, list(inputs)
        return super().apply(state, equation, inputs)


@dataclasses.dataclass(frozen=True)
class Said:
    """A check's verdict on a program.

    Attributes:
        message: its words; None if it was silent.
        places: file and line that it names; for a line of a library, also the user's that calls it.
        failed: whether the check itself failed.
    """

    message: str | None = None
    places: tuple[Place, ...] = ()
    failed: bool = False

    def verdict(self, lines: frozenset[Place]) -> str:
        if self.message is None:
            return NOTHING
        if self.failed:
            return FAILED
        if not self.places:
            return OPERATION
        return LINE if lines & set(self.places) else OTHER


SILENT = Said()


def in_low_precision(case: Failure | Clean) -> tuple[Run, Sequence[Any]]:
    """Returns a program in its low-precision arithmetic, and the arrays to call it with."""
    arguments, low = case.arguments(), case.low
    if low not in DTYPES:
        return _transformed(case), arguments
    dtype = InLow(DTYPES[low])
    program = trace(case.call, dtype, arguments, {}, name="scoreboard")
    arrays = [
        jnp.asarray(x).astype(dtype.dtype) if is_float(a) else jnp.asarray(x)
        for x, a in zip(program.arrays, program.in_avals, strict=True)
    ]
    return lambda *arrays: run(program, dtype, (), arrays)[1], arrays


def _transformed(case: Failure | Clean) -> Run:
    low = case.low
    if low == "float32":
        return case.call
    if isinstance(low, sw.Recipe) or low in sw.recipes.CATALOGUE:
        return sw.autoscale(case.call, low)
    return sw.autocast(case.call, low) if "=" in low else sw.emulate(case.call, low)


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


def op_by_op(name: str) -> Callable[[Run, Run, Sequence[Any]], Said]:
    """Returns the check of a flag on a program that isn't compiled as a whole."""

    def check(jitted: Run, f: Run, arrays: Sequence[Any]) -> Said:
        with flag(name):
            try:
                jax.block_until_ready(f(*arrays))
            except FloatingPointError as error:
                return Said(str(error).partition(". Because ")[0], places(error))
        return SILENT

    return check


def compiled(name: str) -> Callable[[Run, Run, Sequence[Any]], Said]:
    """Returns the check of a flag on a jitted program.

    If an output isn't finite, JAX runs the program again operation by operation, and its error has
    the line.
    """

    def check(jitted: Run, f: Run, arrays: Sequence[Any]) -> Said:
        with flag(name):
            try:
                jax.block_until_ready(jitted(*arrays))
            except FloatingPointError as error:
                found = "encountered in" in str(error)  # else nothing is wrong op by op
                return Said(str(error).partition(". Because ")[0], places(error) if found else ())
        return SILENT

    return check


def checked(jitted: Run, f: Run, arrays: Sequence[Any]) -> Said:
    """Looks for NaN and divisions by zero inside the compiled program."""
    found = jitted(*arrays)[0]
    jax.block_until_ready(found)
    problem = found.get_exception()
    if problem is None:
        return SILENT
    return Said(str(problem), places_in(problem.traceback_info.as_python_traceback()))


def with_checks(f: Run) -> Run:
    return checkify.checkify(f, errors=checkify.float_checks)


Prepare = Callable[[Run], Run]
Check = Callable[[Run, Run, Sequence[Any]], Said]
TOOLS: dict[str, tuple[Prepare, Check]] = {
    "jax_debug_nans": (jax.jit, compiled("jax_debug_nans")),
    "jax_debug_infs": (jax.jit, compiled("jax_debug_infs")),
    "checkify": (lambda f: jax.jit(with_checks(f)), checked),
    "jax_debug_nans, op by op": (lambda f: f, op_by_op("jax_debug_nans")),
    "jax_debug_infs, op by op": (lambda f: f, op_by_op("jax_debug_infs")),
}


def fresh(f: Run) -> Run:
    """Returns a function that JAX compiles anew."""
    return lambda *arrays: f(*arrays)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def steady(call: Callable[[], Any]) -> float:
    """Returns the median time of a call, after the first."""
    return statistics.median(timed(call)[1] for _ in range(REPEATS))


def rows(case: Failure | Clean, tools: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Runs a program without and with each check; yields what each says, and the times.

    The first time holds tracing and compiling. The steady one is measured where a check is silent.
    """
    f, arrays = in_low_precision(case)
    lines = frozenset() if isinstance(case, Clean) else marked(case.at)
    plain = jax.jit(fresh(f))
    outs, first = timed(lambda: jax.block_until_ready(plain(*arrays)))
    plain_times = first, steady(lambda: jax.block_until_ready(plain(*arrays)))
    for tool in tools:
        jax.clear_caches()  # so that no check uses what another has compiled
        prepare, check = TOOLS[tool]
        prepared, again = prepare(fresh(f)), 0.0
        try:
            said, first = timed(lambda p=prepared, c=check: c(p, f, arrays))
            if said == SILENT:
                again = steady(lambda p=prepared, c=check: c(p, f, arrays))
        except Exception as error:  # recorded: a check that fails says nothing of the program
            said, first = Said(f"{type(error).__name__}: {error}", failed=True), 0.0
        where = [f"{Path(file).name}:{line}" for file, line in said.places]
        yield {
            "tool": tool,
            "verdict": said.verdict(lines),
            "message": said.message and said.message.splitlines()[0][:200],
            "where": where,
            "finite": finite(outs),
            "first": [round(first, 4), round(plain_times[0], 4)],
            "steady": [round(again, 7), round(plain_times[1], 7)],
        }


def versions() -> dict[str, str]:
    date = datetime.date.today().isoformat()
    return {"date": date, "python": platform.python_version(), "jax": jax.__version__}


def recorded(file: Path = FILE) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of a file by program and tool; of two of one key, the later."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {(row["program"], row["tool"]): row for row in map(json.loads, lines)}


def record(program: str, row: dict[str, Any], file: Path = FILE) -> None:
    line = json.dumps({"program": program} | row)
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")
    print(line, flush=True)


def main() -> None:
    programs: dict[str, Failure | Clean] = {**ALL, **CLEAN}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="program", help="by name; all by default")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--again", action="store_true", help="also what is there already")
    given = parser.parse_args()
    unknown = set(given.programs) - set(programs)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(programs)}")
    for name in given.programs or programs:
        there = {} if given.again else recorded()
        missing = [tool for tool in given.tools if (name, tool) not in there]
        for row in rows(programs[name], missing) if missing else ():
            record(name, row | versions())
        jax.clear_caches()


if __name__ == "__main__":
    main()
