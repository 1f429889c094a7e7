"""Gradients that a model computes itself: ``torch.autograd.grad``, ``torch.func.grad`` and ``vjp``.

``torch.export`` can't trace torch's engine. While a model is exported, a call of the engine is
recorded as one operation, :data:`GRADIENT`, of the differentiated results and operands. Whoever
computes the graph differentiates the operations between the two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from ._registry import LIBRARY, MissingRuleError, rule
from ._torch import Node, torch

LIBRARY.define("gradient(Tensor[] outs, Tensor[] operands, Tensor[] cotangents, "
               "bool create_graph) -> Tensor[]")  # fmt: skip
LIBRARY.impl(
    "gradient", lambda outs, x, *rest: [*map(torch.zeros_like, x)], "CompositeExplicitAutograd"
)
GRADIENT = torch.ops.scalewise.gradient.default


@rule(GRADIENT)
def _unreachable(*args: Any) -> Any:
    raise AssertionError("a graph computes gradients from its nodes")


@contextlib.contextmanager
def recorded_gradients() -> Iterator[None]:
    transforms = torch._functorch.eager_transforms
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", _recorded),
        mock.patch.object(transforms, "grad_and_value_impl", _gradient_and_value),
        mock.patch.object(transforms, "_vjp_with_argnums", _vjp),
    ):
        yield


def _recorded(
    outs: Sequence[Any],
    cotangents: Sequence[Any],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    *rest: Any,
    accumulate_grad: bool = False,
    **others: Any,
) -> tuple[Any, ...]:
    """Stands for torch's engine."""
    if accumulate_grad:
        raise MissingRuleError(
            "it calls backward(): let it return the loss, and pass grad=True, which audits the "
            "gradients of the parameters"
        )
    given = [torch.ones_like(y) if c is None else c for y, c in zip(outs, cotangents, strict=True)]
    return tuple(GRADIENT([*outs], [*inputs], given, create_graph))


def _gradient_and_value(f: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """Stands for what ``torch.func.grad`` and ``torch.func.grad_and_value`` call."""
    out, pull, *aux = _vjp(functools.partial(f, **kwargs), *args, argnums=argnums, has_aux=has_aux)
    return pull(torch.ones_like(out)), (out, *aux) if has_aux else out


def _vjp(f: Any, *args: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """Stands for what ``torch.func.vjp`` calls."""
    tree = torch.utils._pytree
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MissingRuleError(
            "it differentiates within torch.func.vmap: differentiate one example after the other, "
            "in a loop"
        )
    args = tree.tree_map_only(torch.Tensor, torch.clone, args)
    operands = args
    if argnums is not None:
        operands = torch._functorch.eager_transforms._slice_argnums(args, argnums, as_tuple=False)
    leaves, spec = tree.tree_flatten(operands)
    out, *aux = f(*args) if has_aux else (f(*args),)

    def pull(cotangents: Any, *options: Any, **others: Any) -> Any:
        given = GRADIENT(tree.tree_leaves(out), leaves, tree.tree_leaves(cotangents), True)
        return tree.tree_unflatten(given, spec)

    return out, pull, *aux


def between(operands: Collection[Node], outs: Sequence[Node]) -> list[Node]:
    """Returns the operations that need one of ``operands``, and that ``outs`` need, in order."""
    reached = {*operands}
    for node in outs[0].graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    needed, pending = set(), [*outs]
    while pending:
        node = pending.pop()
        if node in reached and node not in operands and node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return [n for n in outs[0].graph.nodes if n in needed]


def gradient(
    node: Node,
    read: Callable[[Node], Any],
    compute: Callable[[Node, Callable[[Node], Any]], Any],
    vjp: Callable[..., Any] = jax.vjp,
    detached: Callable[[Any], Any] = jax.lax.stop_gradient,
    cast: Callable[[Any, Any], Any] = jnp.astype,
) -> list[Any]:
    """Returns the results of :data:`GRADIENT`; ``vjp``, ``detached``, ``cast`` are JAX's or
    torch's."""
    outs, operands, cotangents, create_graph = node.args
    inner = between(operands, outs)

    def function(*values: Any) -> list[Any]:
        known = dict(zip(operands, values, strict=True))

        def value(n: Node) -> Any:
            return known[n] if n in known else read(n)

        for n in inner:
            known[n] = compute(n, value)
        return [value(n) for n in outs]

    ys, pull = vjp(function, *map(read, operands))
    found = pull([cast(read(c), y.dtype) for y, c in zip(ys, cotangents, strict=True)])
    return list(found) if create_graph else [detached(g) for g in found]
