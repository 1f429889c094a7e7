"""Whether a layout holds the same numbers as another one, and the same codes in it."""

from __future__ import annotations

import dataclasses

import numpy as np

from ._layouts import Layout
from ._packed import Packed


def repacked_exactly(packed: Packed, layout: Layout) -> str | None:
    """Returns whether a layout holds the same numbers: how, in words; None if it doesn't."""
    fmt = layout.format
    fp4 = layout.nibbles is not None
    if fp4 != (packed.element.bits == 4) or packed.transposed != layout.transposed:
        return None
    if fp4 or fmt.startswith("mx"):
        kinds = {"nvfp4": "e4m3fn", "mxfp4": "e8m0", "mxfp8_e4m3": "e8m0"}
        if packed.kind != kinds[fmt] or packed.block != layout.block:
            return None
        if packed.whole is None or packed.divides == layout.divides:
            return "repacked exactly"
        if packed.whole.size > 1:
            return None
        same = repacked(packed, layout)
        codes = np.arange(127, dtype=np.uint8)[None]
        each = [dataclasses.replace(p, scale=codes).factors() for p in (packed, same)]
        worst = np.max(np.abs(each[0] - each[1]) / np.where(each[0] > 0, each[0], 1))
        return "repacked exactly" if not worst else (
            f"repacked: the global scale is inverted, values within {worst:.1e}")  # fmt: skip
    if packed.kind != "fp32" or packed.element.name != "e4m3fn":
        return None
    rows, columns = packed.stored_shape[-2:]
    one = packed.block in ((rows, columns), (1, columns))
    if layout.format == "deepseek":
        return "repacked exactly" if packed.block == (128, 128) else None
    tiles = layout.family in ("compressed-tensors", "torchao")
    return "repacked exactly" if one or (tiles and layout.family != "torchao") else None


def repacked(packed: Packed, layout: Layout) -> Packed:
    """Returns the same codes and block scales for another layout; the global scale is inverted."""
    whole = packed.whole
    if layout.whole is None:
        whole = None
    elif whole is None:
        whole = np.float32(1).reshape(()) if layout.needs_whole else None
    elif packed.divides != layout.divides:
        whole = (np.float32(1) / whole).astype(np.float32)
    return dataclasses.replace(
        packed, whole=whole, divides=layout.divides, transposed=layout.transposed
    )
