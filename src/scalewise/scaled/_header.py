"""A safetensors header, read as strictly as safetensors' own reader, Rust's serde_json, does."""

from __future__ import annotations

import json
import math
from typing import NamedTuple, NoReturn

from .._types import Json

DEEPEST = 127  # serde_json's limit on nested arrays and objects


class Entry(NamedTuple):
    """What a header says of one tensor: its dtype, its shape, and its bytes from first to last."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def read_header(content: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors and the metadata that a header lists.

    A header is UTF-8 without a byte order mark; NaN, numbers beyond float64, unpaired surrogates
    and more than 127 levels are refused, as is a key that occurs twice in one object (safetensors'
    own reader refuses some of these, and takes the last of others).

    Raises:
        ValueError: why it can't be read, as half a sentence.
    """
    try:
        text = content.decode("utf-8")
        header = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        if "\\u" in text:  # unpaired surrogates can't be encoded
            json.dumps(header, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("too many levels") from None
    except UnicodeError as error:
        raise ValueError(f"no UTF-8 ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("no JSON object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ holds something else than strings")
    return {name: _entry(name, found) for name, found in header.items()}, metadata


def _entry(name: str, found: object) -> Entry:
    def refuse(what: str) -> ValueError:
        return ValueError(f"{name!r} has no {what}")

    if not isinstance(found, dict):
        raise refuse("description")
    if not isinstance(found.get("dtype"), str):
        raise refuse("dtype")
    shape, ends = _naturals(found.get("shape")), _naturals(found.get("data_offsets"))
    if shape is None:
        raise refuse("shape of natural numbers")
    if ends is None or len(ends) != 2:
        raise refuse("two data_offsets")
    if _depth(found) + 1 > DEEPEST:
        raise ValueError("too many levels")
    return Entry(found["dtype"], shape, *ends)


def _naturals(x: object) -> tuple[int, ...] | None:
    """The numbers of a list of natural numbers, None for anything else."""
    return tuple(x) if isinstance(x, list) and all(type(n) is int for n in x) else None


def _depth(x: object) -> int:
    """Levels of arrays and objects, counted without recursion."""
    depth, level = 0, [x]
    while level := [y for y in level if isinstance(y, dict | list)]:
        depth += 1
        level = [z for y in level for z in (y.values() if isinstance(y, dict) else y)]
    return depth


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}")


def _integer(text: str) -> int | float:
    """Returns an int where serde_json reads an unsigned integer of 64 bits, else a float as it."""
    small = len(text) <= 20 and not text.startswith("-") and int(text) < 2**64
    return int(text) if small else _float(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number beyond float64")
    return number
