"""The rules: for each ATen overload, the JAX function that computes it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._types import PyTree
from ._convert import to_jax, torch_dtype
from ._torch import Node, Overload, torch

# operations of our own, which stand in an export for what torch doesn't trace
LIBRARY = torch.library.Library("scalewise", "DEF")

RULES: dict[Overload, Callable[..., PyTree]] = {}
"""By overload (``torch.ops.aten.exp.default``): a function of JAX arrays and Python values."""

# By overload whose rule may draw random numbers: of its arguments, whether it does. The rule then
# takes ``seed``, uint32[2], which differs between the operations of a program.
DRAWS: dict[Any, Callable[..., PyTree]] = {}
# operations whose arguments are graphs; their rules get what computes one first
WITH_GRAPHS: set[Any] = set()
# overloads whose derivative is computed by torch's own engine (see ``_autograd``)
BY_TORCH: set[Overload] = set()
# overloads whose rule calls :func:`operation` for each of its roundings by itself
STAGED: set[Overload] = set()
# overloads that torch computes by several operations or in the operands' own arithmetic, so that
# each step of their rule rounds its result
IN_STEPS: set[Overload] = set()


def rule(*overloads: Overload) -> Callable[[Callable], Callable]:
    """Returns a decorator that registers a function as the rule of ATen (or custom) overloads.

    The function gets what the overload gets, JAX arrays in place of tensors, and returns the arrays
    that the overload returns. It may use any JAX function; its results are cast to the dtypes that
    torch says they have. Unless the granularity is ``"decomposed"``, its float operands are float32
    if it takes several roundings, and its results are rounded once. A later rule replaces an
    earlier one.

    Args:
        overloads: such as ``torch.ops.aten.exp.default``.

    Raises:
        TypeError: an argument is no overload, for example ``torch.ops.aten.exp``.

    Example::

        @scalewise.torch.rule(torch.ops.aten.trace.default)
        def trace(x):
            return jnp.sum(jnp.diagonal(x))
    """
    for overload in overloads:
        if isinstance(overload, torch._ops.OpOverloadPacket):
            names = ", ".join(overload.overloads())
            raise TypeError(f"rule takes overloads, not {overload}; expected one of its {names}")
        if not callable(overload):
            raise TypeError(f"rule takes overloads such as torch.ops.aten.exp.default: {overload}")

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


def rules(table: Mapping[Any, Callable]) -> None:
    """Registers the rule of each overload, or of each of several in a tuple."""
    for overloads, function in table.items():
        rule(*(overloads if isinstance(overloads, tuple) else (overloads,)))(function)


def rule_of(target: Any) -> Callable[..., PyTree] | None:
    """Returns the rule of an operation. torch itself computes constants: ranges, ``ones``, ``eye``
    and others without operands."""
    if target in RULES or not isinstance(target, torch._ops.OpOverload):
        return RULES.get(target)
    reads = any("Tensor" in str(argument.type) for argument in target._schema.arguments)
    if reads or not target._schema.returns or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return lambda *args, **kwargs: to_jax(target(*args, **kwargs))


tree_map, tree_flatten = torch.utils._pytree.tree_map, torch.utils._pytree.tree_flatten
DECOMPOSITIONS = torch._decomp.global_decomposition_table["post_autograd"]


def steps_of(target: Overload) -> Callable[..., Any] | None:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if target.has_kernel_for_dispatch_key(composite):
        return target.decompose
    return DECOMPOSITIONS.get(target)


def decomposed(target: Overload, *args: Any, **kwargs: Any) -> PyTree:
    """Computes an operation by the rules of those that torch decomposes it to."""
    steps = steps_of(target)
    assert steps is not None, target

    def rounded_nowhere(target: Overload, dtypes: Any, args: Any, kwargs: Any) -> Any:
        function = rule_of(target)
        assert function is not None
        return function(*args, **kwargs)

    def tensor(x: Any) -> Any:
        return Carrier.of(x, rounded_nowhere) if isinstance(x, jax.Array | np.ndarray) else x

    args, kwargs = tree_map(tensor, (args, kwargs))
    with torch.no_grad():
        return tree_map(carried, steps(*args, **kwargs))


class Carrier(torch.Tensor):
    """A tensor that carries an array of JAX: what torch calls of it is computed by rules, when the
    array is first read.

    ``held`` is what aliases share: what returns the array, which is replaced where torch writes
    into the tensor. ``compute`` returns an operation's results from its overload, their dtypes and
    its arguments.
    """

    held: list[Callable[[], Any]]
    compute: Callable[[Overload, Any, Any, Any], Any]
    __repr__ = object.__repr__  # torch's reads numbers

    @staticmethod
    def __new__(cls, shape: Any, dtype: Any, held: Any, compute: Any, moving: bool = False) -> Any:
        make = torch.Tensor._make_wrapper_subclass
        made = make(cls, tuple(shape), dtype=dtype, requires_grad=moving)
        made.held, made.compute = held, compute
        return made

    @classmethod
    def of(cls, x: Any, compute: Any, moving: bool = False) -> Any:
        return cls(x.shape, torch_dtype(x.dtype), [lambda: x], compute, moving)

    @classmethod
    def __torch_dispatch__(
        cls, target: Overload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first: Any = next(iter(args), None)
        kwargs = kwargs or {}
        if target is torch.ops.aten.detach.default:
            return cls(first.shape, first.dtype, first.held, first.compute)
        if target is torch.ops.aten.copy_.default:
            first.held[:] = args[1].to(first.dtype).expand_as(first).held
            return first
        in_place = target._schema.is_mutable and target._opname.endswith("_")
        if in_place and (own := _out_of_place(target)) is not None:
            return first.copy_(own(*args, **kwargs))
        missing = rule_of(target) is None
        if missing and (steps := steps_of(target)) is not None:
            return steps(*args, **kwargs)
        like, tree = tree_flatten(target(*tree_map(_meta, args), **tree_map(_meta, kwargs)))
        compute = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, cls)).compute
        given = tree_map(lambda x: x.held[0] if isinstance(x, cls) else x, (args, kwargs))

        @functools.cache
        def results() -> list[Any]:
            if missing:  # not raised within torch's engine, which doesn't recover
                raise MissingRuleError(f"{target}, which torch itself calls, has no rule")
            args, kwargs = hashable(tree_map(lambda x: x() if callable(x) else to_jax(x), given))
            return jax.tree.leaves(compute(target, [x.dtype for x in like], args, kwargs))

        outs = [
            cls(x.shape, x.dtype, [lambda i=i: results()[i]], compute) for i, x in enumerate(like)
        ]
        return torch.utils._pytree.tree_unflatten(outs, tree)


def _out_of_place(target: Overload) -> Overload | None:
    packet = getattr(torch.ops.aten, target._opname.removesuffix("_"))
    every = (getattr(packet, name) for name in packet.overloads())
    return next((x for x in every if _takes(x) == _takes(target)), None)


def _takes(target: Overload) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


def _meta(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def carried(x: Any) -> Any:
    """Returns the array of a tensor."""
    return x.held[0]() if isinstance(x, Carrier) else to_jax(x)


def hashable(args: Any) -> Any:
    """Returns a tree of arguments with tuples in place of lists, torch's own as well."""
    if isinstance(args, dict):
        return {name: hashable(x) for name, x in args.items()}
    return tuple(map(hashable, args)) if isinstance(args, tuple | list) else args


def evaluated(
    module: Any,
    inputs: Iterable[Any],
    compute: Callable[[Node, Callable[[Node], Any]], Any],
    known: dict[Node, Any],
    skipped: Collection[Node] = (),
) -> Any:
    """Returns the results of a graph. ``known`` gets the value of each node: ``compute`` returns
    that of an operation, from a function that reads others."""
    left = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], known.__getitem__)
        if node.op == "placeholder":
            known[node] = next(left)
        elif node not in skipped:
            known[node] = compute(node, known.__getitem__)
    raise AssertionError("a graph ends with its output")


class MissingRuleError(NotImplementedError):
    """A program has operations without a rule; the message lists all of them."""


def check_covered(targets: Iterable[tuple[Overload, str]], unknown: Sequence[str] = ()) -> None:
    missing: dict[Any, list[str]] = {}
    symbolic = list(unknown)
    for target, line in targets:
        if target in _OF_SHAPES and target not in RULES:
            symbolic.append(line)
        elif rule_of(target) is None:
            missing.setdefault(target, []).append(line)
    if symbolic and not missing:
        raise MissingRuleError(f"{symbolic[0]}: {STATIC_SHAPES}")
    if not missing:
        return
    ordered = sorted(missing, key=str)
    listed = [f"  {x} ({len(missing[x])}x, first at {missing[x][0]})" for x in ordered]
    advice = list(dict.fromkeys(filter(None, map(_unsupported, ordered))))
    if given := next((x for x in ordered if not _unsupported(x)), None):
        advice += [
            "Give each operation of fixed shapes as a JAX function:",
            f"  @scalewise.torch.rule(torch.ops.{given})",
            "  def rule(*args, **kwargs): ...",
        ]
    first = f"{len(missing)} operation{'s have' if len(missing) > 1 else ' has'} no rule:"
    raise MissingRuleError("\n".join([first, *listed, *advice]))


# Python's functions of sizes that torch.export doesn't know.
_OF_SHAPES = {operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne,
              operator.add, operator.sub, operator.mul, operator.floordiv}  # fmt: skip
STATIC_SHAPES = (
    "Shapes can't depend on numbers: keep all elements, and choose by torch.where (for indices, "
    "torch.nonzero_static(x, size=n))."
)


def _unsupported(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return "Control flow isn't supported: write both ways, and choose by torch.where."
    if torch.Tag.dynamic_output_shape in target.tags:
        return STATIC_SHAPES
    return ""
