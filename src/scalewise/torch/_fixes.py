"""Fixes of an audit in torch's terms: the lines to edit, and a module that computes with them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .._output import place
from ..auditing import FP32_MAX, Edit, Fix, FormatChoice, TableEmulation
from ..interpret import Equation, is_float
from ..primitives import having
from ..rounding import FP32_PARAMS, format_params, is_wide
from ._arguments import as_module
from ._autocast import autocast
from ._convert import is_limit, is_narrow, jax_dtype, to_torch
from ._derivatives import (
    GRADIENT,
    backward_passes,
    deferred,
    derivative_of_torch,
    differentiated,
    gradient,
)
from ._edits import CASTS, STRICT, Line, edits, operation_of
from ._export import CONVERSIONS, Exported, is_marked
from ._function import tensors_of
from ._graph import to_dtype
from ._place import frames, is_of_torch, marked
from ._reference import BY_RUN
from ._registry import evaluated
from ._torch import Module, Node, Tensor, torch

SCALED = "call (loss * {0}).backward(), and divide the gradients by {0} in float32"
SCALER = "train with torch.amp.GradScaler('cuda', init_scale={0})"
# Names of torch for primitives of JAX.
NAMES = {
    "dot_general": "matmul", "conv_general_dilated": "convolution", "logistic": "sigmoid",
    "reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin", "select_n": "where",
    "convert_element_type": "to", "_to_copy": "to", "integer_pow": "pow", "iota": "arange",
}  # fmt: skip
MOVES = having("exact") | having("indexes")
SHOWN = 4  # names that are printed


class TorchEmulation(TableEmulation):
    """The audit's emulation of a torch model, for which only fixes that torch has are tried."""

    unwanted_fixes: ClassVar[frozenset[str]] = frozenset(("norm", "rewrite"))

    def is_low(self, aval: Any) -> bool:
        return aval.dtype == self.low_dtype

    def params_of(self, aval: Any) -> np.ndarray:
        """Returns the format of an array: of another 16-bit dtype, which the program names, its
        own."""
        named = is_narrow(aval.dtype) and not self.is_low(aval)
        return format_params(aval.dtype) if named else super().params_of(aval)

    def own_params(self, equation: Equation) -> np.ndarray | None:
        own = super().own_params(equation)
        floats = [a for a in equation.out_avals if is_float(a)]
        return (
            own if own is None else self.params_of(floats[0]) if is_narrow(floats[0].dtype) else own
        )


@dataclasses.dataclass(frozen=True, eq=False)
class AuditedModel:
    """The program of an audit, and the exported model that it was made from."""

    exported: Exported  # the model in the narrow dtype; in its own dtypes under autocast
    constants: Mapping[str, Any]  # by placeholder, its value in the float32 model
    dtype: Any  # the narrow dtype, of torch
    program: Callable[[], Any]  # returns the traced program
    autocast: bool

    @functools.cached_property
    def nodes(self) -> dict[str, Node]:
        return {n.name: n for n in self.exported.graph_module.graph.nodes}

    def name_of(self, node: Node) -> str:
        """Returns the name of what a node computes, or holds: a parameter, a buffer, an input."""
        exported, name = self.exported, node.name
        if name in exported.inputs:
            return f"input {exported.inputs.index(name)}"
        return exported.weights.get(name) or exported.buffers.get(name) or name

    @functools.cached_property
    def names(self) -> list[str]:
        """For each equation of the program, the operation, parameter or input that it computes."""
        return [marked(eqn) for eqn in self.program().jaxpr.jaxpr.eqns]

    def reader(self, name: str) -> tuple[str, int, str] | None:
        """Returns the line that first computes with a parameter, a buffer or an input, and its
        function; None of an operation."""
        placeholders = (x for x in self.nodes.values() if x.op == "placeholder")
        pending = [x for x in placeholders if self.name_of(x) == name]
        while pending:
            for node in pending.pop(0).users:
                if getattr(node.target, "is_view", False):
                    pending.append(node)
                elif places := frames(node):
                    return places[-1]
        return None

    @functools.cached_property
    def backward(self) -> dict[Node, list[Node]]:
        return backward_passes(self.exported.graph_module.graph)

    @functools.cached_property
    def scalars(self) -> dict[tuple[str, int], set[str]]:
        """By file and line, operations whose first operand has no axes, and another one has."""
        found: dict[tuple[str, int], set[str]] = {}
        for node in self.nodes.values():
            read = node.all_input_nodes
            values = [n.meta["val"] for n in read if isinstance(n.meta.get("val"), torch.Tensor)]
            first = values and read[0] is node.args[0] and not values[0].ndim
            if first and any(x.ndim for x in values) and (places := frames(node)):
                found.setdefault(places[-1][:2], set()).add(operation_of(node))
        return found

    def casts(
        self, names: Collection[str], out_of_range: Collection[str], indices: Any
    ) -> dict[tuple[str, int], dict[str, str]]:
        """Returns by file and line operations, and the method that casts their operands.

        Args:
            names: the operations, parameters and inputs that are computed in float32.
            out_of_range: those of them whose numbers the narrow dtype can't hold.
            indices: see ``AuditedArithmetic``.
        """
        rounded = self.rounded(indices)
        float32, beyond = set[Node](), set[Node]()  # of the second, 16 bits may not hold numbers
        places: dict[tuple[str, int], dict[str, str]] = {}
        for node in self.nodes.values():
            operation, read, name = operation_of(node), {*node.all_input_nodes}, self.name_of(node)
            how = "float" if name in names else ""
            if not how and not self.autocast and float32 & read:
                if operation in STRICT:
                    how = "float" if beyond & read else CONVERSIONS[self.dtype]
                else:
                    how = "promotes" if _promotes(float32 & read, read) else "float"
            leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
            narrow = any(getattr(x, "dtype", None) == self.dtype for x in leaves)
            if how == "float" or (how == "promotes" and narrow and operation not in CASTS):
                float32.add(node)
                if name in out_of_range or (node.name not in rounded and beyond & read):
                    beyond.add(node)
            if node.op == "placeholder" and name == node.name:  # a constant has the line of its use
                node, operation = next(iter(node.users), node), "tensor"
            if how and how != "promotes" and (found := frames(node)):
                casts = places.setdefault(found[-1][:2], {})
                casts[operation] = how if how == "float" else casts.get(operation, how)
        return places

    def named(self, paths: Iterable[tuple[int, ...]]) -> dict[str, None]:
        """Returns what the equations at some paths compute, without repetitions."""
        return dict.fromkeys(self.names[path[0]] for path in paths if self.names[path[0]])

    def rounded(self, indices: Mapping[tuple[int, ...], tuple[int, str]]) -> dict[str, None]:
        """Returns what has equations that round; others move numbers, also by order and choice."""
        return self.named(path for path, (_, name) in indices.items() if name not in MOVES)


@dataclasses.dataclass(frozen=True, eq=False)
class TorchFix(Fix):
    """A fix with the lines of torch that it edits."""

    audited: AuditedModel | None = dataclasses.field(default=None, repr=False)  # the program
    out_of_range: bool = False  # whether the narrow dtype can't hold what the fix computes

    def apply(self, target: Any) -> Any:
        """Returns the audited model, or function, with this fix: a module that torch computes.

        The module runs the exported model in its narrow dtype, with the fix's operations in
        float32. It has the model's parameters, which it converts at each call, and takes arguments
        of the audited shapes.

        Raises:
            TypeError: a loss scale, which isn't a change of the model.
        """
        target = as_module(target)
        assert self.origin is not None
        assert self.audited is not None
        if self._scaled:
            raise TypeError(f"fix.apply: a loss scale is no change of a model: {self._scaled}")
        audited = self.audited
        if self.kind is not None and self.kind.name == "wider_format":
            if not audited.autocast:
                return copy.deepcopy(target).bfloat16()
            audited = dataclasses.replace(audited, dtype=torch.bfloat16)
        now = target.now if isinstance(target, FixedModel) else self.origin.start
        assert now is not None
        model = target.model if isinstance(target, FixedModel) else target
        return FixedModel(model, audited, self.origin.indices, self.change(now))

    @property
    def _scaled(self) -> str:
        """How a loss is scaled, if that is the fix."""
        if self.kind is None or self.kind.name != "loss_scale":
            return ""
        return (SCALER if self._autocast else SCALED).format(f"2**{self.power}")

    @property
    def _autocast(self) -> bool:
        return self.audited is not None and self.audited.autocast

    @property
    def _dtype(self) -> Any:
        """The dtype in which the fix computes."""
        if self.origin is None or self.origin.start is None or not self.indices:
            return torch.float32
        formats = self.change(self.origin.start).formats[list(self.indices)]
        return wide_dtype(formats)

    @functools.cached_property
    def names(self) -> list[str]:
        """The operations, parameters and inputs that the fix computes in float32."""
        if self.audited is None or self.origin is None or not self.indices:
            return []
        chosen = set(self.indices)
        found = (path for path, (index, _) in self.origin.indices.items() if index in chosen)
        return [*self.audited.named(found)]

    @property
    def held(self) -> list[str]:
        """The parameters, buffers and inputs among them, which no line computes."""
        known = {BY_RUN, *(self.audited.nodes if self.audited is not None else ())}
        return [name for name in self.names if name not in known]

    @property
    def headline(self) -> str:
        return self._kept() or in_torchs_names(super().headline)

    def _kept(self) -> str:
        """Returns which parameters, buffers and inputs stay in float32, and which lines run in it;
        "" where only lines do."""
        held, places = self.held, []
        if not held or self.audited is None:
            return ""
        for found in (frames(self.audited.nodes[x]) for x in self.names if x not in held):
            places += [place(*found[-1][:2])] if found else []
        lines = f"float32 for {', '.join(dict.fromkeys(places))}: " if places else ""
        more = ", ..." if len(held) > SHOWN else ""
        return f"{lines}keep {', '.join(held[:SHOWN])}{more} in float32"

    def __str__(self) -> str:
        if self._scaled:
            return f"{self.text}: {self._scaled}"
        if self.kind is not None and self.kind.name == "wider_format":
            how = "torch.autocast('cuda', torch.bfloat16)" if self._autocast else "model.bfloat16()"
            return f"{self.text}: {how}"
        return self._kept() or in_torchs_names(self.text)


def wide_dtype(formats: Iterable[np.ndarray]) -> Any:
    """Returns the dtype that holds the numbers of the widest of some formats of 32 bits or more."""
    return torch.float64 if any(x[0] > FP32_PARAMS[0] for x in formats) else torch.float32


class FixedModel(torch.nn.Module):
    """A model in a narrow dtype with some operations in float32, as torch computes it; none without
    ``now``."""

    def __init__(
        self, model: Module, audited: AuditedModel, indices: Any, now: FormatChoice | None
    ):
        super().__init__()
        self.model = model
        self.audited, self.indices, self.now = audited, indices, now
        self._rounded = audited.rounded(indices)
        formats, constants = (now.formats, now.constants) if now is not None else ([], ())
        wide = {p: formats[i] for p, (i, _) in indices.items() if is_wide(formats[i])}
        self._wide, self._dtype = audited.named(wide), wide_dtype(wide.values())
        self._numbers = {old: new for old, new in constants if old != new}

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedModel:
        model = copy.deepcopy(self.model, memo)
        return FixedModel(model, self.audited, self.indices, self.now)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a fixed model isn't pickled: save the model's state_dict, and fix it again"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exported = self.audited.exported
        held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        values = dict(exported.values)
        values |= {n: x for n, x in self.audited.constants.items() if n in self._wide}
        known: dict[str, Any] = {n: to_torch(x) for n, x in values.items()}
        for placed in (exported.weights, exported.buffers):
            known |= {n: self._narrowed(name, held[name]) for n, name in placed.items()}
        tensors = enumerate(tensors_of(args, kwargs))
        inputs = [self._narrowed(f"input {i}", x) for i, x in tensors]
        known |= dict(zip(exported.inputs, inputs, strict=True))
        graph = exported.graph_module
        given = [known.get(n.name) for n in graph.graph.nodes if n.op == "placeholder"]
        outs = evaluated(graph, given, self._result, {}, deferred(self.audited.backward))
        return torch.utils._pytree.tree_unflatten(outs[len(exported.updated) :], exported.tree)

    def _narrowed(self, name: str, x: Tensor) -> Tensor:
        low = x.dtype == torch.float32 and name not in self._wide and not self.audited.autocast
        return x.to(self.audited.dtype) if low else x

    def _result(self, node: Node, read: Callable[[Node], Any]) -> Any:
        """Returns an operation's result: in float32 if it, or an operand, is so under the fix."""
        if node.op == "get_attr":
            return functools.reduce(getattr, node.target.split("."), node.graph.owning_module)
        if node.target is GRADIENT:
            return gradient(
                node, read, self._result, torch.func.vjp, torch.Tensor.detach, torch.Tensor.to
            )
        if node in self.audited.backward:
            own = self.audited.backward[node]
            return differentiated(node, own, read, self._result, derivative_of_torch)
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), read)
        here = node.name in self._wide
        if self.audited.autocast and not (here or is_marked(node, "no_autocast")):
            args, kwargs = autocast(
                node.target, args, kwargs, jax_dtype(self.audited.dtype), to_dtype
            )
        elif not here and not self._reads_wide(node, read):
            if not self._numbers:
                return _called(node, args, kwargs)
        else:
            args, kwargs = torch.utils._pytree.tree_map(self._widened, (args, kwargs))
        change = self._number_in_float32 if here else self._number
        args, kwargs = torch.utils._pytree.tree_map(change, (args, kwargs))
        outs = _called(node, args, kwargs)
        if here or node.name not in self._rounded or self.audited.autocast:
            return outs
        leaves, tree = torch.utils._pytree.tree_flatten(outs)
        types = [
            getattr(x, "dtype", None) for x in torch.utils._pytree.tree_leaves(node.meta["val"])
        ]
        cast = [
            y.to(d) if isinstance(y, torch.Tensor) and y.dtype != d else y
            for y, d in zip(leaves, types, strict=True)
        ]
        return torch.utils._pytree.tree_unflatten(cast, tree)

    def _reads_wide(self, node: Node, read: Callable[[Node], Any]) -> bool:
        def widened(n: Node) -> bool:
            own = n.meta.get("val")
            x = read(n) if isinstance(own, torch.Tensor) else None
            return x is not None and x.dtype == self._dtype != own.dtype

        return any(map(widened, node.all_input_nodes))

    def _widened(self, x: Any) -> Any:
        narrow = {self.audited.dtype, torch.float16, torch.bfloat16}
        if isinstance(x, torch.Tensor):
            return x.to(self._dtype) if x.dtype in narrow else x
        return self._dtype if isinstance(x, torch.dtype) and x in narrow else x

    def _number(self, x: Any) -> Any:
        if not isinstance(x, float):
            return x
        new = self._numbers.get(x, self._numbers.get(float(np.float32(x)), x))
        return float(np.copysign(min(abs(new), FP32_MAX), new))

    def _number_in_float32(self, x: Any) -> Any:
        """Returns a number of a line in float32, where a dtype's limit is float32's."""
        limit = is_limit(x, self.audited.dtype)
        return float(np.copysign(FP32_MAX, x)) if limit else self._number(x)


def _promotes(float32: set[Node], read: set[Node]) -> bool:
    """Returns whether torch computes in float32 if some of the operands are so: arrays without axes
    don't count beside others."""
    ranks = {n: n.meta["val"].ndim for n in read if isinstance(n.meta.get("val"), torch.Tensor)}
    return any(ranks.get(n) for n in float32) or not any(ranks.values())


def _called(node: Node, args: Any, kwargs: Any) -> Any:
    """Calls an operation; a view is a reshape, since a fix changes how results are laid out."""
    view = node.target is torch.ops.aten.view.default
    return (torch.ops.aten.reshape.default if view else node.target)(*args, **kwargs)


def in_torchs_names(text: str) -> str:
    def name(found: re.Match[str]) -> str:
        own, backward, _ = found[0].removeprefix("aten.").partition("_backward")
        return NAMES.get(own, own) + backward

    return re.sub(r"[\w.]+", name, text)


def _changed(fixes: Sequence[Fix], now: Any) -> Any:
    return functools.reduce(lambda now, fix: fix.change(now), fixes, now)


def in_torch(report: Any, audited: AuditedModel) -> Any:
    """Returns a report whose findings have torch's names, and fixes in its terms."""

    def one(finding: Any) -> Any:
        fix = finding.fix
        if fix is not None:
            held = {f.name: getattr(fix, f.name) for f in dataclasses.fields(Fix)}
            beyond = finding.kind in ("overflow", "underflow", "nan")
            fix = TorchFix(**held, audited=audited, out_of_range=beyond)
        primitive = in_torchs_names(finding.primitive)
        found = dataclasses.replace(finding, fix=fix, primitive=primitive)
        if (read := reader(finding)) is None:
            return found
        file, line, function = read
        source = linecache.getline(file, line).strip()
        return dataclasses.replace(found, file=file, line=line, function=function, source=source)

    def reader(finding: Any) -> tuple[str, int, str] | None:
        paths = [p for p, (i, _) in report.origin.indices.items() if i in finding.equations]
        places = [audited.reader(name) for name in audited.named(paths)]
        return places[0] if places and None not in places else None

    def as_one(some: Sequence[Any]) -> Any:
        """Returns one finding of a line of which several have the same edit, with all their fixes:
        that of an operation, rather than of an input or a parameter that the line reads."""
        if len(some) == 1:
            return some[0]
        first, *_ = sorted(some, key=lambda x: reader(x) is not None)
        fixes, last = [x.fix for x in some], some[-1]
        fix = dataclasses.replace(
            first.fix, text=f"{first.fix.word} for line {first.line}", all_lines="",
            change=functools.partial(_changed, fixes),
            indices=tuple(dict.fromkeys(i for fix in fixes for i in fix.indices)),
        )  # fmt: skip
        return dataclasses.replace(
            first, fix=fix, order=some[0].order, error_before=some[0].error_before,
            non_finite_before=some[0].non_finite_before, error_after=last.error_after,
            non_finite_after=last.non_finite_after,
        )  # fmt: skip

    findings, unfixed = ([one(x) for x in own] for own in (report.findings, report.unfixed))
    written = _written([x.fix for x in findings if x.fix is not None], audited)
    for i, finding in enumerate(findings):
        if finding.fix is not None:
            fix = dataclasses.replace(finding.fix, edits=tuple(written.pop(0)))
            findings[i] = dataclasses.replace(finding, fix=fix)
    alike: dict[Any, list[Any]] = {}
    for x in findings:
        edits = x.fix.edits if x.fix is not None else ()
        alike.setdefault((x.file, x.line, edits) if edits else id(x), []).append(x)
    found = tuple(map(as_one, alike.values()))
    return dataclasses.replace(report, findings=found, unfixed=tuple(unfixed))


def _written(fixes: Sequence[TorchFix], audited: AuditedModel) -> list[list[Edit]]:
    """Returns the edits of each fix. A line that several of them change is edited once, for all of
    them: each has that edit."""
    wide = [fix for fix in fixes if fix.names]
    if not wide:
        return [[] for _ in fixes]
    assert wide[0].origin is not None
    indices = wide[0].origin.indices
    every = {name for fix in wide for name in fix.names}
    beyond = {name for fix in wide if fix.out_of_range for name in fix.names}
    method = "double" if any(fix._dtype is torch.float64 for fix in wide) else "float"
    files: dict[str, dict[int, Line]] = {}
    for (file, n), operations in audited.casts(every, beyond, indices).items():
        numbers, scalars = (
            x.get((file, n), ()) for x in (audited.exported.numbers, audited.scalars)
        )
        if not is_of_torch(file):
            files.setdefault(file, {})[n] = Line(operations, numbers, scalars)
    found = [
        edit for file, lines in files.items()
        for edit in edits(file, lines, wide=method, autocast=audited.autocast)
    ]  # fmt: skip

    def of(fix: TorchFix) -> list[Edit]:
        own = audited.casts(fix.names, fix.names if fix.out_of_range else (), indices)
        return [x for x in found if any(
            (x.file, x.line + i) in own for i in range(len(x.before)))]  # fmt: skip

    shares = list(map(of, fixes))
    if shares:  # what only all fixes together need
        shares[0] += [x for x in found if not any(x in share for share in shares)]
    return shares
