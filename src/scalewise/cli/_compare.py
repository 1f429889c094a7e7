"""Trains a program by several methods on the same batches, one step of each in turn."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from markupsafe import Markup
from rich.console import Console

from .._jax import Tracer
from .._output import (
    STYLE,
    Panel,
    Rows,
    Tabular,
    append,
    chart_svg,
    replacing,
    sentence,
    tables_page,
    tolerant,
)
from .._types import Json, PyTree
from .._user_file import InputError, call_user
from ..interpret import Applied, Equation, Interpretation, State, Value, is_float, transform
from ..training import all_finite, loss_scale_of
from ._methods import Method
from ._program import StepFunction, TrainingProgram, check_same_types, check_types

WINDOW, SMOOTHING, EARLY = 50, 25, 20  # steps: of the final loss, of curves, of the first losses
COLOURS = ("blue", "red", "green", "dark_orange", "magenta", "cyan")
RATIOS = ("final_loss", "median_seconds", "build_seconds", "bytes_per_parameter")
HEADINGS = (  # the table fits into 80 columns
    "\nmethod", "final\nloss", "loss\nratio", "non-\nfinite", "bytes/\nparam", "step\nms",
    "step\nratio", "build\ns", "build\nratio",
)  # fmt: skip
finite_leaves = jax.jit(lambda tree: jnp.stack([all_finite(x) for x in jax.tree.leaves(tree)]))


class MethodRun:
    """A method's compiled step, its state from one seed, and what was measured of it."""

    def __init__(self, method: Method, program: TrainingProgram, state: PyTree, batch: PyTree):
        prepare, self.step = method.build(program)
        # JAX keeps what it compiled as long as its function lives: these live as long as this run
        self.method, self.prepare = method, jax.jit(functools.partial(prepare))
        self.state = jax.block_until_ready(self.prepare(state, batch))
        start, jitted = time.perf_counter(), jax.jit(functools.partial(self.step))
        lowered = call_user(jitted.lower, f"{method.name}: step", self.state, batch)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        self.built = traced - start, time.perf_counter() - traced
        check_same_types(self.state, lowered.out_info[0], f"{method.name}: step")
        self.clear()

    def restarted(self, state: PyTree, batch: PyTree) -> MethodRun:
        """Returns a run of the same compiled step from another seed's state and first batch."""
        other = copy.copy(self)
        other.state = self.prepare(state, batch)
        other.clear()
        return other

    def clear(self) -> None:
        self.losses, self.seconds, self.scales, self.bad = [], [], [], []
        self.finite_at_start, self.first, self.stopped = finite_leaves(self.state), None, False

    def advance(self, batch: PyTree) -> None:
        """Makes and times one step; does nothing if the method can't become finite again."""
        if self.stopped:
            self.losses.append(math.nan)
            self.bad.append(True)
            return
        before, start = self.state, time.perf_counter()
        self.state, loss = jax.block_until_ready(self.compiled(before, batch))
        self.seconds.append(time.perf_counter() - start)
        if self.method.options is not None:
            self.scales.append(float(loss_scale_of(before).scale))
        finite = bool((finite_leaves(self.state) | ~self.finite_at_start).all())
        self.bad.append(not (finite and math.isfinite(loss)))
        self.losses.append(float(loss) if math.isfinite(loss) else math.nan)
        if self.bad[-1] and self.first is None:
            why = diagnosis(self.step, before, batch, self.state, float(loss))
            self.first = {"step": len(self.losses), "why": why}
        # a non-finite state that gives a non-finite loss stays non-finite
        self.stopped = not finite and not math.isfinite(loss)

    @property
    def skipped(self) -> int:
        return int(loss_scale_of(self.state).skipped) if self.scales else 0

    def line(self, seed: int) -> dict[str, Json]:
        """Returns the line of ``metrics.jsonl`` of the last step."""
        ms = None if self.stopped else round(self.seconds[-1] * 1e3, 3)
        found = {"step": len(self.losses), "method": self.method.name, "loss": self.losses[-1]}
        found |= {"ms": ms, "non_finite_steps": sum(self.bad)} | ({"seed": seed} if seed else {})
        scale = {"scale": self.scales[-1], "skipped_steps": self.skipped} if self.scales else {}
        return known(found | scale)

    def figures(self, steps: int, parameters: int, seeds: Sequence[MethodRun]) -> dict[str, Any]:
        """Returns what ``summary.json`` has of the method; final losses are of all seeds."""
        finals = [last_mean(run.losses[:steps]) for run in seeds]
        size = sum(x.nbytes for x in jax.tree.leaves(self.state))
        return {
            "name": self.method.name, "what": self.method.what, "trace_seconds": self.built[0],
            "compile_seconds": self.built[1], "state_bytes": size, "parameters": parameters,
            "temporary_bytes": getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0),
            "final_loss": statistics.fmean(finals), "build_seconds": sum(self.built),
            "median_seconds": statistics.median(self.seconds),
            "bytes_per_parameter": size / parameters,
            "non_finite_steps": sum(self.bad[:steps]), "skipped_steps": self.skipped,
            "final_loss_by_seed": finals,
            "final_loss_spread": float(np.std(finals, ddof=1)) if len(finals) > 1 else math.nan,
            "loss_scales": [self.scales[0], self.scales[-1]] if self.scales else None,
            "loss_scale_at_end": self.scales[-1] if self.scales else None,
            "first_non_finite": self.first if self.first and self.first["step"] <= steps else None,
        }  # fmt: skip


def last_mean(losses: Sequence[float], window: int = WINDOW) -> float:
    return statistics.fmean(losses[-window:])


def smoothed(losses: Sequence[float], window: int = SMOOTHING) -> list[float]:
    return [last_mean(losses[: i + 1], window) for i in range(len(losses))]


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    pairs = zip(losses, reference, strict=True)
    return [a / b - 1 if b else math.nan for a, b in pairs]


def known(tree: Json) -> Json:
    """Returns JSON with None for NaN and infinity, which JSON doesn't have."""
    if isinstance(tree, dict):
        return {name: known(x) for name, x in tree.items()}
    if isinstance(tree, list):
        return [known(x) for x in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """The measurements of all methods on the same data; ``summary`` has all but the curves."""

    summary: dict[str, Any]
    losses: dict[str, list[float]]  # of each method's first seed; NaN if one wasn't finite

    @property
    def reference(self) -> str:
        """The method that ratios refer to."""
        return self.summary["reference"]

    @property
    def title(self) -> str:
        return f"{self.summary['program']}, {len(self.losses)} methods side by side"

    def sentences(self) -> list[str]:
        s = self.summary
        window = f"final loss: mean of the last {WINDOW}"
        found = [f"{s['program']}: {s['steps_made']} steps, ratios to {self.reference}; {window}"]
        for row in s["methods"]:
            if first := row["first_non_finite"]:
                found.append(f"{row['name']}, step {first['step']}: {first['why']}")
        for row in s["methods"]:
            if row["loss_scales"]:
                span = "loss scale {:g} to {:g}".format(*row["loss_scales"])
                found.append(f"{row['name']}, {span}, {row['skipped_steps']} steps left out")
        if s["interrupted"]:
            found.append(f"interrupted after {s['steps_made']} of {s['steps_asked']} steps")
        return found + [f"Ended early: {s['failure']}"] * bool(s["failure"])

    def tables(self, *, everything: bool = True) -> list[Rows]:
        rows = self.summary["methods"]
        styles = [COLOURS[i % 6] for i in range(len(rows))]
        found = [Rows("Methods", HEADINGS, [cells(row) for row in rows], styles)]
        sizes = ("state_bytes", "temporary_bytes")
        memory = [(r["name"], *(f"{r[s] / 1e6:.2f}" for s in sizes), r["what"]) for r in rows]
        heads = ("method", "state, MB", "temporaries of a step, MB", "what it is")
        run = [*self.summary["environment"].items()]
        return found + [Rows("Memory", heads, memory), Rows("Run", ("", ""), run)] * everything

    def _page(self) -> str:
        chart, styles = Markup(self.curves_svg()), f"<style>{STYLE}</style>"  # it escapes names
        return tables_page(self.title, self.sentences(), self.tables(), chart=chart, styles=styles)

    def curves_svg(self) -> str:
        """Draws two panels: smoothed losses, and their differences from the reference."""
        means = {name: smoothed(losses) for name, losses in self.losses.items()}
        reference = means[self.reference]
        apart = [[100 * x for x in differences(ys, reference)] for ys in means.values()]
        panels = [
            Panel(title, "step", [list(enumerate(ys, start=1)) for ys in curves])
            for title, curves in (
                (f"training loss, mean of the last {SMOOTHING} steps", means.values()),
                (f"difference of that to {self.reference}, %", apart),
            )
        ]
        dead = [row["final_loss"] is None for row in self.summary["methods"]]
        legend = [n + " (diverged)" * d for n, d in zip(means, dead, strict=True)]
        return chart_svg("Loss curves", panels, legend)

    def write(self, folder: Path) -> None:
        texts = {"summary.json": json.dumps(self.summary, indent=2) + "\n"}
        texts |= {"report.html": self._page(), "curves.svg": self.curves_svg()}
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(text.encode())


def cells(row: dict[str, Any]) -> list[str]:
    ms = row["median_seconds"] * 1e3
    figures = (
        (row["final_loss"], 3), (row["final_loss_ratio"], 4), (row["non_finite_steps"], 0),
        (row["bytes_per_parameter"], 2), (ms, 1), (row["median_seconds_ratio"], 2),
        (row["build_seconds"], 2), (row["build_seconds_ratio"], 2),
    )  # fmt: skip
    found = ["–" if x is None else f"{x:.{digits}f}" for x, digits in figures]
    spread = row["final_loss_spread"]
    return [row["name"], found[0] + (f"±{spread:.3f}" if spread is not None else ""), *found[1:]]


def compare(
    program: TrainingProgram, methods: Sequence[Method], text: bytes, steps: int, *, seed: int = 0,
    seeds: int = 1, out: Path | None = None, console: Console | None = None,
) -> Comparison:  # fmt: skip
    """Returns what was measured of each method; ``out`` gets each step's line of metrics.

    The methods make their steps in turn, so that other work on the machine slows all of them alike.
    Ctrl-C, a full disk or an exception in the program's batches ends the training early.
    """
    console = console or Console()
    streams = [program.endless_batches(text, seed + i) for i in range(seeds)]
    batches = [next(stream) for stream in streams]
    states = [call_user(program.init, f"{program.name}.init", seed + i) for i in range(seeds)]
    parameters = check_types(program, states[0], batches[0])
    for each in methods:
        each.build(program)  # fails if the program lacks what the method needs
    with tolerant(console):
        size = f"{parameters:,} parameters, {len(text):,} bytes of text"
        console.print(f"{program.name}: {size}, {steps} steps of each", highlight=False)
        # makes JAX load what it loads on its first trace, derivative and compilation
        jax.jit(jax.grad(lambda x: jnp.tanh(x @ x).mean()))(jnp.ones((8, 8)))
        runs = list[list[MethodRun]]()
        for each in methods:
            with console.status(f"compiling {each.name}"):
                one = MethodRun(each, program, states[0], batches[0])
                others = zip(states[1:], batches[1:], strict=True)
                runs.append([one, *(one.restarted(*other) for other in others)])
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        made, cause = 0, None
        try:
            with console.status("training") as status:
                for step in range(1, steps + 1):
                    for run, batch in [x for y in runs for x in zip(y, batches, strict=True)]:
                        call_user(run.advance, f"{run.method.name}: step", batch)
                    if out is not None:
                        lines = [run.line(i) for by_seed in runs for i, run in enumerate(by_seed)]
                        written = "".join(json.dumps(line) + "\n" for line in lines)
                        append(out / "metrics.jsonl", written.encode())
                    made, now = step, f"step {step}/{steps}  loss {runs[0][0].losses[-1]:.3f}"
                    status.update(now)
                    if step % 50 == 0 and not console.is_terminal:
                        console.print(now, highlight=False)
                    batches = [next(stream) for stream in streams] if step < steps else batches
        except (KeyboardInterrupt, OSError, InputError) as error:
            if not made:
                raise
            cause = error
        found = compared(program.name, runs, parameters, made)
        stopped, device = isinstance(cause, KeyboardInterrupt), jax.devices()[0]
        failure = None if stopped or cause is None else str(cause)
        if isinstance(cause, OSError):
            failure = f"metrics.jsonl can't be written after step {made}: {sentence(cause)}"
        found.summary.update(
            steps_asked=steps, seed=seed, interrupted=stopped, failure=failure,
            environment={
                "date": time.strftime("%Y-%m-%d %H:%M"), "Python": platform.python_version(),
                "device": f"{device.device_kind} ({device.platform})", "JAX": version("jax"),
            },
        )  # fmt: skip
        found.show(console)
    return found


def compared(name: str, runs: list[list[MethodRun]], parameters: int, steps: int) -> Comparison:
    losses = {row[0].method.name: row[0].losses[:steps] for row in runs}
    rows = {row[0].method.name: row[0].figures(steps, parameters, row) for row in runs}
    reference = "float32" if "float32" in rows else next(iter(rows))
    for method, row in rows.items():
        for x in RATIOS:
            base = rows[reference][x]
            row[f"{x}_ratio"] = row[x] / base if base else math.nan
        early = differences(losses[method][:EARLY], losses[reference][:EARLY])
        row["early_difference"] = float(np.max(np.abs(early)))
    summary = {"program": name, "reference": reference, "steps_made": steps}
    return Comparison(known(summary | {"methods": [*rows.values()]}), losses)


class _NonFinite(Exception):
    """Raised at the first equation that has finite inputs and a non-finite output."""


class _Watch(Interpretation):
    """Runs equations one by one up to the first with finite inputs and a non-finite output."""

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        outs = equation.bind(*inputs)
        if not any(isinstance(x, Tracer) for x in (*inputs, *outs)):
            floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
            for out, aval in zip(outs, equation.out_avals, strict=True):
                if is_float(aval) and not all_finite(out) and all(map(all_finite, floats)):
                    raise _NonFinite(_sentence(equation, floats, np.asarray(out)))
        return state, outs


def _sentence(equation: Equation, inputs: Sequence[Value], out: np.ndarray) -> str:
    file, line, function = equation.caller or equation.source or ("?", 0, "?")
    if equation.caller and equation.source:  # the line of the library that it calls
        function += f", which calls {Path(equation.source[0]).name}:{equation.source[1]}"
    wide = out.astype(np.float32)
    kind = "NaN" if np.isnan(wide).any() else "an infinity"
    where = f"{equation.name} at {Path(file).name}:{line} ({function}), {equation.direction}"
    if not inputs or not all(np.shape(x) in ((), out.shape) for x in inputs):
        return f"{where}, makes {kind} of finite {out.dtype} numbers"
    at = np.unravel_index(int(np.argmin(np.isfinite(wide))), wide.shape)
    numbers = ", ".join(f"{float(np.asarray(x)[at] if np.ndim(x) else x):.3g}" for x in inputs)
    return f"{where}, makes {kind} of the {out.dtype} number{'s' * (len(inputs) > 1)} {numbers}"


def diagnosis(step: StepFunction, before: PyTree, batch: PyTree, after: PyTree, loss: float) -> str:
    """Returns the first operation that makes a non-finite number, and what isn't finite after."""
    found = list[str]()
    try:
        with jax.disable_jit():
            transform(step, _Watch(), name="compare")(before, batch)
    except _NonFinite as event:
        found.append(str(event))
    except Exception:  # the step only runs compiled: its state is described instead
        pass
    if not math.isfinite(loss):
        found.append(f"the loss is {loss}")
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)]
    if bad := [p for p, good in zip(paths, finite_leaves(after), strict=True) if not good]:
        found.append(f"{len(bad)} of the state's {len(paths)} arrays aren't finite, first {bad[0]}")
    return "; ".join(found)
