"""Plots curves in a terminal, eight dots in each character."""

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of one cell
BLANK = 0x2800
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def plot(
    curves: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    *,
    width: int,
    height: int,
    ascii_only: bool = False,
) -> list[Text]:
    """Returns lines of text that plot curves over their index, with axis and legend.

    Args:
        curves: maps names to values; values that aren't finite leave a gap.
        colours: a style for each curve; used again from the start for more curves.
        width, height: in characters, including the axis.
        ascii_only: True for a letter for each curve instead of braille characters, for a terminal
            without Unicode or without colour.

    Example:
        >>> for row in plot({"a": [3.0, 2.0, 1.0]}, ["blue"], width=12, height=4, ascii_only=True):
        ...     print(row.plain.rstrip())
        3.00 |aa
             |  aaaa
        1.00 |      aa
              1      3
        a
    """
    values = [y for ys in curves.values() for y in ys if math.isfinite(y)]
    if not values:
        return [Text("no finite loss to draw")]
    low, high = min(values), max(values)
    longest = max(map(len, curves.values()))
    labels = {0: f"{high:.2f}", height - 2: f"{low:.2f}"}
    margin = max(map(len, labels.values())) + 2
    columns, rows = max(width - margin, 8), height - 1
    cells = [[0] * columns for _ in range(rows)]
    owner = [[-1] * columns for _ in range(rows)]
    across, down = (1, 1) if ascii_only else (2, 4)
    for index, ys in enumerate(curves.values()):
        for x, y in _points(ys, longest, columns * across):
            share = (high - y) / (high - low) if high > low else 0.5
            dot = round(share * (rows * down - 1))
            row, column = dot // down, x // across
            cells[row][column] |= DOTS[dot % down][x % across]
            owner[row][column] = index
    lines = []
    for row in range(rows):
        line = Text(f"{labels.get(row, ''):>{margin - 2}} |")
        for bits, index in zip(cells[row], owner[row], strict=True):
            mark = chr(BLANK + bits)
            if ascii_only:
                mark = LETTERS[index % len(LETTERS)] if bits else " "
            line.append(mark, style=colours[index % len(colours)] if index >= 0 else "")
        lines.append(line)
    lines.append(Text(f"{'':{margin}}1{longest:>{columns - 1}}"))
    named = list(curves)
    if ascii_only and len(named) > 1:
        named = [f"{LETTERS[i % len(LETTERS)]} {name}" for i, name in enumerate(named)]
    legend = Text("   ").join(
        Text(name, style=colours[i % len(colours)]) for i, name in enumerate(named)
    )
    return [*lines, legend]


def _points(ys: Sequence[float], longest: int, dots: int) -> list[tuple[int, float]]:
    """Returns (column, value) for each column of dots, interpolated linearly between steps."""
    points = []
    for x in range(dots):
        at = x * max(longest - 1, 1) / max(dots - 1, 1)
        left = int(at)
        if left >= len(ys):
            break
        right = min(left + 1, len(ys) - 1)
        y = ys[left] + (at - left) * (ys[right] - ys[left])
        if math.isfinite(y):
            points.append((x, y))
    return points
