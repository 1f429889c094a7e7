"""Faults that the codes and scales of one tensor show by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..formats import E2M1FN
from ._faults import Fault
from ._findings import Finding
from ._packed import E8M0, WIDE, Packed, elements
from ._repairs import is_bytes, negative_zeros
from ._statistics import is_uniform, powers
from ._weights import Weight


def of_scales(weight: Weight, p: Packed) -> Iterator[Finding]:
    """Yields scales that no quantiser writes."""
    name = (weight.name,)
    if p.kind == WIDE:
        bad = ~np.isfinite(p.scale) | (p.scale == 0)
        count, negative = int(bad.sum()), int((p.scale < 0).sum())
        if negative:
            yield Finding(Fault.BAD_SCALE, name, f"{negative} scales are negative")
        if count:
            what = f"{count} of {p.scale.size} scales are NaN, infinite or zero"
            yield Finding(Fault.BAD_SCALE, name, what)
        elif is_bytes(p.scale):
            low, high = int(p.scale.min()), int(p.scale.max())
            yield Finding(Fault.NUMBER, name, f"all scales are integers from {low} to {high}",
                          "read them as 2^(scale - 127)",
                          f"the scales are then 2^{low - 127} to 2^{high - 127}")  # fmt: skip
    elif p.kind == E8M0:
        count = int((p.scale == 255).sum())
        if count:
            yield Finding(
                Fault.BAD_SCALE, name, f"{count} of {p.scale.size} scales are NaN (byte 255)"
            )
    else:
        nan = int((p.scale & 127 == 127).sum()) if p.kind == "e4m3fn" else 0
        zero = _zero_scales(p)
        negative = int((p.scale >> 7).sum())
        for count, what in ((nan, "NaN"), (zero, "zero over codes that aren't"),
                            (negative, "negative")):  # fmt: skip
            if count:
                yield Finding(Fault.BAD_SCALE, name, f"{count} of {p.scale.size} scales are {what}")
    if p.whole is not None and not np.all(np.isfinite(p.whole) & (p.whole > 0)):
        yield Finding(Fault.BAD_SCALE, name, f"the global scale is {np.min(p.whole)}")


def _zero_scales(p: Packed) -> int:
    zero = p.scale & 127 == 0
    if not zero.any() or p.stored_shape[-1] % p.block[1]:
        return 0
    used = (p.codes & 0x77).reshape(*p.scale.shape, -1).any(axis=-1)
    return int((zero & used).sum())


def of_codes(weight: Weight, p: Packed) -> Iterator[Finding]:
    """Yields codes that no weights have: uniform ones, zeros that are -0, NaN."""
    yield from _at_the_top(weight, p)
    zeros, negative = negative_zeros(p)
    if zeros >= 64 and negative > 0.9 * zeros:
        yield Finding(Fault.NEGATIVE_ZERO, (weight.name,), f"{negative} of {zeros} zeros are -0",
                      "clear the sign of zeros", "no value changes")  # fmt: skip
    rows = p.codes.reshape(-1, p.codes.shape[-1])
    step = max(1, -(-(1 << 14) // max(1, rows.shape[1])))
    uniform, count = [], 0
    for i in range(0, len(rows), max(step, len(rows) // 16)):
        part = rows[i : i + max(step, len(rows) // 16)]
        count += 1
        if part.size >= 4096 and is_uniform(part, p):
            uniform.append(i)
    if uniform:
        where = "all rows" if len(uniform) == count else f"rows from {uniform[0]}"
        yield Finding(Fault.RANDOM, (weight.name,), f"the codes of {where} are equally frequent")
    if p.element != E2M1FN:
        nan = (
            int(np.isnan(elements(p.element))[rows.reshape(-1)].sum()) if p.element.nan_code else 0
        )
        if nan and not uniform:
            yield Finding(Fault.DIFFERENT, (weight.name,), f"{nan} codes are NaN")


def _at_the_top(weight: Weight, p: Packed) -> Iterator[Finding]:
    """Yields a tensor of powers of two as scales whose blocks all reach the largest code.

    The scale of the largest magnitude brings each block there; powers of two bring about one in
    fourteen.
    """
    if p.element.bits != 8 or p.scale.size < 3:
        return
    if not (p.kind == E8M0 or (p.kind == WIDE and powers(p.scale))):
        return
    r, c = p.block
    top = np.max(elements(p.element)[np.isfinite(elements(p.element))])
    reached, used = 0, 0
    for matrix in p.matrices():
        rows, columns = matrix.stored_shape
        for i in range(0, rows, r * max(1, -(-rows // (64 * r)))):
            x = np.abs(elements(p.element)[matrix.codes[i : i + r]])
            x = np.pad(x, ((0, 0), (0, -columns % c))).reshape(len(x), -1, c).max(axis=(0, 2))
            reached, used = reached + int((x == top).sum()), used + int((x > 0).sum())
    if used >= 3 and reached >= max(3, 0.95 * used):
        yield Finding(
            Fault.ROUNDED,
            (weight.name,),
            f"{reached} of {used} blocks reach the largest code, "
            "as with scales of the largest magnitude, but all scales are powers of two",
            "cast the original again",
            "not tried: the file alone lost the scales",
        )
