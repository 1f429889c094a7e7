"""What a format or recipe that isn't in use would do to an array: share flushed, clipped, error."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._resolve import as_format, resolve
from ..autoscaling import Recipe, RecipeLike
from ..autoscaling.recipes import CATALOGUE
from ..formats import BlockFormat, BlockFormatLike, Format
from ..rounding import decode, round_to
from ..scaled import Amax, Scaling, quantize

WhatIfLike: TypeAlias = "BlockFormatLike | RecipeLike"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WhatIf:
    """Statistics of a group of arrays under another format or recipe; float32 scalars.

    Attributes:
        flushed: share of the nonzero numbers that would become zero.
        saturated: share of all numbers that would overflow or be clipped; in a format without a
            scale, those at or beyond its largest; infinities included.
        error: relative error (root mean square) over the numbers that stay finite.
    """

    flushed: Any
    saturated: Any
    error: Any


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A format or recipe to be tried."""

    name: str  # for the keys of its numbers
    fmt: Format | BlockFormat  # a format, or a block format
    # how the scale of each array is chosen; None for no scale, or the block format's own
    scaling: Scaling | None = None


def candidate(spec: WhatIfLike, where: str) -> Candidate:
    """Returns the candidate of a format, a block format or a recipe, or of the name of one.

    A recipe stands for its ``forward`` format (with ``rounds="every_op"`` its ``residuals``; with
    ``products`` that of the forward activation) and its scaling; a scale from the history of steps,
    or from other operands, counts as current scaling.
    """
    if isinstance(spec, str):
        spec = resolve(spec, "format", "block format", "recipe", where=where)
    if not isinstance(spec, Recipe):
        fmt = as_format(spec, where, blocks=True)
        return Candidate(fmt.name, fmt)
    name = next((name for name, known in CATALOGUE.items() if known == spec), "recipe")
    fmt = spec.forward if spec.rounds == "boundaries" and spec.forward else spec.residuals
    if fmt is None:
        raise ValueError(f"{where}: {name} rounds nothing; expected a recipe with a narrow format")
    first = spec.products.operand("forward", "activation")
    scaling = first.scaling if first else spec.scaling
    if isinstance(fmt, BlockFormat):
        return Candidate(name, fmt, scaling.of_blocks())
    return Candidate(name, fmt, scaling if scaling.source not in ("history", "operand") else Amax())


def what_if(arrays: Sequence[jax.Array], tried: Candidate, amax: jax.Array) -> WhatIf:
    unit = jnp.where(amax > 0, amax, 1)  # squares of numbers below 2^-75 would be zero
    sums = sum(_sums(jnp.asarray(x), tried, unit) for x in arrays)
    nonzero, flushed, saturated, noise, signal = jnp.asarray(sums)
    size = sum(x.size for x in arrays)
    error = jnp.sqrt(noise / jnp.where(signal > 0, signal, 1))
    return WhatIf(flushed / jnp.maximum(nonzero, 1), saturated / max(size, 1), error)


def _sums(x: jax.Array, tried: Candidate, unit: jax.Array) -> jax.Array:
    """Returns how many numbers are nonzero, flushed and saturated; squared error and squares."""
    x = jnp.atleast_1d(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if isinstance(tried.fmt, Format) and tried.scaling is None:
        rounded = round_to(x, tried.fmt)
        saturated = ~(jnp.abs(x) < float(tried.fmt.max))
    else:
        element = tried.fmt.element if isinstance(tried.fmt, BlockFormat) else tried.fmt
        stored = quantize(x, tried.fmt, scaling=tried.scaling)
        rounded, data = stored.value(), stored.data
        if not jnp.issubdtype(data.dtype, jnp.floating):
            data = decode(data, element)  # pyright: ignore[reportArgumentType]
        largest = jnp.abs(data.astype(jnp.float32)) == float(element.max)
        saturated = (largest & (jnp.abs(rounded) < jnp.abs(x))) | ~jnp.isfinite(x)
    kept = jnp.isfinite(x) & jnp.isfinite(rounded)
    relative = jnp.where(kept, x, 0) / unit.astype(x.dtype)
    noise = jnp.where(kept, rounded, 0) / unit.astype(x.dtype) - relative
    counts = x != 0, (rounded == 0) & (x != 0), saturated
    sums = [jnp.sum(c.astype(jnp.float32)) for c in counts]
    squares = [jnp.sum(jnp.square(y)).astype(jnp.float32) for y in (noise, relative)]
    return jnp.stack(sums + squares)
