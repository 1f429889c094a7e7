"""Matches the arrays of two recordings, also of two versions of a program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from ._recording import RecordedArray

Arrays = Sequence[RecordedArray]
ENDS = ("argument", "output")


def matched(a: Arrays, b: Arrays) -> list[tuple[int, int]]:
    """Returns the indices of arrays that belong together, in program order.

    Arguments and outputs belong together by their paths. Results of equations are aligned as the
    lines of two texts are (``difflib``): first by file, line, shape, function, primitive and pass;
    what is left between two matches by the last three, since other versions of a program have other
    lines, files and shapes.
    """
    ends = {(x.primitive, x.path): j for j, x in enumerate(b) if x.primitive in ENDS}
    found = [
        (i, ends[x.primitive, x.path])
        for i, x in enumerate(a)
        if x.primitive in ENDS and (x.primitive, x.path) in ends
    ]
    own = [i for i, x in enumerate(a) if x.primitive not in ENDS]
    other = [j for j, x in enumerate(b) if x.primitive not in ENDS]
    for same, before, after in _aligned(a, b, own, other, _by_line):
        found += same
        found += [pair for pairs, _, _ in _aligned(a, b, before, after, _by_name) for pair in pairs]
    return sorted(found)


def _by_line(x: RecordedArray) -> Hashable:
    file = Path(x.file).name if x.file else None
    return file, x.line, x.shape, *_by_name(x)


def _by_name(x: RecordedArray) -> tuple[Hashable, ...]:
    # a program in another dtype has other conversions beside those that it shares
    shape = x.shape if x.primitive == "convert_element_type" else None
    kind = x.dtype.rstrip("0123456789") if x.dtype.startswith("complex") else ""
    return x.function, x.primitive, x.result, x.direction, kind, shape


def _aligned(
    a: Arrays, b: Arrays, own: Sequence[int], other: Sequence[int], key: Callable
) -> Iterator[tuple[list[tuple[int, int]], Sequence[int], Sequence[int]]]:
    keys = [key(a[i]) for i in own], [key(b[j]) for j in other]
    i = j = 0
    for block in SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        same = zip(
            own[block.a : block.a + block.size], other[block.b : block.b + block.size], strict=True
        )
        yield list(same), own[i : block.a], other[j : block.b]
        i, j = block.a + block.size, block.b + block.size
