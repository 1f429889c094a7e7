"""Speed of packing and unpacking beside the packages that define the layouts, on one thread.

    taskset -c 0 python -m proofs.checkpoints.peers

Needs torch, transformers, compressed-tensors and nvidia-modelopt, as
`proofs.checkpoints.record`. Both sides convert the same bfloat16 weights in the same process; the
smallest CPU time of several runs counts. Ours have the time of finding the scales, as theirs.
"""

import argparse
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import torch

from scalewise.checkpoints._encode import quantised, writer_of
from scalewise.checkpoints._layouts import BY_NAME
from scalewise.checkpoints._packed import Packed, values
from scalewise.formats import E2M1FN

BF16 = ml_dtypes.bfloat16


def compressed_tensors(w):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    cases = {
        "nvfp4-pack-quantized": group | {"strategy": "tensor_group", "group_size": 16,
                                         "scale_dtype": torch.float8_e4m3fn},
        "mxfp4-pack-quantized": group,
        "float-quantized": {"num_bits": 8, "strategy": "channel"},
    }  # fmt: skip
    for kind, given in cases.items():
        args = QuantizationArgs(type="float", symmetric=True, **given)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        packer = BaseCompressor.get_value_from_registry(kind)

        def pack(args=args, scheme=scheme, packer=packer):
            blocks = w.reshape(len(w), -1, args.group_size or w.shape[1])
            whole = generate_gparam(w.min(), w.max()) if args.group_size == 16 else None
            low, high = blocks.amin(-1), blocks.amax(-1)
            scale, _ = calculate_qparams(low, high, args, global_scale=whole)
            state = {"weight": w.clone(), "weight_scale": scale}
            state |= {} if whole is None else {"weight_global_scale": whole}
            return packer.compress(state, scheme)

        def unpack(state, scheme=scheme, packer=packer):
            return packer.decompress(dict(state), scheme)

        yield f"compressed-tensors/{kind}", pack, unpack


def modelopt(w):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def unpack(packed):
        q, scale, whole = packed
        return q.dequantize(torch.bfloat16, scale=scale, double_scale=whole, block_sizes={-1: 16})

    yield "modelopt/nvfp4", lambda: NVFP4QTensor.quantize(w.clone(), 16), unpack


def transformers(w):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None)
    q = SimpleNamespace(quantization_config=config)

    def unpack(state):
        return Fp8Dequantize(q)._dequantize_one(*state.values(), output_dtype=torch.bfloat16)

    yield "deepseek/v3", lambda: Fp8Quantize(q).convert({"w.weight": w}), unpack
    blocks = torch.randint(0, 256, (1, len(w), w.shape[1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, blocks.shape[:-1], dtype=torch.uint8)
    theirs = {"blocks": blocks, "scales": scales}
    yield "gpt-oss/mxfp4", None, lambda _: convert_moe_packed_tensors(**theirs, dtype=w.dtype)


def rate(run, numbers, times=5):
    best, result = float("inf"), None
    for _ in range(times):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return numbers / best / 1e6, result


def ours(name, w):
    """Returns our rates of packing and unpacking."""
    layout = BY_NAME[name]
    x = w.view(torch.uint16).numpy().view(BF16)
    if name == "gpt-oss/mxfp4":
        codes = np.random.default_rng(0).integers(0, 256, (*x.shape[:1], x.shape[1] // 2), np.uint8)
        scale = np.random.default_rng(1).integers(100, 140, (len(x), x.shape[1] // 32), np.uint8)
        packed, packing = Packed(codes, E2M1FN, scale, "e8m0", (1, 32), transposed=True), None
    else:
        packing, packed = rate(lambda: quantised(x, layout, writer_of(layout.family)), x.size)
    return packing, rate(lambda: values(packed, BF16), x.size)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    given = parser.parse_args()
    torch.set_num_threads(1)
    w = (torch.randn(given.rows, 4096) * 0.02).to(torch.bfloat16)
    print("million numbers a second: packing ours, theirs; unpacking ours, theirs")
    for package in (compressed_tensors, modelopt, transformers):
        for name, pack, unpack in package(w):
            packing, packed = rate(pack, w.numel()) if pack else (None, None)
            unpacking, _ = rate(lambda p=packed, u=unpack: u(p), w.numel())
            mine = ours(name, w)
            pairs = [(mine[0], packing), (mine[1], unpacking)]
            shown = ("-, -" if b is None else f"{a:.0f}, {b:.0f} ({a / b:.1f})" for a, b in pairs)
            print(f"{name}: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
