"""The settings of ``scalify``: how each result is rounded, and where its scale comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from .._check import checked
from .._repr import changed_fields
from .._resolve import as_format
from .._types import Converted, kept
from ..formats import BF16, FP16, Format, FormatLike
from ..scaled import State, shown
from ._overrides import Scope

Rescale: TypeAlias = Literal["max", "l2", "never"]
Accumulation: TypeAlias = Literal["float32", "narrow"]
ResultFormats: TypeAlias = Annotated[
    Mapping[Scope, FormatLike | None] | tuple[tuple[Scope, FormatLike | None], ...],
    "a dict from names to formats, keep={'head': 'fp32'}",
]


@checked
@dataclasses.dataclass(frozen=True)
class Scalify:
    """The arithmetic of a machine without float32: each operation's result is rounded once.

    What :func:`scalify` takes as arguments, as one object, which stands beside recipes where
    methods are compared: :func:`autoscale`, ``training.step`` and ``audit`` accept it, and the
    names ``"scalify"`` and ``"fp16_every_op"``.

    Attributes:
        format: FP16 or BF16, with a scale for each result.
        rescale: where scales are found from the data. ``"max"`` and ``"l2"``: after each operation
            that can change the magnitude, by that measure, except that a product with a constant
            keeps a scale that was found from its operand. None: after contractions, sums, powers,
            quotients and functions without a rule, in an optimizer, and where a propagated scale
            could overflow the format; elsewhere scales are propagated, from scales that were found
            from the operands. In all of these no two roundings in succession are at propagated
            scales, so that a chain or loop of any length has the errors of its roundings alone.
            ``"never"``: all scales follow from those of the arguments (which are found for plain
            arrays) and from shapes, as :data:`scalewise.scaled.RULES` say, and data are never read
            to find one (but for :func:`rescale`); a constant multiplies the scale; functions
            without a rule have results of scale 1; data beyond the format's largest number
            saturate.
        arithmetic: the dtype in which contractions accumulate: ``"float32"``, or ``"narrow"``, the
            device's own product of that dtype, whose sums may overflow. That is for scales that
            leave data of unit size (propagated ones, ``rescale="l2"``); with ``"max"`` FP16's sums
            would overflow.
        keep: exceptions, ``{name: format}``, named as in :class:`Recipe`, whose results are
            computed and kept in FP32, FP16 or BF16.
        state: the outputs that are returned stored, as in :class:`Recipe`.

    Raises:
        ValueError: another format.

    Example:
        >>> import dataclasses, scalewise as sw
        >>> dataclasses.replace(sw.recipes.scalify, rescale="max") == sw.recipes.fp16_every_op
        True
    """

    format: Converted[Format, FormatLike] = kept(FP16)
    rescale: Rescale | None = None
    arithmetic: Accumulation = "float32"
    keep: Converted[tuple[tuple[Scope, Format | None], ...], ResultFormats] = kept(())
    state: State = ()

    is_delayed: ClassVar[bool] = False  # as recipes say it of themselves
    is_random: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "format", as_format(self.format, "Scalify.format"))
        if self.format not in (FP16, BF16):
            raise ValueError(f"Scalify.format is {self.format.name}; expected 'fp16' or 'bf16'")
        pairs: Any = self.keep.items() if isinstance(self.keep, Mapping) else self.keep
        object.__setattr__(self, "keep", tuple((name, _kept(fmt)) for name, fmt in pairs))

    def __repr__(self) -> str:
        return f"Scalify({', '.join(changed_fields(self, text=shown))})"


def _kept(fmt: FormatLike | None) -> Format | None:
    """Returns the format of an exception's results; None for float32."""
    fmt = None if fmt is None else as_format(fmt, "Scalify.keep")
    if fmt is None or (fmt.mantissa_bits >= 23 and fmt.exponent_bits >= 8):
        return None
    if fmt not in (FP16, BF16):
        raise ValueError(
            f"Scalify computes in fp16, bf16 or, where keep says so, fp32; keep names {fmt.name}"
        )
    return fmt
