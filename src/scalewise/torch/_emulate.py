"""``emulate``: a torch module as a machine computes it that has another format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._jax import ShapedArray
from .._resolve import as_format
from .._types import PyTree
from ..devices import MatrixUnitsLike, matrix_units
from ..emulating import Emulation, EmulationWithDraws, OnDevice, is_exact
from ..formats import FP16, Format, FormatLike, Saturation
from ..formats import format as format_
from ..interpret import (
    Applied,
    Argument,
    Equation,
    Interpretation,
    State,
    Value,
    is_float,
    rebind,
    transform,
)
from ..rounding import round_to, saturation, to_float64
from ._arguments import as_module, check_inputs
from ._convert import jax_dtype, to_jax, to_torch
from ._export import Exported, Granularity, held
from ._function import Given, tensors_of, traced, with_dtypes
from ._graph import converted, draws, torchs_seed
from ._place import at_class, mark
from ._ran import Ran, ran
from ._torch import Module, torch


def emulate(
    model: Module,
    fmt: FormatLike | None = None,
    *,
    saturate: Saturation = False,
    method: str = "forward",
    granularity: Granularity = "operation",
    autocast: bool = False,
    device: MatrixUnitsLike | None = None,
) -> Any:
    """Returns a module that computes what ``model`` would on a machine with a given format.

    The model runs as ``model.half()`` would for FP16, and as ``model.bfloat16()`` would for every
    other format: parameters, inputs and the result of each ATen operation are rounded to ``fmt``;
    what the model itself computes in float32 (``x.float()``) is rounded to float32. The arithmetic
    is that of :func:`scalewise.emulate`, and doesn't depend on the device.

    Args:
        model: a ``torch.nn.Module``, or a function of tensors; it isn't changed. Later changes of
            its weights are not seen.
        fmt: a format of up to 25 significant bits, or a name or dtype of one. None, with a device:
            the model runs in its own dtypes.
        saturate: what overflow does, as for :func:`scalewise.round_to`.
        method: the method to emulate.
        granularity: as for :func:`function`.
        autocast: whether the model runs in its own dtypes, as under
            ``torch.autocast("cuda", dtype)``, and only the results of operations that run in the
            narrow dtype there are rounded to ``fmt``.
        device: without a format, the device whose matrix units add up products and convolutions,
            as for :func:`scalewise.emulate`: FP16 and BF16 operands by their own units.

    Returns:
        A module without gradients. It exports the model again for other shapes, and returns
        tensors where the model does, in containers that JAX knows: tuples, and dicts for mappings
        and dataclasses.

    Raises:
        ExportError, MissingRuleError: when it is called, as :func:`function`.
        ValueError: an unknown format or device, both or neither of them; ``autocast`` with a format
            of more than 16 bits, or with a device.
    """
    if (fmt is None) == (device is None):
        raise ValueError("emulate: expected a format or a device, and not both")
    if device is not None:
        if autocast:
            raise ValueError("emulate: autocast=True needs a format, and takes no device")
        own = OnDevice(matrix_units(device))
        return _Emulated(as_module(model), own, {"method": method, "granularity": granularity})
    assert fmt is not None
    fmt = as_format(fmt, "emulate")
    options = {"method": method, "granularity": granularity, "autocast": autocast}
    return _Emulated(as_module(model), (fmt, saturation(saturate, fmt)), options)


class _Emulated(torch.nn.Module):
    def __init__(
        self, model: Module, how: OnDevice | tuple[Format, Saturation], options: dict[str, Any]
    ):
        super().__init__()
        self._of = [model]  # in a list, so that it isn't a submodule
        self._how, self._options = how, options
        self._compiled: dict[Hashable, tuple[Callable[..., PyTree], Any, bool]] = {}

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        tensors = tensors_of(args, kwargs)
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        key = (
            str(tree),
            tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves),
        )
        if key not in self._compiled:
            f, params, exported, emulation = self._exported(args, kwargs)
            compiled = jax.jit(transform(f, emulation, name="emulate"))
            self._compiled[key] = compiled, params, draws(exported)
        f, params, drawn = self._compiled[key]
        seed = torchs_seed() if drawn else NO_SEED
        return to_torch(f(params, *map(to_jax, tensors), key=seed))

    def _exported(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Callable[..., PyTree], Any, Exported, Interpretation]:
        if isinstance(self._how, OnDevice):
            check_inputs(args, kwargs)
            f, exported, _ = traced(self._of[0], (args, kwargs), **self._options)
            return f, exported.params, exported, self._how
        fmt, saturate = self._how
        low = low_function(self._of[0], args, kwargs, fmt, **self._options)
        return low.f, low.params, low.exported, LowEmulation(fmt, saturate, low.dtype)


NO_SEED = np.zeros(2, np.uint32)  # of an audit, all of whose runs draw the same numbers


@dataclasses.dataclass(frozen=True)
class LowFunction:
    """A model as a JAX function that computes in a low-precision dtype."""

    f: Callable[..., PyTree]  # of parameters and tensors; casts float32 ones to ``dtype`` first
    params: dict[str, jax.Array]  # the model's own parameters, not rounded
    dtype: np.dtype  # float16, bfloat16, or float32 if the format has more than 16 bits
    exported: Exported  # the model in that dtype; in its own dtypes under ``autocast``
    constants: Mapping[str, Any]  # by placeholder, its value in the float32 model
    runs: tuple[Ran | None, Ran | None]  # torch's own in the dtype and in float32; None without
    # low, wide: arguments, and the dtype that the model is converted to, if any
    low: tuple[Given, Any]
    wide: tuple[Given, Any]


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
    given, dtype, wide = (tuple(args), dict(kwargs or {})), None, None
    options = {"method": method, "granularity": granularity, "as_given": reference}
    low_run = None
    narrow = (torch.bfloat16, torch.float16)[:: -1 if fmt == FP16 else 1]
    dtypes = {p.dtype for p in model.parameters()} if not autocast else ()
    found = next((d for d in narrow if d in dtypes), None)
    low = found or narrow[0]
    if autocast:
        _check_autocast(fmt, granularity)
        options["low"] = jax_dtype(low)
    elif found is not None:
        wide = (
            with_dtypes(given, dict.fromkeys(narrow, torch.float32)),
            torch.float32,
            jax_dtype(low),
        )
    elif fmt.bits > 16:
        low = torch.float32
    else:
        wide = given, None, jax_dtype(low)
        dtype, given = low, with_dtypes(given, {torch.float32: low})
    if not autocast:
        with held(model, dtype):
            low_run = ran(model, *given, method, low)
    wide = wide if reference else None
    wide_run = None
    if reference and wide is not None and low_run is not None and low_run.results:
        own, kind, _ = wide
        with held(model, kind), contextlib.suppress(Exception):  # exporting tells what is wrong
            wide_run = ran(model, *own, method, torch.float32)
    f, exported, beside = traced(model, given, dtype=dtype, reference=wide, **options)
    params, is_converted = exported.params, dtype is not None
    if is_converted:
        own = dict(model.named_parameters())
        params = {name: to_jax(own[name]) for name in params}
    converted_to, dtype, place = dtype, jax_dtype(low), at_class(model)

    def lowered(name: str, x: jax.Array) -> jax.Array:
        if not is_converted or x.dtype != jnp.float32:
            return x
        return place(lambda: mark(name, lambda: converted(x, dtype)))

    def widened(y: jax.Array) -> jax.Array:
        return y.astype(jnp.float32) if y.dtype == dtype else y

    def in_low(params: dict[str, jax.Array], *tensors: jax.Array, key: Any = NO_SEED) -> Any:
        params = {name: lowered(name, x) for name, x in params.items()}
        arrays = [lowered(f"input {i}", x) for i, x in enumerate(tensors)]
        outs = f(params, *arrays, key=key)
        return place(lambda: jax.tree.map(widened, outs))

    in_low.__name__ = in_low.__qualname__ = f.__name__
    constants = beside.constants if beside is not None else {}
    runs = low_run, None if draws(exported) else wide_run
    of_wide = wide[:2] if wide is not None else (given, None)
    return LowFunction(
        in_low, params, dtype, exported, constants, runs, (given, converted_to), of_wide
    )


def _check_autocast(fmt: Format, granularity: str) -> None:
    if fmt.bits > 16:
        raise ValueError(f"autocast=True takes a format of at most 16 bits, not {fmt.name}")
    if granularity != "operation":
        raise ValueError("autocast=True follows torch's lists of operations: granularity has to be "
                         f"'operation', not {granularity!r}")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _OwnDtypes(Emulation):
    """Emulation that rounds only the arrays of one dtype to the format."""

    low_dtype: DTypeLike | None = None
    unlifted = Interpretation.unlifted  # a complex dtype isn't the low one

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
        # in the format of its own dtype: also a 16-bit one that the program names
        return state, [
            round_to(y, format_(a.dtype)) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class LowEmulation(EmulationWithDraws, _OwnDtypes):
    """``emulate`` of a program in two dtypes: float32 stays float32."""
