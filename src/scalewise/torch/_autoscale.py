"""``autoscale``: a torch module whose forward and backward pass run under a recipe."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import autoscaling
from .._resolve import resolve
from ..autoscaling import Recipe, RecipeLike
from ._arguments import as_module, check_inputs
from ._convert import to_jax, to_torch
from ._export import Exported, export
from ._function import tensors_of
from ._graph import draws, run, torchs_seed
from ._torch import Module, Tensor, torch


def autoscale(model: Module, recipe: RecipeLike = "fp16") -> Any:
    """Returns a module that computes what ``model`` does, forward and backward, under a recipe.

    It is an instance of the model's class, and has the model's own parameters, buffers, submodules
    and names: an optimizer, a scheduler, ``clip_grad_norm_``, ``state_dict``,
    ``DistributedDataParallel`` and the training loop stay. ``model`` itself isn't changed, and
    shares the parameters. Calls run the program of :func:`scalewise.autoscale`, compiled by JAX for
    each new set of shapes, and ``backward`` its derivative; tensors pass by DLPack.

    Args:
        model: a ``torch.nn.Module``. Tensors that it has besides parameters and buffers are
            constants.
        recipe: a :class:`scalewise.Recipe`, or the name of one. Roundings and dropout draw from
            torch's generator, as ``torch.manual_seed`` determines it.

    Returns:
        A module. Its results are those of the model, in the model's own containers; they can be
        differentiated once. Models of transformers run with ``use_cache=False``.

    Raises:
        ExportError, MissingRuleError: when it is called, as :func:`function`.
        ValueError: no recipe has that name, or its scales depend on earlier steps.

    Example:
        >>> import torch, scalewise.torch as st
        >>> model = st.autoscale(torch.nn.Linear(4, 1), "fp8")
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> loss = model(torch.ones(8, 4)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
    """
    recipe = resolve(recipe, "recipe", where="autoscale") if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"autoscale: expected a recipe, not {type(recipe).__name__}")
    if recipe.is_delayed:
        raise ValueError("autoscale: a module keeps no history of amaxes: choose a recipe whose "
                         "scales are those of each step")  # fmt: skip
    model = as_module(model)
    scaled = copy.copy(model)  # shares the dicts of parameters, buffers and submodules
    kind = type(model)
    members = {"forward": _forward(kind.forward), "__module__": kind.__module__}
    scaled.__class__ = type(kind.__name__, (kind,), members)
    vars(scaled)[_RUNNER] = _Runner(model, recipe)
    return scaled


_RUNNER = "_scalewise_runner"


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_RUNNER](self.training, args, kwargs)

    return forward


class _Runner:
    """Exports and compiles a model for the arguments that it is called with."""

    def __init__(self, model: Module, recipe: Recipe):
        self.model, self.recipe = model, recipe
        self.programs: dict[Hashable, _Program] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runner:
        return _Runner(copy.deepcopy(self.model, memo), self.recipe)

    def __call__(self, training: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        model, model.training = self.model, training
        check_inputs(args, kwargs)
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        key = (
            str(tree), tuple(m.training for m in model.modules()),
            tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves),
            tuple(p.dtype for p in model.parameters()),
        )  # fmt: skip
        if key not in self.programs:
            exported = export(model, args, kwargs, "forward", "operation")
            self.programs[key] = _Program(exported, self.recipe)
        return self.programs[key](model, tensors_of(args, kwargs))


@dataclasses.dataclass(eq=False)
class _Program:
    """A model for arguments of some shapes."""

    exported: Exported
    recipe: Recipe

    def __post_init__(self) -> None:
        exported = self.exported
        self.draws, self.count = draws(exported), len(exported.updated)
        buffers = dict.fromkeys(exported.buffers.values())
        self.names = [*exported.params, *buffers]
        *_, output = exported.graph_module.graph.nodes
        self.outs = list(output.args[0])[self.count :]

    def __call__(self, model: Module, tensors: Sequence[Tensor]) -> Any:
        held = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
        given = [*(held[name] for name in self.names), *tensors]
        needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in given)
        found = iter(_Differentiated.apply(self, needs, held, *given))
        outs = [next(found) if _is_tensor(x) else x for x in self.outs]
        return torch.utils._pytree.tree_unflatten(outs, self.exported.tree)

    def computed(self, arrays: Sequence[jax.Array], seed: jax.Array) -> Any:
        params = dict(zip(self.names, arrays, strict=False))
        outs, updated = run(self.exported, params, arrays[len(self.names) :], seed=seed)
        results = [y for x, y in zip(self.outs, outs, strict=True) if _is_tensor(x)]
        return [jnp.asarray(y) for y in results], updated

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        """Of the operands that are differentiated, the others, which are which, and a seed: returns
        the float results, what pulls their gradients back, the other results, and new buffers."""
        keyed = self.recipe.is_random
        scaled = autoscaling.autoscale(self.computed, self.recipe, keyed=keyed)

        @functools.partial(jax.jit, static_argnums=2)
        def call(moving: list[Any], still: list[Any], needs: tuple[bool, ...], seed: Any) -> Any:
            key = [jax.random.wrap_key_data(seed, impl="threefry2x32")] if keyed else []

            def of(moving: list[Any]) -> Any:
                own, others = iter(moving), iter(still)
                arrays = [next(own if needed else others) for needed in needs]
                outs, updated = scaled(*key, arrays, seed)
                floats = [y for y in outs if jnp.issubdtype(y.dtype, jnp.inexact)]
                rest = [y for y in outs if not jnp.issubdtype(y.dtype, jnp.inexact)]
                return floats, (rest, updated)

            if moving:
                floats, pull, (rest, updated) = jax.vjp(of, moving, has_aux=True)
            else:
                (floats, (rest, updated)), pull = of(moving), None
            return floats, pull, rest, updated

        return call

    @functools.cached_property
    def backward(self) -> Callable[..., Any]:
        return jax.jit(lambda pull, cotangents: pull(cotangents)[0])


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.fx.Node)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: _Program, needs: tuple[bool, ...], held: dict[str, Any], *given: Any
    ) -> Any:
        moving, still = ([to_jax(x) for x, n in zip(given, needs, strict=True) if n is kind]
                         for kind in (True, False))  # fmt: skip
        seed = torchs_seed()
        floats, ctx.pull, rest, updated = program.forward(moving, still, needs, seed)
        for name, value in updated.items():
            held[name].copy_(to_torch(value))
        left = {True: iter(floats), False: iter(rest)}
        outs = []
        for node in filter(_is_tensor, program.outs):
            dtype = node.meta["val"].dtype
            inexact = dtype.is_floating_point or dtype.is_complex
            # a copy, since the backward pass may read the results, and users write to them
            outs.append(to_torch(next(left[inexact])).to(dtype, copy=True))
        ctx.program, ctx.needs = program, needs
        ctx.mark_non_differentiable(*(y for y in outs if not y.dtype.is_floating_point))
        ctx.types = [y.dtype for y in outs if y.dtype.is_floating_point]
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = [to_jax(c) for c in cotangents if c.dtype.is_floating_point]
        found = iter(ctx.program.backward(ctx.pull, given))
        gradients, seen = [], set[int]()
        for needed in ctx.needs:
            g = to_torch(next(found)) if needed else None
            if g is not None and g.data_ptr() in seen:  # the optimizer writes to each
                g = g.clone()
            seen |= {g.data_ptr()} if g is not None else set()
            gradients.append(g)
        return None, None, None, *gradients
