"""Other libraries' casts of float32, each used as its documentation recommends."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Run = Callable[[], Any]

# Read when torch is loaded: by default its threads, their work done, go on spinning for a while
# and hold a core that whatever is timed next needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

TORCH = {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp16": "float16", "bf16": "bfloat16"}
# exponent and mantissa bits, for libraries that round within float32
WIDTHS = {
    "e4m3fn": (4, 3), "e5m2": (5, 2), "fp16": (5, 10), "bf16": (8, 7), "e2m1fn": (2, 1),
    "e6m9": (6, 9),
}  # fmt: skip


def peers(x: np.ndarray) -> dict[tuple[str, str], Run]:
    """Returns the timed calls by (format, library)."""
    table: dict[tuple[str, str], Run] = {}
    for name, found in {"torch": _torch, "qtorch": _qtorch, "pychop": _pychop, "gfloat": _gfloat,
                        "torchao": _torchao, "jax.nn": _jax_nn}.items():  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        table |= {(fmt, name): run for fmt, run in found(x).items()}
    return table


def _torch(x: np.ndarray) -> dict[str, Run]:
    import torch

    tensor = torch.from_numpy(x)
    return {f: lambda k=k: tensor.to(getattr(torch, k)) for f, k in TORCH.items()}


def _qtorch(x: np.ndarray) -> dict[str, Run]:
    import torch
    from qtorch.quant import float_quantize

    tensor = torch.from_numpy(x)
    return {
        f: lambda e=e, m=m: float_quantize(tensor, exp=e, man=m, rounding="nearest")
        for f, (e, m) in WIDTHS.items()
    }


def _pychop(x: np.ndarray) -> dict[str, Run]:
    import pychop

    pychop.backend("numpy")
    chops = {f: pychop.Chop(exp_bits=e, sig_bits=m, rmode=1) for f, (e, m) in WIDTHS.items()}
    return {f: lambda c=c: c(x) for f, c in chops.items()}


def _gfloat(x: np.ndarray) -> dict[str, Run]:
    import gfloat
    import gfloat.formats as gf
    from gfloat.types import Domain

    e6m9 = gfloat.FormatInfo(
        name="e6m9", k=16, precision=10, bias=31, is_signed=True, domain=Domain.Extended,
        has_nz=True, num_high_nans=2**9 - 1, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip
    formats = {
        "e4m3fn": gf.format_info_ocp_e4m3, "e5m2": gf.format_info_ocp_e5m2,
        "fp16": gf.format_info_binary16, "bf16": gf.format_info_bfloat16,
        "e2m1fn": gf.format_info_ocp_e2m1, "e6m9": e6m9,
    }  # fmt: skip
    there = jnp.asarray(x)

    def run(info: Any) -> Run:
        compiled = jax.jit(
            lambda v: gfloat.round_ndarray(info, v, gfloat.RoundMode.TiesToEven, sat=True)
        )
        return lambda: jax.block_until_ready(compiled(there))

    return {f: run(info) for f, info in formats.items()}


def _torchao(x: np.ndarray) -> dict[str, Run]:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    rows = torch.from_numpy(x).reshape(-1, 4096)
    compiled = torch.compile(to_mx)
    kinds = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
    return {f: lambda k=k: compiled(rows, k, 32) for f, k in kinds.items()}


def _jax_nn(x: np.ndarray) -> dict[str, Run]:
    from jax._src.cudnn.scaled_matmul_stablehlo import quantize

    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    rows = jnp.asarray(x).reshape(-1, 4096)
    compiled = jax.jit(lambda v: quantize(v, config))
    return {"mxfp8_e4m3": lambda: jax.block_until_ready(compiled(rows))}
