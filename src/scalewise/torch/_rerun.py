"""Runs a model again by torch, with its functions as they are then: edited ones, for example."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..auditing import OutputError
from ._convert import to_jax, to_torch, torch_dtype
from ._emulate import LowFunction
from ._export import export, held
from ._fixes import AuditedModel, FixedModel
from ._function import as_plain, with_dtypes
from ._ran import called, measured
from ._torch import Module, Tensor, torch


@dataclasses.dataclass(frozen=True)
class Rerun:
    """Returns the error of a model's run in the narrow dtype, on the CPU or the model's device.

    Attributes:
        model, method, low: the audited ones.
        autocast: whether the model runs as under autocast: then it is exported again, and torch
            computes the graph with the lists of its CUDA backend.
        loss: a JAX function of the results, or None.
        grad: whether the outputs are the loss and its gradients.
        factor, unscaled: of a loss scale, and what divides gradients by it.
        kept: names of parameters, buffers and inputs that stay in float32.
    """

    model: Module
    method: str
    low: LowFunction
    autocast: bool
    loss: Callable[[Any], Any] | None
    grad: bool
    factor: float
    unscaled: Callable[[Any], Any]
    kept: frozenset[str]
    references: Sequence[Sequence[Tensor]] = ()  # outputs of the model before it was edited

    def __call__(self) -> OutputError:
        references = self.references or self.with_references().references
        low = self._outputs(*self.low.low, low=True)
        return min(_error(low, wide) for wide in references)

    def with_references(self) -> Rerun:
        """Returns it with the outputs of the model as it is now, in float64 and in float32: an
        edited line has no more digits than the model in float32."""
        found, (given, dtype) = [], self.low.wide
        floats = [x for x in _leaves(given) if x.is_floating_point()]
        dtypes = dict.fromkeys({x.dtype for x in floats}, torch.float64)
        with contextlib.suppress(Exception):  # a dtype that the program names isn't the others'
            found += [self._outputs(with_dtypes(given, dtypes), torch.float64, low=False)]
        with contextlib.suppress(Exception):  # exporting tells what is wrong
            wide = self._outputs(given, dtype, low=False)
            finite = all(x.isfinite().all() for x in wide)  # only finite numbers are compared
            found += [wide] if finite or not found else []
        return dataclasses.replace(self, references=found)

    def _outputs(self, given: Any, dtype: Any, low: bool) -> list[Tensor]:
        model, named = self.model, {}
        for own in (model.named_parameters, model.named_buffers):
            named |= {name: x.data for name, x in own() if low and name in self.kept}
        with held(model, dtype), torch.set_grad_enabled(self.grad):
            for name, x in named.items():
                path, _, own = name.rpartition(".")
                module = model.get_submodule(path)
                if own in module._parameters:
                    module.get_parameter(own).data = x
                else:
                    module._buffers[own] = x
            outs = self._called(self._with_kept(given) if low else given, low)
            return self._gradients(outs) if self.grad else self._results(outs)

    def _with_kept(self, given: Any) -> Any:
        leaves, tree = torch.utils._pytree.tree_flatten(given)
        wide, _ = torch.utils._pytree.tree_flatten(self.low.wide[0])
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        for number, i in enumerate(tensors):
            if f"input {number}" in self.kept:
                leaves[i] = wide[i]
        return torch.utils._pytree.tree_unflatten(leaves, tree)

    def _called(self, given: Any, low: bool) -> Any:
        if not (low and self.autocast):
            return called(self.model, given, self.method)
        args, kwargs = given
        exported = export(self.model, args, kwargs, self.method, "operation", as_given=True)
        dtype = torch_dtype(self.low.dtype)
        audited = AuditedModel(exported, {}, dtype, lambda: None, autocast=True)
        return FixedModel(self.model, audited, {}, None)(*args, **kwargs)

    def _results(self, outs: Any) -> list[Tensor]:
        if self.loss is not None:
            outs = to_torch(self.loss(as_plain(_map(lambda x: to_jax(x.detach()), outs))))
        return [x.detach() for x in _leaves(outs)]

    def _gradients(self, outs: Any) -> list[Tensor]:
        own = [p for p in self.model.parameters() if p.requires_grad]
        floats = [x for x in _leaves(outs) if x.is_floating_point()]
        if self.loss is None:
            floats = [outs["loss"] if isinstance(outs, dict) or hasattr(outs, "loss") else outs]
            value, factors = floats[0].detach().float(), [self.factor]
        else:
            loss, arrays = self.loss, [to_jax(x.detach().float()) for x in floats]

            def of(arrays: Sequence[jax.Array]) -> jax.Array:
                left = iter(arrays)

                def of_jax(x: Tensor) -> jax.Array:
                    return next(left) if x.is_floating_point() else to_jax(x)

                return loss(as_plain(_map(of_jax, outs)))

            value, back = jax.vjp(of, arrays)
            factors, value = back(jnp.asarray(self.factor, value.dtype))[0], to_torch(value)
        cotangents = [
            torch.as_tensor(to_torch(c) if isinstance(c, jax.Array) else c).to(x)
            for c, x in zip(factors, floats, strict=True)
        ]
        found = torch.autograd.grad(
            floats, own, cotangents, allow_unused=True, materialize_grads=True
        )
        gradients = [x.float() for x in found]
        gradients = to_torch(self.unscaled([to_jax(x) for x in gradients]))
        return [value, *gradients]


def _error(low: Sequence[Tensor], wide: Sequence[Tensor]) -> OutputError:
    found = measured(low, wide)
    if found is not None:
        return OutputError(found[1], found[0])
    pairs = list(zip(low, wide, strict=True))
    differ = sum(int((a != b).sum()) for a, b in pairs)
    return OutputError(0, differ / max(sum(b.numel() for _, b in pairs), 1), decided=True)


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, change, tree)


def _leaves(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor)]
