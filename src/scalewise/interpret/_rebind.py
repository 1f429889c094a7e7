"""Binds an equation to floats of another width than it was traced with, or to matrix units."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import _jax
from .._jax import Jaxpr, Parameter, ShapedArray, jex
from ..devices import MatrixUnit, MatrixUnits
from ..formats import FP32, TF32, Format
from ..formats import format as format_
from ..ops import conv_general_dilated, dot_general
from ..primitives import PRIMITIVES, having, params
from ._equation import Equation
from ._interpret import Applied, Argument, Interpretation, State, interpret_jaxpr
from ._wide import Value, bind, is_float, map_floats

OWN_DTYPE = having("own_dtype")
WIDE = {"float64", "int64", "uint64", "complex128"}  # which JAX has only with 64 bits enabled


def is_quantization(equation: Equation) -> bool:
    """Returns whether the program itself converts wider floats to a dtype of 8 bits or fewer.

    Its numbers are meant, whereas 16-bit dtypes stand for the precision of what follows.
    """
    if equation.name != "convert_element_type":
        return False
    before, after = equation.in_avals[0], equation.out_avals[0]
    return (
        is_float(before)
        and is_float(after)
        and after.dtype.itemsize == 1
        and (before.dtype != after.dtype)
    )


def rebind(
    equation: Equation,
    inputs: Sequence[Value],
    dtype: DTypeLike,
    inside: Interpretation | None = None,
    *,
    complex_dtype: DTypeLike | None = None,
) -> list[jax.Array]:
    """Binds the primitive with every float operand and result in ``dtype``, float32 or float64.

    Complex numbers keep the program's own dtype, or get ``complex_dtype``.

    Primitives that depend on the bits of their own dtype (a bitcast) or hold code traced for it
    (a callback) run in that dtype, with conversions. The function that an operation applies to
    its elements (a reduction's operator, a scatter's update) is interpreted by ``inside``, on
    arrays of ``dtype``; by default its equations run in ``dtype``, too.
    """
    floats = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
    if complex_dtype is None and all(d == dtype for d in floats):
        return equation.bind(*inputs)
    inputs = equation.varied(inputs)
    own = jnp.dtype(dtype)
    if equation.name in OWN_DTYPE and (complex_dtype is None or equation.name != "fft"):
        own_inputs = map_floats(
            lambda x, a: lax.convert_element_type(x, a.dtype), inputs, equation.in_avals
        )
        widened = lambda y, _: lax.convert_element_type(y, dtype)  # noqa: E731
        return map_floats(widened, equation.bind(*own_inputs), equation.out_avals)
    solver = params.solver(equation)
    if solver is not None:
        jaxpr, consts, right = solver
        within = InDtype(own, complex_dtype)
        return interpret_jaxpr(within, jaxpr, (), [*inputs[consts], *inputs[right]])[1]
    foreign = _implementation(equation)
    if foreign is not None:
        return interpret_jaxpr(InDtype(own, complex_dtype), foreign, (), inputs)[1]

    def typed(v: Parameter) -> Parameter:
        if isinstance(v, lax.DotAlgorithm | lax.DotAlgorithmPreset):
            return None  # for operands of its own dtypes, and devices may lack it
        if not isinstance(v, np.dtype):
            return v
        if jnp.issubdtype(v, jnp.complexfloating):
            return v if complex_dtype is None else jnp.dtype(complex_dtype)
        return own if jnp.issubdtype(v, jnp.floating) else v

    changed: dict[str, Parameter] = {k: typed(v) for k, v in equation.params.items()}
    functions = params.scalar_functions(equation)
    if complex_dtype is not None:
        if functions:  # traced for the program's own complex dtype
            inputs = _converted(inputs, [a.dtype for a in equation.in_avals])
            outs = equation.bind(*inputs)
        else:
            inputs = _converted(inputs, [typed(a.dtype) for a in equation.in_avals])
            outs = bind(equation.primitive, changed, inputs)
        return _converted(outs, [typed(a.dtype) for a in equation.out_avals])
    for name, (jaxpr, consts, constants) in functions.items():
        changed[name] = traced = _retraced(jaxpr, consts, own, inside or InDtype(own))
        if constants:  # an open jaxpr, whose constants are another parameter
            changed[name], consts = _jax.open_jaxpr(traced)
            changed[constants] = tuple(consts)
    outs = bind(equation.primitive, changed, inputs)
    return [_typed(y, a, own) for y, a in zip(outs, equation.out_avals, strict=True)]


def _implementation(equation: Equation) -> jex.ClosedJaxpr | None:
    """Returns the operations of another library's primitive, such as lineax's solve; None for
    JAX's own, for one of :func:`operation_body`, for one whose primitive has the attribute
    ``any_dtype``, since it can be bound to floats of any, and if it has no implementation in JAX.

    Its parameters may say of which dtypes its operands are, so that it can't be bound to others.
    """
    if equation.name in PRIMITIVES or {"steps", "any_dtype"} & vars(equation.primitive).keys():
        return None
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in equation.in_avals]
    dtypes = {str(a.dtype) for a in equation.in_avals + equation.out_avals}
    implementation = functools.partial(equation.primitive.impl, **equation.params)
    try:
        with jax.enable_x64(bool(dtypes & WIDE)):
            return jax.make_jaxpr(implementation)(*operands)
    except Exception:  # of a library unknown here: one that needs numbers, or none at all
        return None


def _typed(x: jax.Array, aval: ShapedArray, dtype: DTypeLike) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        dtype = aval.dtype
    elif not is_float(aval):
        return x
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _converted(arrays: Sequence[Value], dtypes: Sequence[np.dtype]) -> list[Value]:
    return [
        x if x.dtype == d else lax.convert_element_type(x, d)
        for x, d in zip(map(jnp.asarray, arrays), dtypes, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class InDtype(Interpretation):
    """Runs every equation on floats of one dtype, and complex numbers of one if it is given."""

    dtype: DTypeLike
    complex_dtype: DTypeLike | None = None

    def lift(self, x: Argument, aval: ShapedArray) -> Value:
        return lax.convert_element_type(x, self.dtype)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        return state, rebind(equation, inputs, self.dtype, complex_dtype=self.complex_dtype)

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if self.complex_dtype is None:
            return super().unlifted(state, equation, inputs)
        return self.apply(state, equation, inputs)


def _retraced(
    jaxpr: Jaxpr, consts: Sequence[ArrayLike], dtype: DTypeLike, inside: Interpretation
) -> jex.ClosedJaxpr:
    """Returns the same object each time: an eager program is compiled again for another one."""
    try:
        return _retraced_once(jaxpr, consts, dtype, inside)
    except TypeError:  # constants that are arrays can't be hashed
        return _retraced_once.__wrapped__(jaxpr, consts, dtype, inside)


@functools.lru_cache(maxsize=256)
def _retraced_once(
    jaxpr: Jaxpr, consts: Sequence[ArrayLike], dtype: DTypeLike, inside: Interpretation
) -> jex.ClosedJaxpr:
    body, own = _jax.open_jaxpr(jaxpr)
    closed = jex.ClosedJaxpr(body, own or consts)

    def function(*scalars):
        return interpret_jaxpr(inside, closed, (), scalars)[1]

    scalars = [
        jax.ShapeDtypeStruct(v.aval.shape, dtype if is_float(v.aval) else v.aval.dtype)
        for v in body.invars
    ]
    return jax.make_jaxpr(function)(*scalars)


# Of the precisions of a product of float32 operands, those that allow TF32.
FAST = (None, lax.Precision.DEFAULT)


def unit_for(
    equation: Equation, units: MatrixUnits, formats: Sequence[Format] | None = None
) -> MatrixUnit | None:
    """Returns the unit of a device that computes an equation of operands in these formats, or None.

    Operands in float32 are multiplied as TF32, unless the product asks for more precision.
    """
    if equation.name not in ("dot_general", "conv_general_dilated"):
        return None
    if any(not jnp.issubdtype(a.dtype, jnp.floating) for a in equation.in_avals):
        return None
    left, right = formats or [format_(a.dtype) for a in equation.in_avals]
    unit = units.unit(left, right)
    if unit is None and FP32 in (left, right):
        precision = params.precision(equation)
        asked = precision if isinstance(precision, tuple) else (precision, precision)
        if formats is not None or all(p in FAST for p in asked):
            left, right = (TF32 if fmt == FP32 else fmt for fmt in (left, right))
            unit = units.unit(left, right)
    return unit


def unit_result(
    equation: Equation,
    unit: MatrixUnit,
    inputs: Sequence[jax.Array],
    out: DTypeLike | None = None,
) -> jax.Array:
    """Returns a product or convolution, in the operands' one dtype or ``out``, by a unit."""
    a, b = inputs
    if equation.name == "dot_general":
        return dot_general(a, b, params.dot_dimensions(equation), accumulator=unit, out=out)
    features, batch = params.conv_groups(equation)
    return conv_general_dilated(
        a, b, **params.conv_window(equation), dimension_numbers=params.conv_dimensions(equation),
        feature_group_count=features, batch_group_count=batch, accumulator=unit, out=out,
    )  # fmt: skip
