"""``function``: a torch model as a JAX function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import jax_dtype
from ._export import Exported, Granularity, export
from ._operation import Call, Flat, operation, rounds_several_times
from ._place import at, scope_of
from ._registry import DRAWS, RULES
from ._torch import torch
from .rules import load

load()


def function(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    method: str = "forward",
    granularity: Granularity = "operation",
) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """Returns a torch module as a JAX function, and its parameters as JAX arrays.

    The module is exported by ``torch.export`` for the shapes and dtypes of the arguments, and each
    ATen operation is computed by a rule (see :func:`rule`). The equations carry the model's source
    lines, and its module paths as name scopes.

    Args:
        model: a ``torch.nn.Module`` on any device, in ``eval()`` or ``train()`` mode. In train mode
            dropout draws from a fixed key; updates of buffers (batch statistics) are not returned.
        args, kwargs: arguments of the method. Everything but tensors becomes a constant.
        method: the method to export.
        granularity: ``"operation"``: each ATen operation rounds its results once, as torch's
            kernels do; those of several steps (softmax, norms, GELU, attention) compute in float32
            inside. ``"decomposed"``: operations are decomposed to core ATen, and each step rounds
            to the dtype of the operands, as a kernel does that keeps nothing in float32.

    Returns:
        ``f`` and ``params``. ``f(params, *tensors)`` takes the tensors among ``args`` and
        ``kwargs``, in that order, as arrays. It returns the model's results: an array, a tuple, or
        a dict (for a mapping or a dataclass, such as those of transformers, without its Nones).
        ``params`` has each parameter by its first name; tied parameters are there once. They share
        the model's memory (see :func:`to_jax`). Buffers are constants of ``f``.

    Raises:
        ExportError: torch.export refuses the model.
        MissingRuleError: operations have no rule.
    """
    exported = export(model, args, kwargs or {}, method, granularity)

    def f(params: dict[str, jax.Array], *tensors: jax.Array) -> Any:
        return _plain(torch.utils._pytree.tree_unflatten(run(exported, params, tensors), tree))

    tree = exported.tree
    f.__name__ = f.__qualname__ = type(model).__name__
    return f, exported.params


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Returns the tensors among the arguments, in the order of :func:`function`."""
    leaves = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _plain(tree: Any) -> Any:
    """Returns nested results as tuples and dicts, which JAX knows."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, Mapping):
        tree = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        return {name: _plain(x) for name, x in tree.items() if x is not None}
    if isinstance(tree, tuple | list):
        return tuple(map(_plain, tree))
    return tree


def run(exported: Exported, params: Mapping[str, Any], tensors: Sequence[Any]) -> list[Any]:
    """Computes the exported graph; returns its results in torch's order.

    Raises:
        TypeError: another number of tensors, or other shapes or dtypes than in the export.
    """
    nodes = {n.name: n for n in exported.graph_module.graph.nodes if n.op == "placeholder"}
    if len(tensors) != len(exported.inputs):
        raise TypeError(f"f takes {len(exported.inputs)} tensors after params, not {len(tensors)}")
    known: dict[str, Any] = dict(exported.values)
    known |= {name: params[target] for name, target in exported.weights.items()}
    for i, (name, x) in enumerate(zip(exported.inputs, tensors, strict=True)):
        expected = nodes[name].meta["val"]
        shape, dtype = tuple(expected.shape), jax_dtype(expected.dtype)
        x = jnp.asarray(x)
        if x.shape != shape or x.dtype != dtype:
            raise TypeError(
                f"f: tensor {i} is {x.dtype}{list(x.shape)}; the model was exported for "
                f"{dtype}{list(shape)}"
            )
        known[name] = x
    placeholders = [n for n in nodes if n in known]
    outs = _run_graph(exported, exported.graph_module, [known[n] for n in placeholders])
    return list(outs)[exported.skipped :]


def _run_graph(exported: Exported, graph_module: Any, inputs: Sequence[Any]) -> Any:
    """Computes a graph of the model, or one nested in it, on the values of its placeholders."""
    known: dict[Any, Any] = {}
    left = iter(inputs)

    def read(x: Any) -> Any:
        return torch.fx.node.map_arg(x, known.__getitem__)

    for number, node in enumerate(graph_module.graph.nodes):
        match node.op:
            case "placeholder":
                known[node] = next(left)
            case "get_attr":
                held = functools.reduce(getattr, node.target.split("."), graph_module)
                if isinstance(held, torch.fx.GraphModule):
                    known[node] = functools.partial(_run_nested, exported, held)
                else:
                    known[node] = held
            case "output":
                return read(node.args[0])
            case _:
                args, kwargs = read(node.args), dict(read(node.kwargs))
                if node.target in DRAWS:
                    kwargs["position"] = number
                with jax.named_scope(scope_of(node) or "model"):
                    call = functools.partial(
                        apply, node.target, args, kwargs, results_of(node), exported.granularity
                    )
                    known[node] = at(node)(call)


def _run_nested(exported: Exported, graph_module: Any, *inputs: Any) -> Any:
    return _run_graph(exported, graph_module, inputs)


def results_of(node: Any) -> list[np.dtype]:
    """Returns the dtypes of a node's results, as torch has them."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return [jax_dtype(x.dtype) for x in leaves if isinstance(x, torch.Tensor)]


def apply(
    target: Any, args: Any, kwargs: Any, dtypes: Sequence[np.dtype], granularity: Granularity
) -> Any:
    """Computes one operation by its rule.

    Args:
        target: the operation.
        args, kwargs: its arguments, arrays in place of tensors.
        dtypes: those of its results.
        granularity: see :func:`function`.

    Returns:
        The results of the rule, in these dtypes.
    """
    function = RULES[target]
    leaves, tree = jax.tree.flatten(_hashable((args, kwargs)), is_leaf=lambda x: x is None)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    at = tuple(i for i, array in enumerate(is_array) if array)
    arrays = [leaves[i] for i in at]
    static = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
    call = Call(function, tree, static, at)
    if not dtypes or any(map(callable, static)):
        return call(*arrays)
    if granularity == "operation" and arrays and _rounds_several_times(call, arrays, dtypes):
        shape = jax.eval_shape(call, *arrays)
        name = getattr(target, "_opname", getattr(target, "__name__", str(target)))
        outs = operation(name, Flat(call), dtypes, *arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)
    outs, tree = jax.tree.flatten(call(*arrays))
    outs = [y.astype(d) for y, d in zip(outs, dtypes, strict=True)]
    return jax.tree.unflatten(tree, outs)


def _hashable(args: Any) -> Any:
    """Returns arguments with tuples for lists, torch's as well."""
    if isinstance(args, dict):
        return {name: _hashable(x) for name, x in args.items()}
    return tuple(map(_hashable, args)) if isinstance(args, tuple | list) else args


def _rounds_several_times(call: Call, arrays: Sequence[Any], dtypes: Sequence[Any]) -> bool:
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return _cached(call, types, tuple(dtypes))


_cached = functools.lru_cache(maxsize=4096)(rounds_several_times)
