"""Computes other libraries' numbers for tests/autoscale/test_reference_numbers.py.

In an environment of its own, with checkouts of github.com/microsoft/microxcaling,
github.com/mit-han-lab/fouroversix and github.com/NVIDIA/TransformerEngine, of which the references
in PyTorch are imported, without the compiled code:

    pip install torch==2.13.0 torchao==0.18.0 numpy packaging
    python proofs/reference_numbers.py MICROXCALING FOUROVERSIX TRANSFORMER_ENGINE

It writes tests/reference_numbers/numbers.npz: float32 arrays, the numbers after a rounding and
back.
"""

import pathlib
import sys
import types

import numpy as np
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.optim.quant_utils import (
    create_dynamic_map,
    dequant_with_qmap,
    quantize_4bit_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

FILE = pathlib.Path(__file__).parents[1] / "tests" / "reference_numbers" / "numbers.npz"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def numbers() -> np.ndarray:
    """Returns the input of every rounding: float32, some rows and columns much larger."""
    x = np.random.RandomState(0).standard_normal((8, 256)).astype(np.float32)
    x[3] *= 1000
    x[:, 77] *= 50
    return x


def of_codes(packed: torch.Tensor) -> torch.Tensor:
    """Returns the values of E2M1 codes, two in a byte, the first in the low bits."""
    packed = packed.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3)).float()


def by_rows(x: torch.Tensor, **options) -> torch.Tensor:
    scale = tensor_to_scale(x, torch.float8_e4m3fn, round_scales_to_power_of_2=True, **options)
    return to_fp8_saturated(x * scale, torch.float8_e4m3fn).float() / scale


def mx(x: torch.Tensor, dtype, mode: ScaleCalculationMode) -> torch.Tensor:
    scale, data = to_mx(x, dtype, 32, mode)
    return to_dtype(data, scale, dtype, 32, torch.float32)


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    whole = per_tensor_amax_to_scale(x.abs().max())
    scale, data = nvfp4_quantize(x, 16, whole)
    return of_codes(data) * (scale.float() * whole).repeat_interleave(16, -1)


def states(x: torch.Tensor) -> dict[str, torch.Tensor]:
    squares, found = x * x, {}
    for name, y, table, block, quantized in (
        ("signed8", x, create_dynamic_map(True, 7, 8), 256, quantize_8bit_with_qmap),
        ("unsigned8", squares, create_dynamic_map(False, 7, 8), 256, quantize_8bit_with_qmap),
        ("signed4", x, create_dynamic_map(True, 3, 4), 128, quantize_4bit_with_qmap),
        ("linear4", squares, torch.linspace(0, 1, 17)[1:], 128, quantize_4bit_with_qmap),
    ):
        table = torch.as_tensor(table, dtype=torch.float32)
        relative, scale = scale_tensor(y, block)
        found[name] = dequant_with_qmap(quantized(relative, table), table, scale)
    return found


def microxcaling(folder: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    sys.path.insert(0, folder)
    from mx.mx_ops import _quantize_mx

    return {
        f"microxcaling_{fmt}": _quantize_mx(x, 8, fmt, axes=[-1], block_size=32, round="even")
        for fmt in ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")
    }


def empty_packages(folder: str, *names: str) -> None:
    """Makes packages whose modules can be imported without their ``__init__``."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = module


def transformer_engine(folder: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    name = "transformer_engine.pytorch"
    empty_packages(folder, "transformer_engine", name, f"{name}.custom_recipes")
    bases = types.ModuleType(f"{name}.quantized_tensor")
    bases.QuantizedTensorStorage = bases.Quantizer = object
    sys.modules[bases.__name__] = bases
    gemm = types.ModuleType(f"{name}.custom_recipes.gemm")
    gemm.GEMMType, gemm.MMParams = types.SimpleNamespace(FPROP=0), object
    sys.modules[gemm.__name__] = sys.modules[f"{name}.custom_recipes"].gemm = gemm
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    def rounded(x: torch.Tensor, rows: int, **options) -> torch.Tensor:
        amax, top = x.abs().max(), options.get("nvfp4_e4m3_max", 448)
        data, scale = NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax, 16, rows, pow_2_scales=False, eps=0.0, **options
        )
        scale = scale.view(torch.float8_e4m3fn).float().reshape(len(x), -1)
        return of_codes(data) * (scale * (amax / (6 * top))).repeat_interleave(16, -1)

    four = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"}
    found = {"te_1d": rounded(x, 1), "te_2d": rounded(x.reshape(16, 128), 16)}
    return found | {"te_four_over_six": rounded(x, 1, **four)}


def four_over_six(folder: str, x: torch.Tensor) -> torch.Tensor:
    empty_packages(
        f"{folder}/src", "fouroversix", "fouroversix.quantize", "fouroversix.quantize.pytorch"
    )
    from fouroversix.quantize.pytorch.reference import quantize
    from fouroversix.utils import ScaleRule

    options = {"scale_rule": ScaleRule.mse, "use_blackwell_scale_layout": False}
    data, scale, amax = quantize(x, **options)
    whole = amax / (6 * 256)
    return of_codes(data) * (scale.float().view(len(x), -1) * whole).repeat_interleave(16, -1)


def main() -> None:
    x = torch.from_numpy(numbers())
    row = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    found = {"rowwise": by_rows(x, **row), "tensorwise": by_rows(x), "nvfp4": nvfp4(x)}
    for mode in ScaleCalculationMode:
        found[f"mxfp8_{mode.value}"] = mx(x, torch.float8_e4m3fn, mode)
    found |= states(x) | microxcaling(sys.argv[1], x)
    found["four_over_six"] = four_over_six(sys.argv[2], x)
    found |= transformer_engine(sys.argv[3], x)
    arrays = {name: y.detach().numpy().astype(np.float32) for name, y in found.items()}
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
