"""``emulate``: a torch module as a machine computes it that has another format."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax

from .._resolve import as_format
from .._types import PyTree
from ..formats import Format, FormatLike, Saturation
from ..interpret import transform
from ..scaled import saturation
from ._convert import to_jax, to_torch
from ._export import Granularity
from ._function import tensors_of
from ._low import LowEmulation, low_function
from ._torch import Module, torch


def emulate(
    model: Module,
    fmt: FormatLike,
    *,
    saturate: Saturation = False,
    method: str = "forward",
    granularity: Granularity = "operation",
    autocast: bool = False,
) -> Any:
    """Returns a module that computes what ``model`` would on a machine with a given format.

    The model runs as ``model.half()`` would for FP16, and as ``model.bfloat16()`` would for every
    other format: parameters, inputs and the result of each ATen operation are rounded to ``fmt``;
    what the model itself computes in float32 (``x.float()``) is rounded to float32. The arithmetic
    is that of :func:`scalewise.emulate`, and doesn't depend on the device.

    Args:
        model: a ``torch.nn.Module``; it isn't changed. Later changes of its weights are not seen.
        fmt: a format of up to 25 significant bits, or a name or dtype of one.
        saturate: what overflow does, as for :func:`scalewise.round_to`.
        method: the method to emulate.
        granularity: as for :func:`function`.
        autocast: whether the model runs in its own dtypes, as under
            ``torch.autocast("cuda", dtype)``, and only the results of operations that run in the
            narrow dtype there are rounded to ``fmt``.

    Returns:
        A module without gradients. It exports the model again for other shapes, and returns
        tensors where the model does, in containers that JAX knows: tuples, and dicts for mappings
        and dataclasses.

    Raises:
        ExportError, MissingRuleError: when it is called, as :func:`function`.
        ValueError: an unknown format; ``autocast`` with one of more than 16 bits.
    """
    fmt = as_format(fmt, "emulate")
    options = {"method": method, "granularity": granularity, "autocast": autocast}
    return _Emulated(model, fmt, saturation(saturate, fmt), options)


class _Emulated(torch.nn.Module):
    def __init__(self, model: Module, fmt: Format, saturate: Saturation, options: dict[str, Any]):
        super().__init__()
        self._of = [model]  # in a list, so that it isn't a submodule
        self._fmt, self._options = fmt, options
        self._saturate: Saturation = saturate
        self._compiled: dict[Hashable, tuple[Callable[..., PyTree], dict[str, jax.Array]]] = {}

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        tensors = tensors_of(args, kwargs)
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        key = (
            str(tree),
            tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves),
        )
        if key not in self._compiled:
            low = low_function(self._of[0], args, kwargs, self._fmt, **self._options)
            emulation = LowEmulation(self._fmt, self._saturate, low.dtype)
            self._compiled[key] = jax.jit(transform(low.f, emulation, name="emulate")), low.params
        f, params = self._compiled[key]
        return to_torch(f(params, *map(to_jax, tensors)))
