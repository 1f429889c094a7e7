"""Derivatives of operations by torch's own engine.

torch's backward pass reads what an operation saves, mostly its result as it was rounded, and rounds
where its formulas do. Here its engine differentiates tensors that carry arrays of JAX: each
operation of the backward pass is computed by its rule, and rounds its results once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._types import PyTree
from ..interpret import is_inexact
from ._convert import jax_dtype
from ._operation import Call, Inexact, OwnTranspose, operation
from ._registry import BY_TORCH, Carrier, carried
from ._torch import Overload, torch


def with_derivative(compute: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PyTree:
    """Returns what a :class:`Computed` returns, with torch's derivative if its operation is one of
    :data:`BY_TORCH`."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=lambda x: x is None)
    at = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Array))
    arrays = [leaves[i] for i in at]
    floats = any(map(is_inexact, arrays)) and not any(map(jnp.iscomplexobj, arrays))
    if compute.target not in BY_TORCH or not floats:
        return compute(*args, **kwargs)
    call = Call(compute, tree, tuple(None if i in at else x for i, x in enumerate(leaves)), at)
    function = jax.custom_jvp(call)

    def jvp(arrays: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        y, name = function(*arrays), f"{compute.target._opname}_jvp"
        moving = tuple(i for i, t in enumerate(tangents) if type(t) is not SymbolicZero)
        given = (tangents[i] for i in moving)
        (t,) = operation(name, ByTorch(Inexact(call), moving), [y.dtype], *arrays, y, *given)
        return y, t

    function.defjvp(jvp, symbolic_zeros=True)
    return function(*arrays)


class ByTorch(OwnTranspose):
    """A tangent of an operation, whose operands are followed by its result; its transpose is
    torch's backward pass."""

    def at(self, operands: Sequence[jax.Array]) -> Any:
        return super().at(operands[:-1])

    def pulled(self, operands: Sequence[jax.Array], given: Sequence[jax.Array]) -> list[jax.Array]:
        call = self.function.function

        def compute(target: Overload, dtypes: Any, args: Any, kwargs: Any) -> Any:
            types = tuple(map(jax_dtype, dtypes))
            own = dataclasses.replace(call.rule, target=target, dtypes=types)
            return with_derivative(own, args, kwargs)

        with torch.inference_mode(False), torch.enable_grad():
            tensors = [Carrier.of(x, compute, i in self.moving) for i, x in enumerate(operands)]
            leaves = list(call.static)
            for i, x in zip(call.at, tensors, strict=False):
                leaves[i] = x
            args, kwargs = jax.tree.unflatten(call.tree, leaves)
            out = call.rule.target(*args, **kwargs)
            out.held[:] = tensors[-1].held  # as the forward pass rounded it
            found = torch.autograd.grad(
                out, [tensors[i] for i in self.moving], Carrier.of(given[0], compute),
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        return [*map(carried, found)]
