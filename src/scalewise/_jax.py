"""JAX's internals: what scalewise takes from ``jax.core``, ``jax.extend`` and ``jax._src``.

Nothing else in scalewise imports them. The code looks at which attributes exist rather than
at JAX's version, so that a new release needs no table of versions. The oldest supported release is
0.10.2. :mod:`scalewise.primitives.params` reads parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config, core, dispatch, mesh
from jax._src import source_info_util as source_info_util
from jax._src.api_util import InternalFloatingPointError
from jax._src.interpreters import pxla
from jax._src.interpreters.batching import AxisData as AxisData
from jax._src.interpreters.batching import BatchTracer
from jax._src.lax import lax as lax_internal
from jax._src.state.types import AbstractRef
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.experimental.layout import Format as Format
from jax.experimental.layout import Layout as Layout
from jax.experimental.layout import with_layout_constraint as with_layout_constraint
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters.partial_eval import JaxprTracer, dce_jaxpr
from jax.sharding import AbstractMesh
from jax.typing import ArrayLike, DTypeLike

from ._types import AxisName, PyTree

Tree = TypeVar("Tree")  # of a pytree

Jaxpr: TypeAlias = Any
"""An open or closed jaxpr: ``jex.Jaxpr`` or ``jex.ClosedJaxpr``, one class since JAX 0.12."""

Parameter: TypeAlias = Any
"""The value of one of a primitive's parameters, whose type JAX chooses for each."""


# Equations have the line that calls these packages, as they have the one that calls jax.numpy.
for _own in ("ops", "layers", "scaled", "rounding", "checkpoints", "testing", "_check.py"):
    source_info_util.register_exclusion(str(Path(__file__).parent / _own))


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns the open jaxpr, and the constants, of one that is open, closed or (JAX 0.12) both."""
    consts = getattr(jaxpr, "consts", ())
    return (jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr), consts


def avals_of(variables: Iterable[jex.Var | jex.Literal]) -> list[ShapedArray]:
    """Returns the types of an equation's operands or results, or of a jaxpr's variables."""
    return [cast(ShapedArray, v.aval) for v in variables]


def anonymous(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a closed jaxpr whose equations name no source line or scope, without dead ones."""
    body, consts = open_jaxpr(jaxpr)
    body, _ = dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    info = source_info_util.new_source_info()
    eqns = [e.replace(source_info=info) for e in body.eqns]
    return jex.ClosedJaxpr(body.replace(eqns=eqns), consts)


def with_literals(jaxpr: Jaxpr, numbers: Mapping[int, np.ndarray]) -> Jaxpr:
    """Returns an open jaxpr with other numbers for the literals of those ids, in nested ones too.

    A literal keeps its type. One whose number has more bits is rounded where it is read.
    """
    made: dict[int, Jaxpr] = {}

    def atom(x: jex.Var | jex.Literal) -> jex.Var | jex.Literal:
        return jex.Literal(numbers[id(x)], x.aval) if id(x) in numbers else x

    def nested(value: Parameter) -> Parameter:
        if type(value) is tuple:  # of branches
            return tuple(map(nested, value))
        if not hasattr(value, "eqns") and not hasattr(value, "jaxpr"):
            return value
        if id(value) not in made:  # bodies that are shared stay so
            body, consts = open_jaxpr(value)
            closed = hasattr(value, "consts")
            made[id(value)] = jex.ClosedJaxpr(of(body), consts) if closed else of(body)
        return made[id(value)]

    def of(body: Jaxpr) -> Jaxpr:
        eqns = [
            e.replace(
                invars=[atom(x) for x in e.invars],
                params={name: nested(value) for name, value in e.params.items()},
            )
            for e in body.eqns
        ]
        return body.replace(eqns=eqns)

    return of(jaxpr) if numbers else jaxpr


def without_references(jaxpr: Jaxpr) -> tuple[Jaxpr, list[core.Ref], list[int]]:
    """Returns a closed jaxpr with values in place of mutable arrays (``jax.new_ref``).

    Returns:
        The jaxpr. Each mutable array among its inputs is an array now, and so are those that it
        closed over, which are further inputs. Further outputs are their values after the call.
        The mutable arrays that it closed over; and for each further output the number of its input.
    """
    held = any(isinstance(c, core.Ref) for c in jaxpr.consts)
    if held or any(isinstance(a, AbstractRef) for a in jaxpr.in_avals):
        jaxpr, _, mutable = pxla._discharge_refs(jaxpr)
        return jaxpr, mutable.in_mut, [i for i in mutable.out_mut if i is not None]
    if any(isinstance(e, core.InternalMutableArrayEffect) for e in jaxpr.effects):
        jaxpr = pxla._discharge_internal_refs(jaxpr)
    return jaxpr, [], []


def is_to_be_transposed(x: object) -> bool:
    """Returns whether ``x`` is the trace of an argument of ``jax.linear_transpose``."""
    while isinstance(x, BatchTracer):
        x = x.val
    return isinstance(x, JaxprTracer) and not x.is_known()


def is_tracing() -> bool:
    """Returns whether what is called now becomes a part of a program, rather than being run."""
    return not core.trace_state_clean()


def is_taylor_series(x: object) -> bool:
    """Returns whether ``x`` is the trace of an argument of ``jax.experimental.jet``."""
    return type(x).__name__ == "JetTracer"  # whose module isn't imported otherwise


def is_reference(x: object) -> bool:
    """Returns whether ``x`` is a mutable array, or the trace of one."""
    return isinstance(x, core.Ref) or isinstance(getattr(x, "aval", None), AbstractRef)


class provenance:
    """A context manager that gives equations traced in it ``eqn``'s scope, mesh and x64, and the
    line of a ``traceback``.

    A class, since it is entered for each equation of each run.
    """

    __slots__ = ("managers",)

    def __init__(self, eqn: jex.JaxprEqn, traceback: object):
        scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
        line = source_info_util.user_context(cast(Any, traceback), name_stack=scope)
        wide = (jax.enable_x64(True),) if _is_wide(eqn) else ()
        self.managers = (line, eqn.ctx.manager, *wide)

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error: object) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*error)


def provenance_here() -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes a context with the line and scope that equations get where it is called,
    for operations that are deferred."""
    info = source_info_util.current()
    return partial(source_info_util.user_context, info.traceback, name_stack=info.name_stack)


def line_here() -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes a context with the line that equations get where it is called."""
    return partial(source_info_util.user_context, source_info_util.current().traceback)


def at_line_of(ctx: mlir.LoweringRuleContext) -> AbstractContextManager[None]:
    """Returns a context in which traced operations get the line of the equation being lowered."""
    return source_info_util.user_context(ctx.traceback)


def _is_wide(eqn: jex.JaxprEqn) -> bool:
    """Returns whether x64 is off now, and was on when an equation with 64-bit arrays was traced."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return False
    return any(is_64_bit(v.aval) for v in eqn.outvars + eqn.invars)


def is_64_bit(x: object) -> bool:
    """Returns whether an array or abstract array has a dtype that JAX makes only with x64 on.

    The elements of complex64 and of random keys have 64 bits, too, but don't need x64.
    """
    return str(getattr(x, "dtype", "")) in ("float64", "int64", "uint64", "complex128")


def user_frames(eqn: jex.JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """Yields the stack frames outside of JAX that led to the equation, innermost first."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def user_positions(eqn: jex.JaxprEqn) -> Iterator[tuple[str, int, int, int, int]]:
    """Yields file, line, column, last line and last column of the same frames."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        start, end = (frame.start_line, frame.start_column), (frame.end_line, frame.end_column)
        yield frame.file_name, *start, *end


def entry(eqn: jex.JaxprEqn) -> str:
    """Returns the name of JAX's function that the user's code called for an equation; "" if that is
    unknown, as within JAX's own jitted functions."""
    traceback = eqn.source_info.traceback
    own = next(source_info_util.user_frames(traceback), None)
    if traceback is None or own is None:
        return ""
    called = ""
    for frame in traceback.frames:
        if (frame.file_name, frame.line_num) == (own.file_name, own.start_line):
            return called
        if frame.function_name not in _METHODS:
            called = frame.function_name
    return ""


# How a tracer's methods and JAX's scalar types call its functions.
_METHODS = "_forward_method_to_aval.<locals>.meth", "_astype", "_ScalarMeta.__call__"


def manual_now() -> frozenset[str]:
    """Returns the mesh axes that a ``shard_map`` around the caller maps over."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: ArrayLike | ShapedArray) -> frozenset[str]:
    """Returns the mesh axes over which an array or type varies, as a ``shard_map`` checks them."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    manual = getattr(aval, "mat", aval)  # JAX 0.10.2 keeps them with other manual types
    return frozenset(getattr(manual, "varying", None) or getattr(manual, "vma", ()))


def vary(value: Tree, axes: Iterable[str]) -> Tree:
    """Returns a pytree of arrays cast so that each varies over ``axes`` at least.

    Outside of a ``shard_map`` that checks what varies, returns the pytree itself.
    """
    if not axes:
        return value

    def leaf(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if a not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, value)


def gather_invariant(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Applies ``lax.all_gather``; a checking ``shard_map`` knows the result equal everywhere."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    x = per_device(x, axes)
    tracked = bool(axes) and set(axes) <= varying(x)
    return lax.all_gather(x, axis_name, to="invarying") if tracked else lax.all_gather(x, axis_name)


def per_device(tree: Tree, axis_name: AxisName) -> Tree:
    """Returns a pytree whose gradient, within a ``shard_map``, is each device's own.

    A ``shard_map`` with checks sums the gradient of what is equal on all devices.
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return vary(tree, manual_now() & set(axes))


def type_like(
    shape: Sequence[int], dtype: DTypeLike, array: object, weak: bool = False
) -> jax.ShapeDtypeStruct | ShapedArray:
    """Returns the type of an array of that shape and dtype, split over a mesh as ``array`` is."""
    if not isinstance(array, jax.Array) or array.shape != shape:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    return jax.typeof(array).update(dtype=jnp.dtype(dtype), weak_type=weak)


# Collectives of a shard_map that checks what varies over which axes, for scalewise's shard_maps
# without these checks: the program was checked when it was traced.
UNTRACKED = {
    "psum_invariant": lambda x, axes, **_: lax.psum(x, axes),
    "all_gather_invariant": lambda x, axis_name, all_gather_dimension, tiled, **_: lax.all_gather(
        x, axis_name, axis=all_gather_dimension, tiled=tiled
    ),
}


def with_common_axes(inputs: Tree) -> Tree:
    """Returns a pytree of arrays, each cast to vary over all mesh axes that one varies over.

    Within a ``shard_map`` that checks what varies, a new array (a constant, a scale) varies over no
    axis. JAX's own functions cast such arrays likewise.
    """
    if not manual_now():
        return inputs
    return vary(inputs, frozenset().union(*map(varying, jax.tree.leaves(inputs))))


def bind(
    primitive: jex.Primitive, params: dict[str, Parameter], inputs: Sequence[ArrayLike]
) -> list[jax.Array]:
    """Binds a primitive to plain arrays with an equation's parameters, and returns its results."""
    inputs = with_common_axes(inputs)
    if primitive.name in UNTRACKED and not any(map(varying, inputs)):
        return [UNTRACKED[primitive.name](*inputs, **params)]
    outs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(outs) if primitive.multiple_results else [outs]


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA splits the program that a primitive is lowered in over several devices.

    Within a ``shard_map`` over all axes of its mesh it doesn't: each device has its own arrays.

    Args:
        ctx: the context that a lowering rule gets.
    """
    axes = ctx.module_context.axis_context
    manual, split = getattr(axes, "manual_axes", frozenset()), getattr(axes, "mesh", None)
    if split is not None:
        return split.size > 1 and frozenset(split.axis_names) != frozenset(manual)
    return getattr(axes, "num_devices", None) != 1


def gpu_kernel(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    operands: Sequence[tuple[jax.Array, tuple[int, ...], tuple[int, ...] | None]],
    results: Sequence[tuple[jax.ShapeDtypeStruct, tuple[int, ...], tuple[int, ...] | None]],
    interpret: bool,
    warps: int = 4,
    stages: int = 1,
) -> list[jax.Array]:
    """Calls a Pallas kernel that Triton compiles: a function of its place in the grid and tiles.

    Each operand and result comes with the shape of its tiles, and the axes of the grid along which
    its axes are split into them; None for an array of which each program indexes what it needs.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    def specs(arrays):
        def place(order, tile):
            return lambda *at: (0,) * len(tile) if order is None else tuple(at[a] for a in order)

        return [pallas.BlockSpec(tile, place(order, tile)) for _, tile, order in arrays]

    def body(*tiles):
        kernel(tuple(map(pallas.program_id, range(len(grid)))), *tiles)

    options = triton.CompilerParams(num_warps=warps, num_stages=stages)
    call = pallas.pallas_call(
        body, [y for y, *_ in results], grid=grid, in_specs=specs(operands),
        out_specs=specs(results), interpret=interpret, compiler_params=options,
        name=getattr(kernel, "func", kernel).__name__.strip("_"),
    )  # fmt: skip
    return call(*[x for x, *_ in operands])


@cache
def _gpu_dot() -> jex.Primitive:
    from jax._src.pallas.triton import lowering
    from jaxlib.triton import dialect

    def plain(a, b, total):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return total + lax.dot_general(a, b, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST)

    def lowered(ctx, a, b, total):
        # Triton adds up a tile in the matrix units, whose sums of FP8 products have fewer bits than
        # float32, and adds the tile to the total in float32
        narrow = ctx.avals_in[0].dtype.itemsize == 1
        bound = {"max_num_imprecise_acc": ctx.avals_in[0].shape[1]} if narrow else {}
        return dialect.dot(a, dialect.trans(b, (1, 0)), total, **bound)

    primitive = jex.Primitive("gpu_dot")
    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda a, b, total: total)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    lowering.register_lowering(primitive)(lowered)
    return primitive


def gpu_dot(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    """Returns ``total + a @ b.T`` within a kernel that Triton compiles.

    Pallas's own product multiplies FP8 numbers as FP16, and only pairs of one dtype.
    """
    return _gpu_dot().bind(a, b, total)


def gpu_span(start: ArrayLike, size: int) -> Any:
    """Returns the index of ``size`` elements from ``start`` on, within a Pallas kernel."""
    from jax.experimental import pallas

    return pallas.ds(start, size)  # pyright: ignore[reportArgumentType]


def gpu_load(ref: Any, mask: jax.Array | None = None) -> jax.Array:
    """Reads an array within a Pallas kernel, 0 where ``mask`` is false."""
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def gpu_store(ref: Any, x: jax.Array, mask: jax.Array) -> None:
    """Writes those elements of ``x`` for which ``mask`` is true, within a Pallas kernel."""
    from jax.experimental.pallas import triton

    triton.store(ref, x, mask=mask)


def compiles_gpu_kernels() -> bool:
    """Returns whether Triton's kernels can be compiled here: JAX 0.12 asks the GPU for its kind."""
    try:
        from jax._src.pallas.triton import gpu_info  # pyright: ignore
    except ImportError:
        return True
    try:
        gpu_info.get_gpu_info()
    except (ValueError, RuntimeError):
        return False
    return True


def has_fp8_attention() -> bool:
    """Returns whether the cuDNN of this process has attention in FP8: 9.1 and later, not 9.10.0."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    version = fused.check_cudnn_version()
    return version >= 90100 and version != 91000


def fp8_attention(
    operands: Sequence[jax.Array], scales: Sequence[ArrayLike], backward: bool, **options: Parameter
) -> list[jax.Array]:
    """Calls cuDNN's FP8 attention, and returns its results with their largest magnitudes.

    Args:
        operands: queries, keys and values; in the backward pass also the forward result, its
            gradient, and the logarithms of the exponentials' sums, all others in E4M3.
        scales: numbers, in the order of JAX's ``fp8_params_keys_fwd`` or ``fp8_params_keys_bwd``: a
            ``descale`` multiplies what is read, a ``scale`` what is about to be rounded.
        backward: whether to call the backward pass.
        options: the primitive's other parameters.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    name = f"_dot_product_attention_fp8_{'bwd' if backward else 'fwd'}_p_wrapper"
    one = (jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 1) for x in scales)
    return getattr(fused, name).bind(*operands, *one, **options)


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is lowered by ``jax.export``, which allows only stable operations.

    Args:
        ctx: the context that a lowering rule gets.
    """
    return ctx.module_context.lowering_parameters.for_export


def in_mesh(abstract: AbstractMesh) -> AbstractContextManager[object]:
    """Returns a context in which new arrays belong to a mesh, if there is any."""
    return nullcontext() if abstract.empty else mesh.use_abstract_mesh(abstract)


def out_of_meshes() -> AbstractContextManager[object]:
    """Returns a context in which arrays belong to no mesh."""
    return mesh.use_abstract_mesh(AbstractMesh((), ()))


def unchecked() -> AbstractContextManager[object]:
    """Returns a context in which ``jax.debug_nans`` and ``jax.debug_infs`` raise nothing."""
    stack = ExitStack()
    if dispatch.needs_check_special():
        stack.enter_context(config.debug_nans(False))
        stack.enter_context(config.debug_infs(False))
    return stack


def checked(run: Callable[[], Tree], results: Callable[[Tree], PyTree] = lambda x: x) -> Tree:
    """Returns ``run()``, with its ``results`` checked as JAX checks a compiled function's under
    ``jax.debug_nans``: if one fails, each operation is checked. A mask of -inf is no failure."""
    with unchecked():
        found = run()
    leaves = [x for x in jax.tree.leaves(results(found)) if isinstance(x, jax.Array)]
    try:
        dispatch.check_special("", [x for x in leaves if not isinstance(x, Tracer)])
    except InternalFloatingPointError:
        return run()
    return found


@cache
def quick_compilation(level: int) -> dict[str, Any] | None:
    """Returns ``compiler_options`` that halve the time to compile for a CPU, or better.

    The code of level 0 isn't optimized, and takes up to ten times as long; that of level 1 is as
    fast as without options. None on other platforms.
    """
    if jax.default_backend() != "cpu":
        return None
    options = {"xla_backend_optimization_level": level, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # the second has gone with JAX 0.12
        options.popitem()
    return options


def without_varying_types() -> AbstractContextManager[object]:
    """Returns a context in which types don't carry the mesh axes that they vary over."""
    return config._check_vma(False)


def has_name(axis: AxisData) -> bool:
    """Returns whether the program can name the axis that ``vmap`` maps over."""
    return axis.name is not core.no_axis_name


def typed_as(x: PyTree, aval: ShapedArray) -> PyTree:
    """Returns a result as JAX returns it: a JAX array, weakly typed if its type ``aval`` is, that
    varies over the same axes of a mesh."""
    x = vary(jnp.asarray(x) if isinstance(x, np.ndarray) else x, varying(aval))
    if not aval.weak_type or not isinstance(x, jax.Array) or x.dtype != aval.dtype:
        return x
    return lax_internal._convert_element_type(x, weak_type=True)


def needs_devices(primitive: jex.Primitive) -> None:
    """Registers that a primitive's lowering rule reads the devices of a program."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def has_explicit_mesh() -> bool:
    """Returns whether types carry how arrays are split over a mesh (``AxisType.Explicit``)."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return any(t == jax.sharding.AxisType.Explicit for t in types)


def in_mesh_of(avals: Iterable[object]) -> AbstractContextManager[object]:
    """Returns a context in which arrays of these types may be computed with: those of
    ``jax.sharding.auto_axes`` and ``explicit_axes`` are of another mesh than their caller's."""
    for aval in avals:
        own = getattr(aval, "sharding", None)
        if own is not None and own.mesh != jax.sharding.get_abstract_mesh():
            return in_mesh(own.mesh)
    return nullcontext()
