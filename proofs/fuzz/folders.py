"""Damaged checkpoint folders: each is read, or refused in one sentence, with bounded memory.

A case is a recorded file of another package (tests/checkpoints/recorded) with its config and an
index, of which the header, the index, a config or bytes are damaged. It is loaded, each tensor is
decoded, and it is inspected, checked, compared and cast; only :class:`UnreadableError`, ValueError
and OSError are allowed, each of one sentence.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from proofs.fuzz.files import damaged, dumped
from scalewise import checkpoints

RECORDED = Path(__file__).parents[2] / "tests/checkpoints/recorded"
NAMES = sorted(p.name.removesuffix(".safetensors") for p in RECORDED.glob("*[!d].safetensors"))
MEMORY, SECONDS, LONGEST = 24 << 20, 20, 600  # of one case; characters of a message
JSON_FILES = {
    "config": "config.json",
    "hf_quant_config": "hf_quant_config.json",
    "index": "model.safetensors.index.json",
}


@st.composite
def folder(draw: Any) -> dict[str, bytes]:
    """The files of a checkpoint, one of which is damaged."""
    name = draw(st.sampled_from(NAMES))
    what = draw(st.sampled_from((*JSON_FILES, "header", "bytes")))
    content = (RECORDED / f"{name}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    config = RECORDED / f"{name}.config.json"
    texts = {
        "config": json.loads(config.read_text()) if config.exists() else {},
        "hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}},
        "index": {"weight_map": {x: "model.safetensors" for x in header if x != "__metadata__"}},
    }

    def changed(x: object) -> bytes:
        return draw(dumped(x, (0.02, 0.05, 0.2))).encode("utf-8", "surrogatepass")

    files = {}
    for key, file in JSON_FILES.items():
        if key == what:
            files[file] = draw(damaged(changed(texts[key])))
        elif key != "hf_quant_config" and draw(st.booleans()):
            files[file] = json.dumps(texts[key]).encode()
    if what == "header":
        text = changed(header)
        content = len(text).to_bytes(8, "little") + text + body
    content = draw(damaged(content)) if what == "bytes" else content
    return files | {"model.safetensors": content}


def decoded(path: Path) -> None:
    tree = checkpoints.load(path, unscaled_fp8=True)
    for name in tree:
        tree.value(name)
        tree[name]


def uses(path: Path, whole: Path, out: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "load", lambda: decoded(path)
    yield "inspect", lambda: checkpoints.inspect(path).json()
    yield "check", lambda: checkpoints.check(path).json()
    yield "against", lambda: checkpoints.check(path, whole).json()
    yield "cast", lambda: checkpoints.cast(path, "bf16", out=out, unscaled_fp8=True)


def use(files: dict[str, bytes], other: str, memory: float = MEMORY) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path, whole = Path(scratch, "model"), Path(scratch, "whole")
        for new in (path, whole):
            new.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
        shutil.copy(RECORDED / f"{other}.safetensors", whole / "a.safetensors")
        for name, run in uses(path, whole, Path(scratch, "out")):
            start = time.process_time()
            tracemalloc.start()
            try:
                run()
            except (ValueError, OSError) as error:  # UnreadableError is one
                text = str(error)
                assert text, name
                assert "\n" not in text, f"{name}: {text}"
                assert len(text) <= LONGEST, f"{name}: {text}"
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            seconds = time.process_time() - start
            assert peak <= memory, f"{name}: {peak:,} bytes"
            assert seconds <= SECONDS, f"{name}: {seconds:.1f} s"


def prepare() -> None:
    """Imports what the first case needs, whose memory isn't the case's."""
    files = {"model.safetensors": (RECORDED / f"{NAMES[0]}.safetensors").read_bytes()}
    use(files, NAMES[0], memory=math.inf)


@given(folder(), st.sampled_from(NAMES))
def reads_damaged_folders(files: dict[str, bytes], other: str) -> None:
    use(files, other)


PROPERTIES = {"reads_damaged_folders": reads_damaged_folders}
