"""Options of a cast, checked before a file is read."""

from __future__ import annotations

import dataclasses
import re

from .._resolve import as_format
from ..formats import ROUNDINGS
from ._encode import CHOICES, Choice, writer_of
from ._layouts import writable

KEEP = "lm_head|norm|embed|router|gate\\.weight|shared_expert_gate"


WIDE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


@dataclasses.dataclass(frozen=True)
class Options:
    to: str
    layout: str | None = None
    keep: str = KEEP
    rules: tuple[tuple[str, str], ...] = ()
    writer: str | None = None
    scales: Choice = "amax"
    strategy: str = "channel"
    fuse: bool = True
    powers: bool = False
    requantise: bool = False
    unscaled: bool = False
    rounding: str = "nearest_even"

    def format_of(self, name: str) -> str | None:
        """Returns the format of a weight, None if it stays as it is."""
        for pattern, fmt in self.rules:
            if re.search(pattern, name):
                return None if fmt == "keep" else fmt
        return None if self.keep and re.search(self.keep, name) else self.to


def checked_options(options: Options) -> Options:
    """Returns the options with their formats' own names."""
    for what, given, expected in (
        ("scales", options.scales, CHOICES),
        ("strategy", options.strategy, ("tensor", "channel", "block")),
    ):
        if given not in expected:
            raise ValueError(f"{what} is {given!r}; expected one of {', '.join(expected)}")
    for pattern in (options.keep, *(p for p, _ in options.rules)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
    names = [(p, f if f == "keep" else as_format(f, "--tensors", blocks=True).name)
             for p, f in options.rules]  # fmt: skip
    to = as_format(options.to, "--to", blocks=True).name
    layout = options.layout
    if layout is None:
        layout = "plain" if to in WIDE else "scalewise"
    for fmt in (to, *(f for _, f in names if f != "keep")):
        if layout not in ("plain", "scalewise") and fmt not in WIDE:
            writer_of(writable(layout, fmt).family, options.writer)
        elif layout == "plain" and fmt not in WIDE and fmt not in ("e4m3fn", "e5m2"):
            raise ValueError(f"the layout plain has no {fmt}: it holds no scales")
    if options.strategy == "block" and layout != "compressed-tensors":
        raise ValueError(f"strategy is 'block'; the layout {layout} has tensor and channel")
    if options.rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding is {options.rounding!r}; expected one of {', '.join(ROUNDINGS)}"
        )
    if layout != "scalewise" and options.rounding != "nearest_even":
        raise ValueError(f"rounding is {options.rounding!r}; the layout {layout} has nearest_even")
    return dataclasses.replace(options, to=to, rules=tuple(names), layout=layout)
