"""Compares other libraries' casts with ours: ``python -m proofs.references``.

Each is given the inputs at which a result can change: both sides of every threshold of the format
and rounding (``oracle.edges``), zeros, infinities, NaN, and a million random bit patterns. What is
installed takes part: NumPy and ml_dtypes, XLA and gfloat always; ONNX and torch where they are
(``pip install --group prove``). Prints the tables of docs/references.md. ONNX's backend tests come
first, and fail the run if a node differs; ``python -m proofs.references nodes`` runs them alone.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gfloat
import gfloat.formats as gf
import jax
import numpy as np
from jax import lax

from proofs.oracle import edges
from scalewise.formats import CATALOGUE, FP32, Format, rounding_mode
from scalewise.rounding import cast, round_to

Cast = Callable[[np.ndarray], np.ndarray]

GFLOAT = {
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "e4m3fn": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e2m3fn": gf.format_info_ocp_e2m3,
    "e3m2fn": gf.format_info_ocp_e3m2,
    "e2m1fn": gf.format_info_ocp_e2m1,
}  # its rounding of E8M0 takes no notice that there is neither sign nor zero nor subnormal
GFLOAT_ROUNDINGS = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "toward_positive": gfloat.RoundMode.TowardPositive,
    "toward_negative": gfloat.RoundMode.TowardNegative,
}
ONNX = {
    "fp16": "FLOAT16", "bf16": "BFLOAT16", "e4m3fn": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2",
    "e4m3fnuz": "FLOAT8E4M3FNUZ", "e5m2fnuz": "FLOAT8E5M2FNUZ", "e2m1fn": "FLOAT4E2M1",
}  # fmt: skip
# Other dtypes that its backend tests cast to and from.
WIDER = {"e8m0": "FLOAT8E8M0", "fp32": "FLOAT", "fp64": "DOUBLE"}
TORCH = {
    "fp16": "float16", "bf16": "bfloat16", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz", "e8m0": "float8_e8m0fnu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Route:
    """Another library's cast of float32, and which of ours it should equal."""

    library: str
    fmt: Format
    rounding: str
    saturate: bool
    cast: Cast


def routes() -> Iterator[Route]:
    for fmt in CATALOGUE.values():
        if fmt.mantissa_bits >= 23:
            continue
        if fmt.dtype is not None:
            library = "NumPy" if fmt.name == "fp16" else "ml_dtypes"
            yield Route(library, fmt, "nearest_even", False, _by_dtype(fmt))
            if fmt.bits != 6:  # XLA on CPU crashes on these
                yield Route("XLA", fmt, "nearest_even", False, _by_xla(fmt))
        if fmt.name in GFLOAT:
            for rounding in GFLOAT_ROUNDINGS:
                # where there is neither infinity nor NaN it has to saturate, and takes no NaN
                for saturate in (False, True) if fmt.nan_code is not None else (True,):
                    cast = _by_gfloat(fmt, rounding, saturate)
                    yield Route("gfloat", fmt, rounding, saturate, cast)
        yield from _onnx(fmt)
        yield from _torch(fmt)


def _by_dtype(fmt: Format) -> Cast:
    def cast(x):
        with np.errstate(all="ignore"):
            return x.astype(fmt.dtype).astype(np.float64)

    return cast


def _by_xla(fmt: Format) -> Cast:
    convert = jax.jit(lambda x: lax.convert_element_type(x, fmt.dtype))
    return lambda x: np.asarray(convert(x)).astype(np.float64)


def _by_gfloat(fmt: Format, rounding: str, saturate: bool) -> Cast:
    def cast(x):
        mode = GFLOAT_ROUNDINGS[rounding]
        x = np.where(np.isnan(x), np.float32(0), x) if fmt.nan_code is None else x
        with np.errstate(all="ignore"):
            return gfloat.round_ndarray(GFLOAT[fmt.name], x.astype(np.float64), mode, saturate)

    return cast


def _onnx(fmt: Format) -> Iterator[Route]:
    try:
        import onnx
        from onnx.numpy_helper import to_float8e8m0
        from onnx.reference.ops.op_cast import cast_to
    except ImportError:
        return
    library = f"ONNX {onnx.__version__}, reference"

    def e8m0(how: str, saturate: bool) -> Cast:
        return lambda x: to_float8e8m0(x, saturate, how).astype(np.float64)

    def others(saturate: bool) -> Cast:
        def cast(x):
            with np.errstate(all="ignore"):
                kind = getattr(onnx.TensorProto, ONNX[fmt.name])
                return np.asarray(cast_to(x, kind, saturate, "up")).astype(np.float64)

        return cast

    for saturate in (False, True):
        if fmt.name == "e8m0":
            for how in ("up", "down", "nearest"):
                yield Route(library, fmt, how, saturate, e8m0(how, saturate))
        elif fmt.name in ONNX and (saturate is False or fmt.bits < 16):
            yield Route(library, fmt, "nearest_even", saturate, others(saturate))


def _torch(fmt: Format) -> Iterator[Route]:
    try:
        import torch
    except ImportError:
        return
    if fmt.name in TORCH:

        def cast(x):
            y = torch.from_numpy(x).to(getattr(torch, TORCH[fmt.name]))
            return y.to(torch.float64).numpy()

        version = torch.__version__.split("+")[0]
        yield Route(f"torch {version}", fmt, "nearest_even", False, cast)


def inputs(fmt: Format, rounding: str, saturate: bool) -> np.ndarray:
    """Returns inputs on both sides of every threshold, and a million random bit patterns."""
    both = [bits for bits, _ in edges(fmt, rounding_mode(rounding, fmt).name, saturate)]
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan]).view(np.uint32)
    return np.unique(np.concatenate([*both, noise, special])).view(np.float32)


def compare(route: Route) -> tuple[int, list[str]]:
    """Returns the number of inputs compared, and one example of each kind of difference."""
    x = inputs(route.fmt, route.rounding, route.saturate)
    ours = np.asarray(round_to(x, route.fmt, rounding=route.rounding, saturate=route.saturate))
    theirs = route.cast(x)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        ours = ours.astype(np.float64)
    if route.fmt.nan_code is None:  # a format without NaN: each library chooses
        ours = np.where(np.isnan(x), theirs, ours)
    same = (ours == theirs) & (np.signbit(ours) == np.signbit(theirs))
    differs = np.flatnonzero(~(same | (np.isnan(ours) & np.isnan(theirs))))
    ways: dict[tuple, list[int]] = {}
    for i in differs:
        ways.setdefault((_kind(x[i]), _kind(ours[i]), _kind(theirs[i])), []).append(int(i))
    return len(x), [
        f"{x[w[0]]!s} ({x[w[0]].view(np.uint32):#010x}): {ours[w[0]]:.8g} here, "
        f"{theirs[w[0]]:.8g} there ({len(w):,} inputs so)"
        for w in ways.values()
    ]


def _kind(value: Any) -> str:
    """Returns the kind of a number, by which differences are grouped into one line."""
    if np.isnan(value):
        return "nan"
    size = "inf" if np.isinf(value) else "0" if value == 0 else "number"
    return f"-{size}" if np.signbit(value) else size


def node_tests() -> tuple[int, int, list[str]]:
    """ONNX's backend tests of casts in the formats of ``ONNX``: nodes, inputs, and what differs.

    These are all nodes of Cast, CastLike, QuantizeLinear and DequantizeLinear between floats of
    which one is a float of at most 16 bits, and those from integers to one.
    """
    try:
        import onnx
        from onnx.backend.test.case.node import collect_testcases
    except ImportError:
        return 0, 0, []
    kinds = {getattr(onnx.TensorProto, n): CATALOGUE[f] for f, n in (ONNX | WIDER).items()}
    nodes, compared, wrong = 0, 0, []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # its examples overflow
        cases = collect_testcases(None)
    for case in cases:
        graph = case.model.graph
        operator = graph.node[0].op_type
        if len(graph.node) > 1 or operator not in OPERATORS:
            continue
        types = [v.type.tensor_type.elem_type for v in (graph.input[0], graph.output[0])]
        target = kinds.get(types[1])
        if target is None or not {t for t in types if kinds.get(t) and kinds[t].bits <= 16}:
            continue  # an integer results, or no narrow format takes part
        options = {a.name: onnx.helper.get_attribute_value(a) for a in graph.node[0].attribute}
        for inputs, outputs in case.data_sets:
            arrays = [_array(onnx, v) for v in inputs]
            want = _array(onnx, outputs[0]).astype(np.float64)
            got = OPERATORS[operator](arrays, target, options)
            with np.errstate(invalid="ignore"):  # signalling NaNs
                nan = np.isnan(arrays[0].astype(np.float64)) & (target.nan_code is None)
            got = np.where(nan, want, got)
            same = (got == want) & (np.signbit(got) == np.signbit(want))
            same |= np.isnan(got) & np.isnan(want)
            compared += want.size
            if not same.all():
                x = arrays[0][~same].ravel()[:3]
                wrong.append(f"{case.name}: {x}: {got[~same][:3]} for {want[~same][:3]}")
        nodes += 1
    return nodes, compared, wrong


def _cast_node(arrays: list[np.ndarray], fmt: Format, options: dict[str, Any]) -> np.ndarray:
    """Cast and CastLike: ``saturate`` is for float8, ``round_mode`` for E8M0."""
    saturate = fmt.bits <= 8 and options.get("saturate", 1) != 0
    how = "nearest_even" if fmt.zero else options.get("round_mode", b"up").decode()
    return _numbers(arrays[0], fmt, how, saturate)


def _quantize_node(arrays: list[np.ndarray], fmt: Format, options: dict[str, Any]) -> np.ndarray:
    """``x / y_scale + y_zero_point``: a quotient of -0 and the zero point, +0, add up to 0."""
    x, scale, *zeros = (_along(a, arrays[0].ndim, options) for a in arrays)
    quotient = x / scale
    if zeros:
        quotient = quotient + zeros[0].astype(x.dtype)
    return _numbers(quotient, fmt, "nearest_even", options.get("saturate", 1) != 0)


def _dequantize_node(arrays: list[np.ndarray], fmt: Format, options: dict[str, Any]) -> np.ndarray:
    """``(x - x_zero_point) * x_scale``: exact in float32, then in the scale's dtype."""
    x, scale, *zeros = (
        _numbers(_along(a, arrays[0].ndim, options), FP32, "nearest_even", False) for a in arrays
    )
    value = (x - zeros[0] if zeros else x) * scale
    return _numbers(value.astype(np.float32), fmt, "nearest_even", False)


OPERATORS = {
    "Cast": _cast_node,
    "CastLike": _cast_node,
    "QuantizeLinear": _quantize_node,
    "DequantizeLinear": _dequantize_node,
}


def _along(scale: np.ndarray, ndim: int, options: dict[str, Any]) -> np.ndarray:
    """An array with a number for each index of an axis in a shape that broadcasts; others as is."""
    if scale.ndim != 1 or ndim == 1:
        return scale
    axis = options.get("axis", 1) % ndim
    return scale.reshape([-1 if a == axis else 1 for a in range(ndim)])


def _numbers(x: np.ndarray, fmt: Format, rounding: str, saturate: bool) -> np.ndarray:
    """Returns ``cast`` of a NumPy array of any dtype, as float64."""
    if np.issubdtype(x.dtype, np.integer) or x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        x = x.astype(np.float32)  # integers of at most 8 bits
    with jax.enable_x64(True):
        stored = np.asarray(cast(x, fmt, rounding=rounding, saturate=saturate))
    if fmt.dtype is None or stored.dtype != fmt.dtype:
        return fmt.decode(stored)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return stored.astype(np.float64)


def _array(onnx: Any, value: Any) -> np.ndarray:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value)


def main() -> int:
    nodes, compared, wrong = node_tests()
    print(f"{nodes} of ONNX's backend nodes, {compared} inputs, {len(wrong)} nodes unlike", *wrong)
    if "nodes" not in sys.argv[1:]:
        _libraries()
    return 1 if wrong else 0


def _libraries() -> None:
    agree: dict[str, list[str]] = {}
    total, notes = 0, []
    for route in routes():
        compared, ways = compare(route)
        total += compared
        what = f"{route.fmt.name} {route.rounding}" + (" saturating" if route.saturate else "")
        if ways:
            notes += [f"| {route.library} | {what} | {way} |" for way in ways]
        else:
            agree.setdefault(route.library, []).append(what)
    print(f"{total:,} inputs compared\n")
    print("## Alike on every input\n")
    for library, cases in agree.items():
        print(f"- {library} ({len(cases)}): {'; '.join(cases)}")
    print("\n## Unlike\n\n| library | cast | first input, and how |\n|---|---|---|")
    print("\n".join(notes))


if __name__ == "__main__":
    sys.exit(main())
