"""Computes an exported graph: each ATen operation by its rule, at the model's source line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._autocast import autocast, listed, refusal
from ._autograd import with_derivative
from ._convert import is_limit, is_narrow, jax_dtype, torch_dtype
from ._derivatives import (
    GRADIENT,
    backward_passes,
    deferred,
    derivative_of_jax,
    differentiated,
    gradient,
)
from ._export import Exported, ExportError, Granularity, first_line, is_marked, quiet
from ._operation import (
    Call,
    in_float32,
    in_steps,
    operation,
    rounded_in_program,
    rounds_several_times,
)
from ._place import at, line_of, mark, scope_of
from ._reference import Matched, Sides
from ._registry import (
    DRAWS,
    IN_STEPS,
    RULES,
    STAGED,
    STATIC_SHAPES,
    WITH_GRAPHS,
    MissingRuleError,
    evaluated,
    hashable,
    rule_of,
)  # fmt: skip
from ._torch import Node, torch

A = torch.ops.aten
# Operations of which a Python number may be lost in a narrow dtype.
NUMBERS = {
    A.add.Tensor, A.add.Scalar, A.sub.Tensor, A.sub.Scalar, A.rsub.Scalar, A.masked_fill.Scalar,
    A.where.ScalarOther, A.where.ScalarSelf, A.where.Scalar, A.clamp.default, A.clamp_min.default,
    A.clamp_max.default,
}  # fmt: skip
# Operations of which CUDA rounds a Python number to the tensor's dtype, unlike factors and terms.
NARROWED = {
    A.pow.Tensor_Scalar, A.pow.Scalar, A.remainder.Scalar, A.fmod.Scalar, A.eq.Scalar, A.ne.Scalar,
    A.lt.Scalar, A.le.Scalar, A.gt.Scalar, A.ge.Scalar, A.hardshrink.default,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A graph of a model as a function of its placeholders' values."""

    module: Any  # the graph
    granularity: Granularity  # see :func:`function`
    low: np.dtype | None = None  # the narrow dtype of ``torch.autocast``; None without it
    matched: Matched | None = None  # the model in float32 beside this one, for the reference run
    seed: jax.Array | np.ndarray | None = None  # uint32[2], of what it draws

    def __call__(self, *inputs: Any) -> Any:
        if self.matched is None:
            return evaluated(self.module, inputs, self.computed, {}, self._deferred)
        known: dict[Node, Any] = {}
        sides = Sides(self.matched, known, self.computed)
        *nodes, output = self.module.graph.nodes
        places = (n for n in nodes if n.op == "placeholder")
        given = [sides.placeholder(n, x) for n, x in zip(places, inputs, strict=True)]
        evaluated(self.module, given, sides.value, known, self._deferred)
        return sides.outputs(output)

    @functools.cached_property
    def _positions(self) -> dict[Node, int]:
        return {node: i for i, node in enumerate(self.module.graph.nodes)}

    @functools.cached_property
    def _backward(self) -> dict[Node, list[Node]]:
        modules = [self.module]
        if self.matched is not None:
            modules.append(self.matched.exported.graph_module)
        return {n: b for m in modules for n, b in backward_passes(m.graph).items()}

    @functools.cached_property
    def _deferred(self) -> set[Node]:
        return deferred(self._backward)

    def computed(self, node: Node, read: Callable[[Node], Any]) -> Any:
        """Returns an operation's results, or an attribute of its graph, which may be the float32
        one."""
        if node.op == "get_attr":
            return functools.reduce(getattr, node.target.split("."), node.graph.owning_module)
        if node in self._backward:
            own = self._backward[node]
            compute = functools.partial(
                differentiated, node, own, read, self.computed, derivative_of_jax
            )
        elif node.target is GRADIENT:
            compute = functools.partial(gradient, node, read, self._inner)
        elif node.target in WITH_GRAPHS:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), read)
            compute = functools.partial(RULES[node.target], self._within, *args, **kwargs)
        else:
            compute = functools.partial(self._results_at, node, read)
        try:
            with jax.named_scope(scope_of(node) or "model"):
                return mark(node.name, functools.partial(at(node), compute))
        except MissingRuleError:
            raise
        except NotImplementedError as error:
            raise MissingRuleError(f"{line_of(node)}: {error}") from error
        except jax.errors.JAXTypeError as error:  # a rule needs the number that an array has
            raise MissingRuleError(f"{line_of(node)}: {STATIC_SHAPES}") from error

    def _inner(self, node: Node, read: Callable[[Node], Any]) -> Any:
        return None if node in self._deferred else self.computed(node, read)

    def _within(self, module: Any) -> Graph:
        return dataclasses.replace(self, module=module, matched=None)

    def _results_at(self, node: Node, read: Callable[[Node], Any]) -> Any:
        args, kwargs = hashable(torch.fx.node.map_arg((node.args, dict(node.kwargs)), read))
        dtypes = _dtypes(node.meta.get("val"))
        low = None if is_marked(node, "no_autocast") else self.low
        if self.low is not None and dtypes:  # operands may have other dtypes than in the export
            dtypes = _dtypes(self._results(node, args, kwargs, low))
        if low is not None:
            args, kwargs = autocast(node.target, args, kwargs, low, converted)
        if node.target in DRAWS and DRAWS[node.target](*args, **kwargs):
            if self.seed is None:
                raise ValueError(
                    f"{line_of(node)}: {listed(node.target)} draws random numbers: pass "
                    "key=jax.random.key(0), another one in each call, or call model.eval()"
                )
            own = self.matched.own.get(node, node) if self.matched is not None else node
            place = np.array([0, self._positions.get(own, 2**32 - 1)], np.uint32)
            kwargs = {**kwargs, "seed": self.seed ^ place}
        target = node.target
        compute = Computed(target, tuple(dtypes), self.granularity)
        outs = with_derivative(compute, args, kwargs)
        return jax.lax.stop_gradient(outs) if is_marked(node, "no_grad") else outs

    @staticmethod
    def _results(node: Node, args: Any, kwargs: Any, low: np.dtype | None) -> Any:
        """Returns an operation's results under autocast, or in a region without it (``low=None``),
        as torch's fake tensors."""

        def like(x: Any, fake: Any) -> Any:
            floats = isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point
            return fake.to(torch_dtype(x.dtype)) if floats else fake

        own = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        fakes = jax.tree.map(like, (args, kwargs), hashable(own), is_leaf=lambda x: x is None)
        args, kwargs = fakes
        if low is not None:
            args, kwargs = autocast(node.target, args, kwargs, low, to_dtype)
        if why := refusal(node, args, low):
            raise ExportError(f"{line_of(node)}: under torch.autocast, {why}")
        try:
            with torch.no_grad(), quiet():
                return node.target(*args, **kwargs)
        except RuntimeError as error:
            why = f"torch raises: {first_line(error)}"
            raise ExportError(f"{line_of(node)}: under torch.autocast, {why}") from error


def run(
    exported: Exported,
    params: Mapping[str, Any],
    tensors: Sequence[Any],
    low: np.dtype | None = None,
    matched: Matched | None = None,
    seed: jax.Array | np.ndarray | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the results in torch's order, and the updated buffers by name. ``params`` may have
    buffers, too, in place of the model's own."""
    known: dict[str, Any] = dict(exported.values)
    known |= {name: params[target] for name, target in exported.weights.items()}
    known |= {name: params[b] for name, b in exported.buffers.items() if b in params}
    known |= dict(zip(exported.inputs, tensors, strict=True))
    names = [n.name for n in exported.graph_module.graph.nodes if n.op == "placeholder"]
    graph = Graph(exported.graph_module, exported.granularity, low, matched, seed)
    outs = list(graph(*[known[name] for name in names if name in known]))
    updates = dict(zip(exported.updated, outs, strict=False))
    return outs[len(exported.updated) :], {name: y for name, y in updates.items() if name}


@dataclasses.dataclass(frozen=True)
class Computed:
    """An operation as a function of its arguments."""

    target: Any
    dtypes: tuple[np.dtype, ...]  # of its results
    granularity: Granularity

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return apply(self.target, args, kwargs, self.dtypes, self.granularity)


def draws(exported: Exported) -> bool:
    """Returns whether a model draws random numbers, as in training mode with dropout."""
    graphs = (m.graph for m in exported.graph_module.modules() if hasattr(m, "graph"))
    nodes = (n for graph in graphs for n in graph.nodes if n.target in DRAWS)
    return any(DRAWS[n.target](*n.args, **n.kwargs) for n in nodes)


def seed_of(key: Any) -> jax.Array:
    """Returns the seed of a JAX random key; a seed as it is."""
    is_key = jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key)
    return jax.random.bits(key, (2,), np.uint32) if is_key else key


def torchs_seed() -> np.ndarray:
    """Returns a seed from torch's generator, as ``torch.manual_seed`` determines it."""
    return torch.randint(2**32, (2,)).numpy().astype(np.uint32)


def to_dtype(x: Any, dtype: np.dtype) -> Any:
    return x.to(torch_dtype(dtype))


def converted(x: jax.Array, dtype: Any) -> jax.Array:
    target = torch.ops.aten._to_copy.default
    return apply(target, (x,), {"dtype": torch_dtype(dtype)}, [jnp.dtype(dtype)], "operation")


def _widened(args: Any) -> Any:
    """Returns an operation's arguments with float32 in place of 16-bit dtypes.

    The operation then computes in float32, and its results are rounded by an equation: a reference
    run knows the numbers before.
    """
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

    def one(x: Any) -> Any:
        return wide.get(x, x) if isinstance(x, torch.dtype) else x

    return jax.tree.map(one, args, is_leaf=_is_none)


def _dtypes(tree: Any) -> list[np.dtype]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [jax_dtype(x.dtype) for x in leaves if isinstance(x, torch.Tensor)]


def apply(
    target: Any, args: Any, kwargs: Any, dtypes: Sequence[np.dtype], granularity: Granularity
) -> Any:
    function = rule_of(target)
    assert function is not None, target
    if target in NARROWED:
        own = next(x.dtype for x in args if isinstance(x, jax.Array | np.ndarray))
        args = [_narrowed(x, own) for x in args] if is_narrow(own) else args
    if dtypes and is_narrow(dtypes[0]):
        args = _with_float_numbers(target, args, dtypes[0])
    leaves, tree = jax.tree.flatten(hashable((args, kwargs)), is_leaf=_is_none)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    at = tuple(i for i, array in enumerate(is_array) if array)
    arrays = [leaves[i] for i in at]
    static = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
    call = Call(function, tree, static, at)
    if not dtypes:
        return call(*arrays)
    if not arrays and len(dtypes) == 1 and is_narrow(dtypes[0]) and target not in DRAWS:
        args, kwargs = _widened((args, kwargs))
        made = jnp.asarray(function(*args, **kwargs))
        return rounded_in_program(made.astype(jnp.float32), dtypes[0])
    in_own_steps = granularity == "decomposed" or target in IN_STEPS
    may_be_one = arrays and not in_own_steps and target not in STAGED
    if may_be_one and rounds_several_times(
        call, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays), tuple(dtypes)
    ):
        if target in NUMBERS or any(map(is_limit, call.static)):
            call, arrays = _with_numbers(call, arrays, len(jax.tree.leaves(args, is_leaf=_is_none)))
        tree = jax.tree.structure(jax.eval_shape(call, *in_float32(arrays)))
        call = dataclasses.replace(call, static=_widened(call.static))
        name = getattr(target, "_opname", getattr(target, "__name__", str(target)))
        return jax.tree.unflatten(tree, operation(name, call, dtypes, *arrays))
    if in_own_steps and target not in STAGED and target not in DRAWS:
        tree = jax.tree.structure(jax.eval_shape(call, *in_float32(arrays)))
        outs = in_steps(call, dtypes, arrays)
    else:
        outs, tree = jax.tree.flatten(call(*arrays))
    outs = [y.astype(d) for y, d in zip(outs, dtypes, strict=True)]
    return jax.tree.unflatten(tree, outs)


def _with_float_numbers(target: Any, args: Sequence[Any], dtype: np.dtype) -> Sequence[Any]:
    """Returns arguments with floats in place of the whole numbers that a dtype can't hold, which
    JAX would round to it: torch computes with them in float32."""
    if not hasattr(target, "_schema"):
        return args
    kinds = [str(argument.type) for argument in target._schema.arguments]

    def number(x: Any, kind: str) -> Any:
        whole = type(x) is int and (kind == "Tensor" or "number" in kind)
        return float(x) if whole and float(np.asarray(x).astype(dtype)) != x else x

    return [number(x, kind) for x, kind in zip(args, kinds, strict=False)]


def _narrowed(x: Any, dtype: np.dtype) -> Any:
    """Returns a Python number that a dtype can't hold as an array in it."""
    if type(x) not in (int, float) or float(np.asarray(x).astype(dtype)) == x:
        return x
    return rounded_in_program(np.float32(x), dtype)


def _is_none(x: Any) -> bool:
    return x is None


def _with_numbers(call: Call, arrays: list[Any], count: int) -> tuple[Call, list[Any]]:
    """Returns a call whose first ``count`` arguments are operands, so that an audit sees them."""
    wide = np.float64 if any(x.dtype == jnp.float64 for x in arrays) else np.float32
    at = [i for i, x in enumerate(call.static[:count]) if isinstance(x, float)]
    static = [None if i in at else x for i, x in enumerate(call.static)]
    numbers = [wide(call.static[i]) for i in at]
    return dataclasses.replace(call, static=tuple(static), at=(*call.at, *at)), [*arrays, *numbers]
