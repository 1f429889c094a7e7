"""Records small checkpoints that other packages write, and the values that they decode.

    python -m proofs.checkpoints.record tests/checkpoints/recorded

Needs torch, transformers, compressed-tensors, torchao, nvidia-modelopt and comfy-kitchen; the
tests read the recorded files, so that they need none of them. Each ``NAME.safetensors`` is as
the package writes it; ``NAME.expected.safetensors`` has the inputs and the values.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

SHAPE = (48, 64)
VERSIONS = {}


def matrix(seed, shape=SHAPE, zeros=True):
    """Returns float32 weights with outliers, a block of zeros and a -0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 0.02 * np.exp(rng.standard_normal((*shape[:-1], 1)))
    x = x.astype(np.float32)
    if zeros:
        x[..., 1, :32] = 0
        x[..., 2, 40] = -0.0
        x[..., 3, :] *= 1e-3
    return torch.from_numpy(x)


def write(folder, name, tensors, expected, metadata, config, package):
    VERSIONS[name] = f"{package} {version(package)}"
    keep = {k: v.contiguous() for k, v in tensors.items()}
    save_file(keep, folder / f"{name}.safetensors", metadata)
    save_file({k: v.float().contiguous() for k, v in expected.items()},
              folder / f"{name}.expected.safetensors")  # fmt: skip
    if config is not None:
        text = json.dumps({"quantization_config": config}, indent=1)
        (folder / f"{name}.config.json").write_text(text + "\n")


def compressed_tensors(folder):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    fp = {"type": "float", "symmetric": True}
    cases = {
        "nvfp4-pack-quantized": dict(num_bits=4, **fp, strategy="tensor_group", group_size=16,
                                     scale_dtype=torch.float8_e4m3fn),
        "mxfp4-pack-quantized": dict(num_bits=4, **fp, strategy="group", group_size=32,
                                     scale_dtype=torch.uint8),
        "mxfp8-quantized": dict(num_bits=8, **fp, strategy="group", group_size=32,
                                scale_dtype=torch.uint8),
        "float-quantized": dict(num_bits=8, **fp, strategy="channel"),
        "float-quantized-tensor": dict(num_bits=8, **fp, strategy="tensor"),
        "float-quantized-block": dict(num_bits=8, **fp, strategy="block",
                                      block_structure=[16, 32]),
        "float-quantized-ragged": dict(num_bits=8, **fp, strategy="block",
                                       block_structure=[128, 128]),
    }  # fmt: skip
    for kind, given in cases.items():
        args = QuantizationArgs(**given)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        shape = (160, 192) if "ragged" in kind else SHAPE  # the last tiles are smaller
        w = matrix(len(kind), shape, zeros=str(args.strategy) != "block")
        blocks = {"channel": (1, shape[1]), "tensor": shape, "block": args.block_structure}
        r, c = blocks.get(str(args.strategy)) or (1, args.group_size)
        tiles = torch.nn.functional.pad(w, (0, -shape[1] % c, 0, -shape[0] % r))
        tiles = tiles.reshape(-(-shape[0] // r), r, -(-shape[1] // c), c)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
        if str(args.strategy) == "tensor":
            low, high = low.reshape(1), high.reshape(1)
        whole = generate_gparam(w.min(), w.max()) if args.group_size == 16 else None
        scale, _ = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": w.clone(), "weight_scale": scale}
        state |= {"weight_global_scale": whole} if whole is not None else {}
        name = re.sub("-(tensor|block|ragged)$", "", kind)
        packer = BaseCompressor.get_value_from_registry(name)
        found = packer.compress(state, scheme)
        # the packages' own formula in float32: their decompress rounds to bfloat16 on the way
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        codes = found.get("weight_packed", found.get("weight"))
        if "weight_packed" in found:
            codes = unpack_fp4_from_uint8(codes, *shape, dtype=torch.float32)
        stored = found["weight_scale"]
        wide = stored.float() if stored.dtype != torch.uint8 else torch.exp2(stored.float() - 127)
        value = dequantize(codes.float(), wide, args=args, global_scale=whole, dtype=torch.float32)
        tensors = {f"model.layer.{k}": v.data for k, v in found.items()}
        config = {"quant_method": "compressed-tensors", "format": name, "ignore": [],
                  "config_groups": {"group_0": json.loads(scheme.model_dump_json())}}  # fmt: skip
        write(
            folder,
            f"compressed-tensors_{kind}",
            tensors,
            {"model.layer.weight": value, "input": w},
            None,
            config,
            "compressed-tensors",
        )


def modelopt(folder):
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    algorithms = {"nvfp4": "NVFP4", "nvfp4-32": "W4A8_NVFP4_FP8", "fp8": "FP8", "mxfp8": "MXFP8",
                  "fp8-ragged": "fp8_pb_wo", "mxfp4": "mxfp4"}  # fmt: skip
    for kind, algorithm in algorithms.items():
        w = matrix(11, (160, 192), zeros=False) if kind == "fp8-ragged" else matrix(11)
        size = 32 if kind == "nvfp4-32" else 16
        if kind.startswith("nvfp4"):
            q, scale, whole = NVFP4QTensor.quantize(w.clone(), size)
            value = q.dequantize(torch.float32, scale=scale, double_scale=whole,
                                 block_sizes={-1: size})  # fmt: skip
            parts = {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
        elif kind == "fp8":
            scale = (w.abs().amax() / 448).float()
            q, scale = FP8QTensor.quantize(w.clone(), scale)
            value = q.dequantize(torch.float32, scale=scale, block_sizes=None)
            parts = {"weight": q._quantized_data, "weight_scale": scale}
        elif kind == "fp8-ragged":
            tiles = {-1: 128, -2: 128}
            q, scale = FP8QTensor.quantize(w.clone(), block_sizes=tiles)
            value = q.dequantize(torch.float32, scale=scale, block_sizes=tiles)
            parts = {"weight": q._quantized_data, "weight_scale": scale}
        elif kind == "mxfp4":
            q, scale = MXFP4QTensor.quantize(w.clone(), 32)
            value = q.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
            scale = scale.reshape(len(w), -1)  # as the package's exporter does
            parts = {"weight": q._quantized_data, "weight_scale": scale}
        else:
            q, scale = MXFP8QTensor.quantize(w.clone())
            value = q.dequantize(torch.float32, scale=scale)
            parts = {"weight": q._quantized_data, "weight_scale": scale}
        tensors = {f"model.layer.{k}": v for k, v in parts.items()}
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        config |= {"group_size": size} if kind.startswith("nvfp4") else {}
        write(folder, f"modelopt_{kind}", tensors, {"model.layer.weight": value, "input": w},
              None, config, "nvidia-modelopt")  # fmt: skip


def torchao(folder):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, PerRow, PerTensor

    w, full = matrix(21), matrix(22, zeros=False)
    whole = per_tensor_amax_to_scale(w.abs().max())
    cases = {
        "Float8Tensor": (full, Float8Tensor.from_hp(full, granularity=PerRow())),
        "Float8Tensor-tensor": (full, Float8Tensor.from_hp(full, granularity=PerTensor())),
        "NVFP4Tensor": (w, NVFP4Tensor.to_nvfp4(w, per_tensor_scale=whole)),
        "NVFP4Tensor-alone": (w, NVFP4Tensor.to_nvfp4(w)),
        "NVFP4Tensor-swizzled": (w, NVFP4Tensor.to_nvfp4(w, per_tensor_scale=whole,
                                                         is_swizzled_scales=True)),
        "MXTensor": (w, MXTensor.to_mx(w, torch.float8_e4m3fn, 32)),
        "MXTensor-fp4": (w, MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32)),
    }  # fmt: skip
    for kind, (x, tensor) in cases.items():
        state = {"model.layer.weight": tensor, "model.layer.bias": torch.ones(3)}
        tensors, metadata = flatten_tensor_state_dict(state)
        expected = {"model.layer.weight": tensor.dequantize(torch.float32), "input": x}
        write(folder, f"torchao_{kind}", tensors, expected, metadata, None, "torchao")


def transformers(folder):
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def quantizer(**config):
        return SimpleNamespace(quantization_config=SimpleNamespace(**config))

    w = matrix(31, (256, 128), zeros=False)
    for kind, scale in (("v3", None), ("v3-ue8m0", "ue8m0")):
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config |= {"scale_fmt": scale} if scale else {}
        q = quantizer(weight_block_size=[128, 128], scale_fmt=scale)
        found = Fp8Quantize(q).convert({"model.layer.weight": w})
        found = {k: v.float() if "scale" in k else v for k, v in found.items()}
        one = Fp8Dequantize(q)._dequantize_one(*found.values(), output_dtype=torch.float32)
        write(folder, f"deepseek_{kind}", found, {"model.layer.weight": one, "input": w}, None,
              config, "transformers")  # fmt: skip
    rng = np.random.default_rng(32)
    codes = torch.from_numpy(rng.integers(0, 256, (48, 32), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(110, 130, (48, 2), dtype=np.uint8))
    q = quantizer(weight_block_size=[128, 128], scale_fmt="ue8m0")
    e8m0 = scales.view(torch.float8_e8m0fnu)
    one = Fp8Dequantize(q)._dequantize_one(codes.view(torch.int8), e8m0.float(), torch.float32)
    dense = w[:128].to(torch.float8_e4m3fn)
    scale = torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    two = Fp8Dequantize(q)._dequantize_one(dense, scale.float(), torch.float32)
    tensors = {"layers.0.ffn.experts.0.w1.weight": codes.view(torch.int8),
               "layers.0.ffn.experts.0.w1.scale": e8m0,
               "layers.0.attn.wq_a.weight": dense, "layers.0.attn.wq_a.scale": scale}  # fmt: skip
    expected = {"layers.0.ffn.experts.0.w1.weight": one, "layers.0.attn.wq_a.weight": two}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    write(folder, "deepseek_v4", tensors, expected, None, config, "transformers")
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 8, 3, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(100, 140, (2, 8, 3), dtype=np.uint8))
    value = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for kind, tail in (("mxfp4", "_"), ("original", ".")):
        base = "model.layers.0.mlp.experts.gate_up_proj"
        tensors = {f"{base}{tail}blocks": blocks, f"{base}{tail}scales": scales}
        write(folder, f"gpt-oss_{kind}", tensors, {base: value}, None, {"quant_method": "mxfp4"},
              "transformers")  # fmt: skip


def fbgemm(folder):
    """Writes dense and Llama-4's weights by transformers; its kernel for rows needs a GPU."""
    from types import SimpleNamespace

    from transformers.integrations import fbgemm_fp8

    def per_row(x):
        scale = x.abs().amax(1).clamp(min=1e-6) / 448
        return (x / scale[:, None]).to(torch.float8_e4m3fn), scale

    fbgemm_fp8.quantize_fp8_per_row = per_row
    config = SimpleNamespace(num_local_experts=2, intermediate_size=24, hidden_size=24,
                             hidden_act="silu")  # fmt: skip
    model = torch.nn.ModuleDict({
        "dense": torch.nn.Linear(64, 48, bias=False),
        "experts": fbgemm_fp8.FbgemmFp8Llama4TextExperts(config),
    })  # fmt: skip
    given = {"dense.weight": matrix(41),
             "experts.gate_up_proj": matrix(42, (2, 24, 48), zeros=False),
             "experts.down_proj": matrix(43, (2, 24, 24), zeros=False)}  # fmt: skip
    tensors, expected = {}, {}
    for name, w in given.items():
        found = fbgemm_fp8.FbgemmFp8Quantize(None).convert({name: [w]}, model=model)
        codes, scale = found[name], found[f"{name}_scale"]
        tensors |= found
        # all have a scale for each output; experts are stored as inputs x outputs
        expected[name] = codes.float() * (scale if codes.ndim == 2 else scale.reshape(2, 1, -1))
    write(folder, "fbgemm_fp8", tensors, expected, None, {"quant_method": "fbgemm_fp8"},
          "transformers")  # fmt: skip


def comfyui(folder):
    from comfy_kitchen.tensor import fp8, mxfp8, nvfp4

    algorithms = {
        "float8_e4m3fn": (fp8.TensorCoreFP8Layout, {"weight": "", "weight_scale": "_scale"}),
        "nvfp4": (nvfp4.TensorCoreNVFP4Layout, {"weight": "", "weight_scale": "_scale",
                                                "weight_scale_2": "_scale_2"}),
        "mxfp8": (mxfp8.TensorCoreMXFP8Layout, {"weight": "", "weight_scale": "_scale"}),
    }  # fmt: skip
    for kind, (layout, parts) in algorithms.items():
        w = matrix(61, (128, 128) if kind == "nvfp4" else SHAPE)
        codes, params = layout.quantize(w)
        state = layout.state_dict_tensors(codes, params)
        tensors = {f"model.layer.{own}": state[theirs] for own, theirs in parts.items()}
        value = {"model.layer.weight": layout.dequantize(codes, params), "input": w}
        text = json.dumps({"format": kind}).encode()
        metadata = {"_quantization_metadata": json.dumps(
            {"format_version": "1.0", "layers": {"model.layer": {"format": kind}}})}  # fmt: skip
        if kind != "float8_e4m3fn":  # ComfyUI writes a tensor, and reads either
            metadata, text = None, torch.tensor(list(text), dtype=torch.uint8)
            tensors |= {"model.layer.comfy_quant": text}
        write(folder, f"comfyui_{kind.removesuffix('_e4m3fn').replace('float8', 'fp8')}", tensors,
              value, metadata, None, "comfy-kitchen")  # fmt: skip


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    makers = (compressed_tensors, torchao, transformers, fbgemm, comfyui, modelopt)
    for make in makers:
        make(folder)
    (folder / "versions.json").write_text(json.dumps(VERSIONS, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
