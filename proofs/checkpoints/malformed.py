"""Damaged checkpoint folders: each is read, or refused in one sentence, with bounded memory.

    python -m proofs.checkpoints.malformed --count 461

A case is a recorded file of another package (tests/checkpoints/recorded) with its config and an
index, of which the header, the index, a config or bytes are damaged. It is loaded, each tensor is
decoded, and it is inspected, checked, compared and cast; only :class:`UnreadableError`, ValueError
and OSError are allowed, each of one sentence.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

from proofs.fuzz.files import ODD
from scalewise import checkpoints

RECORDED = Path(__file__).parents[2] / "tests/checkpoints/recorded"
NAMES = sorted(p.name.removesuffix(".safetensors") for p in RECORDED.glob("*[!d].safetensors"))
MEMORY, SECONDS, LONGEST = 24 << 20, 20, 600  # of one case; characters of a message
FILES = ("header", "index", "config", "hf_quant_config", "bytes")


def dumped(x: object, rng: random.Random, rate: float) -> str:
    """JSON of x, in which at a rate values are replaced, entries doubled, dropped or renamed."""
    if rng.random() < rate:
        return rng.choice(ODD)
    if isinstance(x, list):
        return "[" + ",".join(dumped(value, rng, rate) for value in x) + "]"
    if not isinstance(x, dict):
        return json.dumps(x)
    entries = []
    for key, value in x.items():
        chance = rng.random()
        name = json.dumps(rng.choice(("a", "dtype", key + "x")) if chance < rate / 2 else key)
        times = 0 if chance < rate / 3 else 2 if chance > 1 - rate / 2 else 1
        entries += [f"{name}:{dumped(value, rng, rate)}" for _ in range(times)]
    return "{" + ",".join(entries) + "}"


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes as they are, cut, grown, with a byte changed or two parts exchanged."""
    at = rng.randrange(len(content) + 1)
    head, tail = content[:at], content[at:]
    other = rng.randbytes(rng.randrange(1, 9))
    return rng.choice((content, head, content + other, head + other[:1] + tail[1:], tail + head))


def folder_of(rng: random.Random, folder: Path) -> str:
    """Writes a damaged checkpoint; returns which file is damaged."""
    name, what = rng.choice(NAMES), rng.choice(FILES)
    content = (RECORDED / f"{name}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    config = RECORDED / f"{name}.config.json"
    texts = {"config": json.loads(config.read_text()) if config.exists() else {},
             "hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}},
             "index": {"weight_map": dict.fromkeys(header, "model.safetensors")}}  # fmt: skip
    texts["index"]["weight_map"].pop("__metadata__", None)
    files = {"config": "config.json", "hf_quant_config": "hf_quant_config.json",
             "index": "model.safetensors.index.json"}  # fmt: skip

    def changed(x: object) -> bytes:
        return dumped(x, rng, rng.choice((0.02, 0.05, 0.2))).encode("utf-8", "surrogatepass")

    for key, file in files.items():
        if key == what or (key != "hf_quant_config" and rng.random() < 0.5):
            text = changed(texts[key]) if key == what else json.dumps(texts[key]).encode()
            cut = key == what and rng.random() < 0.2
            (folder / file).write_bytes(damaged(text, rng) if cut else text)
    if what == "header":
        text = changed(header)
        content = len(text).to_bytes(8, "little") + text + body
    content = damaged(content, rng) if what == "bytes" else content
    (folder / "model.safetensors").write_bytes(content)
    return what


def values_of(path: Path) -> None:
    tree = checkpoints.load(path, unscaled_fp8=True)
    for name in tree:
        tree.value(name)
        tree[name]


def uses(folder: Path, whole: Path, out: Path):
    yield "load", lambda: values_of(folder)
    yield "inspect", lambda: checkpoints.inspect(folder).json()
    yield "check", lambda: checkpoints.check(folder).json()
    yield "diff", lambda: checkpoints.diff(whole, folder, tolerance=0.5).json()
    yield "cast", lambda: checkpoints.cast(folder, "bf16", out=out, unscaled_fp8=True)


def case(seed: int) -> tuple[str, Counter, list[str]]:
    """Returns what was damaged, how many uses were refused, and failures."""
    rng, counts, failures = random.Random(seed), Counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder, whole = Path(scratch, "model"), Path(scratch, "whole")
        for path in (folder, whole):
            path.mkdir()
        what = folder_of(rng, folder)
        shutil.copy(RECORDED / f"{NAMES[seed % len(NAMES)]}.safetensors", whole / "a.safetensors")
        for use, run in uses(folder, whole, Path(scratch, "out")):
            start = time.process_time()
            tracemalloc.start()
            try:
                run()
                counts["read"] += 1
            except (ValueError, OSError) as error:  # UnreadableError is one
                counts["refused"] += 1
                message = str(error)
                if not message or "\n" in message or len(message) > LONGEST:
                    failures.append(f"{use}: the message is {message[:200]!r}")
                if type(error) not in (checkpoints.UnreadableError, OSError):
                    counts[type(error).__name__] += 1
            except Exception as error:
                failures.append(f"{use}: {type(error).__name__}: {error}"[:300])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > MEMORY or time.process_time() - start > SECONDS:
                failures.append(f"{use}: {peak:,} bytes, {time.process_time() - start:.1f} s")
    return what, counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=461)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    case(given.first)  # modules that are imported then take memory once
    each, total, failed = Counter(), Counter(), 0
    for seed in range(given.first, given.first + given.count):
        what, counts, failures = case(seed)
        each[what] += 1
        total += counts
        failed += bool(failures)
        for failure in failures:
            print(f"--first {seed} --count 1: {what}: {failure}", flush=True)
    print(f"{given.count} folders ({dict(each)}), uses: {dict(total)}, {failed} folders failed")


if __name__ == "__main__":
    main()
