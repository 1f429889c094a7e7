"""Exact results of equations on the host, in float64, and the products with their derivatives.

NumPy computes common primitives. JAX computes the others, and each is compiled once: with the
numbers at which it is differentiated as operands, so that a loop's equation is one program.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import ThreadpoolController

from ...interpret import (
    Equation,
    InDtype,
    interpret_jaxpr,
    is_float,
    is_inexact,
    operation_body,
    rebind,
)
from ...primitives import having, params
from ._cells import LargeCell, is_key

SAME_ORDER = having("same_order")


def _logistic(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which = np.asarray(which)
    which = which.reshape(which.shape + (1,) * (np.ndim(cases[0]) - which.ndim))
    if len(cases) == 2:
        return np.where(which.astype(bool), cases[1], cases[0])
    return np.choose(np.broadcast_to(which, np.shape(cases[0])), cases)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if np.asarray(a).dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))  # as XLA has it for integers


# Functions of the operands' elements, which need no parameters.
EXPRESSIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "add_any": np.add,
    "and": np.bitwise_and, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(low, x), high), "cos": np.cos,
    "cosh": np.cosh, "eq": np.equal, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
    "le": np.less_equal, "log": np.log, "log1p": np.log1p, "logistic": _logistic, "lt": np.less,
    "max": np.maximum, "min": np.minimum, "mul": np.multiply, "name": lambda x: x,
    "ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or,
    "rem": _remainder,
    "rsqrt": lambda x: 1 / np.sqrt(x), "select_n": _select, "sign": np.sign,
    "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt,
    "square": np.square, "sub": np.subtract, "tan": np.tan, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip


def _broadcast(x: np.ndarray, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any):
    spread = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        spread[axis] = size
    return np.broadcast_to(x.reshape(spread), shape)


def _slice(
    x: np.ndarray, start_indices: Sequence[int], limit_indices: Sequence[int],
    strides: Sequence[int] | None,
):  # fmt: skip
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _window(x: np.ndarray, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns where a slice of a given size is; as in XLA, it doesn't leave the array."""
    limits = (n - size for n, size in zip(x.shape, sizes, strict=True))
    first = [min(max(int(i), 0), limit) for i, limit in zip(starts, limits, strict=True)]
    return tuple(slice(i, i + size) for i, size in zip(first, sizes, strict=True))


def _dynamic_slice(x: np.ndarray, *starts: Any, slice_sizes: Sequence[int]) -> np.ndarray:
    return x[_window(x, starts, slice_sizes)]


def _dynamic_update_slice(x: np.ndarray, new: np.ndarray, *starts: Any) -> np.ndarray:
    x = np.array(x)
    x[_window(x, starts, np.shape(new))] = new
    return x


MOVES: Mapping[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "transpose": lambda x, permutation: np.transpose(x, permutation),
}


MOVED = SAME_ORDER | {*MOVES, "name", "convert_element_type"}


def _split(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    sizes, axis = params.split(equation)
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _power(equation: Equation, x: np.ndarray) -> np.ndarray:
    """Multiplies as XLA does: NumPy's powers take ten times as long."""
    degree = int(params.degree(equation))
    power, left = np.ones_like(x), abs(degree)
    while left:
        power = power * x if left % 2 else power
        x, left = x * x if left > 1 else x, left // 2
    return power if degree >= 0 else 1 / power


def _converted(equation: Equation, x: np.ndarray) -> np.ndarray:
    """Converts to integers as XLA does: towards zero, and to the nearest one that exists."""
    new = np.dtype(equation.out_avals[0].dtype) if not is_float(equation.out_avals[0]) else None
    if new is None:
        return np.asarray(x, np.float64)
    if new == np.bool_ or np.asarray(x).dtype.kind != "f":
        return np.asarray(x).astype(new)
    most = jnp.iinfo(new)  # of integers of four bits, too
    whole = np.clip(np.nan_to_num(np.trunc(x), nan=0.0), float(most.min), float(most.max))
    return np.where(whole >= float(most.max), most.max, whole.astype(new)).astype(new)


def _cumulative(equation: Equation, x: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    axis, reverse = params.cumulative(equation)
    if reverse == transposed:
        return np.cumsum(x, axis)
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def _product(equation: Equation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left, right, out = _letters(equation, np.ndim(a), np.ndim(b))
    return _contracted(left, a, right, b, out)


def _contracted(left: str, a: np.ndarray, right: str, b: np.ndarray, out: str) -> np.ndarray:
    """Returns ``np.einsum(f"{left},{right}->{out}", a, b)``, by BLAS for batches too."""
    batch = [x for x in left if x in right and x in out]
    summed = [x for x in left if x in right and x not in out]
    free = [[x for x in own if x not in other] for own, other in ((left, right), (right, left))]

    def matrices(letters: str, x: np.ndarray, *groups: list[str]) -> np.ndarray:
        x = np.transpose(x, [letters.index(c) for group in groups for c in group])
        sizes = iter(x.shape)
        return x.reshape([math.prod(next(sizes) for _ in group) for group in groups])

    rows, columns = (
        matrices(left, a, batch, free[0], summed),
        matrices(right, b, batch, summed, free[1]),
    )
    if len(rows) > 1:
        with _blas().limit(limits=1):  # for small products its threads wait for each other
            product = rows @ columns
    else:
        product = rows @ columns
    order = "".join([*batch, *free[0], *free[1]])
    known = dict(zip(left + right, np.shape(a) + np.shape(b), strict=True))
    return np.transpose(product.reshape([known[c] for c in order]), [order.index(c) for c in out])


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def _letters(equation: Equation, *ndims: int) -> tuple[str, str, str]:
    contracted, batch = params.dot_dimensions(equation)
    letters, rows, free = iter(string.ascii_letters), [[""] * n for n in ndims], []
    for i, j in (*zip(*batch, strict=True), *zip(*contracted, strict=True)):
        rows[0][i] = rows[1][j] = next(letters)
    shared = [rows[0][i] for i in batch[0]]
    for row in rows:
        for i, letter in enumerate(row):
            if not letter:
                row[i] = next(letters)
                free.append(row[i])
    return "".join(rows[0]), "".join(rows[1]), "".join(shared + free)


# Functions of the equation and its operands, of real floats.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "cumsum": _cumulative,
    "div": lambda equation, a, b: a / b,
    "dot_general": _product,
    "integer_pow": _power,
    "pow": lambda equation, a, b: np.power(a, b),
    "reduce_max": lambda equation, x: np.max(x, params.reduced_axes(equation)),
    "reduce_min": lambda equation, x: np.min(x, params.reduced_axes(equation)),
    "reduce_sum": lambda equation, x: np.sum(x, params.reduced_axes(equation)),
}


def is_complex(equation: Equation) -> bool:
    avals = equation.in_avals + equation.out_avals
    return any(is_inexact(a) and not is_float(a) for a in avals)


def kernel_of(equation: Equation) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that computes the exact results of an equation: floats in float64,
    integers as they are."""
    name = equation.name
    keys = any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in equation.in_avals)
    if not (is_complex(equation) or keys):
        if name in SAME_ORDER:
            shape = equation.out_avals[0].shape
            return lambda inputs: [np.reshape(inputs[0], shape)]
        if name in EXPRESSIONS:
            expression = EXPRESSIONS[name]
            return lambda inputs: [expression(*inputs)]
        if name in MOVES:
            move, how = MOVES[name], equation.params
            return lambda inputs: [move(*inputs, **how)]
        if name == "split":
            return lambda inputs: _split(equation, inputs[0])
        if name == "convert_element_type":
            return lambda inputs: [_converted(equation, inputs[0])]
        if name in REDUCTIONS and all(map(is_float, equation.in_avals)):
            reduce = REDUCTIONS[name]
            return lambda inputs: [reduce(equation, *inputs)]
    return functools.partial(through_jax, equation)


def computed(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    return kernel_of(equation)(inputs)


def through_jax(equation: Equation, inputs: Sequence[Any], *, own: bool = False) -> list[Any]:
    """Returns JAX's results; with ``own`` complex numbers keep the program's dtype."""
    arrays = [
        x if is_key(x) else jnp.asarray(x, a.dtype if own and np.iscomplexobj(x) else None)
        for x, a in zip(inputs, equation.in_avals, strict=True)
    ]
    wide = jnp.complex128 if is_complex(equation) and not own else None
    if equation.lifted or wide is not None:
        outs = rebind(equation, arrays, jnp.float64, complex_dtype=wide)
    else:
        outs = equation.bind(*arrays)
    return [y if is_key(y) else np.asarray(y) for y in outs]


def pulled(equation: Equation, bars: Sequence[Any], at: Sequence[Any]) -> list[Any]:
    """Returns of each operand the product of ``bars`` with the derivative at the numbers ``at``;
    None for operands that are no floats."""
    name, bar = equation.name, bars[0]
    real = not is_complex(equation) and all(np.asarray(x).dtype == np.float64 for x in at)
    if real and name == "reduce_sum":
        spread = np.expand_dims(bar, params.reduced_axes(equation))
        return [np.broadcast_to(spread, np.shape(at[0]))]
    if real and name == "cumsum":
        return [_cumulative(equation, bar, transposed=True)]
    if real and name == "dot_general":
        left, right, out = _letters(equation, *map(np.ndim, at))
        return [
            _contracted(out, bar, right, at[1], left),
            _contracted(out, bar, left, at[0], right),
        ]
    given = [jnp.asarray(x) if not is_key(x) else x for x in at]
    inexact = [is_inexact(a) for a in equation.in_avals]
    bars = [jnp.asarray(b) for b, a in zip(bars, equation.out_avals, strict=True) if is_inexact(a)]
    found = iter(_vjp(equation)(given, bars))
    return [np.asarray(next(found)) if moves else None for moves in inexact]


@functools.lru_cache(maxsize=512)
def _vjp(equation: Equation) -> Callable[..., Any]:
    inexact = [is_inexact(a) for a in equation.in_avals]
    wide = jnp.complex128 if is_complex(equation) else None
    body = operation_body(equation)

    def run(at: Sequence[jax.Array], bars: Sequence[jax.Array]) -> list[jax.Array]:
        def of_floats(some: Sequence[jax.Array]) -> list[jax.Array]:
            left = iter(some)
            inputs = [next(left) if w else x for x, w in zip(at, inexact, strict=True)]
            if body is None:
                outs = rebind(equation, inputs, jnp.float64, complex_dtype=wide)
            else:  # another library's operation, whose primitive has no derivative
                outs = interpret_jaxpr(InDtype(jnp.float64, wide), body, (), inputs)[1]
            return [y for y in outs if jnp.issubdtype(y.dtype, jnp.inexact)]

        some = [x for x, w in zip(at, inexact, strict=True) if w]
        outs, back = jax.vjp(of_floats, some)
        return back([b.astype(y.dtype) for b, y in zip(bars, outs, strict=True)])[0]

    return jax.jit(run)


def forget() -> None:
    """Releases the compiled code of derivatives, and arrays of large cells."""
    _vjp.cache_clear()
    LargeCell.recent.clear()
