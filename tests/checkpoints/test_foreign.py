"""Checkpoints of other packages: factors of channels, unknown quantisations, several files."""

import json

import ml_dtypes
import numpy as np
import pytest

import scalewise as sw
from scalewise import checkpoints
from scalewise._output import TargetError
from scalewise.checkpoints import UnreadableError
from scalewise.scaled import load_safetensors, save_safetensors

RNG = np.random.default_rng(0)
WIDE = RNG.normal(size=(32, 64)).astype(np.float32)


def relative(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(y)


@pytest.fixture(params=["nvfp4", "e4m3fn"])
def awq(request, tmp_path):
    """A layer whose input is multiplied by factors of its channels, and its effective weight."""
    save_safetensors(tmp_path / "wide.safetensors", {"a.weight": WIDE})
    checkpoints.cast(
        tmp_path / "wide.safetensors", request.param, out=tmp_path / "q", layout="modelopt"
    )
    parts = load_safetensors(tmp_path / "q" / "wide.safetensors")
    factors = np.exp2(RNG.normal(size=64)).astype(np.float32)
    folder = tmp_path / "awq"
    folder.mkdir()
    parts = {name: np.asarray(x) for name, x in parts.items()}
    save_safetensors(folder / "model.safetensors", parts | {"a.pre_quant_scale": factors})
    quantization = {"quant_algo": "NVFP4_AWQ", "group_size": 16}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return request.param, folder, checkpoints.load(folder).value("a.weight") * factors


def test_factors_of_channels_are_kept_or_multiplied(awq, tmp_path):
    fmt, folder, effective = awq
    report = checkpoints.cast(folder, "bf16", out=tmp_path / "bf16")
    assert relative(checkpoints.load(tmp_path / "bf16")["a.weight"], effective) < 2**-8
    assert not report.dropped

    checkpoints.cast(folder, fmt, out=tmp_path / "same", layout="modelopt")
    own, again = (load_safetensors(f / "model.safetensors") for f in (folder, tmp_path / "same"))
    assert own.keys() == again.keys()
    assert all(np.array_equal(np.asarray(own[n]), np.asarray(again[n])) for n in own)
    config = json.loads((tmp_path / "same" / "hf_quant_config.json").read_text())
    assert config["quantization"]["pre_quant_scale"] is True

    with pytest.raises(UnreadableError, match="factors of the input's channels"):
        checkpoints.cast(folder, fmt, out=tmp_path / "no", layout="compressed-tensors")
    out = tmp_path / "again"
    checkpoints.cast(folder, fmt, out=out, layout="compressed-tensors", requantise=True)
    assert relative(checkpoints.load(out).value("a.weight"), effective) < 0.15
    for other in ("bf16", "same", "again"):
        assert checkpoints.check(tmp_path / other, folder)


def test_a_check_sees_that_factors_are_gone(awq, tmp_path):
    _, folder, _ = awq
    parts = load_safetensors(folder / "model.safetensors")
    del parts["a.pre_quant_scale"]
    save_safetensors(tmp_path / "lost.safetensors", {n: np.asarray(x) for n, x in parts.items()})
    assert not checkpoints.check(tmp_path / "lost.safetensors", folder)


INT8 = {"a.weight": np.ones((8, 64), np.int8), "a.weight_scale": np.ones((8, 1), np.float32)}
UNKNOWN = {
    "gptq": {
        "a.qweight": np.ones((8, 64), np.int32), "a.qzeros": np.ones((1, 8), np.int32),
        "a.scales": np.ones((1, 64), np.float16),
    },
    "compressed-tensors": INT8,
    "bitsandbytes": {
        "a.weight": np.ones((2048, 1), np.uint8), "a.weight.absmax": np.ones(64, np.float32),
    },
}  # fmt: skip


@pytest.mark.parametrize("method", UNKNOWN)
def test_codes_that_no_layout_decodes_are_refused(method, tmp_path):
    (tmp_path / "in").mkdir()
    save_safetensors(tmp_path / "in" / "model.safetensors", UNKNOWN[method] | {"b.weight": WIDE})
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    for to in ("bf16", "e4m3fn"):
        with pytest.raises(UnreadableError, match=f"isn't known .quant_method '{method}'"):
            checkpoints.cast(tmp_path / "in", to, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", [[1, 0], {"a": 1}, 3, True])
def test_a_method_that_is_no_name_is_one_that_is_not_known(method, tmp_path):
    save_safetensors(tmp_path / "model.safetensors", {"b.weight": WIDE})
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"quant_method is {method!r}, which is not known" in str(checkpoints.inspect(tmp_path))


def test_integers_that_are_no_codes_are_copied(tmp_path):
    arrays = {
        "attn.relative_position_index": np.arange(64).reshape(8, 8), "attn.logit_scale": WIDE[0],
        "bn.num_batches_tracked": np.array(3), "bn.weight": WIDE[0],
    }  # fmt: skip
    save_safetensors(tmp_path / "a.safetensors", arrays | {"b.weight": WIDE})
    checkpoints.cast(tmp_path / "a.safetensors", "bf16", out=tmp_path / "b.safetensors")
    found = checkpoints.load(tmp_path / "b.safetensors")
    assert np.array_equal(found["attn.relative_position_index"], np.arange(64).reshape(8, 8))


def test_each_file_of_a_folder_describes_its_own_arrays(tmp_path):
    x = {name: RNG.normal(size=(32, 64)).astype(np.float32) for name in "ab"}
    stored = {name: sw.quantize(y, "mxfp4") for name, y in x.items()}
    for name in x:
        save_safetensors(tmp_path / f"{name}.safetensors", {name: stored[name]})
    tree = checkpoints.load(tmp_path)
    assert set(tree) == {"a", "b"}
    for name, y in stored.items():
        assert np.array_equal(tree.value(name), np.asarray(y.value()))


def test_a_name_with_two_contents_is_refused(tmp_path):
    for i in (1, 2):
        save_safetensors(tmp_path / f"s-{i}.safetensors", {"a.weight": WIDE * i})
    with pytest.raises(UnreadableError, match="with different bytes"):
        checkpoints.load(tmp_path)
    index = {"weight_map": {"a.weight": "s-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.array_equal(checkpoints.load(tmp_path)["a.weight"], WIDE * 2)


def test_numbers_that_become_infinite_are_reported(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a.weight": WIDE * 1e5})
    report = checkpoints.cast(tmp_path / "a.safetensors", "fp16", out=tmp_path / "b.safetensors")
    lost = int(np.isinf(checkpoints.load(tmp_path / "b.safetensors").value("a.weight")).sum())
    assert lost
    assert f"{lost} not finite any more" in report.sentences()[1]
    assert report.sqnr < 100


def test_fp8_without_scales_is_cast_if_its_numbers_are_stored(tmp_path):
    codes = WIDE.astype(ml_dtypes.float8_e4m3fn)
    save_safetensors(tmp_path / "a.safetensors", {"a.weight": codes})
    for to, layout in (("bf16", None), ("mxfp8_e4m3", "compressed-tensors")):
        out = tmp_path / f"{to}.safetensors"
        checkpoints.cast(tmp_path / "a.safetensors", to, out=out, layout=layout, unscaled_fp8=True)
        assert relative(checkpoints.load(out).value("a.weight"), codes) < 0.05


@pytest.mark.parametrize("place", ["text_config", "llm_config", "compression_config"])
def test_no_config_of_the_old_quantisation_stays(place, tmp_path):
    save_safetensors(tmp_path / "w.safetensors", {"l.up_proj.weight": WIDE})
    checkpoints.cast(tmp_path / "w.safetensors", "e4m3fn", out=tmp_path / "q",
                     layout="compressed-tensors")  # fmt: skip
    path = tmp_path / "q" / "config.json"
    own = json.loads(path.read_text())["quantization_config"]
    nested = own if place == "compression_config" else {"quantization_config": own, "size": 3}
    path.write_text(json.dumps({place: nested}))
    checkpoints.cast(tmp_path / "q", "bf16", out=tmp_path / "wide")
    assert checkpoints.load(tmp_path / "wide").layout is None
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config == ({} if place == "compression_config" else {place: {"size": 3}})


def test_an_index_keeps_its_name(tmp_path):
    (tmp_path / "unet").mkdir()
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_safetensors(tmp_path / "unet" / name, {f"l{i}.weight": WIDE})
    index = "diffusion_pytorch_model.safetensors.index.json"
    places = {f"l{i}.weight": name for i, name in enumerate(names)}
    (tmp_path / "unet" / index).write_text(json.dumps({"weight_map": places}))
    checkpoints.cast(tmp_path / "unet", "bf16", out=tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [*names, index]


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_an_odd_number_of_rows_of_gpt_oss(rows, tmp_path):
    codes = RNG.integers(0, 256, (1, rows, 2, 16)).astype(np.uint8)
    parts = {"a_blocks": codes, "a_scales": np.full((1, rows, 2), 127, np.uint8)}
    save_safetensors(tmp_path / "model.safetensors", parts)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    tree = checkpoints.load(tmp_path)
    assert np.array_equal(np.asarray(tree["a"].value()), tree.value("a"))


def test_a_dangling_link_is_refused_before_the_work(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a.weight": WIDE})
    (tmp_path / "out").symlink_to("nowhere")
    told = []
    with pytest.raises(TargetError, match="it exists"):
        checkpoints.cast(tmp_path / "a.safetensors", "bf16", out=tmp_path / "out",
                         told=lambda *x: told.append(x))  # fmt: skip
    assert not told


@pytest.mark.parametrize(
    ("to", "layout", "options", "message"),
    [
        ("e4m3fn", None, {"strategy": "channel"}, "the layout scalewise has tensor"),
        ("e4m3fn", "deepseek", {"strategy": "tensor"}, "deepseek has no choice"),
        ("e4m3fn", "modelopt", {"scales": "mse"}, "modelopt has amax"),
        ("nvfp4", None, {"scales": "mse"}, "scalewise has amax"),
    ],
)
def test_options_without_an_effect_are_refused(to, layout, options, message, tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a.weight": WIDE})
    with pytest.raises(ValueError, match=message):
        checkpoints.cast(
            tmp_path / "a.safetensors", to, out=tmp_path / "b", layout=layout, **options
        )
