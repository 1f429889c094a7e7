"""Files of other people's packages are read to equal values, and written to equal bytes."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from scalewise import checkpoints
from scalewise.checkpoints._encode import WRITERS, quantised
from scalewise.checkpoints._files import open_file
from scalewise.checkpoints._lay import base_of, laid_out
from scalewise.checkpoints._layouts import (
    BY_NAME,
    algorithm_of,
    quantization_config,
    strategy_of,
)
from scalewise.checkpoints._weights import _size
from scalewise.checkpoints._write import Job, Shard, entry_of
from scalewise.scaled import save_safetensors

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(json.loads((RECORDED / "versions.json").read_text()))
WRITTEN = {  # the layout, the writer, and options of it
    "compressed-tensors_nvfp4-pack-quantized": {},
    "compressed-tensors_mxfp4-pack-quantized": {},
    "compressed-tensors_mxfp8-quantized": {},
    "compressed-tensors_float-quantized": {},
    "compressed-tensors_float-quantized-tensor": {"strategy": "tensor"},
    "compressed-tensors_float-quantized-block": {"strategy": (16, 32)},
    "compressed-tensors_float-quantized-ragged": {"strategy": (128, 128)},
    "modelopt_nvfp4": {},
    "modelopt_fp8": {"strategy": "tensor"},
    "modelopt_mxfp8": {},
    "deepseek_v3": {},
}


def folder_of(name, tmp_path):
    """Returns a folder with a recorded file and its config, as a model is passed around."""
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(RECORDED / f"{name}.safetensors", folder / "model.safetensors")
    if (RECORDED / f"{name}.config.json").exists():
        shutil.copy(RECORDED / f"{name}.config.json", folder / "config.json")
    return folder


def expected_of(name):
    found = load_file(RECORDED / f"{name}.expected.safetensors")
    return {key: x for key, x in found.items() if key != "input"}, found.get("input")


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_file_is_read_to_equal_values(name, tmp_path):
    tree = checkpoints.load(folder_of(name, tmp_path))
    expected, _ = expected_of(name)
    assert tree.layout == name.partition("_")[0]
    for key, want in expected.items():
        got = tree.value(key)
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)
        near = np.asarray(tree[key]).astype(np.float32)
        if tree.weights[key].layout and tree.weights[key].layout.divides:
            np.testing.assert_allclose(near, want, rtol=3e-7)
        else:
            np.testing.assert_array_equal(near, want)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_recorded_file_is_written_to_equal_bytes(name, tmp_path):
    tree = checkpoints.load(folder_of(name, tmp_path))
    _, x = expected_of(name)
    weight = tree.weights["model.layer.weight"]
    layout = weight.layout
    packed = quantised(x, layout, WRITERS[writer_name(layout)], **WRITTEN[name])
    found = laid_out(packed, layout, base_of(layout, weight.name))
    stored = {t.name: t for t in weight.parts.values()}
    assert set(found) == set(stored)
    for key, got in found.items():
        assert got.shape == stored[key].shape, key
        assert np.ascontiguousarray(got).tobytes() == stored[key].bytes.tobytes(), key


def writer_name(layout):
    return {"deepseek": "transformers"}.get(layout.family, layout.family)


@pytest.mark.parametrize("name", ["gpt-oss_mxfp4", *WRITTEN])
def test_what_was_read_is_laid_out_again_to_equal_bytes(name, tmp_path):
    for weight in checkpoints.load(folder_of(name, tmp_path)).weights.values():
        if weight.layout is None:
            continue
        found = laid_out(weight.packed, weight.layout, base_of(weight.layout, weight.name))
        for t in weight.parts.values():
            assert np.ascontiguousarray(found[t.name]).tobytes() == t.bytes.tobytes(), t.name


def shared(got, want):
    """Returns both without the keys that one of them leaves out or has no value for."""
    if not (isinstance(got, dict) and isinstance(want, dict)):
        return got, want
    keys = [k for k in got if got[k] is not None and want.get(k) is not None]
    assert keys
    pairs = {k: shared(got[k], want[k]) for k in keys}
    return {k: x for k, (x, _) in pairs.items()}, {k: y for k, (_, y) in pairs.items()}


@pytest.mark.parametrize("name", ["gpt-oss_mxfp4", *WRITTEN])
def test_the_config_has_the_values_of_the_packages_own(name, tmp_path):
    folder = folder_of(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    weight = next(w for w in checkpoints.load(folder).weights.values() if w.layout)
    got = quantization_config({weight.name: (weight.layout, strategy_of(weight.packed))}, [])
    if name == "modelopt_nvfp4":  # its activations are quantised, too
        got["quant_algo"] = got["quant_algo"].removeprefix("W4A16_")
    got, want = shared(got, config.get("quantization_config", config))
    assert got == want


@pytest.mark.parametrize(
    ("layout", "strategy", "activations"),
    [
        ("float-quantized", "channel", {"strategy": "token", "dynamic": True}),
        ("float-quantized", (128, 64), {"strategy": "group", "group_size": 64, "dynamic": True}),
        ("nvfp4-pack-quantized", "", None),
    ],
)
def test_fp8_activations_are_rounded_when_they_are_known(layout, strategy, activations):
    written = {"a.weight": (BY_NAME[f"compressed-tensors/{layout}"], strategy)}
    (group,) = quantization_config(written, [])["config_groups"].values()
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    assert group["input_activations"] == (activations and common | activations)


@pytest.mark.parametrize(
    ("layout", "strategy", "awq", "name"),
    [
        ("fp8", "tensor", False, "FP8"),
        ("fp8", "channel", False, "FP8_PER_CHANNEL_PER_TOKEN"),
        ("nvfp4", "", False, "W4A16_NVFP4"),
        ("nvfp4", "", True, "NVFP4_AWQ"),
    ],
)
def test_modelopt_has_a_name_for_each_kind_of_scale(layout, strategy, awq, name):
    assert algorithm_of(BY_NAME[f"modelopt/{layout}"], strategy, awq)["quant_algo"] == name


def test_blocks_that_the_shapes_give_are_written_as_they_were_read(tmp_path):
    name = "compressed-tensors_float-quantized-block"
    source, out = folder_of(name, tmp_path), tmp_path / "out"
    checkpoints.cast(source, "e4m3fn", out=out, layout="compressed-tensors")
    stored = [{t.name: t.bytes.tobytes() for t in open_file(f / "model.safetensors").tensors}
              for f in (source, out)]  # fmt: skip
    assert stored[0] == stored[1]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["block_structure"]) == ("block", [16, 32])


def test_every_layout_has_a_recorded_file(tmp_path):
    seen = set()
    for name in NAMES:
        tree = checkpoints.load(folder_of(name, tmp_path))
        seen |= {w.layout.name for w in tree.weights.values() if w.layout}
    assert set(BY_NAME) - seen <= {"deepseek/v3-experts", "comfyui/scale_weight"}


def test_a_quantised_vector_is_read_compared_and_decoded(tmp_path):
    x = np.float32([0.5, -0.25, 0.125, 0.0])
    codes = (x / np.float32(0.01)).astype(ml_dtypes.float8_e4m3fn)
    save_safetensors(
        tmp_path / "x.safetensors", {"a.bias": codes, "a.bias_scale": np.float32(0.01).reshape(())}
    )
    save_safetensors(tmp_path / "wide.safetensors", {"a.bias": x})
    tree = checkpoints.load(tmp_path / "x.safetensors")
    want = codes.astype(np.float32) * np.float32(0.01)
    np.testing.assert_array_equal(tree.value("a.bias"), want)
    np.testing.assert_array_equal(tree["a.bias"].value(), want)
    assert checkpoints.check(tmp_path / "x.safetensors", tmp_path / "wide.safetensors")
    assert checkpoints.inspect(tmp_path / "x.safetensors").groups[0].numbers == 4
    checkpoints.cast(tmp_path / "x.safetensors", "fp32", out=tmp_path / "y.safetensors")
    again = checkpoints.load(tmp_path / "y.safetensors")["a.bias"]
    assert again.shape == (4,)
    np.testing.assert_array_equal(again, want)
    with pytest.raises(checkpoints.UnreadableError, match="it has no name there; decode it by"):
        checkpoints.cast(tmp_path / "x.safetensors", "nvfp4", out=tmp_path / "z.safetensors",
                         layout="modelopt", requantise=True)  # fmt: skip


def test_a_scale_for_each_expert_is_told_from_one_for_each_row(tmp_path):
    codes = np.ones((4, 4, 8), ml_dtypes.float8_e4m3fn)
    scale = np.float32([1, 2, 3, 4])
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"experts.up": codes, "experts.up_scale": scale})
    want = np.broadcast_to(scale[:, None, None], codes.shape)
    tree = checkpoints.load(path)
    np.testing.assert_array_equal(tree.value("experts.up"), want)
    np.testing.assert_array_equal(tree["experts.up"].value(), want)


@pytest.mark.parametrize(("n", "scales", "size"), [(192, 2, 128), (192, 3, 64), (320, 3, 128),
                                                   (96, 2, 64), (48, 3, 16), (24, 2, 16),
                                                   (256, 2, 128), (7, 7, 1), (7, 1, 7), (70, 7, 10),
                                                   (10, 4, 0)])  # fmt: skip
def test_tiles_that_no_config_names_have_sizes_that_are_powers_of_two(n, scales, size):
    assert _size(n, scales) == size


@pytest.mark.parametrize(
    "name", ["compressed-tensors_nvfp4-pack-quantized", "modelopt_nvfp4", "comfyui_nvfp4"]
)
def test_blocks_without_their_tensors_scale_are_refused(name, tmp_path):
    folder = folder_of(name, tmp_path)
    parts = {t.name: t.array() for t in open_file(folder / "model.safetensors").tensors}
    kept = {n: x for n, x in parts.items() if not n.endswith(("global_scale", "scale_2"))}
    assert len(kept) == len(parts) - 1
    save_safetensors(folder / "model.safetensors", kept)
    with pytest.raises(checkpoints.UnreadableError, match="FP8 without a scale"):
        checkpoints.load(folder)


def test_the_order_of_nibbles_is_asked_for_where_two_packages_differ(tmp_path):
    parts = {t.name: t.array() for t in open_file(RECORDED / "modelopt_nvfp4.safetensors").tensors}
    both = {"_quantization_metadata": "{}", "quantization_config": "{}"}
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        jobs = [Job((entry_of(n, x),), lambda: ([], None)) for n, x in parts.items()]
        file.write(Shard("x", both, jobs).header())
        file.writelines(np.ascontiguousarray(x).tobytes() for x in parts.values())
    with pytest.raises(checkpoints.UnreadableError, match="pack NVFP4 in different orders"):
        checkpoints.load(path)
