"""Trains a program by several methods on the same batches, one step of each in turn."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from markupsafe import Markup

from .._jax import Tracer
from .._output import Rows, Tabular, append, place, progress, replacing, sentence, tables_page
from .._types import PyTree
from .._user_file import InputError, call_user
from ..interpret import Applied, Equation, Interpretation, State, Value, is_float, transform
from ..training import all_finite, loss_scale_of
from ._curves import curves_svg
from ._methods import Method, params_of
from ._program import StepFunction, TrainingProgram

WINDOW, SMOOTHING, EARLY = 50, 25, 20  # steps: of the final loss, of curves, of the first losses
COLOURS = ("blue", "red", "green", "dark_orange", "magenta", "cyan")
RATIOS = ("final_loss", "median_seconds", "build_seconds", "bytes_per_parameter")
COLUMNS = (  # heading (the table fits into 80 columns), figure, unit, digits
    ("final\nloss", "final_loss", 1, 3), ("loss\nratio", "final_loss_ratio", 1, 4),
    ("non-\nfinite", "non_finite_steps", 1, 0), ("bytes/\nparam", "bytes_per_parameter", 1, 2),
    ("step\nms", "median_seconds", 1e-3, 1), ("step\nratio", "median_seconds_ratio", 1, 2),
    ("build\ns", "build_seconds", 1, 2), ("build\nratio", "build_seconds_ratio", 1, 2),
)  # fmt: skip
finite_leaves = jax.jit(lambda tree: jnp.stack([all_finite(x) for x in jax.tree.leaves(tree)]))


class MethodRun:
    """A method's compiled step, its state from one seed, and the metrics of each step."""

    def __init__(self, method: Method, program: TrainingProgram, state: PyTree, batch: PyTree):
        prepare, self.step = method.build(program)
        # JAX keeps what it compiled as long as its function lives: these live as long as this run
        self.method, self.prepare = method, jax.jit(functools.partial(prepare))
        jitted = jax.jit(functools.partial(self.step))
        self.begin(0, state, batch)
        times = [time.perf_counter()]
        lowered = call_user(jitted.lower, f"{method.name}: step", self.state, batch)
        times.append(time.perf_counter())
        self.compiled = lowered.compile()
        self.trace_seconds, self.compile_seconds = np.diff([*times, time.perf_counter()]).tolist()
        check_types(f"{method.name}: step", self.state, lowered.out_info)

    def begin(self, seed: int, state: PyTree, batch: PyTree) -> MethodRun:
        """Returns the run, at a seed's state and first batch."""
        self.state = jax.block_until_ready(self.prepare(state, batch))
        self.finite_at_start, self.stopped, self.first = finite_leaves(self.state), False, None
        self.lines, self.seconds = list[dict[str, Any]](), list[float]()
        self.last: dict[str, Any] = {"non_finite_steps": 0} | ({"seed": seed} if seed else {})
        return self

    def advance(self, batch: PyTree) -> None:
        """Makes and times one step; does nothing if the method can't become finite again."""
        before, loss, finite = self.state, math.nan, False
        if not self.stopped:
            began = time.perf_counter()
            self.state, loss = jax.block_until_ready(self.compiled(before, batch))
            self.seconds.append(time.perf_counter() - began)
            finite = bool((finite_leaves(self.state) | ~self.finite_at_start).all())
            if self.method.options is not None:
                self.last["scale"] = float(loss_scale_of(before).scale)
                self.last["skipped_steps"] = int(loss_scale_of(self.state).skipped)
        loss, step = float(loss), len(self.lines) + 1
        bad = not (finite and math.isfinite(loss))
        self.last["non_finite_steps"] += bad
        if bad and self.first is None:
            why = diagnosis(self.step, before, batch, self.state, loss)
            self.first = {"step": step, "why": why}
        # a non-finite state that gives a non-finite loss stays non-finite
        self.stopped = not finite and not math.isfinite(loss)
        ms = None if self.stopped else round(self.seconds[-1] * 1e3, 3)
        shown = loss if math.isfinite(loss) else None
        line = {"step": step, "method": self.method.name, "loss": shown, "ms": ms}
        self.lines.append(line | self.last)

    def losses(self, steps: int) -> list[float]:
        """Returns the losses of that many steps, NaN for those that aren't finite."""
        return np.array([line["loss"] for line in self.lines[:steps]], float).tolist()

    def figures(self, steps: int, parameters: int, seeds: Sequence[MethodRun]) -> dict[str, Any]:
        """Returns what ``summary.json`` has of the method; final losses are of all seeds."""
        finals = [fmean(run.losses(steps)[-WINDOW:]) for run in seeds]
        size = sum(x.nbytes for x in jax.tree.leaves(self.state))
        scales = [line["scale"] for line in self.lines[:steps] if "scale" in line]
        return {
            "name": self.method.name, "what": self.method.what,
            "trace_seconds": self.trace_seconds, "compile_seconds": self.compile_seconds,
            "state_bytes": size, "parameters": parameters,
            "temporary_bytes": getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0),
            "final_loss": fmean(finals), "build_seconds": self.trace_seconds + self.compile_seconds,
            "median_seconds": median(self.seconds),
            "bytes_per_parameter": size / parameters,
            "non_finite_steps": self.lines[steps - 1]["non_finite_steps"],
            "skipped_steps": self.lines[steps - 1].get("skipped_steps", 0),
            "final_loss_by_seed": finals,
            "final_loss_spread": float(np.std(finals, ddof=1)) if len(finals) > 1 else math.nan,
            "loss_scales": [scales[0], scales[-1]] if scales else None,
            "loss_scale_at_end": scales[-1] if scales else None,
            "first_non_finite": self.first if self.first and self.first["step"] <= steps else None,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """The measurements of all methods on the same data; ``summary`` has all but the curves."""

    summary: dict[str, Any]
    losses: dict[str, list[float]]  # of each method's first seed; NaN if one wasn't finite

    @property
    def title(self) -> str:
        return f"{self.summary['program']}, {len(self.losses)} methods side by side"

    def sentences(self) -> list[str]:
        s, rows = self.summary, self.summary["methods"]
        window = f"final loss: mean of the last {WINDOW}"
        return [
            f"{s['program']}: {s['steps_made']} steps, ratios to {s['reference']}; {window}",
            *("{name}, step {first_non_finite[step]}: {first_non_finite[why]}".format(**row)
              for row in rows if row["first_non_finite"]),
            *("{name}, loss scale {loss_scales[0]:g} to {loss_scales[1]:g}, {skipped_steps} steps "
              "left out".format(**row) for row in rows if row["loss_scales"]),
            *["interrupted after {steps_made} of {steps_asked} steps".format(**s)]
            * s["interrupted"], *[f"Ended early: {s['failure']}"] * bool(s["failure"]),
        ]  # fmt: skip

    def tables(self, *, everything: bool = True) -> list[Rows]:
        rows = self.summary["methods"]
        styles = [COLOURS[i % 6] for i in range(len(rows))]
        headings = ("\nmethod", *(heading for heading, *_ in COLUMNS))
        memory = [(r["name"], f"{r['state_bytes'] / 1e6:.2f}", f"{r['temporary_bytes'] / 1e6:.2f}",
                   r["what"]) for r in rows]  # fmt: skip
        return [Rows("Methods", headings, [cells(row) for row in rows], styles)] + [
            Rows(
                "Memory", ("method", "state, MB", "temporaries of a step, MB", "what it is"), memory
            ),
            Rows("Run", ("", ""), [*self.summary["environment"].items()]),
        ] * everything

    def _page(self) -> str:
        svg = self.curves_svg()
        lines, tables, chart = self.sentences(), self.tables(), Markup(svg)  # it escapes names
        return tables_page(self.title, lines, tables, chart=chart, styles=svg)

    def write(self, folder: Path) -> None:
        texts = {"summary.json": json.dumps(self.summary, indent=2) + "\n"}
        texts |= {"report.html": self._page(), "curves.svg": self.curves_svg()}
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(text.encode())

    def curves_svg(self) -> str:
        """Draws two panels: smoothed losses, and their differences from the reference."""
        means = {
            name: [fmean(ys[max(0, i - SMOOTHING) : i]) for i in range(1, len(ys) + 1)]
            for name, ys in self.losses.items()
        }
        reference = self.summary["reference"]
        apart = [[100 * x for x in differences(ys, means[reference])] for ys in means.values()]
        dead = [row["final_loss"] is None for row in self.summary["methods"]]
        panels = {f"training loss, mean of the last {SMOOTHING} steps": [*means.values()]}
        return curves_svg(
            "Loss curves",
            panels | {f"difference of that to {reference}, %": apart},
            [name + " (diverged)" * d for name, d in zip(means, dead, strict=True)],
        )


def check_types(what: str, state: PyTree, out: PyTree) -> None:
    """Checks that a step returned a state of the types that it got, and a loss."""
    if not (isinstance(out, tuple) and len(out) == 2):
        count = f" of {len(out)}" if isinstance(out, tuple) else ""
        raise InputError(f"{what} returned a {type(out).__name__}{count}; expected (state, loss)")
    before, after, loss = map(types, (state, *out))
    if set(loss) != {""} or not loss[""].endswith("[]") or "float" not in loss[""]:
        kind = loss.get("", f"a {type(out[1]).__name__}")
        raise InputError(f"{what} returned a loss of {kind}; expected a scalar float")
    if jax.tree.structure(state) != jax.tree.structure(out[0]):
        raise InputError(f"{what} returned a state of another structure than it got")
    for path, kind in before.items():
        if after[path] != kind:
            raise InputError(f"{what} returned state{path} as {after[path]}: it got {kind}")


def types(tree: PyTree) -> dict[str, str]:
    """Returns dtype and shape of each array, by its path."""
    arrays = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: tree))
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in arrays}


def cells(row: dict[str, Any]) -> list[str]:
    figures = [(row[name], unit, digits) for _, name, unit, digits in COLUMNS]
    loss, *found = ["–" if x is None else f"{x / unit:.{digits}f}" for x, unit, digits in figures]
    spread = row["final_loss_spread"]
    return [row["name"], loss + (f"±{spread:.3f}" if spread is not None else ""), *found]


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [a / b - 1 if b else math.nan for a, b in zip(losses, reference, strict=True)]


def compare(
    program: TrainingProgram, methods: Sequence[Method], text: bytes, steps: int, *, seed: int = 0,
    seeds: int = 1, out: Path | None = None, tell: Callable[[str], object] = lambda line: None,
) -> Comparison:  # fmt: skip
    """Returns what was measured of each method; ``out`` gets each step's line of metrics.

    The methods make their steps in turn, so that other work on the machine slows all of them alike.
    Ctrl-C, a full disk or an exception in the program's batches ends the training early.
    """
    streams = [program.endless_batches(text, seed + i) for i in range(seeds)]
    batches = [next(stream) for stream in streams]
    states = [call_user(program.init, f"{program.name}.init", seed + i) for i in range(seeds)]
    parameters = sum(getattr(x, "size", 1) for x in jax.tree.leaves(params_of(states[0])))
    if not parameters:
        raise InputError(
            f"{program.name}.init returned a {type(states[0]).__name__} without params: the state "
            'is a pytree with its parameters under the key (or attribute) "params"'
        )
    what, first = f"{program.name}.train_step", (states[0], batches[0])
    check_types(what, states[0], call_user(jax.eval_shape, what, program.train_step, *first))
    for each in methods:
        each.build(program)  # fails if the program lacks what the method needs
    size = f"{parameters:,} parameters, {len(text):,} bytes of text"
    tell(f"{program.name}: {size}, {steps} steps of each")
    # makes JAX load what it loads on its first trace, derivative and compilation
    jax.jit(jax.grad(lambda x: jnp.tanh(x @ x).mean()))(jnp.ones((8, 8)))
    made, cause, runs = 0, None, list[list[MethodRun]]()
    with progress(program.name) as now:
        for each in methods:
            now(f"compiling {each.name}")
            run, starts = MethodRun(each, program, *first), zip(count(), states, batches)
            runs.append([copy.copy(run).begin(*start) for start in starts])
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        try:
            for step in range(1, steps + 1):
                for run, batch in [x for y in runs for x in zip(y, batches, strict=True)]:
                    call_user(run.advance, f"{run.method.name}: step", batch)
                lines = [json.dumps(run.lines[-1]) + "\n" for each in runs for run in each]
                if out is not None:
                    append(out / "metrics.jsonl", "".join(lines).encode())
                made, done = step, f"step {step}/{steps}  loss {runs[0][0].losses(step)[-1]:.3f}"
                now(done)
                if step % 50 == 0 and not sys.stdout.isatty():
                    tell(done)
                batches = [next(stream) for stream in streams] if step < steps else batches
        except (KeyboardInterrupt, OSError, InputError) as error:
            if not made:
                raise
            cause = error
    stopped, device = isinstance(cause, KeyboardInterrupt), jax.devices()[0]
    failure = None if stopped or cause is None else str(cause)
    if isinstance(cause, OSError):
        failure = f"metrics.jsonl can't be written after step {made}: {sentence(cause)}"
    return compared(
        program.name, runs, parameters, made, steps_asked=steps, seed=seed,
        interrupted=stopped, failure=failure, environment={
            "date": time.strftime("%Y-%m-%d %H:%M"), "Python": platform.python_version(),
            "device": f"{device.device_kind} ({device.platform})", "JAX": version("jax"),
        },
    )  # fmt: skip


def compared(
    program: str, runs: Sequence[Sequence[MethodRun]], parameters: int, steps: int, **about: Any
) -> Comparison:
    losses = {first.method.name: first.losses(steps) for first, *_ in runs}
    rows = {row[0].method.name: row[0].figures(steps, parameters, row) for row in runs}
    reference = "float32" if "float32" in rows else next(iter(rows))
    for method, row in rows.items():
        for x in RATIOS:
            base = rows[reference][x]
            row[f"{x}_ratio"] = row[x] / base if base else math.nan
        early = differences(losses[method][:EARLY], losses[reference][:EARLY])
        row["early_difference"] = float(np.max(np.abs(early)))
    summary = {"program": program, "reference": reference, "steps_made": steps}
    text = json.dumps(summary | {"methods": [*rows.values()]} | about)
    # JSON has no NaN and no infinity
    return Comparison(json.loads(text, parse_constant=lambda name: None), losses)


class _Watch(Interpretation):
    """Runs equations one by one up to the first with finite inputs and a non-finite output."""

    found = ""

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        outs = equation.bind(*inputs)
        if not any(isinstance(x, Tracer) for x in (*inputs, *outs)):
            floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
            for out, aval in zip(outs, equation.out_avals, strict=True):
                if is_float(aval) and not all_finite(out) and all(map(all_finite, floats)):
                    self.found = _sentence(equation, floats, np.asarray(out))
                    raise FloatingPointError
        return state, outs


def _sentence(equation: Equation, inputs: Sequence[Value], out: np.ndarray) -> str:
    file, line, function = equation.caller or equation.source or ("?", 0, "?")
    if equation.caller and equation.source:  # the line of the library that it calls
        function += f", which calls {place(*equation.source[:2])}"
    kind = "NaN" if np.isnan(out.astype(np.float32)).any() else "an infinity"
    where = (
        f"{equation.name} at {place(file, line)} ({function}), {equation.direction}, makes {kind}"
    )
    if not inputs or not all(np.shape(x) in ((), out.shape) for x in inputs):
        return f"{where} of finite {out.dtype} numbers"
    at = int(np.argmin(np.isfinite(out.astype(np.float32))))
    numbers = ", ".join(f"{float(np.broadcast_to(x, out.shape).flat[at]):.3g}" for x in inputs)
    return f"{where} of the {out.dtype} number{'s' * (len(inputs) > 1)} {numbers}"


def diagnosis(step: StepFunction, before: PyTree, batch: PyTree, after: PyTree, loss: float) -> str:
    """Returns the first operation that makes a non-finite number, and what isn't finite after."""
    watch = _Watch()
    with suppress(Exception), jax.disable_jit():  # or the step only runs compiled
        transform(step, watch, name="compare")(before, batch)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)]
    bad = [p for p, good in zip(paths, finite_leaves(after), strict=True) if not good]
    arrays = f"{len(bad)} of the state's {len(paths)} arrays aren't finite, first {[*bad, ''][0]}"
    found = (watch.found, "" if math.isfinite(loss) else f"the loss is {loss}", arrays * bool(bad))
    return "; ".join(filter(None, found))
