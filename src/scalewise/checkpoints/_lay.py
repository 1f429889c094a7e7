"""Lays a weight out as the tensors of a layout, with the same codes if it can hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import scaled
from .._resolve import as_format
from .._types import Json
from ..formats import E2M1FN, BlockFormat, Format
from ..scaled import (
    DTYPES,
    NAMES,
    FourOverSix,
    ScaledArray,
    parts_of,
    quantize,
)
from ._encode import Choice
from ._layouts import Layout
from ._packed import E8M0, WIDE, Packed, loss
from ._weights import Weight
from ._write import FileEntry, Job


def base_of(layout: Layout, name: str) -> str | None:
    """Returns the base of a layout's names for a weight; None if it can't be called so."""
    suffix = layout.weight.removeprefix("{}")
    return name.removesuffix(suffix) if name.endswith(suffix) and name != suffix else None


def laid_out(packed: Packed, layout: Layout, base: str) -> dict[str, np.ndarray]:
    names = layout.names(base)
    codes = packed.codes
    if packed.element != E2M1FN:
        dtype: Json = packed.element.dtype
        codes = codes.view(dtype)
    elif layout.family == "gpt-oss":
        codes = codes.reshape(*codes.shape[:-1], -1, 16)
    if layout.name == "deepseek/v4-experts":
        codes = codes.view(np.int8)
    parts = {names["codes"]: codes, names["scale"]: _scale(packed, layout)}
    if packed.whole is not None:
        shape = {"compressed-tensors": (1,)}.get(layout.family, ())
        whole = packed.whole.astype(np.float32)
        parts[names["whole"]] = whole.reshape(shape) if whole.size == 1 else whole
    return parts


def _scale(packed: Packed, layout: Layout) -> np.ndarray:
    scale = packed.scale
    if packed.kind == WIDE:
        if layout.family in ("compressed-tensors", "modelopt") and scale.size == 1:
            return scale.reshape((1,) if layout.family == "compressed-tensors" else ())
        per_channel = scale.ndim == 2 and scale.shape[1] == 1 and packed.block[0] == 1
        return scale[:, 0] if layout.family == "modelopt" and per_channel else scale
    if packed.kind == E8M0:
        return scale
    return scale.view(ml_dtypes.float8_e4m3fn)


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
    return "repacked exactly" if one or layout.family == "compressed-tensors" else None


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


def own_job(weight: Weight, fmt: str, choice: Choice) -> tuple[Job, Json]:
    """Returns the job that writes a ScaledArray, as ``scaled.save_safetensors`` does."""
    found = as_format(fmt, "to (--to)", blocks=True)
    scaling = FourOverSix() if choice == "four_over_six" else None
    run = partial(quantize, fmt=found, scaling=scaling)
    example = jax.eval_shape(run, jax.ShapeDtypeStruct(weight.shape, np.float32))
    parts: Json
    example = dataclasses.replace(example, value_dtype=_stands_for(weight))
    parts, record = parts_of(weight.name, example)
    entries = tuple(FileEntry(n, NAMES[np.dtype(x.dtype)], x.shape) for n, x in parts.items())
    return Job(entries, partial(_make, weight, run, found)), record


def _stands_for(weight: Weight) -> np.dtype | None:
    """Returns the dtype of a wide tensor, or what a scalewise file states; None if unknown."""
    if weight.kind == "plain":
        dtype = DTYPES[weight.parts["codes"].dtype]
        return dtype if dtype.itemsize > 1 else None
    stated = weight.record.get("dtype") if weight.kind == "scalewise" else None
    return None if stated is None else jnp.dtype(stated)


def _make(
    weight: Weight, run: partial, fmt: Format | BlockFormat
) -> tuple[Sequence[np.ndarray], Json]:
    x = weight.effective()
    stored: ScaledArray = run(jnp.asarray(x))
    parts, _ = parts_of(weight.name, stored)
    y = np.asarray(stored.value())
    lost = loss(x, y)
    element = fmt.element
    ones = scaled.ScaledArray(jnp.ones(stored.shape, jnp.float32), stored.scale, stored.block)
    top = np.asarray(ones.value()).astype(np.float64) * float(element.max)
    lost.saturated = int(np.sum(np.isfinite(x) & (np.abs(x.astype(np.float64)) > top)))
    return [np.asarray(p) for p in parts.values()], weight.record_of(
        "quantised", fmt.name, x.size, lost
    )
