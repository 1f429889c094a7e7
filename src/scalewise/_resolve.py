"""The meaning of a string: the format, policy or recipe that it names, in every function.

A name that a format and a recipe share (``"fp16"``, ``"bf16"``, ``"mxfp4"``) is the format where a
function takes such formats (``audit``, ``emulate``, ``quantize``), and the recipe where it takes
none (``autoscale``, ``training.step``). A string with ``=`` is a policy.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from .formats import BlockFormat, BlockFormatLike, Format


def near(name: str, known: Iterable[str]) -> str:
    """Returns the question whether the names most like this one were meant, or nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=2)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of thing that a string can name.

    Attributes:
        name: with its article, for messages.
        module, table: where the mapping from names to objects is; it is imported on demand. None
            as table for a policy, which is written out: ``p=f32,c=bf16,o=f32``.
        parse: the function in ``module`` that returns the object of a spelling.
        key: returns the key in the table that a spelling stands for.
        aliases: a second table, of other spellings.
    """

    name: str
    module: str
    table: str | None
    parse: str
    key: Callable[[str], str] = str
    aliases: str | None = None

    def names(self) -> Mapping[str, object]:
        return getattr(importlib.import_module(self.module), self.table) if self.table else {}

    def spellings(self) -> list[str]:
        other = getattr(importlib.import_module(self.module), self.aliases) if self.aliases else ()
        return [*self.names(), *other]

    def has(self, text: str) -> bool:
        """Returns True if the text names something of this kind."""
        return self.key(text) in self.spellings() if self.table else "=" in text

    def find(self, text: str) -> Any:
        return getattr(importlib.import_module(self.module), self.parse)(text)


def _underscored(text: str) -> str:
    return text.replace("-", "_")


def _format_key(text: str) -> str:
    name = text.lower().replace("-", "_")
    for prefix in ("float8_", "float6_", "float4_"):
        name = name.removeprefix(prefix)
    return name


KINDS: dict[str, Kind] = {  # in the order in which a string is looked up
    "policy": Kind("a policy", "scalewise.autocasting", None, "policy"),
    "format": Kind(
        "a format", "scalewise.formats", "CATALOGUE", "format", _format_key, aliases="ALIASES"
    ),
    "block format": Kind(
        "a block format", "scalewise.formats", "BLOCK_FORMATS", "block_format", _format_key
    ),
    "rounding mode": Kind("a rounding mode", "scalewise.formats", "ROUNDINGS", "rounding_mode"),
    "recipe": Kind(
        "a recipe", "scalewise.autoscaling.recipes", "CATALOGUE", "recipe", _underscored
    ),
}


def resolve(text: str, *kinds: str, where: str) -> Any:
    """Returns what a string names, which is of one of the given kinds.

    Args:
        text: the string.
        kinds: keys of ``KINDS``.
        where: the function or argument, for the message.

    Raises:
        ValueError: the string names nothing, or something of another kind.

    Example:
        >>> resolve("half", "format", where="emulate").name
        'fp16'
        >>> resolve("fp8", "format", where="emulate")
        Traceback (most recent call last):
        ...
        ValueError: emulate: 'fp8' is a recipe, not a format; did you mean 'e4m3fn' or 'e5m2'? ...
    """
    for name, kind in KINDS.items():
        if name in kinds and kind.has(text):
            return kind.find(text)
    raise ValueError(unknown(text, *kinds, where=where))


OF_INTEGERS = (
    "is a dtype of integers; scalewise has no integer formats: its smallest are e4m3fn and e5m2 "
    "(8 bits), e2m3fn (6) and e2m1fn (4)"
)


def is_of_integers(name: str) -> bool:
    """Returns whether a dtype's name is that of integers, or of truth values."""
    return re.fullmatch(r"u?int\d*|[iu]\d+|bool", name) is not None


def unknown(text: str, *kinds: str, where: str) -> str:
    """Returns the sentence about a string that names nothing of the given kinds."""
    accepted = [kind for name, kind in KINDS.items() if name in kinds]
    both = "format" in kinds  # of which block formats are the last
    wanted = " or ".join(k.name for k in accepted if not (both and k is KINDS["block format"]))
    names = list(dict.fromkeys(name for kind in accepted for name in kind.names()))
    expected = f"expected one of {_listed(names)}" if names else "expected"
    if "policy" in kinds:
        expected += f"{' or' if names else ''} a policy such as 'p=f32,c=bf16,o=f32'"
    if "rounding mode" not in kinds and is_of_integers(text):
        return f"{where}: {text!r} {OF_INTEGERS}"
    other = kind_of(text)
    if other is not None:
        hint = _formats_of(text, names) if "format" in kinds else ""
        return f"{where}: {text!r} is {other}, not {wanted};{hint} {expected}"
    known = dict.fromkeys(spelling for kind in accepted for spelling in kind.spellings())
    wanted = wanted.removeprefix("a ").replace(" or a ", ", ", wanted.count(" or ") - 1)
    wanted = wanted.replace(" or a ", " or ")
    return f"{where}: no {wanted} is called {text!r}; {near(text, known)}{expected}"


def _listed(names: list[str]) -> str:
    """Returns the first dozen of some names, and the commands that list all of them."""
    if len(names) <= 12:
        return ", ".join(names)
    shown = ", ".join(names[:12])
    return f"{shown}, ... ({len(names)} in all: scalewise formats, scalewise recipes)"


def _formats_of(text: str, names: list[str]) -> str:
    """Returns the question whether a format of a recipe or block format was meant; or ""."""
    kind = next((k for k in ("block format", "recipe") if KINDS[k].has(text)), None)
    if kind is None:
        return ""
    found = KINDS[kind].find(text)
    formats = [found] if kind == "block format" else [p[0] for p in found.products.formats()[:2]]
    meant = [f if f.name in names else f.element for f in formats if f is not None]
    return f" did you mean {' or '.join(dict.fromkeys(repr(f.name) for f in meant))}?"


def kind_of(text: str) -> str | None:
    """Returns the kind of thing that a string names, with its article; None if it names nothing."""
    return next((kind.name for kind in KINDS.values() if kind.has(text)), None)


@overload
def as_format(spec: BlockFormatLike | str, where: str) -> Format: ...


@overload
def as_format(
    spec: BlockFormatLike | str, where: str, *, blocks: Literal[True]
) -> Format | BlockFormat: ...


def as_format(
    spec: BlockFormatLike | str, where: str, *, blocks: bool = False
) -> Format | BlockFormat:
    """Returns the format of a name, a dtype or a format; with ``blocks`` also a block format.

    Args:
        spec: what a function was given as a format.
        where: the function or argument, for the message.
        blocks: whether it takes block formats, too.

    Raises:
        ValueError: it is no such thing.
    """
    from .formats import BlockFormat
    from .formats import format as format_

    if isinstance(spec, str):
        return resolve(spec, "format", *(["block format"] if blocks else []), where=where)
    if blocks and isinstance(spec, BlockFormat):
        return spec
    try:
        return format_(spec)
    except ValueError as error:
        raise ValueError(str(error).replace("format:", f"{where}:", 1)) from None
