"""Recipes: which values are stored narrow, in which format, with which scale."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from ..formats import BLOCK_FORMATS, FP16, BlockFormat, Format, block_format
from ..formats import format as format_
from ..scaled import storable


@dataclasses.dataclass(frozen=True)
class Storage:
    """How one array of a training state lies in memory between two steps.

    Attributes:
        format: the narrow format of the data; or a block format of whole bytes (MXFP8), with a
            scale for each block along the last axis. An array without axes has none.
        root: 1 stores the array itself, 2 its square root: the right thing for a second moment,
            whose exponents span twice the gradient's (non-negative arrays only).
        axis: axes that keep a scale for each index of theirs; None for one scale a tensor.
        smallest: arrays with fewer elements (biases, a norm's gains) stay as they are: each that is
            stored costs a few operations of its own, to be traced, compiled and run.
        nonzero: what would be flushed to zero becomes the format's smallest number instead: for
            what others divide by. A root always is stored so.
    """

    format: Format | BlockFormat
    root: Literal[1, 2] = 1
    axis: int | tuple[int, ...] | None = None
    smallest: int = 0
    nonzero: bool = False

    def __post_init__(self):
        object.__setattr__(self, "format", _storable(self.format))
        if self.root not in (1, 2):
            raise ValueError(f"Storage.root is 1 or 2 (the square root), not {self.root!r}")


def _storable(fmt: Any) -> Format | BlockFormat:
    """The format or block format, if its elements can be stored in whole bytes."""
    if isinstance(fmt, BlockFormat) or (isinstance(fmt, str) and fmt.lower() in BLOCK_FORMATS):
        fmt = block_format(fmt)
        storable(fmt.element)
        return fmt
    return storable(format_(fmt))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What :func:`autoscale` rounds, and how.

    Attributes:
        forward: format of a contraction's operands that come from the forward pass (weights,
            activations); None leaves them in the compute dtype.
        backward: format of a contraction's operands that carry a gradient.
        storage: format of everything else that the backward pass reads from the forward pass.
        carry: format of a loop's carry between two iterations; None keeps the compute dtype, since
            a sum carried through a loop swamps in a narrow one.
        state: pairs of a regular expression and a :class:`Storage`; an output whose path (as
            ``jax.tree_util.keystr`` prints it) matches is returned so stored.
        smallest: residuals with fewer elements (the statistics of a norm, say) stay in the compute
            dtype: what a narrow copy saves isn't worth its scale.
        store: ``"boundaries"``: values in flight stay float32 and only what is really stored is
            rounded.

    Each rounding uses one power-of-two scale for the tensor, from its largest magnitude (current
    scaling), so that nothing saturates.
    """

    forward: Format | None = FP16
    backward: Format | None = FP16
    storage: Format | None = FP16
    carry: Format | None = None
    state: tuple[tuple[str, Storage], ...] = ()
    smallest: int = 8192
    store: Literal["boundaries"] = "boundaries"

    def __post_init__(self):
        for field in ("forward", "backward", "storage", "carry"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, storable(format_(value)))
        if self.store != "boundaries":
            raise ValueError(f"Recipe.store accepts 'boundaries', not {self.store!r}")
        for entry in self.state:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Storage)):
                raise ValueError(
                    f"Recipe.state holds pairs (regular expression, Storage), not {entry!r}"
                )
            try:
                re.compile(entry[0])
            except re.error as error:
                raise ValueError(
                    f"Recipe.state: {entry[0]!r} is no regular expression: {error}"
                ) from None

    def stored_as(self, path: str, size: int) -> Storage | None:
        """How an output of ``size`` elements is stored; the first pattern that matches wins."""
        found = next((s for pattern, s in self.state if re.search(pattern, path)), None)
        return found if found is not None and size >= found.smallest else None
