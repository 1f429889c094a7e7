"""Which array a product reads whose weight is a stored ScaledArray, compiled for GPUs.

    PYTHONPATH=.gpu-plugin python -m benchmarks.stored

Needs the compiler that `make gpu-hlo` installs, and no GPU. A weight of 512 x 512 is cast to each
layout and read by `checkpoints.load`; the operand of the product is followed through views to its
origin. docs/gpu.md has the table.
"""

import dataclasses
import re
import tempfile
from pathlib import Path

from benchmarks.gpu_hlo import gpus  # sets what JAX reads when it is imported

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw

LAYOUTS = {
    "FP8, one scale (modelopt)": ("e4m3fn", "modelopt", {"strategy": "tensor"}),
    "FP8, a scale for each row (compressed-tensors)": ("e4m3fn", "compressed-tensors", {}),
    "FP8, 128 x 128 (deepseek)": ("e4m3fn", "deepseek", {}),
    "MXFP8 (compressed-tensors)": ("mxfp8_e4m3", "compressed-tensors", {}),
    "NVFP4 (modelopt)": ("nvfp4", "modelopt", {}),
    "MXFP4 (compressed-tensors)": ("mxfp4", "compressed-tensors", {}),
}
VIEWS = ("bitcast", "get-tuple-element", "tuple", "optimization-barrier", "copy", "transpose")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)(.*)$", re.MULTILINE)


def product(text: str) -> str:
    """Returns the library's function of the only product, and where its right operand is from."""
    lines = {m[1]: m for m in LINE.finditer(text)}

    def operands(name: str) -> list[str]:
        return [x.split()[-1].lstrip("%") for x in lines[name][4].split(", ")]

    targets = ("__cublas$lt", "__cudnn$blockScaledDot")
    call = next(n for n, m in lines.items() if any(t in m[5] for t in targets))
    function = re.search(r'custom_call_target="__([^"]*)"', lines[call][5])
    outer = next((n for n, m in lines.items() if m[3] == "call"), call)
    at = operands(outer)[1]
    while lines[at][3] in VIEWS:
        m, inner = lines[at], operands(at)
        index = re.search(r"index=(\d+)", m[5])
        if index and lines[inner[0]][3] in ("tuple", "optimization-barrier"):
            inner = [operands(inner[0])[int(index[1])]]
        at = inner[0]
    dtype = re.search(r"\w+(?=\[)", lines[at][2])
    assert function
    assert dtype
    if lines[at][3] == "parameter":
        return f"`{function[1]}`, the stored array ({dtype[0]})"
    return f"`{function[1]}`, decoded to {dtype[0]}"


def weights() -> dict[str, sw.ScaledArray]:
    x = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32) * 0.02
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder, "wide.safetensors")
        sw.scaled.save_safetensors(wide, {"a.weight": x})
        for name, (fmt, layout, options) in LAYOUTS.items():
            out = Path(folder, f"{len(found)}.safetensors")
            sw.checkpoints.cast(wide, fmt, out=out, layout=layout, **options)
            found[name] = sw.checkpoints.load(out)["a.weight"]
    return found


def compiled(f, w, device) -> str:
    place = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (x, w)
    )
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()


def main() -> None:
    print(
        "| weight | device | `matmul(quantize(x), w.T)` | `autoscale(x @ w.T)` |\n|---|---|---|---|"
    )
    for device in ("h100", "b200"):
        (gpu,) = gpus(device)
        for name, w in weights().items():
            kind = name.partition(" ")[0]
            recipe = {
                "NVFP4": sw.recipes.nvfp4,
                "MXFP8": sw.recipes.mxfp8,
                "MXFP4": sw.recipes.mxfp8,
            }
            recipe = dataclasses.replace(recipe.get(kind, sw.recipes.fp8), device=device)

            def matmul(x, w):
                return sw.scaled.matmul(sw.scaled.quantize(x, "e4m3fn"), w.T).value()

            def program(x, w, recipe=recipe):
                return sw.autoscale(lambda x, w: x @ w.T, recipe=recipe)(x, w)

            cells = [product(compiled(f, w, gpu)) for f in (matmul, program)]
            print(f"| {name} | {device} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
