"""``cast`` and ``round_to`` that also take the name of a published rule of saturation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeAlias, TypeVar
from typing import cast as typed

from jax.typing import ArrayLike

from .. import rounding
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
    SATURATE,
    BlockFormat,
    Format,
    FormatLike,
    Saturation,
)

P = ParamSpec("P")
R = TypeVar("R")
Mode: TypeAlias = bool | Literal["finite"]

_NOT_SATURATED: dict[Format, Mode] = dict.fromkeys((FP64, FP32, FP16, BF16), False)
_SATURATED: dict[Format, Mode] = dict.fromkeys((E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ), True)
_CAST_24: dict[Format, Mode] = {E8M0: True, E2M1FN: True}
_CAST_19: dict[Format, Mode] = {E4M3FNUZ: "finite", E5M2FNUZ: "finite"}

SATURATION_RULES: dict[str, Mapping[Format, Mode]] = {
    # Cast 24 and newer: infinities saturate in all formats (onnx pull request 7130).
    "onnx": _NOT_SATURATED | _SATURATED | _CAST_24,
    # Cast 19 to 23, and the table of ONNX's page on float8: they are NaN in the FNUZ formats.
    "onnx-19": _NOT_SATURATED | _SATURATED | _CAST_19,
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
    if rule not in SATURATION_RULES:
        names = ", ".join(map(repr, (*SATURATE, *SATURATION_RULES)))
        raise ValueError(f"saturate is {rule!r}; expected one of {names}")
    fmt = as_format(fmt, "saturate", blocks=True)
    fmt = fmt.element if isinstance(fmt, BlockFormat) else fmt
    covered = SATURATION_RULES[rule]
    if fmt not in covered:
        names = ", ".join(f.name for f in covered)
        raise ValueError(
            f"saturate={rule!r} says nothing of {fmt.name}; it covers {names}. "
            "Use False, True or 'finite'"
        )
    return covered[fmt]


def _with_rules(f: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(f)
    def named(
        x: ArrayLike, fmt: FormatLike, *, saturate: Saturation = False, **options: object
    ) -> R:
        return typed(Callable[..., R], f)(x, fmt, saturate=saturation(saturate, fmt), **options)

    return typed(Callable[P, R], named)


cast = _with_rules(rounding.cast)
round_to = _with_rules(rounding.round_to)
