"""Typed reads of the parameters of JAX's equations, from JAX 0.10.2 to 0.12.

No other file reads a parameter by its name. Where a release of JAX renames one, its new name is
added here, and :class:`ParameterError` says so until it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ._table import PRIMITIVES

if TYPE_CHECKING:
    import jax

    from .._jax import Jaxpr, Parameter, jex
    from .._types import AxisName

AxisPair = tuple[tuple[int, ...], tuple[int, ...]]  # of the left and of the right operand
BODIES = {row.name: row.body for row in PRIMITIVES.values() if row.body is not None}
# scalewise's own primitives
BODIES |= {"outlined": "jaxpr", "interpreted_derivative": "function"}
DEGREES = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
# The parameters that hold a function of scalars (a reduction's operator, a scatter's update), and
# those that hold its constants.
SCALAR_FUNCTIONS = {
    "jaxpr": "consts",
    "update_jaxpr": "update_consts",
    "select_jaxpr": "select_consts",
    "scatter_jaxpr": "scatter_consts",
}
_REQUIRED = object()


class ParameterError(LookupError):
    """An equation doesn't have the parameter that scalewise reads."""


class HasParams(Protocol):
    """A JAX equation, or :class:`scalewise.interpret.Equation`."""

    @property
    def primitive(self) -> jex.Primitive: ...

    @property
    def params(self) -> Mapping[str, Parameter]: ...


def read(equation: HasParams, *names: str, default: Parameter = _REQUIRED) -> Parameter:
    """Returns a parameter by its names in the supported releases of JAX, or the default."""
    for name in names:
        if name in equation.params:
            return equation.params[name]
    if default is not _REQUIRED:
        return default
    raise ParameterError(
        f"{equation.primitive.name} has no parameter {' or '.join(map(repr, names))}, only "
        f"{', '.join(sorted(equation.params)) or 'none'}: add the name that this release of JAX "
        "uses to scalewise/primitives/params.py"
    )


def replaced(equation: HasParams, **changes: Parameter) -> dict[str, Parameter]:
    for name in changes:
        read(equation, name)
    return {**equation.params, **changes}


# -- single parameters -------------------------------------------------------------------------


def _reader(*names: str, default: Parameter = _REQUIRED) -> Callable[[HasParams], Any]:
    return lambda equation: read(equation, *names, default=default)


body: Callable[[HasParams], Jaxpr] = _reader("jaxpr")
branches: Callable[[HasParams], Sequence[Jaxpr]] = _reader("branches")
update_function: Callable[[HasParams], Jaxpr | None] = _reader("update_jaxpr")
target_sharding: Callable[[HasParams], jax.sharding.NamedSharding] = _reader("dst_sharding")
out_sharding: Callable[[HasParams], jax.sharding.NamedSharding | None]
out_sharding = _reader("out_sharding", default=None)
axis_name: Callable[[HasParams], AxisName] = _reader("axes", "axis_name")
# the groups of devices that a collective runs within, None for all devices
axis_groups: Callable[[HasParams], Sequence[Sequence[int]] | None]
axis_groups = _reader("axis_index_groups", default=None)
is_tiled = _reader("tiled")
# the number that a `gather` has for indices out of bounds; None for NaN
fill_value = _reader("fill_value", default=None)
slice_sizes: Callable[[HasParams], Sequence[int]] = _reader("slice_sizes")
conv_dimensions: Callable[[HasParams], jax.lax.ConvDimensionNumbers] = _reader("dimension_numbers")
ragged_dimensions: Callable[[HasParams], jax.lax.RaggedDotDimensionNumbers | None]
ragged_dimensions = _reader("ragged_dot_dimension_numbers", default=None)
precision: Callable[[HasParams], jax.lax.PrecisionLike] = _reader("precision")


# -- calls and control flow --------------------------------------------------------------------


def is_call(equation: HasParams) -> bool:
    return "call_jaxpr" in equation.params


def call_body(equation: HasParams) -> Jaxpr:
    named = BODIES.get(equation.primitive.name)
    return read(equation, *[named] if named else [], "call_jaxpr")


def called(equation: HasParams) -> Jaxpr | None:
    """Returns the jaxpr of a call, a nested jit, a checkpoint or a ``shard_map``, or None."""
    if is_call(equation) or equation.primitive.name in BODIES:
        return call_body(equation)
    return read(equation, "jaxpr", default=None)


def is_barrier(equation: HasParams) -> bool:
    """Returns True if a ``jax.checkpoint``'s recomputation must not be merged with the original."""
    return read(equation, "differentiated") and read(equation, "prevent_cse")


class Jit(NamedTuple):
    body: Jaxpr
    name: str
    compiler_options: dict[str, Parameter]
    in_shardings: Sequence[Parameter]
    out_shardings: Sequence[Parameter]


def jit(equation: HasParams) -> Jit:
    options = dict(read(equation, "compiler_options_kvs", default=()))
    shardings = (read(equation, x, default=()) for x in ("in_shardings", "out_shardings"))
    return Jit(body(equation), read(equation, "name"), options, *shardings)


class FusedAttention(NamedTuple):
    """The parameters of cuDNN's attention; ``plain`` if it has no dropout, window or function of
    scores, and no mask but that of causal attention."""

    scale: float
    causal: bool
    heads_first: bool
    training: bool
    plain: bool


def fused_attention(equation: HasParams) -> FusedAttention:
    mask = read(equation, "mask_type").name
    others = (read(equation, x, default=None) for x in ("sliding_window_length", "score_mod"))
    plain = mask in ("NO_MASK", "CAUSAL") and not read(equation, "dropout_rate")
    plain = plain and all(x is None for x in others)
    layout, training = read(equation, "layout"), read(equation, "is_training", default=True)
    return FusedAttention(read(equation, "scale"), mask == "CAUSAL", layout == 1, training, plain)


class While(NamedTuple):
    condition: Jaxpr
    condition_consts: int
    body: Jaxpr
    body_consts: int


def while_loop(equation: HasParams) -> While:
    names = "cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts"
    return While(*(read(equation, name) for name in names))


class Scan(NamedTuple):
    body: Jaxpr
    consts: int
    carries: int
    length: int
    reverse: bool
    unroll: int | bool


def scan(equation: HasParams) -> Scan:
    trees = read(equation, "ft_in", default=None)  # JAX 0.12 groups the operands as trees
    if trees is None:
        consts, carries = read(equation, "num_consts"), read(equation, "num_carry")
    else:
        consts, carries = map(len, trees.unpack()[:2])
    length, unroll = read(equation, "length"), read(equation, "unroll")
    return Scan(body(equation), consts, carries, length, read(equation, "reverse"), unroll)


class ShardMap(NamedTuple):
    """The parameters of a ``shard_map``; ``axes`` are the mesh axes that it maps over."""

    body: Jaxpr
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    in_specs: Sequence[jax.sharding.PartitionSpec]
    out_specs: Sequence[jax.sharding.PartitionSpec]
    axes: frozenset[str]


def shard_map(equation: HasParams) -> ShardMap:
    axes = frozenset(read(equation, "newly_manual_axes", "manual_axes"))
    in_specs, out_specs = read(equation, "in_specs"), read(equation, "out_specs")
    return ShardMap(body(equation), read(equation, "mesh"), in_specs, out_specs, axes)


def solver(equation: HasParams) -> tuple[Jaxpr, slice, slice] | None:
    """Returns what a ``custom_linear_solve`` solves by, and which operands it takes; else None."""
    jaxprs = read(equation, "jaxprs", default=None)
    if jaxprs is None:
        return None
    counts = read(equation, "const_lengths")
    start = counts.matvec + counts.vecmat
    right = start + counts.solve + counts.transpose_solve
    return jaxprs.solve, slice(start, start + counts.solve), slice(right, None)


def scalar_functions(equation: HasParams) -> dict[str, tuple[Jaxpr, Sequence[jax.Array], str]]:
    """Returns by parameter the functions that an operation applies to scalars: the jaxpr, its
    constants, and the parameter that holds these; that is empty for a closed jaxpr, which holds
    its own.
    """
    found = {}
    for name, constants in SCALAR_FUNCTIONS.items():
        jaxpr = read(equation, name, default=None)
        if jaxpr is not None:
            consts = read(equation, constants, default=None)
            found[name] = jaxpr, consts or (), "" if consts is None else constants
    return found


# -- operations --------------------------------------------------------------------------------


def assigned_axes(equation: HasParams, ndim: int) -> dict[int, int]:
    """Returns for each axis of an array to a part of which a ``dynamic_update_slice`` or a
    ``scatter`` assigns, the axis of what is assigned; without those that an index removes."""
    numbers = read(equation, "dimension_numbers", default=None)
    if numbers is None:
        return {i: i for i in range(ndim)}
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(ndim) if i not in gone]
    return dict(zip(kept, numbers.update_window_dims, strict=True))


def scattered(equation: HasParams) -> tuple[Any, bool, bool]:
    """Returns a scatter's dimension numbers, whether it writes to the nearest element in place of
    one outside of the operand, and whether it writes to each element at most once."""
    clips = read(equation, "mode").name == "CLIP"
    return read(equation, "dimension_numbers"), clips, read(equation, "unique_indices")


def exchanged_axes(equation: HasParams) -> tuple[int | None, int | None]:
    """Returns the axis of which a collective sends each device a part, and the axis along which a
    device joins the parts that it gets; None for an axis that there isn't."""
    joined = read(equation, "all_gather_dimension", "concat_axis", default=None)
    return read(equation, "split_axis", default=None), joined


def permutation(equation: HasParams) -> tuple[int, ...]:
    return tuple(read(equation, "permutation"))


def slice_bounds(
    equation: HasParams,
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    start, limit = read(equation, "start_indices"), read(equation, "limit_indices")
    return start, limit, read(equation, "strides") or (1,) * len(start)


def split(equation: HasParams) -> tuple[Sequence[int], int]:
    """Returns the sizes of the parts of a split, and its axis."""
    return read(equation, "sizes"), read(equation, "axis")


def degree(equation: HasParams) -> int | float:
    """Returns the exponent of a power, for example 0.5 of ``sqrt``; 1 for other primitives."""
    if equation.primitive.name == "integer_pow":
        return read(equation, "y")
    return DEGREES.get(equation.primitive.name, 1)


def dot_dimensions(equation: HasParams) -> tuple[AxisPair, AxisPair]:
    """Returns ``((contracted axes), (batch axes))`` of a product, also of a ragged one."""
    ragged = ragged_dimensions(equation)
    numbers = (
        read(equation, "dimension_numbers") if ragged is None else ragged.dot_dimension_numbers
    )
    contracted, batch = (tuple(map(tuple, axes)) for axes in numbers)
    return contracted, batch  # pyright: ignore[reportReturnType]


def contracted_axes(equation: HasParams) -> AxisPair:
    """Returns the axes of each operand that a contraction sums over; a convolution's features."""
    if equation.primitive.name != "conv_general_dilated":
        return dot_dimensions(equation)[0]
    numbers = conv_dimensions(equation)
    return (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)


def reduced_axes(equation: HasParams) -> tuple[int, ...]:
    return tuple(read(equation, "axes"))


def cumulative(equation: HasParams) -> tuple[int, bool]:
    """Returns the axis of a cumulative sum, and whether it begins at the end."""
    return read(equation, "axis"), read(equation, "reverse")


def conv_groups(equation: HasParams) -> tuple[int, int]:
    return read(equation, "feature_group_count"), read(equation, "batch_group_count")


def conv_window(equation: HasParams) -> dict[str, Parameter]:
    """Returns how a convolution moves its kernel, as arguments of ``lax.conv_general_dilated``."""
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    return {name: read(equation, name) for name in names}


def symmetric_factors(equation: HasParams) -> tuple[float, float]:
    return read(equation, "alpha"), read(equation, "beta")
