"""Monitors a training run: every n steps, how much of its state is outside a format's range."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import Count, Natural, Pattern, checked
from .._resolve import as_format
from .._types import PyTree
from ..formats import Format, FormatLike
from ..interpret import is_float
from ._exponents import Exponents, exponents_of
from ._report._trace import is_latent, near_maximum
from ._what_if import Candidate, WhatIf, WhatIfLike, candidate
from ._what_if import what_if as lost_to

Groups = Natural | Mapping[str, Pattern]
MOMENTS = {  # fields of optax's states with an array for each parameter
    "mu", "nu", "nu_max", "trace", "sum_of_squares", "m", "v", "v_row", "v_col", "e_g", "e_x",
}  # fmt: skip
BARE = re.compile(r"\['?(.*?)'?\]|\.(\w+)")  # a key of keystr: ['w'], [0] or .field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """Statistics of a group of arrays with respect to a format; float32 scalars.

    Attributes:
        amax: largest finite magnitude.
        flushed: share of the nonzero numbers that the format would flush to zero.
        saturated: share of all numbers at or beyond the format's largest, infinities included.
        nonfinite: how many numbers are infinite or NaN.
        what_if: what each other format or recipe would do, by its name.
    """

    amax: Any
    flushed: Any
    saturated: Any
    nonfinite: Any
    what_if: dict[str, WhatIf] = dataclasses.field(default_factory=dict)


@checked
def readings(
    tree: PyTree,
    fmt: FormatLike = "float16",
    groups: Groups = 1,
    what_if: Sequence[WhatIfLike] = (),
) -> dict[str, Reading]:
    """Reads a pytree's float arrays by group, in one pass over each; works inside a jitted step.

    Args:
        tree: any pytree: parameters, gradients, activations, an optimizer's state. Arrays that
            aren't real floats are left out.
        fmt: a format, or a name or dtype of one.
        groups: how many keys of a path name a group (``1``: ``params``; ``2``: ``params/blocks``);
            an optimizer's moments are kept apart (``opt_state/mu``, ``opt_state/nu``). Or a dict
            from names of groups to regular expressions: an array belongs to the first that matches
            its path (as ``jax.tree_util.keystr`` prints it).
        what_if: formats, block formats and recipes, or names of them: each :class:`Reading` says
            what they would do to its arrays. A recipe stands for its ``forward`` format and its
            scaling; delayed scaling counts as current scaling.

    Returns:
        A :class:`Reading` for each group, in the order of the tree (or of ``groups``).

    Raises:
        ValueError: an unknown format, or a group without a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> found = readings({"w": jnp.array([1e5, 2.0, 1e-9, 0.0]), "n": jnp.arange(3)})
        >>> [(k, float(r.saturated), round(float(r.flushed), 3)) for k, r in found.items()]
        [('w', 0.25, 0.333)]
    """
    fmt = as_format(fmt, "readings")
    tried = _candidates(what_if, "readings")
    found = _grouped(tree, groups, "readings")
    return {name: _read(arrays, fmt, tried) for name, arrays in found.items()}


@checked
def exponents(tree: PyTree, groups: Groups = 1) -> dict[str, Exponents]:
    """Counts the numbers of a pytree's float arrays by their exponent of two, for each group.

    The histogram of gradients that shows what a format or a loss scale would lose (Micikevicius et
    al., arXiv 1710.03740, figure 3). It works inside a jitted step, in one pass over each array.

    Args:
        tree, groups: as for :func:`readings`.

    Returns:
        An :class:`Exponents` for each group.

    Raises:
        ValueError: a group without a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> found = exponents({"w": jnp.array([1.5, 3.0, 2.0**-25, 0.0])})["w"]
        >>> found.bins(), round(found.flushed("fp16", scale=0.5), 2)
        ({-25: 1, 0: 1, 1: 1}, 0.33)
        >>> found
        3 nonzero numbers, 1 zeros
        2^-2   to 2^2     66.7% #################################
        2^-6   to 2^-2     0.0%
        ...
    """
    found = _grouped(tree, groups, "exponents")
    return {name: exponents_of(arrays) for name, arrays in found.items()}


def _grouped(tree: PyTree, groups: Groups, where: str) -> dict[str, list[jax.Array]]:
    named = groups if isinstance(groups, Mapping) else {}
    found: dict[str, list[jax.Array]] = {name: [] for name in named}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and is_float(leaf):
            name = _group(path, groups)
            if name is not None:
                found.setdefault(name, []).append(leaf)
    empty = [f"group {name!r} ({named[name]!r})" for name, x in found.items() if not x]
    if empty or not found:
        what = empty[0] if empty else "tree"
        raise ValueError(f"{where}: the {what} holds no float array; expected at least one")
    return found


def _candidates(what_if: Any, where: str) -> list[Candidate]:
    if isinstance(what_if, str) or not isinstance(what_if, Sequence):
        raise TypeError(f"{where}: what_if is {what_if!r}; expected a tuple of formats and recipes")
    found = [candidate(spec, f"{where}: what_if") for spec in what_if]
    twice = [x.name for i, x in enumerate(found) if x.name in {y.name for y in found[:i]}]
    if twice:
        raise ValueError(f"{where}: what_if names {twice[0]!r} twice")
    return found


def _group(path: Sequence[Any], groups: Groups) -> str | None:
    if not isinstance(groups, Mapping):
        n = max(groups, 1)
        moment = next((key for key in path[n:] if _names_moment(key)), None)
        text = jax.tree_util.keystr((*path[:n], *([moment] if moment else [])))
        return "/".join(a or b for a, b in BARE.findall(text)) or "all"
    text = jax.tree_util.keystr(tuple(path))
    return next((name for name, pattern in groups.items() if re.search(pattern, text)), None)


def _names_moment(key: Any) -> bool:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name in MOMENTS
    return getattr(key, "key", None) in ("mu", "nu")


def _read(arrays: Sequence[jax.Array], fmt: Format, tried: Sequence[Candidate]) -> Reading:
    parts = [_read_array(jnp.asarray(x), fmt) for x in arrays]
    amax = functools.reduce(jnp.maximum, [p[0] for p in parts])
    nonzero, flushed, saturated, nonfinite = (
        functools.reduce(jnp.add, [p[i] for p in parts]) for i in range(1, 5)
    )
    size = sum(x.size for x in arrays)
    lost = {x.name: lost_to(arrays, x, amax) for x in tried}
    shares = flushed / jnp.maximum(nonzero, 1), saturated / max(size, 1)
    return Reading(amax, *shares, nonfinite, lost)


def _read_array(x: jax.Array, fmt: Format) -> list[jax.Array]:
    """Returns amax, and how many numbers are nonzero, flushed, saturated, non-finite; float32."""
    size = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    finite = jnp.isfinite(size)
    half = float(fmt.smallest) / 2  # itself a tie, which rounds to even: to zero
    counted = [size != 0, (size > 0) & (size <= half), ~(size < float(fmt.max)), ~finite]
    axes = tuple(range(1, x.ndim)) or tuple(range(x.ndim))  # counts of one row fit int32
    amax, *counts = lax.reduce(
        (jnp.where(finite, size, 0), *(c.astype(jnp.int32) for c in counted)),
        (np.zeros((), size.dtype), *[np.int32(0)] * len(counted)),
        lambda a, b: (jnp.maximum(a[0], b[0]), *(p + q for p, q in zip(a[1:], b[1:], strict=True))),
        axes,
    )
    return [jnp.max(amax).astype(jnp.float32), *(jnp.sum(c.astype(jnp.float32)) for c in counts)]


@checked
class Monitor:
    """Takes :func:`readings` every so many steps of a training loop, and writes or returns them.

    ``monitor(step, tree)`` writes a line of ``metrics.jsonl``, and TensorBoard events if
    tensorboardX is installed, at every ``every``-th step, and does nothing at other steps. It
    doesn't wait for the device: a reading is written when the next one is taken, or at the end.

    Args:
        fmt: the format whose range counts.
        every: steps between two readings.
        groups: as for :func:`readings`.
        out: the folder to write to; existing lines are kept. None: nothing is written.
        histograms: True counts the exponents of two of each group as well (:func:`exponents`):
            TensorBoard shows them as histograms of log2, and lines have ``group/exponents``, an
            object from exponents to counts.
        what_if: as for :func:`readings`; lines then have ``group/format/flushed``,
            ``group/format/saturated`` and ``group/format/error``.

    Raises:
        ValueError: an unknown format or recipe; ``every`` below 1.
        TypeError: ``what_if`` is no sequence.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Monitor("fp16", every=2, out=folder) as monitor:
        ...         for step in range(1, 6):
        ...             monitor(step, {"params": jnp.ones(3) * 10.0**step})
        ...     print(Path(folder, "metrics.jsonl").read_text())
        {"step": 2, "params/amax": 100.0, ..., "params/nonfinite": 0.0}
        {"step": 4, "params/amax": 10000.0, ..., "params/nonfinite": 0.0}
    """

    def __init__(
        self,
        fmt: FormatLike = "float16",
        *,
        every: Count = 10,
        groups: Groups = 1,
        out: str | os.PathLike[str] | None = None,
        what_if: Sequence[WhatIfLike] = (),
        histograms: bool = False,
    ):
        self.every = every
        self._fmt = as_format(fmt, "Monitor")
        _candidates(what_if, "Monitor")
        self._histograms = histograms
        self._options = {"fmt": self._fmt, "groups": groups, "what_if": what_if}
        self._largest: dict[str, tuple[float, int]] = {}  # with the step, by group
        self._out = None if out is None else Path(out)
        self._log: Any = None  # a `training.Log`
        self._pending: tuple[int, dict[str, Reading], dict[str, Exponents]] | None = None

    def __repr__(self) -> str:
        out = "" if self._out is None else f", out={str(self._out)!r}"
        return f"Monitor({self._fmt.name!r}, every={self.every}{out})"

    @functools.cached_property
    def _read(self) -> Callable:
        return jax.jit(functools.partial(readings, **self._options))

    @functools.cached_property
    def _count(self) -> Callable:
        return jax.jit(functools.partial(exponents, groups=self._options["groups"]))

    def __getstate__(self) -> dict[str, Any]:  # without the compiled function and the open file
        return {k: v for k, v in self.__dict__.items() if k not in ("_read", "_count")} | {
            "_log": None
        }

    def __call__(self, step: int, tree: Any) -> None:
        """Reads ``tree`` if ``step`` is a multiple of ``every``."""
        if step % self.every == 0:
            found = self._read(tree)
            counted = self._count(tree) if self._histograms else {}
            self._write()
            self._pending = step, found, counted

    def numbers(self, step: int, tree: Any) -> dict[str, float | None]:
        """Returns the reading by ``group/name``; {} unless ``every`` divides ``step``."""
        return self._noted(step, self._read(tree)) if step % self.every == 0 else {}

    @property
    def latent(self) -> tuple[str, ...]:
        """A sentence for each group whose largest value so far was within a factor of 4 of
        overflowing; waits for the last reading."""
        self._write()
        return tuple(
            f"{group}: {near_maximum(amax, self._fmt)} (step {step})"
            for group, (amax, step) in self._largest.items()
            if is_latent(amax, self._fmt) and amax <= float(self._fmt.max)
        )

    def close(self) -> None:
        """Writes the last reading and closes the log."""
        self._write()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self) -> None:
        if self._pending is None:
            return
        step, found, counted = self._pending
        self._pending, numbers = None, self._noted(step, found)
        if self._out is None:
            return
        if self._log is None:
            from ..training import Folder, Log  # needs optax, which nothing else here does

            self._log = Log(Folder(self._out), after=step - 1)
        bins = {f"{group}/exponents": x.bins() for group, x in counted.items()}
        self._log.step({"step": step, **numbers}, bins)

    def _noted(self, step: int, found: Mapping[str, Reading]) -> dict[str, float | None]:
        for group, reading in found.items():
            self._largest[group] = max(
                self._largest.get(group, (0.0, step)), (float(reading.amax), step)
            )
        return _flat(found)


def _flat(found: Mapping[str, Reading]) -> dict[str, float | None]:
    rows: dict[str, float] = {}
    for group, reading in found.items():
        for prefix, part in ((group, reading), *_prefixed(group, reading.what_if)):
            names = [f.name for f in dataclasses.fields(part) if f.name != "what_if"]
            rows |= {f"{prefix}/{name}": float(getattr(part, name)) for name in names}
    return {name: x if math.isfinite(x) else None for name, x in rows.items()}


def _prefixed(group: str, lost: Mapping[str, WhatIf]) -> list[tuple[str, WhatIf]]:
    return [(f"{group}/{name}", x) for name, x in lost.items()]
