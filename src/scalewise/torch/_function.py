"""``function``: a torch model as a JAX function."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree
from ._arguments import as_module, check_inputs
from ._convert import jax_dtype
from ._export import Exported, ExportError, Granularity, export, first_line
from ._graph import run, seed_of
from ._place import at_class
from ._reference import Matched, matched
from ._registry import MissingRuleError
from ._torch import Dtype, Module, torch


def function(
    model: Module,
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    method: str = "forward",
    granularity: Granularity = "operation",
    buffers: bool = False,
) -> tuple[Callable[..., PyTree], dict[str, jax.Array]]:
    """Returns a torch module as a JAX function, and its parameters as JAX arrays.

    The module is exported by ``torch.export`` for the shapes of the arguments, and again for others
    when ``f`` is called with them. Each ATen operation is computed by a rule (see :func:`rule`).
    The equations carry the model's source lines, and its module paths as name scopes.

    Args:
        model: a ``torch.nn.Module`` on any device, in ``eval()`` or ``train()`` mode, or a function
            of tensors.
        args, kwargs: arguments of the method. Everything but tensors becomes a constant.
        method: the method to export.
        granularity: ``"operation"``: each ATen operation rounds its results once, as torch's
            kernels do; those of several steps (softmax, norms, GELU, attention) compute in float32
            inside. ``"decomposed"``: operations are decomposed to core ATen, and each step rounds
            to the dtype of the operands, as a kernel does that keeps nothing in float32.
        buffers: whether ``f`` also returns the buffers that the method updates, such as batch
            statistics: a pair of the results and a dict of arrays by name.

    Returns:
        ``f`` and ``params``. ``f(params, *tensors, key=None)`` takes the tensors among ``args`` and
        ``kwargs``, in that order, as arrays of the same dtypes. It returns the model's results: an
        array, a tuple, or a dict (for a mapping or a dataclass, such as those of transformers,
        without its Nones and texts; a number is an array).
        ``params`` has each parameter by its first name; tied parameters are there once. They share
        the model's memory (see :func:`to_jax`). Buffers are constants of ``f``, unless ``params``
        has one by its name.

    Raises:
        ExportError: torch.export refuses the model.
        MissingRuleError: operations have no rule.
        ValueError: ``f`` of a model that draws random numbers, as dropout does in train mode, is
            called without ``key``, a JAX random key.
        TypeError: ``f`` is called with tensors of other dtypes, or another number of them.
    """
    check_inputs(args, kwargs)
    seen: set[int] = set()

    def own(x: Any) -> Any:  # torch.export takes a tensor that is passed twice for one input
        again = id(x) in seen
        seen.add(id(x))
        return x.clone() if again else x

    given = torch.utils._pytree.tree_map_only(torch.Tensor, own, (tuple(args), dict(kwargs or {})))
    model = as_module(model)
    f, exported, _ = traced(model, given, method=method, granularity=granularity, buffers=buffers)
    return f, exported.params


Given = tuple[Sequence[PyTree], Mapping[str, PyTree]]  # the arguments of a torch method


def with_dtypes(given: Given, dtypes: Mapping[Any, Any]) -> Given:
    """Returns arguments with tensors of some dtypes converted to others."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtypes.get(x.dtype, x.dtype)), given
    )


def _with_shapes(given: Given, shapes: Sequence[tuple[int, ...]]) -> Given:
    """Returns arguments with tensors of other shapes, whose numbers are of no account."""
    left = iter(shapes)
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: torch.zeros(next(left), dtype=x.dtype), given
    )


def traced(
    model: Module,
    given: Given,
    *,
    method: str,
    granularity: Granularity,
    buffers: bool = False,
    low: np.dtype | None = None,
    dtype: Dtype | None = None,
    reference: tuple[Given, Dtype | None, np.dtype] | None = None,
    as_given: bool = False,
) -> tuple[Callable[..., PyTree], Exported, Matched | None]:
    """Returns a model as a JAX function, its export for the given arguments, and beside it that of
    the float32 model. ``low`` is the
    narrow dtype of ``torch.autocast``, ``dtype`` that to which the model is converted before;
    ``reference`` has the arguments and the dtype for an audit's reference run, and the narrow dtype
    of the other one."""
    types = [(tuple(x.shape), jax_dtype(x.dtype)) for x in tensors_of(*given)]
    exported = functools.partial(export, model, method=method, granularity=granularity)
    first = exported(*given, as_given=as_given, dtype=dtype)
    exports: dict[Any, Exported] = {tuple(shape for shape, _ in types): first}
    wide = None
    if reference is not None:
        other, kind, narrow = reference
        of_reference = functools.partial(exported, *other, as_given=as_given, dtype=kind)
        wide = _matched(first, of_reference, at_class(model), narrow)

    def exported_for(arrays: Sequence[jax.Array]) -> Exported:
        if [x.dtype for x in arrays] != [dtype for _, dtype in types]:
            raise TypeError(
                f"f takes {len(types)} tensors after params, of {_listed(types)}; "
                f"got {len(arrays)}, of {_listed([(x.shape, x.dtype) for x in arrays])}"
            )
        shapes = tuple(x.shape for x in arrays)
        if shapes not in exports:
            exports[shapes] = exported(*_with_shapes(given, shapes), dtype=dtype)
        return exports[shapes]

    def f(params: dict[str, jax.Array], *tensors: jax.Array, key: Any = None) -> Any:
        arrays = [jnp.asarray(x) for x in tensors]
        own = exported_for(arrays)
        if low is not None and own.autocasts:
            raise ValueError(
                f"{f.__name__} turns torch.autocast on by itself: leave autocast=True out"
            )
        seed = None if key is None else seed_of(key)
        outs, updated = run(own, params, arrays, low, wide if own is first else None, seed)
        results = as_plain(torch.utils._pytree.tree_unflatten(outs, own.tree))
        return (results, updated) if buffers else results

    f.__name__ = f.__qualname__ = type(model).__name__
    return f, first, wide


def _matched(
    low: Exported, reference: Callable[[], Exported], place: Any, dtype: np.dtype
) -> Matched | None:
    """Returns the operations of the model in float32 that correspond to those in 16 bits.

    None if that model can't be exported, as one with a 16-bit tensor that isn't a parameter or
    buffer: then the reference run computes the 16-bit model's operations in float32, and a warning
    says so.
    """
    try:
        wide = reference()
    except (ExportError, MissingRuleError) as error:
        warnings.warn(
            f"the audit compares with the 16-bit model computed in float32, so that errors of its "
            f"16-bit buffers and constants are missing: in float32 {first_line(error)}",
            stacklevel=2,
        )
        return None
    return matched(low, wide, place, dtype)


def _listed(types: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


def tensors_of(args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def as_plain(tree: PyTree) -> PyTree:
    """Returns nested results as tuples and dicts, which JAX knows."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, Mapping):
        tree = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        plain = {name: as_plain(x) for name, x in tree.items()}
        return {name: x for name, x in plain.items() if x is not None}
    if isinstance(tree, tuple | list):
        return tuple(map(as_plain, tree))
    is_array = isinstance(tree, jax.Array | np.ndarray | bool | int | float)
    return jnp.asarray(tree) if is_array else None
