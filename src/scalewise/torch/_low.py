"""Models in a low-precision dtype: where a tensor has another one, that is left as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._jax import ShapedArray
from .._types import PyTree
from ..emulating import Emulation, EmulationWithDraws, is_exact
from ..formats import FP16, Format
from ..interpret import Applied, Argument, Equation, State, Value, is_float, rebind
from ..rounding import to_float64
from ._arguments import check_runs
from ._convert import to_jax
from ._export import Exported, Granularity
from ._function import Arguments, traced
from ._graph import converted
from ._held import held
from ._place import at_class, mark
from ._torch import Module, torch


@dataclasses.dataclass(frozen=True)
class LowFunction:
    """A model as a JAX function that computes in a low-precision dtype."""

    f: Callable[..., PyTree]  # of parameters and tensors; casts float32 ones to ``dtype`` first
    params: dict[str, jax.Array]  # the model's own parameters, not rounded
    dtype: np.dtype  # float16, bfloat16, or float32 if the format has more than 16 bits
    exported: Exported | None = None  # the model in that dtype; None under ``autocast``


def low_function(
    model: Module,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    fmt: Format,
    *,
    method: str,
    granularity: Granularity,
    autocast: bool = False,
    reference: bool = False,
) -> LowFunction:
    """Exports a model as it is in 16 bits, so that it takes the branches that it takes there. A
    float32 model is converted as by ``model.half()`` for FP16 and by ``model.bfloat16()`` for other
    formats, whose numbers bfloat16 then stands for; one with parameters of 16 bits isn't, nor any
    under ``autocast``. With ``reference`` an audit's reference run computes the float32 model."""
    given, dtype, wide = Arguments(tuple(args), dict(kwargs or {})), None, None
    options = {"method": method, "granularity": granularity, "as_given": reference}
    if autocast:
        return _autocast_function(model, given, fmt, options)
    dtypes = {p.dtype for p in model.parameters()}
    found = next((d for d in (torch.float16, torch.bfloat16) if d in dtypes), None)
    low = found or (torch.float16 if fmt == FP16 else torch.bfloat16)
    if fmt.bits > 16 and found is None:
        low = torch.float32

    if found is None and low != torch.float32:
        wide = given, None
        dtype, given = low, given.converted({torch.float32: low})
    elif found is not None:
        both = dict.fromkeys((torch.float16, torch.bfloat16), torch.float32)
        wide = given.converted(both), torch.float32
    with held(model, dtype):
        check_runs(model, given.args, given.kwargs, method, low)
    f, exported = traced(
        model, given, dtype=dtype, reference=wide if reference else None, **options
    )
    params, is_converted = exported.params, dtype is not None
    if is_converted:
        own = dict(model.named_parameters())
        params = {name: to_jax(own[name]) for name in params}
    dtype, place = jnp.dtype(str(low).removeprefix("torch.")), at_class(model)

    def lowered(name: str, x: jax.Array) -> jax.Array:
        if not is_converted or x.dtype != jnp.float32:
            return x
        return place(lambda: mark(name, lambda: converted(x, dtype)))

    def in_low(params: dict[str, jax.Array], *tensors: jax.Array) -> Any:
        params = {name: lowered(name, x) for name, x in params.items()}
        outs = f(params, *[lowered(f"input {i}", x) for i, x in enumerate(tensors)])
        return place(lambda: _widened(outs, dtype))

    in_low.__name__ = in_low.__qualname__ = f.__name__
    return LowFunction(in_low, params, dtype, exported)


def _widened(outs: Any, dtype: np.dtype) -> Any:
    return jax.tree.map(lambda y: y.astype(jnp.float32) if y.dtype == dtype else y, outs)


def _autocast_function(
    model: Module, given: Arguments, fmt: Format, options: dict[str, Any]
) -> LowFunction:
    if fmt.bits > 16:
        raise ValueError(f"autocast=True takes a format of at most 16 bits, not {fmt.name}")
    if options["granularity"] != "operation":
        raise ValueError("autocast=True follows torch's lists of operations: granularity has to be "
                         f"'operation', not {options['granularity']!r}")  # fmt: skip
    dtype = jnp.dtype(jnp.float16 if fmt == FP16 else jnp.bfloat16)
    f, exported = traced(model, given, low=dtype, **options)

    def in_low(params: dict[str, jax.Array], *tensors: jax.Array) -> Any:
        return _widened(f(params, *tensors), dtype)

    in_low.__name__ = in_low.__qualname__ = f.__name__
    return LowFunction(in_low, exported.params, dtype)


@dataclasses.dataclass(frozen=True)
class _OwnDtypes(Emulation):
    """Emulation that rounds only the arrays of one dtype to the format."""

    low_dtype: DTypeLike | None = None

    def lift(self, x: Argument, aval: ShapedArray) -> jax.Array:
        low = aval.dtype == self.low_dtype
        return super().lift(x, aval) if low else to_float64(jnp.asarray(x))

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Any:
        low = aval.dtype == self.low_dtype
        return super().constant(x, aval) if low else jnp.asarray(x, jnp.float64)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if any(a.dtype == self.low_dtype for a in equation.out_avals) or is_exact(equation):
            return super().apply(state, equation, inputs)
        outs = rebind(equation, inputs, jnp.float64)
        return state, [
            y.astype(jnp.float32).astype(jnp.float64) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class LowEmulation(EmulationWithDraws, _OwnDtypes):
    """``emulate`` of a program in two dtypes: float32 stays float32."""
