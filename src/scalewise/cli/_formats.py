"""`scalewise formats` and `recipes`: catalogues; and numbers in a format."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._output import print_rows
from ._command import refusal

if TYPE_CHECKING:
    from ..formats import Format


def formats(*, device: str | None = None) -> None:
    """List the catalogue: widths, range, spacing, infinities and NaNs.

    Args:
        device (NAME): Show formats that a device's matrix units multiply: h100, b200, v5e, ...

    Example:
        scalewise formats --device h100
    """
    if device is not None:
        _show_device(device)
        return
    from ..formats import CATALOGUE  # numpy takes 0.2 s to import: not for --help

    heads = ("format", "bits", "s-e-m", "bias", "max", "smallest", "eps", "inf", "NaN")
    rows = [
        (
            fmt.name,
            str(fmt.bits),
            f"{int(fmt.signed)}-{fmt.exponent_bits}-{fmt.mantissa_bits}",
            str(fmt.bias),
            f"{float(fmt.max):.5g}",
            # a power of two, or not
            f"2^-{fmt.smallest.denominator.bit_length() - 1}"
            if fmt.smallest.numerator == 1
            else f"{float(fmt.smallest):.3g}",
            f"2^-{fmt.mantissa_bits}" if fmt.mantissa_bits else "1",
            "yes" if fmt.infinities else "no",
            fmt.nan.replace("negative_zero", "-0's code").replace("_", " "),
        )
        for fmt in CATALOGUE.values()
    ]
    print_rows(Console(), heads, rows, right=heads[1:-1])


def _show_device(name: str) -> None:
    from ..devices import best_units, partners_of
    from ..devices import device as device_
    from ..formats import BLOCK_FORMATS, CATALOGUE

    with refusal(ValueError):
        device = device_(name)
    rows = []
    for fmt in (*CATALOGUE.values(), *BLOCK_FORMATS.values()):
        units = best_units(fmt, device)
        if units is not None:
            taken = units.formats[0].name
            how = "native" if taken == fmt.name else f"native, as {taken}"
            partners = ", ".join(partners_of(fmt, device))
            rows.append((fmt.name, how, f"{units.rate:.3g}", partners))
        else:
            element = fmt.element
            stored = element.dtype is not None and element.bits >= 8
            rows.append((fmt.name, "storage only" if stored else "emulated"))
    console = Console()
    console.print(f"{device.name}: {device.title} ({device.source})")
    print_rows(console, ("format", "products", "rate", "with"), rows, right=("rate",))
    console.print(
        "native: operands of a matrix unit, rate relative to 16 bits; storage only: stored in whole"
        " bytes, computed wide; emulated: stored as integer codes, computed wide",
        soft_wrap=True,
    )


def show_numbers(numbers: list[str], fmt: str) -> None:
    """Prints numbers in a format: bits, formula, exact value, neighbours, rounding error."""
    from .._resolve import as_format

    console = Console(highlight=False, soft_wrap=True)  # numbers are not wrapped
    with refusal(ValueError):
        f = as_format(fmt, "--format")
        parsed = [(text, *_parse(text, f)) for text in numbers]
    for text, code, given in parsed:
        _show(console, f, text, code, given)


def _parse(text: str, fmt: Format) -> tuple[int, Fraction | None]:
    """Returns the code, and the exact number if a number was given."""
    is_code = text.lower().lstrip("+").startswith(("0x", "0b"))
    try:
        code, value = (int(text, 0), 0.0) if is_code else (0, float(text))
    except ValueError:
        raise ValueError(f"{text!r} is no number and no code such as 0x3c00") from None
    if is_code:
        if not 0 <= code < 1 << fmt.bits:
            raise ValueError(
                f"code {text} is beyond {fmt.name}'s {fmt.bits} bits; "
                f"expected 0 to {(1 << fmt.bits) - 1:#x}"
            )
        return code, None
    # The number goes through float64 on its way to the format; the error shown is against the
    # decimal number itself. (Fraction("1e-999999999") would not end.)
    exact = None if not math.isfinite(value) else Fraction(text) if value else Fraction(0)
    return int(fmt.encode(value)), exact


def _show(console: Console, fmt: Format, text: str, code: int, given: Fraction | None) -> None:
    from ..formats import fields_of, next_down, next_up

    fields = fields_of(fmt, code)
    line, value = Text(f"{text} in {fmt.name}: "), fields.value
    colours = ("red", "green", "blue") if fmt.signed else ("green", "blue")
    for part, colour in zip(str(fields).split(), colours, strict=False):
        line.append(f"{part} ", style=colour)
    console.print(line.append(f" ({code:#0{2 + -(-fmt.bits // 4)}x})"))
    if not math.isfinite(value):
        console.print(f"  value      {value}")
        return
    console.print(f"  formula    {fields.formula.replace('*', '×')}")
    exact = f"{Decimal(value):f}"
    console.print(f"  value      {exact if len(exact) <= 60 else f'{Decimal(value):.50e}'}")
    console.print(f"  neighbours {next_down(fmt, value)!r}  {next_up(fmt, value)!r}")
    if given is not None:
        error = Fraction(value) - given
        relative = "" if given == 0 else f"  relative {float(abs(error / given)):.3g}"
        console.print(f"  error      {float(error):.6g}{relative}" if error else "  error      0")


def recipes(name: str | None = None) -> None:
    """List the recipes of autoscale and the optimizer states; docs/recipes.md has the sources.

    Args:
        name (NAME): A recipe to show as Python code that makes it.

    Example:
        scalewise recipes fp8
    """
    from ..autoscaling.recipes import CATALOGUE, recipe
    from ._methods import METHODS

    if name is not None:
        with refusal(ValueError):
            typer.echo(repr(recipe(name)))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what")
    for known in (*CATALOGUE, *(name for name in METHODS if name.startswith("state-"))):
        table.add_row(known, METHODS[known].what)
    console = Console()
    console.width = min(console.width, 80)
    console.print(table)
