"""Writes weights as ScaledArrays, in any format, as `scalewise.scaled.save_safetensors` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .. import scaled
from .._resolve import as_format
from .._types import Json
from ..formats import BlockFormat, Format
from ..scaled import FourOverSix, LeastSquares, ScaledArray, Scaling, quantize
from ..scaled._safetensors import NAMES, _parts
from ._encode import Choice
from ._loss import loss
from ._weights import Weight
from ._write import Entry, Job


def own_job(weight: Weight, fmt: str, rounding: Json, choice: Choice) -> tuple[Job, Json]:
    found = as_format(fmt, "--to", blocks=True)
    scaling = _scaling(choice, found)
    run = partial(quantize, fmt=found, rounding=rounding, scaling=scaling)
    example = jax.eval_shape(run, jax.ShapeDtypeStruct(weight.shape, np.float32))
    parts: Json
    parts, record = _parts(weight.name, example)
    entries = tuple(Entry(n, NAMES[np.dtype(x.dtype)], x.shape) for n, x in parts.items())
    return Job(entries, partial(_make, weight, run, found)), record


def _scaling(choice: Choice, fmt: Format | BlockFormat) -> Scaling | None:
    if choice == "four_over_six":
        return FourOverSix()
    if choice in ("least_squares", "mse") and isinstance(fmt, Format):
        return LeastSquares(power_of_two=True)
    return None


def _make(
    weight: Weight, run: partial, fmt: Format | BlockFormat
) -> tuple[Sequence[np.ndarray], Json]:
    x = weight.value()
    stored: ScaledArray = run(jnp.asarray(x))
    parts, _ = _parts(weight.name, stored)
    y = np.asarray(stored.value())
    lost = loss(x, y)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    ones = scaled.ScaledArray(jnp.ones(stored.shape, jnp.float32), stored.scale, stored.block)
    top = np.asarray(ones.value()).astype(np.float64) * float(element.max)
    lost.saturated = int(np.sum(np.isfinite(x) & (np.abs(x.astype(np.float64)) > top)))
    return [np.asarray(p) for p in parts.values()], weight.record_of(
        "quantised", fmt.name, x.size, lost
    )
