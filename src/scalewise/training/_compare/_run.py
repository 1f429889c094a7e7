"""One method's run: compiles its step, advances it, records it, and finds why it isn't finite."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Tracer
from ..._types import Json, PyTree
from ...interpret import Applied, Equation, Interpretation, State, Value, is_float, transform
from .._gradients import all_finite
from .._loss_scale import loss_scale_of, loss_scales
from ._methods import Method
from ._program import Program, Step, call_user, check_same_types
from ._results import Divergence, Record, finite_or_none, last_mean


class Run:
    """A method's compiled step, its current state, and what was measured so far.

    All compiled code but ``finite`` belongs to this object and is released with it. ``finite`` is a
    jitted ``finite_leaves``: methods whose states have the same types share its program.
    """

    def __init__(
        self,
        method: Method,
        program: Program,
        state: PyTree,
        batch: PyTree,
        parameters: int,
        finite: Callable[[PyTree], jax.Array],
    ):
        self.method, self.parameters = method, parameters
        prepare, self.step = method.build(program)
        # JAX keeps compiled code as long as its function lives: partials live as long as this run
        self._prepare = jax.jit(functools.partial(prepare))
        self.state = jax.block_until_ready(self._prepare(state, batch))
        jitted = jax.jit(functools.partial(self.step))
        start = time.perf_counter()
        lowered = call_user(jitted.lower, f"{method.name}: step", self.state, batch)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        self.trace_seconds = traced - start
        self.compile_seconds = time.perf_counter() - traced
        after = lowered.out_info[0]
        check_same_types(jax.eval_shape(lambda s: s, self.state), after, f"{method.name}: step")
        self._finite = finite
        self._begin()

    def restarted(self, state: PyTree, batch: PyTree) -> Run:
        """Returns a run of the same compiled method from another seed's state and first batch."""
        other = copy.copy(self)
        other.state = self._prepare(state, batch)
        other._begin()
        return other

    def _begin(self) -> None:
        self.finite_at_start = self._finite(self.state)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bad: list[bool] = []
        self.scales: list[float] = []
        self.divergence: Divergence | None = None
        self.stopped = False
        self.scaled = len(loss_scales(self.state)) == 1

    def advance(self, batch: PyTree) -> None:
        """Makes and times one step; does nothing if the method can't become finite again."""
        if self.stopped:
            self.losses.append(math.nan)
            self.bad.append(True)
            return
        before = self.state
        if self.scaled:
            self.scales.append(float(loss_scale_of(before).scale))
        start = time.perf_counter()
        after, loss = jax.block_until_ready(self.compiled(before, batch))
        self.seconds.append(time.perf_counter() - start)
        number = float(jnp.asarray(loss))
        finite_state = bool((self._finite(after) | ~self.finite_at_start).all())
        good = finite_state and math.isfinite(number)
        if not good:
            if self.divergence is None:
                why = diagnose(self.step, before, batch, after, number)
                self.divergence = Divergence(len(self.losses) + 1, why)
            # a non-finite state that gives a non-finite loss stays non-finite
            self.stopped = not finite_state and not math.isfinite(number)
        self.bad.append(not good)
        self.losses.append(number if math.isfinite(number) else math.nan)
        self.state = after

    @property
    def skipped(self) -> int:
        return int(loss_scale_of(self.state).skipped) if self.scaled else 0

    def metrics(self, step: int, seed_index: int) -> dict[str, Json]:
        line = {
            "step": step,
            "method": self.method.name,
            "loss": finite_or_none(self.losses[-1]),
            "ms": None if self.stopped else round(self.seconds[-1] * 1e3, 3),
            "non_finite_steps": sum(self.bad),
        }
        if seed_index:
            line["seed"] = seed_index  # counted from the first
        if self.scaled:
            scale = self.scales[-1] if self.scales else None
            line |= {"scale": scale, "skipped_steps": self.skipped}
        return line

    def record(self, steps: int, by_seed: Sequence[Run]) -> Record:
        leaves = jax.tree.leaves(self.state)
        memory = self.compiled.memory_analysis()
        first = self.divergence
        return Record(
            name=self.method.name, what=self.method.what, losses=tuple(self.losses[:steps]),
            seconds=tuple(self.seconds[:steps]), trace_seconds=self.trace_seconds,
            compile_seconds=self.compile_seconds,
            state_bytes=sum(int(x.nbytes) for x in leaves if isinstance(x, jax.Array)),
            parameters=self.parameters, non_finite=sum(self.bad[:steps]),
            divergence=first if first and first.step <= steps else None,
            scales=tuple(self.scales[:steps]), skipped=self.skipped,
            temporary_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
            finals=tuple(last_mean(run.losses[:steps]) for run in by_seed),
        )  # fmt: skip


def finite_leaves(tree: PyTree) -> jax.Array:
    return jnp.stack([all_finite(x) for x in jax.tree.leaves(tree)])


class _Found(Exception):
    """Raised at the first equation that has finite inputs and a non-finite output."""


class _Watch(Interpretation):
    """Runs equations one by one up to the first with finite inputs and a non-finite output."""

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        outs = equation.bind(*inputs)
        if any(isinstance(x, Tracer) for x in (*inputs, *outs)):
            return state, outs
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        for out, aval in zip(outs, equation.out_avals, strict=True):
            if is_float(aval) and not _finite(out) and all(map(_finite, floats)):
                raise _Found(_sentence(equation, floats, np.asarray(out)))
        return state, outs


def _finite(x: PyTree) -> bool:
    return bool(np.isfinite(np.asarray(x).astype(np.float32)).all())


def _sentence(equation: Equation, inputs: Sequence[Value], out: np.ndarray) -> str:
    wide = out.astype(np.float32)
    kind = "NaN" if np.isnan(wide).any() else "an infinity"
    file, line, function = equation.caller or equation.source or ("?", 0, "?")
    if equation.caller and equation.source:  # the line of the library that it calls
        function += f", which calls {Path(equation.source[0]).name}:{equation.source[1]}"
    where = f"{equation.name} at {Path(file).name}:{line} ({function}), {equation.direction}"
    at = np.unravel_index(int(np.argmin(np.isfinite(wide))), wide.shape)
    elementwise = all(np.shape(x) in ((), out.shape) for x in inputs)
    if not inputs or not elementwise:
        return f"{where}, makes {kind} of finite {out.dtype} numbers"
    numbers = ", ".join(f"{float(np.asarray(x)[at] if np.ndim(x) else x):.3g}" for x in inputs)
    return f"{where}, makes {kind} of the {out.dtype} number{'s' * (len(inputs) > 1)} {numbers}"


def first_non_finite(step: Step, state: PyTree, batch: PyTree) -> str | None:
    """Describes the first equation of a step that has finite inputs and a non-finite output."""
    try:
        with jax.disable_jit():
            transform(step, _Watch(), name="compare")(state, batch)
    except _Found as found:
        return str(found)
    except Exception:  # the step only runs compiled: its state is described instead
        pass
    return None


def diagnose(step: Step, before: PyTree, batch: PyTree, after: PyTree, loss: float) -> str:
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)]
    bad = [p for p, good in zip(paths, finite_leaves(after), strict=True) if not good]
    loss_is = None if np.isfinite(loss) else f"the loss is {loss}"
    found = [first_non_finite(step, before, batch), loss_is]
    if bad:
        found.append(f"{len(bad)} of the state's {len(paths)} arrays aren't finite, first {bad[0]}")
    return "; ".join(filter(None, found))
