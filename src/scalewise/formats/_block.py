"""Block formats: narrow elements behind one scale for each run of them, and perhaps one for all."""

from __future__ import annotations

import dataclasses
import difflib

from ._catalogue import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, E8M0, FP32
from ._format import Format


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Elements and their scales: ``value = element * scale``, or ``element * (scale * whole)``.

    Attributes:
        name: lower case.
        element: the format of the elements.
        scale: the format of the scales, one a block.
        size: elements in a block.
        whole: the format of one more scale for the whole array, which brings the blocks' scales
            into the range of theirs (FP32); None where there is none.

    Raises:
        ValueError: a size that isn't positive, or a ``whole`` that isn't FP32.

    Example:
        >>> MXFP4.bits_per_element
        4.25
    """

    name: str
    element: Format
    scale: Format = E8M0
    size: int = 32
    whole: Format | None = None

    def __post_init__(self):
        if self.whole not in (None, FP32):
            raise ValueError(
                f"BlockFormat({self.name!r}): whole is {self.whole.name}; accepted: FP32 or None"
            )
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(
                f"BlockFormat({self.name!r}): size is {self.size!r}; accepted: a positive integer"
            )

    @property
    def bits_per_element(self) -> float:
        """Bits of an element and its share of the scale."""
        return self.element.bits + self.scale.bits / self.size


# OCP Microscaling Formats (MX) Specification 1.0, table 1.
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3FN)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3FN)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2FN)
MXFP4 = BlockFormat("mxfp4", E2M1FN)
# NVIDIA's two-level format: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
NVFP4 = BlockFormat("nvfp4", E2M1FN, scale=E4M3FN, size=16, whole=FP32)
BLOCK_FORMATS = {f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)}


def block_format(spec: BlockFormat | str) -> BlockFormat:
    """The block format of a name; a BlockFormat is itself.

    Raises:
        ValueError: nothing is called so; the nearest names are offered.
    """
    if isinstance(spec, BlockFormat):
        return spec
    if found := BLOCK_FORMATS.get(str(spec).lower().replace("-", "_")):
        return found
    near = difflib.get_close_matches(str(spec).lower(), list(BLOCK_FORMATS), n=2)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."
    raise ValueError(
        f"no block format is called {spec!r}{hint} There are {', '.join(BLOCK_FORMATS)}"
    )
