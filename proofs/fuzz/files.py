"""Malformed files against the official readers: .safetensors, recordings, codes.

Whatever a file holds, a reader returns what the official reader returns or raises a ValueError; it
never raises anything else, and never accepts what the official reader refuses.
"""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from hypothesis import given
from rich.console import Console

import scalewise as sw
from scalewise.auditing import Recording
from scalewise.rounding import EncodedArray
from scalewise.scaled import ScaledArray, load_safetensors, save_safetensors
from scalewise.scaled._safetensors import DTYPES, NAMES

# Where load_safetensors refuses more than safetensors' own reader does, and says so in its docs.
STRICTER = ("; known: ", "NumPy has no shape")
ODD = (
    '1e400', '-0', '2.0', 'NaN', 'Infinity', '18446744073709551616', '9' * 400, '"\\ud800"',
    '"\\ud83d\\ude00"', '"\\u0000"', '"\x01"', '01', '+1', "'x'", '[0,]', '{"a":1,"a":2}', '[1,0]',
    *("[" * n + "]" * n for n in (124, 125, 126, 1000, 100_000)),
    *('{"a":' * n + "1" + "}" * n for n in (124, 125, 126, 1000)),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**64) | st.floats() | st.text(max_size=2),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=2), x, max_size=2),
    max_leaves=4,
)
FRAGMENT = st.sampled_from(ODD) | JSON.map(json.dumps)  # instead of what belongs somewhere
SPACES = st.sampled_from((" ", "\n", "\t", "\v", "\xa0", "/**/"))
TENSOR = {
    "dtype": st.sampled_from([*DTYPES, "F4", "F6_E2M3"]),
    "shape": st.lists(st.integers(0, 3), max_size=3),
}


@st.composite
def dumped(draw: Any, x: Any, rates: tuple[float, ...]) -> str:
    """JSON of x, in which at a rate values are replaced, entries doubled, dropped or renamed."""
    rng, rate = draw(st.randoms(use_true_random=True)), draw(st.sampled_from(rates))

    def text(x: Any) -> str:
        if rng.random() < rate:
            return draw(FRAGMENT)
        space = draw(SPACES) if rng.random() < rate else ""
        if isinstance(x, list):
            return "[" + ",".join(space + text(value) for value in x) + "]"
        if not isinstance(x, dict):
            return json.dumps(x)
        entries = []
        for key, value in x.items():
            chance = rng.random()
            name = json.dumps(rng.choice(("a", "dtype", key + "x")) if chance < rate / 2 else key)
            times = 0 if chance < rate / 3 else 2 if chance > 1 - rate / 2 else 1
            entries += [f"{name}:{space}{text(value)}" for _ in range(times)]
        return "{" + ",".join(entries) + "}"

    return text(x)


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The bytes as they are, or cut, grown, with bytes changed or two parts exchanged."""
    at, more = draw(st.integers(0, len(content))), draw(st.binary(max_size=8))
    head, tail = content[:at], content[at:]
    ways = (content, content, content, head, content + more, head + more + tail[len(more) :],
            head + tail[:8] * 2 + tail[8:], tail + head)  # fmt: skip
    return draw(st.sampled_from(ways))


@st.composite
def safetensors_file(draw: Any) -> bytes:
    """One with a damaged header or body."""
    entries: dict[str, Any] = {}
    if draw(st.booleans()):
        entries["__metadata__"] = draw(st.dictionaries(st.text(max_size=2), st.text(max_size=2)))
    end = 0
    for name in draw(st.lists(st.text("wbé.", max_size=3), max_size=3, unique=True)):
        tensor = draw(st.fixed_dictionaries(TENSOR, optional={"more": JSON}))
        bits = {"F4": 4, "F6_E2M3": 6}.get(tensor["dtype"]) or 8 * DTYPES[tensor["dtype"]].itemsize
        size = int(np.prod(tensor["shape"], dtype=int)) * bits // 8
        entries[name] = tensor | {"data_offsets": [end, end + size]}
        end += size
    text = draw(dumped(entries, (0.0, 0.02, 0.1))).encode("utf-8", "surrogatepass")
    before = draw(st.sampled_from((b"", b"", b"", b" ", b"\xef\xbb\xbf")))
    text = before + text + draw(st.sampled_from((b"", b"", b"", b"  \n", b"\0", b"}", b"\v")))
    length = max(len(text) + draw(st.sampled_from((0, 0, 0, 0, 1, -1, 2**40, 2**63))), 0)
    body = bytes(end + draw(st.sampled_from((0, 0, 0, 0, 1, 3))))
    return draw(damaged(length.to_bytes(8, "little") + text + body))


def require(holds: bool, otherwise: str) -> None:
    assert holds, otherwise


def in_a_file(name: str, content: bytes, check: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        check(path)


@given(safetensors_file())
def reads_as_safetensors(content: bytes) -> None:
    try:
        theirs: Any = {
            name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
            for name, tensor in safetensors.deserialize(content)
        }
    except BaseException as error:
        theirs = error

    def check(path: Path) -> None:
        try:
            found = load_safetensors(path)
        except ValueError as error:
            stricter = any(why in str(error) for why in STRICTER)
            require(not isinstance(theirs, dict) or stricter, f"refused what is right: {error}")
            return
        ours = {n: (NAMES[x.dtype], x.shape, x.tobytes()) for n, x in found.items()}  # type: ignore
        assert ours == theirs

    in_a_file("a.safetensors", content, check)


@functools.cache
def tensors() -> dict[str, Any]:
    """Scaled and encoded arrays of all kinds: of a tensor, of blocks, of two levels, of codes."""
    narrow = np.linspace(-3, 3, 70).reshape(2, 35)
    codes = jnp.asarray(np.arange(36, dtype=np.uint8).reshape(2, 18))
    mx_scale = jnp.asarray(np.ones((2, 2)).astype(ml_dtypes.float8_e8m0fnu))
    nv_scale = jnp.asarray(np.ones((2, 3)).astype(ml_dtypes.float8_e4m3fn))
    coded = EncodedArray(codes, sw.format("e2m1fn"), 35)
    return {
        "w": ScaledArray(jnp.asarray(narrow.astype(ml_dtypes.float8_e4m3fn)), jnp.float32(2)),
        "mx": ScaledArray(coded, mx_scale, (1, 32)),
        "nv": ScaledArray(coded, ScaledArray(nv_scale, jnp.float32(2)), (1, 16)),
        "mine": EncodedArray(jnp.asarray(np.arange(70, dtype=np.uint16)), sw.Format("m", 6, 9), 0),
        "narrow": coded,
    }


@given(st.data())
def reads_our_metadata(data: Any) -> None:
    """A file of ours with damaged metadata: refused, or read as arrays that have values."""
    name = data.draw(st.sampled_from(("w", "mx", "nv", "mine", "narrow")))

    def check(path: Path) -> None:
        save_safetensors(path, {name: tensors()[name]})
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8 : 8 + length])
        notes = json.loads(found["__metadata__"]["scalewise"])
        found["__metadata__"]["scalewise"] = data.draw(dumped(notes, (0.01, 0.03, 0.1)))
        for entry in found.values():  # another dtype of the same width
            if "dtype" in entry:
                width = DTYPES[entry["dtype"]].itemsize
                others = [n for n, d in DTYPES.items() if d.itemsize == width]
                entry["dtype"] = data.draw(st.sampled_from([*[entry["dtype"]] * 20, *others]))
        text = json.dumps(found).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        try:
            read = load_safetensors(path)
        except ValueError:
            return
        for array in read.values():
            value = array.value() if isinstance(array, ScaledArray) else np.asarray(array)
            assert value.shape == array.shape, text

    in_a_file("a.safetensors", b"", check)


@functools.cache
def a_recording() -> Recording:
    """Of a product that overflows in FP16."""
    x = jnp.full((4, 8), 300, jnp.float16)
    return sw.auditing.record(lambda x: jnp.sum(jnp.exp(x) * x @ x.T))(x)


CHANGES: tuple[Callable[[np.ndarray], Any], ...] = (
    lambda x: x, lambda x: x[1:], lambda x: -x, lambda x: x.T, lambda x: x.ravel(),
    lambda x: x.astype(np.float32), lambda x: x.astype(np.int8), lambda x: x[..., :0],
    lambda x: np.full_like(x, -1), lambda x: np.full_like(x, 2**40),
)  # fmt: skip


@given(st.data())
def reads_recordings(data: Any) -> None:
    """Two recordings, one damaged: compared and shown, or refused."""

    def check(path: Path) -> None:
        a_recording().save(path)
        parts: dict[str, Any] = load_safetensors(path)
        header = json.loads(bytes(np.asarray(parts["recording"])))
        text = data.draw(dumped(header, (0.0, 0.003, 0.03))).encode("utf-8", "replace")
        name = data.draw(st.sampled_from(sorted(set(parts) - {"recording"})))
        with np.errstate(all="ignore"):
            changed = data.draw(st.sampled_from(CHANGES))(np.array(parts[name]))
        parts |= {"recording": np.frombuffer(text, np.uint8), name: np.ascontiguousarray(changed)}
        save_safetensors(path, parts)
        try:
            console = Console(file=io.StringIO(), width=100)
            sw.auditing.load_recording(path).show(console, everything=True)
            sw.auditing.compare(path, a_recording()).show(console, everything=True)
        except ValueError as error:
            require("is no recording" in str(error), f"refused late: {error}")

    in_a_file("a.safetensors", b"", check)


PIECES = st.sampled_from(
    ("", "a", ".scale", "__metadata__", "\ud800", "\U0001f600", "\0", "\n", '"', "\\")
)
KEYS = st.lists(PIECES, max_size=2).map("".join) | st.sampled_from((3, None, b"a"))


@given(
    st.dictionaries(
        KEYS, st.sampled_from([d for n, d in DTYPES.items() if n != "C64"]), max_size=3
    ),
    st.sampled_from((None, None, "w", "mx", "nv")),
)
def writes_any_names(dtypes: dict[Any, Any], ours: str | None) -> None:
    """A file with unusual names: refused, or read by the official reader with the same content."""
    arrays: dict[Any, Any] = {k: np.arange(3).astype(dtype) for k, dtype in dtypes.items()}
    arrays |= {"a": tensors()[ours]} if ours else {}

    def check(path: Path) -> None:
        try:
            save_safetensors(path, arrays)
        except (TypeError, ValueError):
            odd = [k for k in arrays if not isinstance(k, str) or k == "__metadata__"]
            odd += [k for k in arrays if isinstance(k, str) and "\ud800" in k]
            assert odd or any(str(k).startswith("a.scale") for k in arrays), f"refused {[*arrays]}"
            return
        theirs = {n: bytes(x["data"]) for n, x in safetensors.deserialize(path.read_bytes())}
        plain = {k: x.tobytes() for k, x in arrays.items() if isinstance(x, np.ndarray)}
        assert plain == {k: theirs[k] for k in plain}

    in_a_file("a.safetensors", b"", check)


PROPERTIES = {
    test.__name__: test
    for test in (
        reads_as_safetensors, reads_our_metadata, reads_recordings,
        writes_any_names,
    )
}  # fmt: skip
