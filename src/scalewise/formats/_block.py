"""Block formats: narrow elements with one scale per block, and optionally one per array."""

from __future__ import annotations

import dataclasses

from .._check import Count, checked
from .._repr import changed_fields
from ._catalogue import CATALOGUE, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, E8M0, FP32, unknown_name
from ._format import Format


@checked
@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of arrays that stores blocks of elements with a common scale.

    A value is ``element * scale``, or ``element * (scale * tensor_scale)``.

    Attributes:
        name: the name, in lower case.
        element: the format of the elements.
        scale: the format of the blocks' scales.
        size: the number of elements in a block.
        tensor_scale: the format of a scale for the whole array, which brings the blocks' scales
            into their format's range: FP32, or None without such a scale.

    Raises:
        ValueError: ``size`` isn't a positive integer, ``scale`` isn't a format, or ``tensor_scale``
            isn't FP32 or None.

    Example:
        >>> MXFP4.bits_per_element
        4.25
    """

    name: str
    element: Format
    scale: Format = E8M0
    size: Count = 32
    tensor_scale: Format | None = None

    def __post_init__(self):
        if self.tensor_scale not in (None, FP32):
            raise ValueError(
                f"BlockFormat({self.name!r}): tensor_scale is {self.tensor_scale.name}; "
                "expected FP32 or None"
            )

    def __repr__(self) -> str:
        changed = changed_fields(self, "name", "element", text=_shown)
        return f"BlockFormat({', '.join([repr(self.name), _shown(self.element), *changed])})"

    @property
    def bits_per_element(self) -> float:
        """The bits of an element plus its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.size


def _shown(value: object) -> str:
    if isinstance(value, Format) and CATALOGUE.get(value.name) == value:
        return value.name.upper()
    return repr(value)


# OCP Microscaling Formats (MX) Specification 1.0, table 1.
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3FN)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3FN)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2FN)
MXFP4 = BlockFormat("mxfp4", E2M1FN)
# NVIDIA's two-level format: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
NVFP4 = BlockFormat("nvfp4", E2M1FN, scale=E4M3FN, size=16, tensor_scale=FP32)
BLOCK_FORMATS = {f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)}


@checked
def block_format(spec: BlockFormat | str) -> BlockFormat:
    """Returns a block format by name; a BlockFormat is returned as it is.

    Raises:
        ValueError: no block format has this name. The message lists the names, suggests the
            nearest, and says so if it is the name of a format, a recipe, ...
    """
    if isinstance(spec, BlockFormat):
        return spec
    if found := BLOCK_FORMATS.get(str(spec).lower().replace("-", "_")):
        return found
    raise ValueError(unknown_name(spec, "block format"))
