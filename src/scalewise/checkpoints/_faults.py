"""The faults that an audit of a checkpoint names."""

from __future__ import annotations

import enum


class Fault(enum.StrEnum):
    """A fault of a checkpoint; its value is what reports show."""

    INVERTED = "global scale inverted"
    TWICE = "global scale applied twice"
    TRANSPOSED = "scale transposed"
    SWIZZLED = "scale swizzled"
    WRONG_BLOCK = "scale of the wrong block"
    NUMBER = "E8M0 byte read as a number"
    BIAS = "E8M0 with a wrong bias"
    ROUNDED = "float32 scales rounded to E8M0"
    MISSING = "scale missing"
    NIBBLES = "nibbles swapped"
    NEGATIVE_ZERO = "zero coded as -0"
    UNEQUAL = "unequal global scales"
    TENSOR_MISSING = "tensor missing"
    TENSOR_STALE = "tensor stale"
    TENSOR_DUPLICATED = "tensor duplicated"
    SHARD_MISSING = "shard missing"
    BAD_SCALE = "NaN, infinite or zero scales"
    RANDOM = "weights near random"
    MISSHAPEN = "scale of a wrong shape"
    DIFFERENT = "other numbers than the original"
