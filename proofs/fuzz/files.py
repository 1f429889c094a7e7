"""Malformed files against the official readers: .safetensors, .npy, audits, recordings, codes.

Whatever a file holds, a reader returns what the official reader returns or raises a ValueError; it
never raises anything else, and never accepts what the official reader refuses.

    python -m proofs.fuzz files --count 500
"""

from __future__ import annotations

import functools
import io
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from rich.console import Console

import scalewise as sw
from proofs.fuzz.cases import run_case
from scalewise.auditing import Recording
from scalewise.cli._npy import read as read_npy
from scalewise.rounding import EncodedArray
from scalewise.scaled import ScaledArray, load_safetensors, save_safetensors
from scalewise.scaled._safetensors import DTYPES, NAMES

# Where load_safetensors refuses more than safetensors' own reader does, and says so in its docs.
STRICTER = ("; known: ", "NumPy has no shape")
FRAGMENTS = (
    *(
        "null",
        "true",
        "false",
        '""',
        '"x"',
        "[]",
        "{}",
        "0",
        "1",
        "-1",
        "-0",
        "2.0",
        "1e2",
        "1e400",
    ),
    *("NaN", "Infinity", "-Infinity", "18446744073709551615", "18446744073709551616", "9" * 400),
    *('"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x01"', '"é"', "01", "+1", "'x'", "[0,]"),
    *('{"a":1}', '{"a":1,"a":2}', "[0,1]", "[1,0]", "[0,0,0]", "4294967296", "1099511627776"),
)


def fragment(rng: random.Random) -> str:
    """Something to put where something else belongs."""
    depth = rng.choice((3, 60, 120, 124, 125, 126, 130, 1000, 100_000))
    nested = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    return rng.choice((*FRAGMENTS, nested))


def dumped(x: Any, rng: random.Random, rate: float) -> str:
    """JSON of x, in which at a rate values are replaced, entries doubled, dropped or renamed."""
    if rng.random() < rate:
        return fragment(rng)
    space = rng.choice((" ", "\n", "\t", "\v", "\xa0", "/**/")) if rng.random() < rate else ""
    if isinstance(x, dict):
        entries = []
        for key, value in x.items():
            chance = rng.random()
            if chance < rate / 3:
                continue
            name = json.dumps(rng.choice(("a", "dtype", key + "x")) if chance < rate / 2 else key)
            times = 2 if chance > 1 - rate / 2 else 1
            entries += [f"{name}:{space}{dumped(value, rng, rate)}" for _ in range(times)]
        return "{" + ",".join(entries) + "}"
    if isinstance(x, list):
        return "[" + ",".join(space + dumped(value, rng, rate) for value in x) + "]"
    return json.dumps(x)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes as they are, or cut, grown, with a byte changed or two parts exchanged."""
    at = rng.randrange(len(content) + 1)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: content,
        lambda: content,
        lambda: content[:at],
        lambda: content + rng.randbytes(rng.randrange(1, 9)),
        lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
        lambda: content[:at] + content[at : at + 8] * 2 + content[at + 8 :],
        lambda: content[at:] + content[:at],
    )
    return rng.choice(changes)()


def header(rng: random.Random) -> tuple[dict[str, Any], int]:
    """A header that is right, and how many bytes its tensors have."""
    entries: dict[str, Any] = {}
    if rng.random() < 0.5:
        entries["__metadata__"] = rng.choice(({}, {"format": "pt"}, {"a": "b", "c": "d"}))
    end = 0
    for n in range(rng.randrange(4)):
        dtype = rng.choice([*DTYPES, "F4", "F6_E2M3"])
        shape = [rng.choice((0, 1, 2, 3)) for _ in range(rng.randrange(4))]
        bits = {"F4": 4, "F6_E2M3": 6}.get(dtype) or 8 * DTYPES[dtype].itemsize
        size = int(np.prod(shape, dtype=int)) * bits // 8
        name = rng.choice(("w", "b", "é", "x.scale", "")) + str(n)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        if rng.random() < 0.1:
            entries[name]["more"] = {"x": [1, "y"]}
        end += size
    return entries, end


def a_safetensors_file(rng: random.Random, folder: Path) -> list[str]:
    """One with a damaged header or body: what both readers make of it."""
    entries, size = header(rng)
    text = dumped(entries, rng, rng.choice((0.0, 0.02, 0.1))).encode("utf-8", "surrogatepass")
    text = rng.choice((b"", b"", b"", b"", b"", b"", b" ", b"\xef\xbb\xbf")) + text
    text += rng.choice((b"", b"", b"", b"", b"", b"  \n", b"\0", b"}", b"\v"))
    if rng.random() < 0.03:
        text = text.decode().encode("utf-16-le")
    length = len(text) + rng.choice((0, 0, 0, 0, 0, 0, 0, 1, -1, 2**40, 2**63))
    body = rng.randbytes(size + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 3)))
    content = max(length, 0).to_bytes(8, "little") + text + body
    content = damaged(content, rng) if rng.random() < 0.3 else content
    path = folder / "a.safetensors"
    path.write_bytes(content)
    try:
        theirs: Any = {
            name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
            for name, tensor in safetensors.deserialize(content)
        }
    except BaseException as error:
        theirs = error
    try:
        found = load_safetensors(path)
    except ValueError as error:
        if isinstance(theirs, dict) and not any(why in str(error) for why in STRICTER):
            return [f"refused ({error}) what safetensors reads: {content!r}"]
        return []
    ours = {n: (NAMES[x.dtype], x.shape, x.tobytes()) for n, x in found.items()}  # type: ignore
    if isinstance(theirs, BaseException):
        return [f"read what safetensors refuses ({theirs}): {content!r}"]
    return [] if ours == theirs else [f"{ours} instead of {theirs}"]


def tensors() -> dict[str, Any]:
    """Scaled and encoded arrays of all kinds: of a tensor, of blocks, of two levels, of codes."""
    narrow = np.linspace(-3, 3, 70).reshape(2, 35)
    codes = jnp.asarray(np.arange(36, dtype=np.uint8).reshape(2, 18))
    mx_scale = jnp.asarray(np.ones((2, 2)).astype(ml_dtypes.float8_e8m0fnu))
    nv_scale = jnp.asarray(np.ones((2, 3)).astype(ml_dtypes.float8_e4m3fn))
    e2m1, mine = sw.format("e2m1fn"), sw.Format("e6m9", 6, 9)
    return {
        "w": ScaledArray(jnp.asarray(narrow.astype(ml_dtypes.float8_e4m3fn)), jnp.float32(2)),
        "mx": ScaledArray(EncodedArray(codes, e2m1, 35), mx_scale, (1, 32)),
        "nv": ScaledArray(
            EncodedArray(codes, e2m1, 35), ScaledArray(nv_scale, jnp.float32(2)), (1, 16)
        ),
        "mine": EncodedArray(jnp.asarray(np.arange(70, dtype=np.uint16)), mine, 0),
        "narrow": EncodedArray(codes, e2m1, 35),
    }


def our_metadata(rng: random.Random, folder: Path) -> list[str]:
    """A file of ours with damaged metadata: refused, or read as arrays that have values."""
    path = folder / "a.safetensors"
    save_safetensors(path, dict([rng.choice(list(tensors().items()))]))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found = json.loads(raw[8 : 8 + length])
    notes = json.loads(found["__metadata__"]["scalewise"])
    found["__metadata__"]["scalewise"] = dumped(notes, rng, rng.choice((0.01, 0.03, 0.1)))
    for entry in found.values():  # another dtype of the same width
        if "dtype" in entry and rng.random() < 0.15:
            width = DTYPES[entry["dtype"]].itemsize
            entry["dtype"] = rng.choice([n for n, d in DTYPES.items() if d.itemsize == width])
    text = json.dumps(found).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    try:
        read = load_safetensors(path)
    except ValueError:
        return []
    for array in read.values():
        value = array.value() if isinstance(array, ScaledArray) else np.asarray(array)
        if value.shape != array.shape:
            return [f"{text!r}: a value of shape {value.shape} for {array.shape}"]
    return []


def an_npy_file(rng: random.Random, folder: Path) -> list[str]:
    """One with a damaged header or body: what both readers make of it."""
    dtype = rng.choice(("<f2", "<f4", "<f8", ">f4", "<i4", "|b1", "<c8", "<f4", "<f8"))
    x = np.arange(rng.choice((0, 1, 6))).astype(dtype)
    x = x.reshape(rng.choice(((-1,), (-1, 1), (1, -1))), order=rng.choice("CF"))
    text = rng.choice((str(x.shape), "(10000000000000,)", "(-1,)", "(2, 3)", "()", "(2.0,)", "3"))
    described = {
        "descr": repr(x.dtype.str),
        "fortran_order": str(rng.random() < 0.3),
        "shape": text,
    }
    if rng.random() < 0.3:
        key = rng.choice(list(described))
        junk = (
            "(" * 90,
            "None",
            "[",
            "__import__('os')",
            "'|O'",
            "[('a', '<f4')]",
            "1e9",
            "'<f16'",
        )
        described[key] = rng.choice(junk)
    pairs = [f"'{k}': {v}" for k, v in described.items() if rng.random() > 0.03]
    head = ("{" + ", ".join(pairs) + "}\n").encode()
    version = rng.choice((*[b"\1\0"] * 8, b"\2\0", b"\7\0"))
    width = 2 if version == b"\1\0" else 4
    content = b"\x93NUMPY" + version + len(head).to_bytes(width, "little") + head + x.tobytes()
    content = damaged(content, rng) if rng.random() < 0.4 else content
    path = folder / "a.npy"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs: Any = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:
            theirs = error
    try:
        ours = read_npy(path)
    except ValueError as error:
        floats = isinstance(theirs, np.ndarray) and theirs.dtype.kind == "f"
        readable = floats and theirs.dtype.itemsize <= 8 and "version" not in str(error)
        return [f"refused ({error}) what NumPy reads: {content!r}"] if readable else []
    if not isinstance(theirs, np.ndarray):
        return [f"read what NumPy refuses ({theirs!r}): {content!r}"]
    same = ours.shape == theirs.shape and ours.tobytes() == theirs.astype(ours.dtype).tobytes()
    return [] if same else [f"{ours} instead of {theirs}: {content!r}"]


@functools.cache
def a_recording() -> Recording:
    """Of a product that overflows in FP16."""
    x = jnp.full((4, 8), 300, jnp.float16)
    return sw.auditing.record(lambda x: jnp.sum(jnp.exp(x) * x @ x.T))(x)


def saved_recordings(rng: random.Random, folder: Path) -> list[str]:
    """Two recordings, one damaged: compared and shown, or refused."""
    path = a_recording().save(folder / "a.safetensors")
    parts: dict[str, Any] = load_safetensors(path)
    header = json.loads(bytes(np.asarray(parts["recording"])))
    text = dumped(header, rng, rng.choice((0.0, 0.003, 0.03))).encode("utf-8", "replace")
    parts["recording"] = np.frombuffer(text, np.uint8)
    if rng.random() < 0.6:
        name = rng.choice(sorted(set(parts) - {"recording"}))
        x = np.array(parts[name])
        changes: tuple[Callable[[], Any], ...] = (
            lambda: x[1:], lambda: -x, lambda: x.T, lambda: x.ravel(), lambda: x.astype(np.float32),
            lambda: x.astype(np.int8), lambda: np.full_like(x, rng.choice((-1, 0, 2**40))),
            lambda: x[..., :0],
        )  # fmt: skip
        with np.errstate(all="ignore"):
            parts[name] = np.ascontiguousarray(rng.choice(changes)())
    save_safetensors(path, parts)
    try:
        console = Console(file=io.StringIO(), width=100)
        sw.auditing.load_recording(path).show(console, everything=True)
        sw.auditing.compare(path, a_recording()).show(console, everything=True)
    except ValueError as error:
        return [] if "is no recording" in str(error) else [f"refused late: {error}"]
    return []


def any_names(rng: random.Random, folder: Path) -> list[str]:
    """A file with unusual names: refused, or read by the official reader with the same content."""
    pieces = ("", "a", ".scale", "__metadata__", "\ud800", "\U0001f600", "\0", "\n", '"', "\\")
    arrays: dict[Any, Any] = {}
    for n in range(rng.randrange(4)):
        name = "".join(rng.choice(pieces) for _ in range(rng.randrange(3)))
        key = name if rng.random() < 0.95 else rng.choice((3, None, b"a"))
        dtype = rng.choice([d for d in DTYPES.values() if d.name != "complex64"])
        arrays[key] = np.arange(n + 1).astype(dtype)
    if rng.random() < 0.3:
        arrays["a"] = tensors()[rng.choice(("w", "mx", "nv"))]
    path = folder / "a.safetensors"
    try:
        save_safetensors(path, arrays)
    except (TypeError, ValueError):
        wrong = [
            k for k in arrays if not isinstance(k, str) or k == "__metadata__" or "\ud800" in k
        ]
        taken = "a" in arrays and any(str(k).startswith("a.scale") for k in arrays)
        return [] if wrong or taken else [f"refused {list(arrays)}"]
    theirs = {name: bytes(x["data"]) for name, x in safetensors.deserialize(path.read_bytes())}
    wrong = [k for k, x in arrays.items() if isinstance(x, np.ndarray) and theirs[k] != x.tobytes()]
    return [f"{wrong} differ"] if wrong else []


KINDS = (
    saved_recordings,
    any_names,
    a_safetensors_file,
    a_safetensors_file,
    our_metadata,
    an_npy_file,
)


def check(seed: int, index: int) -> list[str]:
    """Makes file number ``index`` of a seed and reads it; the failures, a sentence each."""
    return run_case("files", KINDS, seed, index)
