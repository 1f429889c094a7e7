"""The scales of keys and values in a checkpoint: found from a model's own, written, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

from .._check import checked
from .._resolve import as_format
from ..formats import E4M3FN, FormatLike

Layers = Mapping[str, tuple[ArrayLike, ArrayLike]]
NAMES = {
    "compressed-tensors": ("{}.k_scale", "{}.v_scale"),
    "modelopt": ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
}
SATURATED = 1e-3  # the share of numbers beyond a scale that no outliers of other text explain
LARGER = 16.0  # than the scale that the numbers need; FP8 loses nothing before that


@dataclasses.dataclass(frozen=True)
class CacheScale:
    """A scale of keys or values, beside what the model's own keys or values need.

    Attributes:
        name: in the checkpoint.
        scale: stored; the smallest, of one for each head. NaN if there is none.
        needed: with which the largest magnitude becomes the format's largest number.
        saturated: the share of the numbers that the stored scale cuts off.
        wrong: why the scale is wrong; empty if it is right.
    """

    name: str
    scale: float
    needed: float
    saturated: float
    wrong: str


@checked
def cache_scales(
    layers: Layers,
    layout: Literal["compressed-tensors", "modelopt"] = "compressed-tensors",
    format: FormatLike = E4M3FN,
) -> dict[str, np.ndarray]:
    """Returns scales of keys and values by the names that a layout has for them.

    Args:
        layers: by the name of each attention module (``"model.layers.0.self_attn"``), its keys and
            values on some text, floats of shape (..., heads, head_dim).
        layout: ``"compressed-tensors"`` names them ``NAME.k_scale``, ``"modelopt"``
            ``NAME.k_proj.k_scale``.
        format: of the cache.

    Returns:
        Float32 arrays of shape (1,), to be saved beside the weights: the largest magnitude, divided
        by the format's largest number (of zeros, 1).

    Example:
        >>> import numpy as np, scalewise as sw
        >>> k, v = np.full((8, 2, 4), 448.0), np.full((8, 2, 4), 56.0)
        >>> sw.checkpoints.cache_scales({"layers.0.attn": (k, v)})["layers.0.attn.v_scale"]
        array([0.125], dtype=float32)
    """
    top = float(as_format(format, "cache_scales").max)
    return {
        form.format(name): np.asarray([_largest(x) / top or 1], np.float32)
        for name, pair in layers.items()
        for form, x in zip(NAMES[layout], pair, strict=True)
    }


@checked
def check_cache_scales(
    stored: Mapping[str, Any], layers: Layers, format: FormatLike = E4M3FN
) -> tuple[CacheScale, ...]:
    """Returns each layer's scales of keys and values, and which of them are wrong.

    A scale is wrong if it cuts off more than 0.1 % of the numbers, if it is more than 16 times the
    one that they need, if it isn't a positive number, or if it is missing. Between those an FP8
    cache has nearly the same errors with any scale.

    Args:
        stored: a checkpoint's arrays by name, as :func:`load` returns them, in either layout's
            names of :func:`cache_scales`: a number, or one for each head.
        layers: as for :func:`cache_scales`, computed by the model whose checkpoint it is, without a
            quantised cache, on a few hundred tokens.
        format: of the cache.

    Example:
        >>> import numpy as np, scalewise as sw
        >>> k = np.linspace(-350, 350, 1024).reshape(-1, 2, 64)
        >>> stored = {"attn.k_scale": np.float32(0.025), "attn.v_scale": np.float32(0.8)}
        >>> for scale in sw.checkpoints.check_cache_scales(stored, {"attn": (k, k)}):
        ...     print(scale.name, f"{scale.needed:.3f}", scale.wrong or "right")
        attn.k_scale 0.781 too small: 96.7% of the numbers saturate
        attn.v_scale 0.781 right
    """
    top = float(as_format(format, "check_cache_scales").max)
    rows = []
    for layer, pair in layers.items():
        for position, x in enumerate(pair):
            names = [forms[position].format(layer) for forms in NAMES.values()]
            name = next((n for n in names if n in stored), names[0])
            rows.append(_checked(name, stored.get(name), np.asarray(x, np.float32), top))
    return tuple(rows)


def _largest(x: ArrayLike) -> float:
    sizes = np.abs(np.asarray(x, np.float32))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0))


def _checked(name: str, stored: Any, x: np.ndarray, top: float) -> CacheScale:
    needed = _largest(x) / top or 1.0
    if stored is None:
        return CacheScale(name, np.nan, needed, 0.0, "missing")
    scale = np.asarray(stored, np.float32).reshape(-1)
    if scale.size not in (1, x.shape[-2]):
        raise ValueError(
            f"check_cache_scales: {name} has {scale.size} scales for {x.shape[-2]} heads; expected "
            "one, or one for each head"
        )
    least = float(scale.min())
    if not np.all((scale > 0) & np.isfinite(scale)):
        return CacheScale(name, least, needed, 0.0, "not a positive number")
    saturated = float(np.mean(np.abs(x) > scale[:, None] * top * (1 + 2.0**-5)))
    wrong = ""
    if saturated > SATURATED:
        wrong = f"too small: {saturated:.1%} of the numbers saturate"
    elif least > LARGER * needed:
        wrong = f"too large: {least / needed:.0f} times what the numbers need"
    return CacheScale(name, least, needed, saturated, wrong)
