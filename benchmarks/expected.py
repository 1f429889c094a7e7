"""Bounds of a compiled program's figures, and a sentence for each figure beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.hlo import Summary

LOUD = 1 << 16  # collectives of fewer bytes are scales


@dataclass(frozen=True)
class Expected:
    """Bounds of a run's figures; those of other runs are relative to the plain program's.

    Args:
        narrow: matrix products with operands of at most 8 bits, exactly.
        kernels: launches, at most.
        outside: bytes moved outside of products, at most, of plain's.
        target: part of the name of the library function of each narrow product.
        gathered: dtypes in which more than scales is gathered over devices.
        sent: bytes sent to other devices, at most, of plain's.
        reductions: launches of all-reduces, at most.
        speed: of plain's by the bound, at least.
        attention: calls of cuDNN's FP8 attention, exactly, which aren't among the narrow products.
        operations: in products, of plain's, at least: XLA joins products that have an operand in
            common, or pads them; scalewise's kernel for groups expands none.
    """

    narrow: int
    kernels: int
    outside: float
    target: str = "cublas$lt$matmul$f8"
    gathered: tuple[str, ...] = ()
    sent: float = 0.0
    reductions: int = 0
    speed: float = 0.0
    attention: int = 0
    operations: float = 0.99


def moved(name: str, s: Summary, plain: Summary, expected: Expected) -> Iterator[str]:
    """A sentence for each figure of a program that is not as expected; it begins with `name`."""

    def least(what: str, got: float, most: float) -> Iterator[str]:
        if got > most:
            yield f"{name}: {what} {got:.4g}, expected at most {most:.4g}"

    narrow = {x: n for x, n in s.products.items() if x.bits <= 8}
    fused = {x: narrow.pop(x) for x in list(narrow) if "fmha" in x.target}
    if (calls := sum(fused.values())) != expected.attention:
        yield f"{name}: {calls} calls of FP8 attention, expected {expected.attention}"
    count = sum(narrow.values())
    total, all_ = (sum(x.flops * n for x, n in of.products.items()) for of in (s, plain))
    if count != expected.narrow:
        yield f"{name}: {count} products have 8-bit operands or less, expected {expected.narrow}"
    if total < expected.operations * all_:
        least_ = expected.operations * all_
        yield f"{name}: {total:.4g} operations in products, expected at least {least_:.4g}"
    if others := {x.target for x in narrow if expected.target not in x.target}:
        yield f"{name}: narrow products by {sorted(others)}, expected {expected.target!r}"
    known = {"bf16"} | {x.result for x in plain.products}
    if wide := {x.result for x in s.products if x not in fused} - known:
        yield f"{name}: products return {sorted(wide)}, expected {sorted(known)}"
    if (speed := plain.seconds / s.seconds) < expected.speed:
        yield f"{name}: {speed:.3g} of plain's speed, expected at least {expected.speed}"
    yield from least("kernels", s.kernels, expected.kernels)
    outside = s.bytes_outside / plain.bytes_outside
    yield from least("bytes outside of products, of plain's,", outside, expected.outside)
    if expected.gathered:
        gathered = {t for (op, t), n in s.collectives.items() if op == "all-gather" and n > LOUD}
        if gathered != set(expected.gathered):
            names = sorted(expected.gathered)
            yield f"{name}: gathers {sorted(gathered)} over devices, expected {names}"
        reduced = {t for (op, t), n in s.collectives.items() if "reduce" in op and n > LOUD}
        if reduced != {"bf16"}:
            yield f"{name}: reduces {sorted(reduced)} over devices, expected ['bf16']"
        yield from least("all-reduces", s.launches["all-reduce"], expected.reductions)
        yield from least(
            "bytes sent, of plain's,", s.sent.total() / plain.sent.total(), expected.sent
        )
