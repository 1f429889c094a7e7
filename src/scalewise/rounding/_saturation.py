"""The published rules of saturation, by name: what each means for each format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from .._check import checked
from .._resolve import as_format
from ..formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FP16,
    FP32,
    FP64,
    BlockFormat,
    Format,
    FormatLike,
    Saturation,
)

Mode: TypeAlias = bool | Literal["finite"]

_WIDE: dict[Format, Mode] = dict.fromkeys((FP64, FP32, FP16, BF16), False)
_NARROW: dict[Format, Mode] = dict.fromkeys((E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ), True)
_FNUZ: dict[Format, Mode] = {E4M3FNUZ: "finite", E5M2FNUZ: "finite"}

SATURATION_RULES: dict[str, Mapping[Format, Mode]] = {
    # Cast 24 and newer: infinities saturate in all formats (onnx pull request 7130).
    "onnx": _WIDE | _NARROW | {E8M0: True, E2M1FN: True},
    # Cast 19 to 23, and the table of ONNX's page on float8: they are NaN in the FNUZ formats.
    "onnx-19": _WIDE | _NARROW | _FNUZ,
}
"""What each published rule of saturation means for each format that it covers."""


@checked
def saturation(rule: Saturation, fmt: FormatLike | BlockFormat) -> Mode:
    """Returns the mode of saturation, False, True or ``"finite"``, that a rule means for a format.

    Args:
        rule: a key of :data:`SATURATION_RULES`, or a mode, which is returned as it is. ``"onnx"``
            is what ONNX's ``Cast`` does with ``saturate=1`` since operator set 24: float8 and E8M0
            saturate, infinities too; wider formats never do. ``"onnx-19"`` is its rule in operator
            sets 19 to 23: infinities become NaN in E4M3FNUZ and E5M2FNUZ.
        fmt: the format that is cast to; of a block format, the elements' counts.

    Raises:
        ValueError: an unknown rule, or one that doesn't cover the format.

    Example:
        >>> saturation("onnx", "e5m2fnuz"), saturation("onnx-19", "e5m2fnuz")
        (True, 'finite')
    """
    if not isinstance(rule, str) or rule == "finite":
        return rule
    fmt = as_format(fmt, "saturate", blocks=True).element
    covered = SATURATION_RULES[rule]
    if fmt not in covered:
        names = ", ".join(f.name for f in covered)
        raise ValueError(
            f"saturate={rule!r} says nothing of {fmt.name}; it covers {names}. "
            "Use False, True or 'finite'"
        )
    return covered[fmt]
