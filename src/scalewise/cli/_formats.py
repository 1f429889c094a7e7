"""`scalewise formats` and `recipes`: catalogues."""

import typer
from rich.console import Console
from rich.table import Table

from .._output import print_rows
from ._command import refusal


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
