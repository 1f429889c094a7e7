"""Where other libraries' casts agree with ours, and where not: ``python -m proofs.references``.

Each is given the inputs at which a result can change: both sides of every threshold of the format
and rounding (``oracle.edges``), zeros, infinities, NaN, and a million random bit patterns. What is
installed takes part: NumPy and ml_dtypes, XLA and gfloat always; ONNX and torch where they are
(``pip install --group prove``). Prints the tables of docs/references.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gfloat
import gfloat.formats as gf
import jax
import numpy as np
from jax import lax

from proofs.oracle import edges
from scalewise.formats import CATALOGUE, Format, check_rounding
from scalewise.rounding import round_to

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
    """Both sides of every threshold, and a million random bit patterns."""
    both = [bits for bits, _ in edges(fmt, check_rounding(fmt, rounding), saturate)]
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan]).view(np.uint32)
    return np.unique(np.concatenate([*both, noise, special])).view(np.float32)


def compare(route: Route) -> tuple[int, list[str]]:
    """How many inputs were compared, and one example of each way to differ."""
    x = inputs(route.fmt, route.rounding, route.saturate)
    ours = np.asarray(round_to(x, route.fmt, rounding=route.rounding, saturate=route.saturate))
    theirs = route.cast(x)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        ours = ours.astype(np.float64)
    if route.fmt.nan_code is None:  # what NaN becomes where there is none is anybody's choice
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
    """What a number is, so that a thousand inputs of one disagreement are one line."""
    if np.isnan(value):
        return "nan"
    size = "inf" if np.isinf(value) else "0" if value == 0 else "number"
    return f"-{size}" if np.signbit(value) else size


def node_tests() -> tuple[int, list[str]]:
    """ONNX's own test vectors for casts from float32: how many inputs, and what differs."""
    try:
        import onnx
        from onnx.backend.test.loader import load_model_tests
    except ImportError:
        return 0, []
    names = {kind: name for name, kind in ONNX.items()} | {"FLOAT8E8M0": "e8m0"}
    compared, wrong = 0, []
    for case in load_model_tests(kind="node"):
        if not case.name.startswith("test_cast_") or "_FLOAT_to_" not in case.name:
            continue
        fmt = CATALOGUE.get(names.get(case.name.split("_to_")[1], ""))
        if fmt is None or case.model_dir is None:
            continue
        folder = Path(case.model_dir)
        node = onnx.load(folder / "model.onnx").graph.node[0]
        options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        x, want = (
            _tensor(onnx, folder / "test_data_set_0" / f"{n}_0.pb") for n in ("input", "output")
        )
        how = options.get("round_mode", b"").decode() or "nearest_even"
        saturate = fmt.bits <= 8 and options.get("saturate", 1) != 0  # for these alone
        got = round_to(x, fmt, rounding=how, saturate=saturate)
        got = np.where(np.isnan(x) & (fmt.nan_code is None), want.astype(np.float64), got)
        same = (got == want.astype(np.float64)) | (
            np.isnan(got) & np.isnan(want.astype(np.float64))
        )
        compared += x.size
        wrong += [f"{case.name}: {x[~same]}"] if not same.all() else []
    return compared, wrong


def _tensor(onnx: Any, path: Path) -> np.ndarray:
    proto = onnx.TensorProto()
    proto.ParseFromString(path.read_bytes())
    return onnx.numpy_helper.to_array(proto)


def main() -> None:
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
    compared, wrong = node_tests()
    print(f"{total:,} inputs compared, and {compared} of ONNX's node tests, {len(wrong)} unlike:")
    print(*wrong, sep="\n")
    print("## Alike on every input\n")
    for library, cases in agree.items():
        print(f"- {library} ({len(cases)}): {'; '.join(cases)}")
    print("\n## Unlike\n\n| library | cast | first input, and how |\n|---|---|---|")
    print("\n".join(notes))


if __name__ == "__main__":
    main()
