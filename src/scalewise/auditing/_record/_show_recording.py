"""A recording in the terminal: the first non-finite number, and the arrays before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..._output import print_table
from ..._output._text import Text
from .._report._verdict import counted

if TYPE_CHECKING:
    from ._recording import RecordedArray, Recording

SHOWN = 12  # arrays shown up to the first non-finite number, or of the largest magnitudes
COLUMNS = (
    "line", "function", "primitive", "type", "visits", "smallest", "largest", "not finite",
    "zeros", "subnormal",
)  # fmt: skip


def show(recording: Recording, console: Console, *, everything: bool = False) -> None:
    """Prints a sentence, and a table of the arrays in program order."""
    versions = ", ".join(f"{name} {version}" for name, version in recording.versions)
    how = "one compiled program" if recording.fused else "each equation compiled alone"
    head = Text(f"record  {recording.function} on {recording.device}")
    head.append(f"   {versions}; {how}; {counted(len(recording.arrays), 'array')}", style="dim")
    console.print(head)
    console.print(Text(verdict(recording), style="bold"))
    note = _jit_note(recording.jit_difference)
    if note:
        console.print(Text(note, style="dim"))
    shown, title = _shown(recording, everything)
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="", title=title)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i > 3 else "left", no_wrap=True)
    for x in shown:
        table.add_row(*map(Text, _cells(x)), style="red" if x.created else None)
    print_table(console, table)


def verdict(recording: Recording) -> str:
    """Returns in one sentence where the first non-finite number was made."""
    first = recording.first_non_finite
    if first is None:
        held = sum(x.non_finite > 0 for x in recording.arrays)
        if not held:
            return f"All numbers that {recording.function} computed are finite."
        text = "Non-finite numbers come from non-finite operands alone"
        return f"{text}; {counted(held, 'array')} hold some."
    kind = "NaN" if first.nan and not first.infinite else "infinite or NaN"
    kind = "infinite" if first.infinite and not first.nan else kind
    if first.primitive == "argument":
        return f"The first numbers that aren't finite are those of {first.where}."
    visit = f" in visit {first.first}" if first.visits > 1 else ""
    return (
        f"The first number that isn't finite comes from {first.primitive} at {first.where} "
        f"({first.name or 'unknown function'}){visit}: {first.created:,} of {first.size:,} numbers "
        f"are {kind}, though those of its operands are finite."
    )


def _jit_note(difference: float | None) -> str:
    """Returns a sentence on how far the outputs are from those of the compiled function."""
    if difference is None:
        return ""
    if difference == 0:
        return "The outputs have the same bits as those of jax.jit of the function."
    if math.isinf(difference):
        return "jax.jit of the function gives other non-finite outputs: it fuses operations."
    return (
        f"The outputs of jax.jit of the function differ by {difference:.2g}: it fuses operations."
    )


def _shown(recording: Recording, everything: bool) -> tuple[list[RecordedArray], str]:
    arrays, first = list(recording.arrays), recording.first_non_finite
    if everything:
        return arrays, "All arrays in program order"
    if first is not None:
        end = next(i for i, x in enumerate(arrays) if x is first) + 1
        return arrays[max(end - SHOWN, 0) : end], "The last arrays up to it, in program order"
    largest = sorted(arrays, key=_amax, reverse=True)[:SHOWN]
    return [x for x in arrays if x in largest], "The arrays with the largest numbers"


def _amax(x: RecordedArray) -> float:
    return max(abs(x.minimum), abs(x.maximum)) if x.minimum <= x.maximum else 0.0


def _cells(x: RecordedArray) -> tuple[str, ...]:
    shape = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    smallest = f"{x.smallest:.2e}" if math.isfinite(x.smallest) else ""
    counts = (f"{n:,}" if n else "" for n in (x.non_finite, x.zeros, x.subnormal))
    named = "" if x.path else x.primitive
    return x.where, x.name, named, shape, f"{x.visits:,}", smallest, f"{_amax(x):.2e}", *counts
