"""`checkpoints.cast`: what is written, what stays, and what happens when it fails."""

import errno
import json
import os
import subprocess
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from scalewise import checkpoints
from scalewise.checkpoints._files import open_file
from scalewise.cli import app
from scalewise.scaled import save_safetensors

BF16 = ml_dtypes.bfloat16


def weights(seed=0, shape=(64, 128)):
    rng = np.random.default_rng(seed)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    tensors = {
        f"model.layers.0.self_attn.{n}.weight": (rng.standard_normal(shape) * 0.02 * (i + 1))
        for i, n in enumerate(names)
    }
    tensors = {n: x.astype(BF16) for n, x in tensors.items()}
    return tensors | {
        "model.norm.weight": np.ones(128, BF16),
        "lm_head.weight": rng.standard_normal((32, 128)).astype(np.float32),
        "step": np.array(7, np.int64),
    }


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors(folder / "model.safetensors", weights())
    (folder / "config.json").write_text(json.dumps({"architectures": ["Some"], "hidden_size": 128}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize(
    ("to", "layout", "error"),
    [
        ("nvfp4", "compressed-tensors", 0.12), ("mxfp4", "compressed-tensors", 0.15),
        ("mxfp8_e4m3", "compressed-tensors", 0.05), ("e4m3fn", "compressed-tensors", 0.04),
        ("nvfp4", "modelopt", 0.12), ("mxfp8_e4m3", "modelopt", 0.05), ("e4m3fn", "modelopt", 0.04),
        ("e4m3fn", "deepseek", 0.04),
        ("nvfp4", None, 0.12),
    ],
)  # fmt: skip
def test_a_cast_is_read_again_and_kept_tensors_have_their_bytes(model, tmp_path, to, layout, error):
    out = tmp_path / "out"
    report = checkpoints.cast(model, to, out=out, layout=layout)
    kept = {t.name: t for t in open_file(out / "model.safetensors").tensors}
    for t in open_file(model / "model.safetensors").tensors:
        if "proj" not in t.name:
            assert kept[t.name].bytes.tobytes() == t.bytes.tobytes()
            assert (kept[t.name].dtype, kept[t.name].shape) == (t.dtype, t.shape)
    assert (out / "tokenizer.json").read_text() == "{}"
    tree = checkpoints.load(out)
    for name, x in weights().items():
        if "proj" in name:
            wrong = np.linalg.norm(tree.value(name) - x.astype(np.float32))
            assert 0 < wrong < error * np.linalg.norm(x.astype(np.float32))
    lost = [r for r in report.records if "loss" in r]
    assert len(lost) == 4
    for r in lost:
        y, x = tree.value(r["name"]), weights()[r["name"]].astype(np.float32)
        sqnr = 10 * np.log10(np.sum(x**2) / np.sum((y - x) ** 2))
        assert r["loss"]["sqnr"] == pytest.approx(sqnr, abs=0.01)
        assert r["loss"]["flushed"] == np.sum((y == 0) & (x != 0))
    assert checkpoints.check(out, model)


def test_global_scales_of_q_k_and_v_are_one_unless_told(model, tmp_path):
    def wholes(out):
        tensors = {t.name: t.array() for t in open_file(out / "model.safetensors").tensors}
        return [float(tensors[f"model.layers.0.self_attn.{n}_proj.weight_scale_2"]) for n in "qkvo"]

    checkpoints.cast(model, "nvfp4", out=tmp_path / "a", layout="modelopt")
    checkpoints.cast(model, "nvfp4", out=tmp_path / "b", layout="modelopt", fuse=False)
    q, k, v, o = wholes(tmp_path / "a")
    assert q == k == v != o
    assert len(set(wholes(tmp_path / "b"))) == 4
    assert [f.fault for f in checkpoints.check(tmp_path / "b").findings] == [
        "unequal global scales"
    ]


def test_requantising_gives_gate_and_up_one_global_scale(model, tmp_path):
    """Engines read both as one matrix, with one global scale, whatever another tool has stored."""
    checkpoints.cast(model, "nvfp4", out=tmp_path / "own", layout="modelopt", fuse=False)
    again = {"out": tmp_path / "one", "layout": "modelopt", "requantise": True}
    checkpoints.cast(tmp_path / "own", "nvfp4", **again)
    faults = [[f.fault for f in checkpoints.check(tmp_path / n).findings] for n in ("own", "one")]
    assert faults == [["unequal global scales"], []]


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-37, 3e38])
@pytest.mark.parametrize(
    ("to", "layout"),
    [("e4m3fn", n) for n in ("deepseek", "compressed-tensors", "modelopt")]
    + [
        ("mxfp4", "compressed-tensors"),
        ("mxfp8_e4m3", "modelopt"),
        ("nvfp4", "compressed-tensors"),
        ("nvfp4", "modelopt"),
    ],
)
def test_extreme_weights_keep_normal_scales_and_finite_numbers(magnitude, to, layout, tmp_path):
    x = np.full((128, 128), magnitude, np.float32)
    save_safetensors(tmp_path / "model.safetensors", {"a.weight": x})
    checkpoints.cast(tmp_path / "model.safetensors", to, out=tmp_path / "out", layout=layout)
    y = checkpoints.load(tmp_path / "out").value("a.weight")
    assert np.isfinite(y).all()
    if magnitude == 3e38:
        np.testing.assert_allclose(y, x, rtol=0.25)
    elif to in ("e4m3fn", "nvfp4"):
        parts = {t.name: t for t in open_file(tmp_path / "out" / "model.safetensors").tensors}
        (scale,) = [
            t.array() for n, t in parts.items() if "scale" in n and t.array().dtype.itemsize == 4
        ]
        assert np.all(scale.astype(np.float32) >= np.finfo(np.float32).smallest_normal)
        np.testing.assert_allclose(y, x, rtol=0.07 if magnitude > 1e-40 else 1)
        assert np.all(y > 0) or magnitude < 1e-40


def test_repacking_keeps_codes_and_requantising_has_to_be_asked_for(model, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    checkpoints.cast(model, "nvfp4", out=a, layout="modelopt")
    report = checkpoints.cast(a, "nvfp4", out=b, layout="compressed-tensors")
    assert all("repacked" in r["what"] or r["what"] == "copied" for r in report.records)
    left, right = (checkpoints.load(x) for x in (a, b))
    for name in left:
        np.testing.assert_allclose(right.value(name), left.value(name), rtol=3e-7)
        if left.weights[name].layout:
            codes = [t.weights[name].parts["codes"].bytes.tobytes() for t in (left, right)]
            assert codes[0] == codes[1]
    with pytest.raises(checkpoints.UnreadableError, match="quantized already"):
        checkpoints.cast(a, "mxfp4", out=tmp_path / "c", layout="compressed-tensors")
    again = checkpoints.cast(
        a, "mxfp4", out=tmp_path / "c", layout="compressed-tensors", requantise=True
    )
    assert sum(r["what"] == "requantised" for r in again.records) == 4


def test_rules_make_a_mixed_checkpoint(model, tmp_path):
    out = tmp_path / "out"
    rules = {"o_proj": "e4m3fn", "v_proj": "keep"}
    checkpoints.cast(model, "nvfp4", out=out, layout="compressed-tensors", rules=rules)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {g["format"] for g in config["config_groups"].values()} == {
        "nvfp4-pack-quantized", "float-quantized"}  # fmt: skip
    tree = checkpoints.load(out)
    formats = {n.split(".")[-2]: tree.weights[n].format for n in tree if "proj" in n}
    assert formats == {"q_proj": "nvfp4", "k_proj": "nvfp4", "v_proj": "bf16", "o_proj": "e4m3fn"}


def test_fp8_without_a_scale_is_refused_unless_the_caller_says_so(tmp_path):
    x = np.ones((4, 8), ml_dtypes.float8_e4m3fn)
    save_safetensors(tmp_path / "x.safetensors", {"a.weight": x})
    with pytest.raises(checkpoints.UnreadableError, match="FP8 without a scale"):
        checkpoints.load(tmp_path / "x.safetensors")
    with pytest.raises(checkpoints.UnreadableError, match="FP8 without a scale"):
        checkpoints.cast(tmp_path / "x.safetensors", "bf16", out=tmp_path / "y.safetensors")
    tree = checkpoints.load(tmp_path / "x.safetensors", unscaled_fp8=True)
    assert tree.value("a.weight").tolist() == np.ones((4, 8)).tolist()


@pytest.mark.parametrize(("options", "message"), [
    ({"layout": "gpt-oss"}, "the layout gpt-oss can't hold the others, such as 'a.weight'"),
    ({"keep": "."}, "keep 1 of 1$"),
])  # fmt: skip
def test_a_cast_that_would_only_copy_is_refused(options, message, tmp_path):
    save_safetensors(tmp_path / "x.safetensors", {"a.weight": np.ones((4, 32), np.float32)})
    with pytest.raises(checkpoints.UnreadableError, match=message):
        checkpoints.cast(tmp_path / "x.safetensors", "mxfp4", out=tmp_path / "y", **options)
    assert not (tmp_path / "y").exists()


def test_shards_keep_their_names_and_the_index_is_written(tmp_path):
    folder, tensors = tmp_path / "model", weights()
    folder.mkdir()
    names = list(tensors)
    shards = {"a-1.safetensors": names[:3], "a-2.safetensors": names[3:]}
    for shard, those in shards.items():
        save_safetensors(folder / shard, {n: tensors[n] for n in those})
    index = {"weight_map": {n: s for s, those in shards.items() for n in those}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoints.cast(folder, "nvfp4", out=tmp_path / "out", layout="compressed-tensors")
    found = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    stored = {t.name: s for s in shards for t in open_file(tmp_path / "out" / s).tensors}
    assert found["weight_map"] == stored
    assert checkpoints.check(tmp_path / "out", folder)


def test_a_run_that_fails_changes_nothing(model, tmp_path):
    before = contents(model)

    def full(record, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        checkpoints.cast(model, "nvfp4", out=tmp_path / "out", layout="modelopt", told=full)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert contents(model) == before


def test_outputs_that_exist_and_invalid_options_are_errors(model, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "note").write_text("mine")
    for arguments, message in [
        (("--to", "nvfp4", "--out", taken), "it exists"),
        (("--to", "nvfp4", "--out", tmp_path / "no/where"), "there is no folder"),
        (("--to", "nvfp4", "--layout", "gptq"), "no layout to write is called 'gptq'"),
        (("--to", "mxfp6_e3m2", "--layout", "modelopt"), "the layout modelopt has no mxfp6_e3m2"),
        (("--to", "nvfp4", "--layout", "plain"), "the layout plain has no nvfp4"),
        (("--to", "nvfp4", "--keep", "("), "keep is '('; expected a regular expression"),
        (("--to", "nvfp4", "--tensors", "x"), "expected PATTERN=FORMAT"),
        (("--to", "nvfp4", "--scales", "best"), "scales is 'best'"),
    ]:
        result = CliRunner().invoke(app, ["cast", str(model), *map(str, arguments)])
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert (taken / "note").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_while_it_is_written_loses_nothing(model, disk):
    out, filler = disk / "out", disk / "filler"
    before = contents(model)

    def fill(record, size):
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    with pytest.raises(OSError, match="No space left") as caught:
        checkpoints.cast(model, "nvfp4", out=out, layout="modelopt", told=fill)
    assert caught.value.filename == str(out)
    assert [p.name for p in disk.iterdir()] == ["filler"]
    assert contents(model) == before
    refused = CliRunner().invoke(app, ["cast", str(model), "--to", "nvfp4", "--out", str(out)])
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    filler.unlink()
    assert checkpoints.cast(model, "nvfp4", out=out, layout="modelopt")


def test_a_folder_that_cannot_be_written_is_an_error(model, disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    ran = CliRunner().invoke(app, ["cast", str(model), "--to", "nvfp4", "--out", str(disk / "out")])
    assert ran.exit_code == 2
    assert ran.stderr == f"scalewise: Read-only file system: '{disk / 'out'}'\n"
    assert not list(disk.iterdir())


def test_a_report_that_the_disk_does_not_take_is_printed(model, tmp_path, disk):
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    out = tmp_path / "out"
    arguments = ["cast", model, "--to", "nvfp4", "--out", out, "--report", disk / "r.html"]
    ran = CliRunner().invoke(app, [str(a) for a in arguments])
    assert ran.exit_code == 2
    assert "q_proj.weight" in ran.stdout
    assert ran.stderr.splitlines() == [f"scalewise: No space left on device: '{disk / 'r.html'}'"]
    assert len(checkpoints.load(out)) == 7
    assert [p.name for p in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize(("path", "message"), [("no/r.html", "there is no folder"),
                                               ("r.txt", "ends with .html or .json")])  # fmt: skip
def test_a_report_that_cannot_be_written_is_refused_before_the_cast(model, tmp_path, path, message):
    given = ["--out", str(tmp_path / "out"), "--report", str(tmp_path / path)]
    ran = CliRunner().invoke(app, ["cast", str(model), "--to", "nvfp4", *given])
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert not (tmp_path / "out").exists()
    for command in ("inspect", "check"):
        ran = CliRunner().invoke(app, [command, str(model), "--out", str(tmp_path / path)])
        assert ran.exit_code == 2
        assert message in ran.stderr


def test_better_scales_lose_less(model, tmp_path):
    def sqnr(choice):
        out = tmp_path / choice
        records = checkpoints.cast(
            model, "nvfp4", out=out, layout="compressed-tensors", scales=choice
        ).records
        return np.array([r["loss"]["sqnr"] for r in records if "loss" in r])

    amax, adaptive, mse = map(sqnr, ("amax", "four_over_six", "mse"))
    assert len(amax) == 4
    assert np.all((amax < adaptive) & (amax < mse))


def test_the_commands_print_reports_and_json(model, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    out = tmp_path / "out"
    cast = run("cast", model, "--to", "nvfp4", "--layout", "modelopt", "--out", out,
               "--report", tmp_path / "r.html", "--json")  # fmt: skip
    assert cast.exit_code == 0, cast.output
    assert json.loads(cast.stdout)["layout"] == "modelopt"
    assert "largest error" in (tmp_path / "r.html").read_text()
    shown = run("inspect", out)
    assert "layout modelopt (quant_method is 'modelopt')" in shown.stdout
    assert json.loads(run("inspect", out, "--json").stdout)["layout"] == "modelopt"
    assert run("check", out, "--against", model).exit_code == 0
    path = out / "model.safetensors"
    tensors = {t.name: np.array(t.array()) for t in open_file(path).tensors}
    tensors["model.layers.0.self_attn.q_proj.weight_scale_2"] **= -1
    save_safetensors(path, tensors)
    found = run("check", out)
    assert found.exit_code == 1
    assert "global scale inverted: model.layers.0.self_attn.q_proj.weight" in found.stdout
    assert "repair: invert the global scale" in found.stdout
