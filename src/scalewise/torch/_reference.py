"""The float32 model beside the one in 16 bits, as the reference run of an audit has it.

Both are exported, and their operations matched. Where the two graphs have the same operations, one
JAX program computes both models. Where they differ, since a branch, a literal or a constant depends
on the dtype, the program computes both sides, and each of an audit's runs reads its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._convert import is_limit
from ._export import Exported
from ._operation import rounded_in_program
from ._place import at, frames, line_of, mark, scope_of
from ._torch import Node, torch

A = torch.ops.aten
TARGETS = (A._to_copy.default, A.to.dtype, A.to.dtype_layout, A.to.device, A.type_as.default,
           A.lift_fresh_copy.default, A.alias.default, A.detach.default)  # fmt: skip
NODE = torch.fx.Node
UNMATCHED = ("placeholder", "output")
# A float32 number that every narrower format rounds to 1.
ABOVE_ONE = np.float32(1 + 2.0**-23)
BY_RUN = "by run"  # the mark of equations that no operation of torch stands for


def by_run(low: jax.Array, reference: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns ``low``; under an audit, its reference run gets ``reference``.

    ``dtype`` is the program's narrow one, which only the low-precision run rounds to; ``low`` may
    be float32, as the program's own casts make it.

    The predicate compares with 1 a number that only the low-precision run rounds to 1. So a fix
    that computes these lines in float32 has the float32 model's branch as well.
    """
    rounded = rounded_in_program(ABOVE_ONE, dtype)
    return jnp.where(rounded > 1, reference.astype(low.dtype), low)


@dataclasses.dataclass(frozen=True, eq=False)
class Matched:
    """Two exports of a model, in 16 bits and in float32, and the nodes that correspond."""

    exported: Exported  # the model in float32
    other: Mapping[Node, Node]  # by node of the 16-bit graph, the corresponding node
    place: Callable[[Callable[[], Any]], Any]  # calls a function from the line that constants have
    dtype: np.dtype  # the narrow dtype of the 16-bit graph

    @functools.cached_property
    def own(self) -> dict[Node, Node]:
        return {b: a for a, b in self.other.items()}

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        """By placeholder of the 16-bit graph, its value in the float32 model."""
        values = self.exported.values
        return {a.name: values[b.name] for a, b in self.other.items() if b.name in values}

    def corresponds(self, own: Node, other: Node) -> bool:
        """Returns whether two operands are the same value, apart from casts between floats."""
        return self.other.get(_uncast(own)) is _uncast(other)


def matched(low: Exported, wide: Exported, place: Any, dtype: np.dtype) -> Matched:
    other = dict(_placeholders(low, wide))
    ours, theirs = _operations(low), _operations(wide)
    blocks = difflib.SequenceMatcher(None, *map(_keys, (ours, theirs)), autojunk=False)
    for i, j, size in blocks.get_matching_blocks():
        other.update(zip(ours[i : i + size], theirs[j : j + size], strict=True))
    return Matched(wide, other, place, dtype)


def _placeholders(low: Exported, wide: Exported) -> Iterator[tuple[Node, Node]]:
    nodes = {n.name: n for n in wide.graph_module.graph.nodes if n.op == "placeholder"}
    names = dict(zip(low.inputs, wide.inputs, strict=True))
    for held in ("weights", "buffers"):
        theirs = {target: name for name, target in getattr(wide, held).items()}
        names |= {n: theirs[t] for n, t in getattr(low, held).items() if t in theirs}
    for node in low.graph_module.graph.nodes:
        name = names.get(node.name, node.name)
        if node.op == "placeholder" and name in nodes:
            yield node, nodes[name]


def _operations(exported: Exported) -> list[Node]:
    nodes = exported.graph_module.graph.nodes
    return [n for n in nodes if n.op not in UNMATCHED and not _is_cast(n) and n.users]


def _keys(nodes: list[Node]) -> list[Any]:
    return [(str(n.target), _shapes(n), scope_of(n), line_of(n)) for n in nodes]


def _shapes(node: Node) -> Any:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor))


def _is_cast(node: Node) -> bool:
    if node.target not in TARGETS:
        return False
    types = [n.meta["val"].dtype for n in (node, node.args[0])]
    return all(t.is_floating_point for t in types)


def _uncast(node: Node) -> Node:
    while _is_cast(node):
        node = node.args[0]
    return node


@dataclasses.dataclass(eq=False)
class Sides:
    """The values of both graphs while they are computed."""

    matched: Matched
    known: dict[Node, Any]  # values of the 16-bit graph
    compute: Callable[[Node, Callable[[Node], Any]], Any]  # of a node and what reads its operands
    # values of nodes that only the float32 graph has
    others: dict[Node, Any] = dataclasses.field(default_factory=dict)

    def placeholder(self, node: Node, value: Any) -> Any:
        """Returns a constant for both graphs: the float32 one, rounded here, where that is all."""
        wide: Any = self.matched.constants.get(node.name)
        if not (_is_float(value) and _is_float(wide)) or wide.dtype == value.dtype:
            return value
        with np.errstate(over="ignore"):
            rounded = np.asarray(wide).astype(value.dtype)
        name = self.matched.exported.buffers.get(self.matched.other[node].name, "")
        user = next((n for n in node.users if frames(n)), None)
        place = self.matched.place if user is None else at(user)
        with jax.named_scope("/".join(name.split(".")[:-1]) or "model"):
            if np.array_equal(rounded, np.asarray(value), equal_nan=True):
                rounding = functools.partial(rounded_in_program, wide, value.dtype)
                return place(functools.partial(mark, name or node.name, rounding))
            return place(lambda: self.joined(value, wide))

    def joined(self, low: Any, wide: Any) -> Any:
        """Returns a float array that differs between the runs; other values as in 16 bits."""
        if not _is_float(low) or not _is_float(wide) or low.shape != wide.shape:
            return low
        return mark(BY_RUN, lambda: by_run(low, wide, self.matched.dtype))

    def value(self, node: Node, read: Callable[[Node], Any]) -> Any:
        """Returns the value of a node of the 16-bit graph, the other graph's in a reference run."""
        other = self.matched.other.get(node)
        if other is None:
            return self.compute(node, read)
        ours, theirs = _leaves(node), _leaves(other)
        if len(ours) != len(theirs) or not all(map(_same, ours, theirs)):
            both = self.compute(node, read), self.compute(other, self.read_other)
            return at(node)(lambda: jax.tree.map(self.joined, *both))
        return self.compute(node, self._reader(node, other))

    def outputs(self, node: Node) -> Any:
        last = next(iter(reversed(self.matched.exported.graph_module.graph.nodes)))
        return torch.fx.node.map_arg(node.args[0], self._reader(node, last))

    def _reader(self, node: Node, other: Node) -> Callable[[Node], Any]:
        """Returns what reads a node's operands, each run its own where the graphs have others."""
        ours, theirs, changed = _leaves(node), _leaves(other), {}
        for a, b in zip(ours, theirs, strict=True) if len(ours) == len(theirs) else ():
            both = isinstance(a, NODE) and isinstance(b, NODE) and a.op != "get_attr"
            if both and not self.matched.corresponds(a, b):
                changed[a] = b

        def read(n: Node) -> Any:
            if n not in changed:
                return self.known[n]
            both = self.known[n], self.read_other(changed[n])
            return at(n)(lambda: self.joined(*both))

        return read

    def read_other(self, node: Node) -> Any:
        """Returns the value of a node of the float32 graph; computes what it needs before."""
        own = self.matched.own.get(node)
        if own is not None and own in self.known:
            return self.known[own]
        if node not in self.others:
            pending = [node]
            while pending:
                last = pending[-1]
                needed = [n for n in last.all_input_nodes if not self._is_known(n)]
                pending.extend(needed)
                if not needed:
                    self.others[last] = self._computed(last)
                    pending.pop()
        return self.others[node]

    def _is_known(self, node: Node) -> bool:
        return node in self.others or self.matched.own.get(node) in self.known

    def _computed(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.matched.exported.values[node.name]
        return self.compute(node, self.read_other)


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _leaves(node: Node) -> list[Any]:
    return torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))


def _same(a: Any, b: Any) -> bool:
    kinds = NODE, torch.dtype
    for kind in kinds:
        if isinstance(a, kind) or isinstance(b, kind):
            return isinstance(a, kind) and isinstance(b, kind)
    if isinstance(a, float) and isinstance(b, float):
        # the audit itself replaces the limits of narrow dtypes
        limits = is_limit(a) and is_limit(b, torch.float32) and a * b > 0
        return a == b or a != a or limits
    return a == b
