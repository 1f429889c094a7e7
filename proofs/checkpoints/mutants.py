"""Faults put into clean checkpoints of every layout, and the share that `check` finds and names.

    python -m proofs.checkpoints.mutants --count 160

A mutant is a layout, a fault, a seed: the same seed makes the same bytes. Each is checked beside
the original and alone. A mutant whose bytes are also those of a clean cast of other plausible
weights (all of a tensor's times 2 or 4, say) has no evidence alone: if it isn't found, it is
counted apart, after the equal bytes were made.
"""

import argparse
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from scalewise import checkpoints
from scalewise.checkpoints._encode import encoded, quantised, writer_of
from scalewise.checkpoints._files import open_file
from scalewise.checkpoints._lay import base_of, laid_out
from scalewise.checkpoints._layouts import BY_NAME, quantization_config
from scalewise.checkpoints._report import Fault as c
from scalewise.checkpoints._weights import swizzled
from scalewise.checkpoints._write import Job, Shard, entry_of
from scalewise.formats import E4M3FN

HIDDEN, INNER, ROWS = 256, 512, 256
BF16 = ml_dtypes.bfloat16
LAYOUTS = [
    n
    for n, layout in BY_NAME.items()
    if not n.startswith("torchao")
    and not layout.swizzled
    and n
    not in ("gpt-oss/original", "deepseek/v3-experts", "comfyui/scale_weight", "fbgemm/fp8-experts")
]
TENSORWISE = ("modelopt/fp8", "comfyui/fp8")
METHOD = {"fbgemm": "fbgemm_fp8", "deepseek": "fp8", "modelopt": "modelopt", "gpt-oss": "mxfp4"}


def model(seed):
    """Returns the wide weights of two layers, whose input channels have magnitudes of their own."""
    rng = np.random.default_rng(seed)
    channels = {n: np.exp(0.8 * rng.standard_normal(n)) for n in (HIDDEN, INNER)}

    def weight(rows, columns):
        x = rng.standard_normal((rows, columns)) * channels[columns]
        x *= np.exp(0.4 * rng.standard_normal((rows, 1)))
        return (x * 0.02 * 2 ** rng.uniform(-0.5, 0.5)).astype(BF16)

    tensors = {"model.embed_tokens.weight": weight(512, HIDDEN)}
    for i in range(3):
        at = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (ROWS, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
            "self_attn.v_proj": (128, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }.items():  # fmt: skip
            tensors[f"{at}{name}.weight"] = weight(*shape)
        tensors[f"{at}input_layernorm.weight"] = np.ones(HIDDEN, BF16)
    tensors["lm_head.weight"] = weight(512, HIDDEN)
    wide = weight(64, INNER)
    wide[:, :64] = 0  # of it narrow formats make zeros
    tensors["model.sparse.weight"] = wide
    return tensors


def experts(seed):
    """Returns the experts of a gpt-oss: [E, H, 2I], input channels first."""
    rng = np.random.default_rng(seed)
    tensors = {k: x for k, x in model(seed).items() if "_proj" not in k and "sparse" not in k}
    lines = np.exp(0.8 * rng.standard_normal((1, HIDDEN, 1)))
    for i in range(3):
        x = rng.standard_normal((2, HIDDEN, 256)) * lines * 0.02
        x[:, :64, :8] = 0
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = x.astype(BF16)
    return tensors


def narrow(layout, tensors, fuse=True):
    """Returns the tensors of a clean checkpoint, its metadata and config."""
    result, layouts = {}, {}
    writer = writer_of({"fbgemm": "modelopt", "comfyui": "modelopt"}.get(
        layout.family, layout.family))  # fmt: skip
    top, group = {}, {}
    for name, x in tensors.items():
        key = name.replace("q_proj", "_").replace("k_proj", "_").replace("v_proj", "_")
        key = key.replace("gate_proj", "+").replace("up_proj", "+") if x.ndim == 2 else key
        top.setdefault(key, []).append(float(np.abs(x.astype(np.float32)).max()))
        group[name] = key
    for name, x in tensors.items():
        own = base_of(layout, name)
        if x.ndim < 2 or "embed" in name or "lm_head" in name or own is None:
            result[name] = x
            continue
        largest = max(top[group[name]]) if fuse and layout.whole else None
        powers = layout.name == "deepseek/v4"
        strategy = "tensor" if layout.name in ("modelopt/fp8", "comfyui/fp8") else "channel"
        if powers:
            v3 = quantised(x, BY_NAME["deepseek/v3"], writer)
            scale = np.exp2(np.ceil(np.log2(v3.scale))).astype(np.float32)
            wide = np.kron(scale, np.ones((128, 128), np.float32))[: x.shape[0], : x.shape[1]]
            codes = encoded(np.ascontiguousarray(x.astype(np.float32) / wide), E4M3FN)
            v3 = replace(v3, codes=codes, scale=scale)
            parts = laid_out(v3, layout, own)
            scale = (np.log2(v3.scale) + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
            parts[layout.scale.format(own)] = scale
        else:
            packed = quantised(x, layout, writer, largest=largest, strategy=strategy)
            parts = laid_out(packed, layout, own)
        layouts[name] = layout
        result |= parts
    comfyui = layout.family == "comfyui"
    metadata = {"_quantization_metadata": json.dumps({"layers": {}})} if comfyui else {}
    config = quantization_config(
        {n: (x, "channel") for n, x in layouts.items()}, []) if layout.family in (
        "compressed-tensors",) else {"quant_method": METHOD.get(layout.family)}  # fmt: skip
    if layout.family == "deepseek":
        config["weight_block_size"] = [128, 128]
    return result, metadata, {} if comfyui else config


def write(folder, tensors, metadata, config, shards=1, index=None):
    """Writes a checkpoint; ``index`` changes which shard it says a tensor is in."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    half = -(-len(names) // shards)
    for i, file in enumerate(files):
        write_file(
            folder / file, {n: tensors[n] for n in names[i * half : (i + 1) * half]}, metadata
        )
    if config:
        text = json.dumps({"quantization_config": config})
        (folder / "config.json").write_text(text)
    if shards > 1:
        weights = {n: files[i // half] for i, n in enumerate(names)}
        text = json.dumps({"metadata": {}, "weight_map": weights | (index or {})})
        (folder / "model.safetensors.index.json").write_text(text)
    return files


def write_file(path, tensors, metadata):
    entries = [entry_of(n, x) for n, x in tensors.items()]
    jobs = [Job((e,), lambda: ([], None)) for e in entries]
    with path.open("wb") as file:
        file.write(Shard(path.name, metadata, jobs).header())
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def parts_of(layout, tensors, rng):
    """Returns a random quantised weight's base and the names of its parts."""
    names = [n for n in tensors if n.endswith(layout.scale.removeprefix("{}"))]
    tail = layout.scale.removeprefix("{}")
    names = [n for n in names if layout.names(n.removesuffix(tail))["codes"] in tensors]
    names = [n for n in names if "sparse" not in n]
    base = names[rng.integers(len(names))].removesuffix(layout.scale.removeprefix("{}"))
    return base, layout.names(base)


def as_bytes(x):
    return np.ascontiguousarray(x).view(np.uint8)


def of_all(change):
    """Makes a mutation of one tensor, or, for every third seed, of all."""

    def mutate(layout, tensors, rng):
        if rng.integers(3):
            bases = [parts_of(layout, tensors, rng)[0]]
        else:
            tail = layout.scale.removeprefix("{}")
            bases = [n.removesuffix(tail) for n in tensors if n.endswith(tail)]
            bases = [b for b in bases if layout.names(b)["codes"] in tensors]
        done = [b for b in bases if change(layout, tensors, layout.names(b), rng)]
        return [layout.weight.format(b) for b in done]

    return mutate


def inverted(layout, t, names, rng):
    if names.get("whole") not in t:
        return False
    t[names["whole"]] = (1 / t[names["whole"]]).astype(np.float32)
    return True


def twice(layout, t, names, rng):
    if names.get("whole") not in t:
        return False
    t[names["whole"]] = np.square(t[names["whole"]]).astype(np.float32)
    return True


def _reordered(order):
    def change(layout, t, names, rng):
        x = t[names["scale"]]
        if x.ndim < 2 or 1 in x.shape[-2:]:
            return False
        y = order(x, rng)
        if y is None or (y.shape == x.shape and np.array_equal(as_bytes(y), as_bytes(x))):
            return False
        t[names["scale"]] = np.ascontiguousarray(y)
        return True

    return change


def _swizzle(x, rng):
    if x.ndim != 2 or x.shape[0] % 128 or x.shape[1] % 4:
        return None
    return swizzled(as_bytes(x)).reshape(x.shape).view(x.dtype) if x.dtype.itemsize == 1 else None


def _roll(x, rng):
    y = np.roll(
        as_bytes(x).reshape(*x.shape, -1), int(rng.choice([-1, 1])), int(rng.choice([-2, -3]))
    )
    return y.view(x.dtype).reshape(x.shape)


def _transpose(x, rng):
    y = np.swapaxes(x, -1, -2)
    return y if rng.integers(2) else np.ascontiguousarray(y).reshape(x.shape)


def number(layout, t, names, rng):
    if not layout.exponents:
        return False
    t[names["scale"]] = as_bytes(t[names["scale"]]).astype(np.float32)
    return True


def bias(layout, t, names, rng):
    if not layout.exponents:
        return False
    x, by = t[names["scale"]], int(rng.choice([-2, -1, 1, 2, 8, 20]))
    moved = np.clip(as_bytes(x).astype(int) + by, 0, 254).astype(np.uint8)
    t[names["scale"]] = moved.view(x.dtype)
    return True


def missing(layout, t, names, rng):
    t.pop(names["whole" if names.get("whole") in t and rng.integers(2) and layout.needs_whole
                else "scale"])  # fmt: skip
    return True


def flipped(layout, t, names, rng):
    if layout.nibbles is None:
        return False
    x = t[names["codes"]]
    y = as_bytes(x)
    t[names["codes"]] = ((y >> 4) | (y << 4)).view(x.dtype).reshape(x.shape)
    return True


def bad_scale(layout, t, names, rng):
    name = names["whole"] if names.get("whole") in t and rng.integers(2) else names["scale"]
    x = t[name].copy()
    flat = x.reshape(-1)
    at = int(rng.integers(flat.size))
    if x.dtype.itemsize == 1:
        e8m0 = layout.exponents
        flat.view(np.uint8)[at] = 255 if e8m0 else rng.choice([0x7F, 0xFF, 0x80])
    else:
        flat[at] = rng.choice([np.nan, np.inf, 0.0])
    t[name] = x
    return True


def random_codes(layout, t, names, rng):
    x = t[names["codes"]]
    y = as_bytes(x).copy().reshape(-1)
    y[: y.size // int(rng.integers(1, 3))] = 0
    y = np.where(y == 0, rng.integers(0, 256, y.size, dtype=np.uint8), y)
    t[names["codes"]] = y.view(x.dtype).reshape(x.shape)
    return True


OPERATORS = {
    c.INVERTED: of_all(inverted), c.TWICE: of_all(twice),
    c.TRANSPOSED: of_all(_reordered(_transpose)), c.SWIZZLED: of_all(_reordered(_swizzle)),
    c.WRONG_BLOCK: of_all(_reordered(_roll)), c.NUMBER: of_all(number), c.BIAS: of_all(bias),
    c.MISSING: of_all(missing), c.NIBBLES: of_all(flipped), c.BAD_SCALE: of_all(bad_scale),
    c.RANDOM: of_all(random_codes),
}  # fmt: skip
FILES = (c.UNEQUAL, "tensor missing", "tensor stale", "tensor duplicated", "shard missing")


def of_files(fault, layout, original, folder, rng):
    """Writes a mutant whose fault is in the files; returns the names, None if it doesn't apply."""
    clean = narrow(layout, original)
    if fault == c.UNEQUAL:
        if not layout.needs_whole:
            return None
        write(folder, *narrow(layout, original, fuse=False))
        return [n for n in original if "proj" in n and "down" not in n]
    tensors, metadata, config = clean
    files = write(folder, tensors, metadata, config, shards=2)
    if fault == "shard missing":
        (folder / files[rng.integers(2)]).unlink()
        return []
    here = folder / files[0]
    stored = {t.name: t.array() for t in open_file(here).tensors}
    name = list(stored)[rng.integers(len(stored))]
    second = open_file(folder / files[1])
    if fault == "tensor missing":
        stored = {n: np.array(x) for n, x in stored.items() if n != name}
        write_file(here, stored, metadata)
    elif fault == "tensor stale":
        stored = {n: np.array(x) for n, x in stored.items()} | {"old.weight": np.ones(4, BF16)}
        name = "old.weight"
        write_file(here, stored, metadata)
    else:
        extra = {t.name: np.array(t.array()) for t in second.tensors}
        write_file(folder / files[1], extra | {name: np.array(stored[name])}, metadata)
    return [name]


def able(fault, layout):
    """Returns whether a layout can have a fault."""
    return {
        c.INVERTED: layout.whole, c.TWICE: layout.whole, c.UNEQUAL: layout.needs_whole,
        c.NUMBER: layout.exponents, c.BIAS: layout.exponents, c.NIBBLES: layout.nibbles,
        c.SWIZZLED: layout.block and layout.block[0] == 1,
        c.WRONG_BLOCK: layout.name not in TENSORWISE,
        c.TRANSPOSED: layout.name not in TENSORWISE,
    }.get(fault, True)  # fmt: skip


def mutant(seed, folder):
    """Writes a mutant; returns the layout, the fault, the names of the tensors, the original."""
    rng = np.random.default_rng(seed)
    faults = [*OPERATORS, *FILES]
    fault = faults[seed % len(faults)]
    names_of = [n for n in LAYOUTS if able(fault, BY_NAME[n])]
    for _ in range(200):
        layout = BY_NAME[names_of[rng.integers(len(names_of))]]
        original = experts(seed) if layout.transposed else model(seed)
        if fault in FILES:
            names = of_files(fault, layout, original, folder, rng)
        else:
            tensors, metadata, config = narrow(layout, original)
            names = OPERATORS[fault](layout, tensors, rng)
            if names:
                write(folder, tensors, metadata, config)
        if names is not None and (names or fault == "shard missing"):
            return layout.name, fault, names, original
    raise AssertionError(f"no layout can have {fault}")


def judged(report, fault, names):
    """Returns whether a fault was found, and whether it was named in those tensors alone."""
    named = [f for f in report.findings if f.fault == fault]
    there = {n for f in named for n in f.tensors}
    hit = bool(named) and (not names or any(n.startswith(tuple(names)) or any(
        n.startswith(x.removesuffix(".weight")) for x in names) for n in there))  # fmt: skip
    return bool(report.findings), hit


def clean(seed, name, folder):
    layout = BY_NAME[name]
    original = experts(seed) if layout.transposed else model(seed)
    write(folder / "clean", *narrow(layout, original))
    write_file(folder / "original.safetensors", original, {})
    return [len(checkpoints.check(folder / "clean", against).findings)
            for against in (None, folder / "original.safetensors")]  # fmt: skip


def has_clean_twin(layout, names, original, folder):
    """Returns whether the original, some tensors times a power of two, is cast to equal bytes."""
    here = {t.name: t.bytes.tobytes() for t in open_file(folder / "model.safetensors").tensors}
    for factor in (0.25, 0.5, 2, 4):
        moved = {n: x * BF16(factor) if n in names else x for n, x in original.items()}
        tensors, _, _ = narrow(BY_NAME[layout], moved)
        if {n: np.ascontiguousarray(x).tobytes() for n, x in tensors.items()} == here:
            return True
    return False


def run(count, first=0, verbose=False):
    counts = defaultdict(Counter)
    alarms = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for seed in range(first, first + count):
            layout, fault, names, original = mutant(seed, folder / "mutant")
            write_file(folder / "original.safetensors", original, {})
            for beside, against in (("beside the original", folder / "original.safetensors"),
                                    ("alone", None)):  # fmt: skip
                report = checkpoints.check(folder / "mutant", against)
                found, named = judged(report, fault, names)
                counts[beside].update(n=1, found=found, named=named)
                counts[beside, fault].update(n=1, found=found, named=named)
                if against is None and fault == c.BIAS and not found:
                    twin = has_clean_twin(layout, names, original, folder / "mutant")
                    counts["alone, not found, equal to clean files of other weights"].update(n=twin)
                if verbose and not named:
                    print(seed, layout, beside, fault, names[:2], len(names), "->",
                          [(f.fault, f.tensors[:1], f.evidence[:70]) for f in report.findings][:3],
                          flush=True)  # fmt: skip
            if seed % 20 == 19:
                pair = [dict(counts[k]) for k in ("alone", "beside the original")]
                print(seed + 1 - first, "mutants, alone and beside:", *pair, flush=True)
        for seed, name in enumerate(LAYOUTS):
            for against, n in zip(("alone", "beside"), clean(seed, name, folder), strict=True):
                alarms.update({"files": 1, "alarms": bool(n)})
                if verbose and n:
                    print("alarm", seed, name, against)
    return counts, alarms


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    counts, alarms = run(given.count, given.first, given.verbose)
    for key, found in counts.items():
        name = key if isinstance(key, str) else " / ".join(key)
        rest = f", {found['found']} found, {found['named']} named" if "found" in found else ""
        print(f"{name}: {found['n']} mutants{rest}")
    print(f"clean: {alarms['files']} checks, {alarms['alarms']} false alarms")


if __name__ == "__main__":
    main()
