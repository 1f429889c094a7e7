"""Scales of caches in checkpoints: written in both layouts' names, wrong ones found."""

import numpy as np
import pytest

import scalewise as sw
from scalewise.checkpoints import cache_scales, check_cache_scales

KINDS = ("normal", "heavy tails", "outlier channel", "first token", "uneven heads")
SIZES = (0.01, 0.3, 4.0, 350.0)  # of a layer's numbers


def numbers(kind, size, seed):
    """Keys or values of one layer on a text, which the seed stands for."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((300, 4, 64))
    if kind == "heavy tails":
        x = random.standard_t(4, x.shape)
    if kind == "outlier channel":
        x[..., 7] *= 30
    if kind == "first token":
        x[0] *= 20
    if kind == "uneven heads":
        x *= 2.0 ** np.arange(4)[:, None]
    return size * x


def layers(seed):
    pairs = [(k, s) for k in KINDS for s in SIZES]
    return {
        f"model.layers.{i}.self_attn": (
            numbers(kind, size, (seed, i, 0)),
            numbers(kind, size / 2, (seed, i, 1)),
        )
        for i, (kind, size) in enumerate(pairs)
    }


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_40_of_40_wrong_scales_are_found_and_no_right_one_in_40(layout, tmp_path):
    right = cache_scales(layers(0), layout)  # from one text, checked on another
    assert len(right) == 40
    sw.scaled.save_safetensors(tmp_path / "model.safetensors", right)
    stored = sw.checkpoints.load(tmp_path / "model.safetensors")
    assert not [row for row in check_cache_scales(stored, layers(1)) if row.wrong]
    # 0.0250 for 0.7817 (vllm#19292) and other factors; inverted; no number
    changes = [lambda s: s * 0.025 / 0.7817, lambda s: s / 8, lambda s: s * 40, lambda s: -s]
    changes += [lambda s: s * np.nan]
    wrong = {n: changes[i % 5](s) for i, (n, s) in enumerate(sorted(right.items()))}
    assert len([row for row in check_cache_scales(wrong, layers(1)) if row.wrong]) == 40


def test_names_and_reasons():
    k = np.linspace(-350, 350, 1024).reshape(8, 2, 64)
    stored = {"a.k_scale": np.float32([0.0250, 0.7817]), "a.v_proj.v_scale": np.float32(100)}
    first, second = check_cache_scales(stored, {"a": (k, k)})
    assert first.name == "a.k_scale"
    assert first.scale == np.float32(0.025)
    assert abs(first.saturated - 0.48) < 0.02  # those of one head of two
    assert first.wrong.startswith("too small: 48")
    assert second.wrong == "too large: 128 times what the numbers need"
    (missing, _) = check_cache_scales({}, {"a": (k, k)})
    assert missing.wrong == "missing"
    with pytest.raises(ValueError, match=r"a.k_scale has 3 scales for 2 heads; expected one, or"):
        check_cache_scales({"a.k_scale": np.ones(3)}, {"a": (k, k)})


def test_the_scales_are_those_of_a_cache():
    k, v = (numbers("normal", 3.0, seed)[None].astype(np.float32) for seed in (0, 1))
    scales = cache_scales({"a": (k, v)})
    cache = sw.KVCache.init(
        k.shape, "e4m3fn", scales="tensor", dtype="float32",
        k_scale=scales["a.k_scale"][0], v_scale=scales["a.v_scale"][0],
    ).update(k, v, 0)  # fmt: skip
    for x, stored in zip((k, v), cache.read(), strict=True):
        assert np.abs(stored - x).max() <= np.abs(x).max() / 28 + 1e-6  # half of 32 at 448
