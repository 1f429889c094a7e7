"""``torch.export`` of a model: a graph of ATen operations, its weights and its inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from .._types import PyTree, TreeDef
from ._convert import to_jax
from ._derivatives import recorded_derivatives
from ._place import is_torchs_own, line_of, line_of_error, recorded_frames
from ._registry import DECOMPOSITIONS, RULES, MissingRuleError, check_covered, rule_of
from ._torch import Dtype, GraphModule, Module, Node, Overload, torch
from .rules._losses import RecordedCTCLoss

Granularity = Literal["operation", "decomposed"]
HIGHER_ORDER = torch.ops.higher_order
_KEY = "scalewise"  # in `custom`, what decompositions keep of a node's metadata


class ExportError(ValueError):
    """``torch.export`` refuses a model; the message says why, and what to try."""


@dataclasses.dataclass(frozen=True, eq=False)
class Exported:
    """An exported model."""

    graph_module: GraphModule  # the graph of ATen operations
    params: dict[str, jax.Array]  # each parameter by its first name; tied ones are there once
    values: Mapping[str, Any]  # by placeholder, what stays: buffers, constants, Python arguments
    weights: Mapping[str, str]  # by placeholder, the name in ``params``
    inputs: Sequence[str]  # the placeholders of the tensors among the arguments, in order
    buffers: Mapping[str, str]  # by placeholder, the name of a buffer
    updated: Sequence[str]  # names of the buffers that the first results update, "" for an argument
    tree: TreeDef  # torch's structure of the results
    granularity: Granularity  # see :func:`function`
    autocasts: bool  # whether the model itself turns autocast on somewhere
    numbers: Mapping[tuple[str, int], frozenset[str]]  # by file and line, the Python numbers there


def export(
    model: Module,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    method: str,
    granularity: Granularity,
    *,
    as_given: bool = False,
    dtype: Dtype | None = None,
) -> Exported:
    """Exports a method of a model for arguments of these shapes and dtypes. ``as_given``: a branch
    that depends on numbers is the one of these arguments' numbers."""
    if granularity not in ("operation", "decomposed"):
        expected = "expected 'operation' or 'decomposed'"
        raise ValueError(f"function: granularity={granularity!r}; {expected}")
    _check_batch_norms(model)
    with held(model, dtype), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance.treespec", FutureWarning)  # torch's own
        program, *rest = _exported(model, args, kwargs, method, granularity, as_given)
        return _of_program(program, first_names(model), granularity, *rest)


def _check_batch_norms(model: Module) -> None:
    for name, m in model.named_modules():
        own = isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.track_running_stats
        if own and m.training and m.momentum is None:
            raise ExportError(
                f"{name or 'the model'}: {type(m).__name__}(momentum=None) computes its momentum "
                "from the number of batches, which torch.export can't: set a number, or call eval()"
            )


def _of_program(program: Any, first: Mapping[str, str], *rest: Any) -> Exported:
    _erase_checks(program.graph_module.graph)
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    for node in nodes:
        if node.target not in RULES:
            node.target = SAME.get(str(node.target), node.target)
    called = [(node.target, line_of(node)) for node in nodes]
    check_covered(called, [line_of(node) for node in nodes if _has_unknown_shape(node)])
    params, values, weights, buffers, inputs = {}, {}, {}, {}, []
    kinds = torch.export.graph_signature.InputKind, torch.export.graph_signature.OutputKind
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, spec.target
        if spec.kind == kinds[0].BUFFER:
            buffers[name] = target
        if spec.kind == kinds[0].PARAMETER:
            weights[name] = first.get(target, target)
            if weights[name] not in params:
                params[weights[name]] = to_jax(program.state_dict[target])
        elif target is not None:
            own = program.state_dict if target in program.state_dict else program.constants
            values[name] = to_jax(own[target])
        elif isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            inputs.append(name)
        else:
            values[name] = spec.arg.value
    updated = [
        spec.target if spec.kind == kinds[1].BUFFER_MUTATION else ""
        for spec in program.graph_signature.output_specs
        if spec.kind != kinds[1].USER_OUTPUT
    ]
    return Exported(
        program.graph_module, params, values, weights, inputs, buffers, updated,
        program.call_spec.out_spec, *rest,
    )  # fmt: skip


def _has_unknown_shape(node: Any) -> bool:
    """Returns whether a result's shape depends on numbers, as that of ``x[x > 0]`` does."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    tensors = (x for x in leaves if isinstance(x, torch.Tensor))
    return any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape)


RENORM = {torch.ops.aten.embedding_renorm.default}


def _erase_checks(graph: Any) -> None:
    """Erases what changes nothing, and what only checks of numbers need, such as that a branch is
    still the right one. torch keeps operations that raise or draw though nothing reads them."""
    A, nodes = torch.ops.aten, list(graph.nodes)
    for node in reversed(nodes):
        if node.target is A.dropout.default and not node.args[2]:  # not in training
            node.replace_all_uses_with(node.args[0])
        if node.target is A.detach.default and {n.target for n in node.users} == RENORM:
            node.replace_all_uses_with(node.args[0])  # the weight keeps its gradient
        if node.op == "call_function" and not node.users and not _writes_to_operand(node):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def first_names(model: Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _exported(
    model: Module, args: Any, kwargs: Any, method: str, granularity: str, as_given: bool
) -> tuple[Any, bool, Mapping[tuple[str, int], frozenset[str]]]:
    use_as_forward(model, method)
    try:
        with (
            torch.enable_grad(),  # so that no_grad() in it is seen
            _without_cache(model),
            recorded_frames() as numbers,
            recorded_derivatives(),
            RecordedCTCLoss(),
            without_validation(),
        ):
            program = _program(model, args, kwargs, as_given)
        return *_decomposed(program, granularity), numbers
    except ExportError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds
        raise ExportError(refusal(model, error)) from error


def _decomposed(program: Any, granularity: str) -> tuple[Any, bool]:
    autocasts = inline_regions(program.graph_module)
    keeps = granularity == "operation"
    writes = any(map(_writes_to_operand, program.graph_module.graph.nodes))
    if keeps and not (_without_rule(program) or writes):
        return program, autocasts  # decomposing would trace it again, to the same operations
    table = torch.export.default_decompositions()
    for overload in [x for x in table if rule_of(x) is not None] if keeps else ():
        del table[overload]
    with _without_effects(torch.ops.aten._linalg_check_errors.default):
        program = program.run_decompositions(table)
    more = {x: DECOMPOSITIONS[x] for x in _without_rule(program) if x in DECOMPOSITIONS}
    decomposed = program.run_decompositions({**table, **more}) if more else program
    return program if _without_rule(decomposed) else decomposed, autocasts


def _without_rule(program: Any) -> set[Any]:
    called = {n.target for n in program.graph_module.graph.nodes if n.op == "call_function"}
    return {target for target in called if rule_of(target) is None}


def _writes_to_operand(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _program(model: Module, args: Any, kwargs: Any, as_given: bool) -> Any:
    export = functools.partial(torch.export.export, model, tuple(args), dict(kwargs), strict=False)
    try:
        with quiet():
            return export()
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        if not (as_given or is_torchs_own(error)):
            raise
    # a check of a loss's arguments; BART in FP16 clamps if a number is infinite, for example
    with quiet(), torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        return export()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from printing graphs and tracebacks of what it refuses."""
    names = "fx.experimental.symbolic_shapes", "_subclasses.fake_tensor"
    with contextlib.ExitStack() as stack:
        for name in names:
            log = logging.getLogger(f"torch.{name}")
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


# Operations of libraries that compute what one of ATen does: mixtures of experts in transformers.
SAME = {"transformers.grouped_mm_fallback.default": torch.ops.aten._grouped_mm.default}


@contextlib.contextmanager
def _without_effects(overload: Overload) -> Iterator[None]:
    """Lets torch drop an operation without results: a check that raises where it runs.

    torch 2.13 registers it as an effect, and orders effects by tokens among a graph's inputs.
    """
    effects = torch._library.simple_registry.singleton.find(overload.name()).effect
    kept = effects.effect
    effects.register(None)
    try:
        yield
    finally:
        effects.register(kept)


def use_as_forward(model: Module, method: str) -> None:
    """Makes ``model.forward`` another method, until the model is no longer :func:`held`."""
    if not callable(getattr(model, method, None)):
        raise ExportError(f"{type(model).__name__} has no method {method!r}")
    own, outer = registering(getattr(model, method)), model.forward

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        model.forward = outer  # while it runs: its body may call the model
        try:
            return own(*args, **kwargs)
        finally:
            model.forward = call

    model.forward = call


# By a word of torch's message: what to do.
_STATIC = (
    "control flow must not depend on numbers: pass masks and lengths that make the branch "
    "unnecessary"
)
_FIXED = "no shape can depend on numbers: keep all elements, and choose by torch.where"
_GRADIENT = (
    "torch.export can't trace this derivative: write torch.autograd.grad, or torch.func.grad, vjp, "
    "jvp, jacrev, jacfwd or hessian"
)
_ADVICE = {
    "got FakeTensor": "shapes can't depend on numbers, such as the lengths of "
    "pack_padded_sequence: run the layer on the padded batch, and mask the steps behind each "
    "length",
    "linalg_lstsq": "write torch.linalg.pinv(a) @ b in place of torch.linalg.lstsq(a, b)",
    "aten.equal.default": "torch.equal, torch.cov and torch.corrcoef branch on numbers: write a "
    "covariance as y @ y.T / (n - 1), where y = x - x.mean(1, keepdim=True)",
    "DynamicOutputShape": _FIXED,
    "UnbackedSymbol": _FIXED,
    "Cache": "pass use_cache=False",
    "pytree": "return tensors in tuples, lists and dicts",
    "Unsupported input type": "pass tensors, alone or in tuples, lists and dicts",
    "data-dependent": _STATIC,
    "DataDependent": _STATIC,
    "program constant's list": _GRADIENT,
    "has no attribute 'constant'": _GRADIENT,
    "does not require grad": _GRADIENT,
    "scalewise::gradient": _GRADIENT,
    ".numpy()": "forward has to compute with torch, without NumPy",
    "vmap": 'set model.config._attn_implementation = "eager"',
    "ScriptModule": "pass the module that torch.jit compiled",
    "Jitted": "pass the module that torch.jit compiled",
    "references nonexistent attribute": "torch.fx has an attribute of this name: rename the "
    "submodule or tensor",
    "UnsupportedOperator": "write this operation with dense tensors",
}
LONGEST = 160  # characters of torch's message


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _without_cache(model: Module) -> Iterator[None]:
    configs: list[Any] = [getattr(m, "config", None) for m in model.modules()]
    with contextlib.ExitStack() as stack:
        for config in configs:
            if getattr(config, "use_cache", None) is True:
                stack.callback(setattr, config, "use_cache", True)
                config.use_cache = False
        yield


def refusal(model: Module, error: Exception, what: str = "torch.export refuses") -> str:
    """Returns a sentence on why torch can't use a model: the model's line, and what to do."""
    text, where = f"{type(error).__name__}: {error}", line_of_error(error)
    advice = next((advice for word, advice in _ADVICE.items() if word in text), None)
    if isinstance(error, MissingRuleError):
        advice = str(error)
    if advice is None:
        advice = first_line(error).partition(". ")[0]
        advice = f"{type(error).__name__}: {advice[:LONGEST]}"
    return f"{what} {type(model).__name__}{where}: {advice}"


def inline_regions(graph_module: GraphModule) -> bool:
    """Inlines regions that turn gradients or autocast off, and marks their nodes; ``x.detach()`` is
    one, which decomposing replaces by an alias. Returns whether a region turns autocast on: torch
    inserts its casts."""
    turned_on = False
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            _mark(node, "no_grad")
        off = _turned_off(node)
        if off is None:
            turned_on |= node.target is HIGHER_ORDER.wrap_with_autocast
            continue
        mark, graph, args = off
        inner = getattr(graph_module, graph.target)
        turned_on |= inline_regions(inner)
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        known = dict(zip(placeholders, args, strict=True))
        with graph_module.graph.inserting_before(node):
            outs = graph_module.graph.graph_copy(inner.graph, known)
        for original, copied in known.items():
            if mark is not None and original not in placeholders:
                _mark(copied, mark)
        for user in list(node.users):
            user.replace_all_uses_with(outs[user.args[1]])
            graph_module.graph.erase_node(user)
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return turned_on


def _mark(node: Node, mark: str) -> None:
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = custom | {_KEY: custom.get(_KEY, frozenset()) | {mark}}


def _turned_off(node: Node) -> tuple[str | None, Any, Any] | None:
    """Returns the mark of a region that is to be inlined, its graph and its arguments."""
    if node.target is HIGHER_ORDER.wrap_with_set_grad_enabled:
        enabled, graph, *args = node.args
        return (None if enabled else "no_grad"), graph, args
    if node.target is HIGHER_ORDER.wrap_with_autocast and not node.args[2]:
        return "no_autocast", node.args[4], node.args[5:]
    return None


def is_marked(node: Node, mark: str) -> bool:
    return mark in (node.meta.get("custom") or {}).get(_KEY, ())


CONVERSIONS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float",
               torch.float64: "double"}  # fmt: skip


@contextlib.contextmanager
def held(model: Module, dtype: Dtype | None = None) -> Iterator[None]:
    """Lets a model be converted as by ``model.half()``, and takes back all changes of its modules.

    A model that has run may not be copied: ``copy.deepcopy`` refuses tensors with a history, and
    hooks of a copy still change the original.
    """
    tensors = [(p, p.data, p.grad) for p in model.parameters()]
    attributes = [(vars(m), dict(vars(m))) for m in model.modules()]
    inside = [x for _, own in attributes for x in own.values() if isinstance(x, list | dict)]
    contents = [(x, dict(x) if isinstance(x, dict) else list(x)) for x in inside]
    try:
        if dtype is not None:
            for p, *_ in tensors:
                p.grad = None
            getattr(model, CONVERSIONS[dtype])()
        yield
    finally:
        for p, data, gradient in tensors:
            p.data, p.grad = data, gradient
        for held_now, before in [*attributes, *contents]:
            if not _holds(held_now, before):  # a configuration may refuse to be written to
                held_now.clear()
                (held_now.extend if isinstance(held_now, list) else held_now.update)(before)


def _holds(held_now: Any, before: Any) -> bool:
    """Returns whether a list or dict has the same objects as before, in the same order."""

    def items(x: Any) -> list[Any]:
        return [*x, *x.values()] if isinstance(x, dict) else x

    now, then = items(held_now), items(before)
    return len(now) == len(then) and all(map(operator.is_, now, then))


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def register_dataclasses(tree: PyTree) -> None:
    for x in torch.utils._pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            torch.export.register_dataclass(type(x))
            register_dataclasses(x)


def registering(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        outs = forward(*args, **kwargs)
        register_dataclasses(outs)
        return outs

    vars(call)["__wrapped__"] = forward  # its signature
    return call
