"""Detects which family of layouts a checkpoint has, by its files, metadata, names and configs."""

from __future__ import annotations

from ._layouts import METHODS
from ._open import Source


def family_of(source: Source) -> tuple[str | None, str]:
    metadata, method = source.metadata, source.quantization.get("quant_method")
    if "gguf" in metadata and source.files[0].path.suffix == ".gguf":
        return "gguf", "the file is GGUF"
    for key, family in (("tensor_names", "torchao"), ("_quantization_metadata", "comfyui"),
                        ("scalewise", "scalewise")):  # fmt: skip
        if key in metadata:
            return family, f"the header's metadata has {key!r}"
    if any(name.endswith(".comfy_quant") for name in source.tensors):
        return "comfyui", "tensors are called *.comfy_quant"
    if method is None and "quant_algo" in source.quantization:
        method = "modelopt"
    if method in METHODS:
        return METHODS[method], f"quant_method is {method!r}"
    return None, "no config and no metadata names a layout" if method is None else (
        f"quant_method is {method!r}, which is not known")  # fmt: skip
