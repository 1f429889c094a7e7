"""Writes docs/checkpoints.md: the layouts of quantised checkpoints, and the files that tests read.

python docs/checkpoints_page.py
"""

import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from parts import parts_of

from scalewise.checkpoints import load
from scalewise.checkpoints._encode import WRITERS
from scalewise.checkpoints._layouts import LAYOUTS

HERE = Path(__file__).parent
PARTS = parts_of("checkpoints")
RECORDED = HERE.parent / "tests/checkpoints/recorded"
FAMILIES = {
    "scalewise": "ScaledArrays by `scalewise.scaled.save_safetensors`",
    "torchao": "metadata `tensor_names`, github.com/pytorch/ao prototype/safetensors",
    "comfyui": "metadata `_quantization_metadata` or tensors `*.comfy_quant`, "
    "github.com/comfyanonymous/ComfyUI",
    "compressed-tensors": "`quant_method: compressed-tensors`, github.com/vllm-project/"
    "compressed-tensors",
    "modelopt": "`hf_quant_config.json`, github.com/NVIDIA/TensorRT-Model-Optimizer",
    "deepseek": "`quant_method: fp8`, github.com/deepseek-ai/DeepSeek-V3 inference",
    "gpt-oss": "`quant_method: mxfp4`, github.com/openai/gpt-oss",
    "fbgemm": "`quant_method: fbgemm_fp8`, github.com/huggingface/transformers integrations",
}
ORDER = {
    "pairs": "even element low", "swapped": "even element high",
    None: "",
}  # fmt: skip


def packages() -> dict[str, list[str]]:
    """Returns the packages whose recorded files have each layout."""
    found = defaultdict(list)
    for name, package in json.loads((RECORDED / "versions.json").read_text()).items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(RECORDED / f"{name}.safetensors", Path(folder, "model.safetensors"))
            if (RECORDED / f"{name}.config.json").exists():
                shutil.copy(RECORDED / f"{name}.config.json", Path(folder, "config.json"))
            weights = load(folder).weights.values()
        for layout in {w.layout.name for w in weights if w.layout}:
            found[layout] = sorted({*found[layout], package})
    return found


def row(layout, tested) -> str:
    names = [layout.codes, layout.scale] + ([layout.whole] if layout.whole else [])
    shown = ", ".join(f"`{n.format('*')}`" for n in dict.fromkeys(names))
    block = "by the shapes" if layout.block is None else f"{layout.block[0]} x {layout.block[1]}"
    whole = "" if layout.whole is None else "divide" if layout.divides else "multiply"
    swapped = "yes" if layout.transposed else ""
    cells = (f"`{layout.name}`" + (" w" if layout.writes else ""), shown,
             ", ".join(layout.code_dtypes), ", ".join(layout.scale_dtypes), block,
             ORDER[layout.nibbles], whole, swapped,
             ", ".join(tested.get(layout.name, ["no file of its package"])))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Returns the page."""
    versions = json.loads((RECORDED / "versions.json").read_text())
    writers = (
        f"| {w.name} | {w.zero:g} | {w.smallest:g} | {w.exponent} | {w.product} | {w.empty:g} |"
        for w in WRITERS.values()
    )
    tested = packages()
    return PARTS.TEXT.format(
        layouts="\n".join(row(layout, tested) for layout in LAYOUTS),
        families="\n".join(f"| {name} | {what} |" for name, what in FAMILIES.items()),
        writers="\n".join(writers),
        recorded="\n".join(f"| {n} | {package} |" for n, package in sorted(versions.items())),
    )


if __name__ == "__main__":
    (HERE / "checkpoints.md").write_text(page())
