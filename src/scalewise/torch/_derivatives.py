"""Derivatives in an exported graph: those that a model computes, and custom backward passes.

``torch.export`` can't trace torch's engine. While a model is exported, a call of the engine, or of
``torch.func``, is recorded as one operation, :data:`GRADIENT`, of the differentiated results and
operands. Whoever computes the graph differentiates the operations between the two.

It keeps the forward pass of a ``torch.autograd.Function`` alone. So ``Function.apply`` is replaced
by one that also runs the function's ``backward``, on marks in place of the gradients of its
results. The graph then has the operations of both, and the function's results pass through
:data:`WITH_BACKWARD`, which names the gradients of its operands.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from ._place import own_lines
from ._registry import LIBRARY, MissingRuleError, rule
from ._torch import Node, torch

# By signature, the function that torch calls in place of an operation while it exports.
STAND_INS = {
    "gradient(Tensor[] outs, Tensor[] operands, Tensor[] cotangents, bool create_graph)"
    " -> Tensor[]": lambda outs, operands, *rest: [*map(torch.zeros_like, operands)],
    "cotangent(Tensor x) -> Tensor": torch.zeros_like,
    "with_backward(Tensor[] outs, Tensor[] marks, Tensor[] operands, Tensor?[] gradients, str name,"
    " str error) -> Tensor[]": lambda outs, *rest: [y.clone() for y in outs],
}
for _signature, _stand_in in STAND_INS.items():
    _name = LIBRARY.define(_signature)
    LIBRARY.impl(_name, _stand_in, "CompositeExplicitAutograd")
GRADIENT = torch.ops.scalewise.gradient.default
COTANGENT = torch.ops.scalewise.cotangent.default
WITH_BACKWARD = torch.ops.scalewise.with_backward.default
rule(GRADIENT, COTANGENT, WITH_BACKWARD)(jnp.zeros_like)  # a graph computes them by itself


class DerivativeError(ValueError):
    """The backward pass of a function can't be used; the message says why."""


class _Context:
    """The ``ctx`` of a function's ``forward`` and ``backward``."""

    def __init__(self, args: Sequence[Any]):
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = tuple(_is_float_tensor(x) for x in args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *args: Any) -> None:
        """Marks are for torch's own engine."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


def _is_float_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point


@contextlib.contextmanager
def recorded_derivatives() -> Iterator[None]:
    transforms, function = torch._functorch.eager_transforms, torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return args[0](*args[2:])  # its backward pass is that of what it calls
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        return _applied(cls, args, kwargs)

    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", _recorded),
        mock.patch.object(transforms, "grad_and_value_impl", _gradient_and_value),
        mock.patch.object(transforms, "_vjp_with_argnums", _vjp),
        mock.patch.object(transforms, "_jvp_with_argnums", _jvp),
        mock.patch.object(torch._functorch.apis, "vmap_impl", _vmap),
        mock.patch.object(function, "apply", classmethod(apply)),
    ):
        yield


class _WithinVmap(Exception):
    """A function that is mapped differentiates, which torch can't map while it exports."""


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
    return tuple(_gradient(outs, inputs, given, create_graph))


def _gradient(outs: Any, operands: Any, cotangents: Any, create_graph: bool = True) -> list[Any]:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _WithinVmap
    leaves = torch.utils._pytree.tree_leaves
    return GRADIENT(leaves(outs), leaves(operands), leaves(cotangents), create_graph)


def _gradient_and_value(f: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """Stands for what ``torch.func.grad`` and ``torch.func.grad_and_value`` call."""
    out, pull, *aux = _vjp(functools.partial(f, **kwargs), *args, argnums=argnums, has_aux=has_aux)
    return pull(torch.ones_like(out)), (out, *aux) if has_aux else out


def _vjp(f: Any, *args: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """Stands for what ``torch.func.vjp`` and ``jacrev`` call."""
    tree = torch.utils._pytree
    args = tree.tree_map_only(torch.Tensor, torch.clone, args)
    operands = args
    if argnums is not None:
        operands = torch._functorch.eager_transforms._slice_argnums(args, argnums, as_tuple=False)
    out, *aux = f(*args) if has_aux else (f(*args),)

    def pull(cotangents: Any, *options: Any, **others: Any) -> Any:
        found = _gradient(out, operands, cotangents)
        return tree.tree_unflatten(found, tree.tree_structure(operands))

    return out, pull, *aux


def _jvp(f: Any, args: Any, tangents: Any, argnums: Any = None, has_aux: bool = False, **_: Any):
    """Stands for what ``torch.func.jvp`` and ``jacfwd`` call: the derivative of a gradient, which
    is linear in the cotangents."""
    tree = torch.utils._pytree
    out, pull, *aux = _vjp(f, *args, argnums=argnums, has_aux=has_aux)
    cotangents = tree.tree_map(torch.ones_like, out)
    found = _gradient(pull(cotangents), cotangents, tangents)
    return out, tree.tree_unflatten(found, tree.tree_structure(out)), *aux


_torchs_vmap = torch._functorch.vmap.vmap_impl


def _vmap(
    f: Any, in_dims: Any, out_dims: Any, randomness: str, chunk: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands for ``torch.func.vmap``: one example after the other, if the function
    differentiates."""
    try:
        return _torchs_vmap(f, in_dims, out_dims, randomness, chunk, *args, **kwargs)
    except _WithinVmap:
        found = torch._functorch.vmap._process_batched_inputs(in_dims, args, f)
    size, dims, leaves, spec = found
    tree = torch.utils._pytree

    def row(i: int) -> tuple[list[Any], Any]:
        own = [x if d is None else x.select(d, i) for x, d in zip(leaves, dims, strict=True)]
        return tree.tree_flatten(f(*tree.tree_unflatten(own, spec), **kwargs))

    rows, specs = zip(*map(row, range(size)), strict=True)
    places = tree._broadcast_to_and_flatten(out_dims, specs[0])
    return tree.tree_unflatten([*map(torch.stack, zip(*rows, strict=True), places)], specs[0])


def _applied(cls: Any, args: Sequence[Any], kwargs: Any) -> Any:
    bound = inspect.signature(cls.forward)
    ctx = _Context(args)
    with torch.no_grad():
        if cls.setup_context is not torch.autograd.Function.setup_context:
            given = bound.bind(*args, **kwargs)
            given.apply_defaults()
            ctx = _Context(given.args)
            result = cls.forward(*given.args, **given.kwargs)
            cls.setup_context(ctx, given.args, result)
            args = given.args
        else:
            result = cls.forward(ctx, *args, **kwargs)
    outs = list(result) if isinstance(result, tuple) else [result]
    floats = [i for i, y in enumerate(outs) if _is_float_tensor(y)]
    if not floats:
        return result
    given = [outs[i] for i in floats]
    marks = [COTANGENT(y) for y in given]
    operands = [x for x in args if _is_float_tensor(x)]
    gradients, error = _gradients(cls, ctx, args, outs, dict(zip(floats, marks, strict=True)))
    given = WITH_BACKWARD(given, marks, operands, gradients, cls.__name__, error)
    for i, y in zip(floats, given, strict=True):
        outs[i] = y
    return tuple(outs) if isinstance(result, tuple) else outs[0]


def _gradients(
    cls: Any, ctx: Any, args: Sequence[Any], outs: Sequence[Any], marks: dict[int, Any]
) -> tuple[list[Any], str]:
    try:
        found = cls.backward(ctx, *[marks.get(i) for i in range(len(outs))])
    except Exception as error:  # whatever a user's function raises
        return [], f"{type(error).__name__}: {error}".splitlines()[0]
    found = found if isinstance(found, tuple) else (found,)
    return [g for x, g in zip(args, found, strict=False) if _is_float_tensor(x)], ""


def backward_passes(graph: Any) -> dict[Node, list[Node]]:
    """Returns for each call of :data:`WITH_BACKWARD` the operations of its backward pass."""
    return {n: _only_for(n) for n in graph.nodes if n.target is WITH_BACKWARD}


def deferred(passes: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Returns the operations that only the backward passes of custom functions need."""
    return {n for call, own in passes.items() for n in (*call.args[1], *own)}


def _only_for(call: Node) -> list[Node]:
    """Returns the operations that only the gradients of a custom function need."""
    outs, marks, operands, gradients, *_ = call.args
    kept = {*outs, *marks, *operands}
    own: dict[Node, None] = {}
    pending = [g for g in gradients if g is not None]
    while pending:
        node = pending.pop()
        if node.op != "placeholder" and node not in kept and own.keys() | {call} >= {*node.users}:
            own[node] = None
            pending.extend(node.all_input_nodes)
    return [n for n in call.graph.nodes if n in own]


def differentiated(
    node: Node,
    inner: Sequence[Node],
    read: Callable[[Node], Any],
    compute: Callable[[Node, Callable[[Node], Any]], Any],
    wrap: Callable[..., Any],
) -> list[Any]:
    """Returns the results of a custom function, with its own derivative; ``wrap`` is
    :func:`derivative_of_jax` or :func:`derivative_of_torch`."""
    outs, marks, operands, gradients, name, error = node.args
    needed = [g for g in gradients if g is not None]
    needed += [n for x in inner for n in x.all_input_nodes]
    own = {*inner, *marks}
    reads = [n for n in dict.fromkeys(needed) if n not in own]

    def pull(captured: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        if error:
            raise DerivativeError(f"the backward pass of {name} can't be traced: {error}")
        known = dict(zip((*reads, *marks), (*captured, *cotangents), strict=True))
        with own_lines():
            for n in inner:
                known[n] = compute(n, known.__getitem__)
        return [g and known[g] for g in gradients or [None] * len(operands)]

    return list(wrap(pull, *([read(n) for n in nodes] for nodes in (outs, operands, reads))))


def derivative_of_jax(pull: Callable[..., list[Any]], *values: Any) -> Any:
    @jax.custom_vjp
    def call(outs: Any, operands: Any, captured: Any) -> Any:
        return outs

    def backward(kept: Any, cotangents: Any) -> Any:
        operands, captured = kept
        found = zip(operands, pull(captured, cotangents), strict=True)
        return None, [jnp.zeros_like(x) if g is None else g.astype(x.dtype) for x, g in found], None

    call.defvjp(lambda outs, *kept: (outs, kept), backward)
    return call(*values)


def derivative_of_torch(
    pull: Callable[..., list[Any]], outs: Any, operands: Any, captured: Any
) -> Any:
    return _InTorch.apply(functools.partial(pull, captured), len(outs), *outs, *operands)


class _InTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pull: Any, count: int, *tensors: Any) -> Any:
        ctx.pull, ctx.count = pull, count
        return tuple(y.clone() for y in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, None, *[None] * ctx.count, *ctx.pull(cotangents)


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
