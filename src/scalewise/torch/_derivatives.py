"""Custom backward passes (``torch.autograd.Function``) in an exported graph.

``torch.export`` keeps the forward pass of such a function alone. While a model is exported,
``Function.apply`` is replaced by one that also runs the function's ``backward``, on marks in place
of the gradients of its results. The graph then has the operations of both, and the function's
results pass through :data:`WITH_BACKWARD`, which names the gradients of its operands.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._place import own_lines
from ._registry import LIBRARY, rule
from ._torch import Node, torch

LIBRARY.define("cotangent(Tensor x) -> Tensor")
LIBRARY.define("with_backward(Tensor[] outs, Tensor[] marks, Tensor[] operands, "
               "Tensor?[] gradients, str name, str error) -> Tensor[]")  # fmt: skip
COTANGENT = torch.ops.scalewise.cotangent.default
WITH_BACKWARD = torch.ops.scalewise.with_backward.default


LIBRARY.impl("cotangent", torch.zeros_like, "CompositeExplicitAutograd")
LIBRARY.impl(
    "with_backward", lambda outs, *rest: [y.clone() for y in outs], "CompositeExplicitAutograd"
)
rule(COTANGENT)(jnp.zeros_like)  # a graph evaluates it only to differentiate
rule(WITH_BACKWARD)(lambda outs, *rest: outs)


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
def recorded_backward() -> Iterator[None]:
    function = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return args[0](*args[2:])  # its backward pass is that of what it calls
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        return _applied(cls, args, kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


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
