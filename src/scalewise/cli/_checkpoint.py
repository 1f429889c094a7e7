"""Casts a `.safetensors` checkpoint tensor by tensor, and reports the error of a cast."""

import math
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import typer

from .._output import check_source, check_target


def target_of(data: Path, out: Path | None, name: str) -> Path:
    """Returns the file to write: ``out``, or one of that name beside the data, but not the data."""
    target = out or data.with_name(name)
    with suppress(OSError):  # one of them doesn't exist
        if os.path.samefile(target, data):
            raise ValueError(f"{target} is the input itself; give another --out")
    check_target(target)
    return target


def cast_checkpoint(data: Path, fmt: Any, out: Path | None, rounding: Any) -> None:
    """Quantizes the float tensors of a checkpoint or a .npy file, and writes them with scales.

    float32, float16 and bfloat16 tensors of at least one dimension are quantized; others are
    copied, and listed as copied.
    """
    import jax.numpy as jnp  # takes a second to import: not for --help

    from ..formats import BlockFormat
    from ..scaled import load_safetensors, quantize, save_safetensors

    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    target = target_of(data, out, f"{data.stem}.{fmt.name}.safetensors")
    tensors = {"data": read(data)} if data.suffix == ".npy" else load_safetensors(data)
    result: dict[str, Any] = {}
    lines = []
    for name, x in tensors.items():
        if not isinstance(x, np.ndarray):
            raise ValueError(f"{data.name}: {name!r} is quantized already; cast the original")
        kind = str(x.dtype)
        if kind not in ("float32", "float16", "bfloat16") or x.ndim == 0 or x.size == 0:
            result[name] = x
            lines.append(f"{name}: {kind} of shape {x.shape}, copied as it is")
            continue
        stored = quantize(jnp.asarray(x), fmt, rounding=rounding)
        result[name] = stored
        value = np.asarray(stored.value()).astype(np.float64)
        top = _largest(stored, float(element.max))
        lines.append(f"{name}: {report(x, value, top)}")
    save_safetensors(target, result)
    for line in lines:
        typer.echo(line)
    typer.echo(f"{data.name} -> {target.name}: {len(result)} tensors")


def read(path: Path) -> np.ndarray:
    """Reads the floats of a .npy file.

    The size in the header is checked against the file's before any memory is allocated.

    Raises:
        ValueError: the file is no .npy file, is truncated, or holds other numbers than floats.
        OSError: the file can't be read.
    """
    size = check_source(path)
    with path.open("rb") as file:
        shape, transposed, dtype = _npy_header(path, file)
        if dtype.kind != "f" or dtype.itemsize > 8:
            raise ValueError(f"{path} holds {dtype}; expected float16, float32 or float64")
        claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
        if claimed > there:
            raise ValueError(
                f"{path} is no complete .npy file (an array of shape {shape} has {claimed:,} "
                f"bytes, {there:,} are there)"
            )
        x = np.frombuffer(file.read(claimed), dtype)
    x = x.reshape(shape[::-1]).T if transposed else x.reshape(shape)
    return x.astype(dtype.newbyteorder("="))


def _npy_header(path: Path, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, whether the array is in Fortran order, and dtype."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            shape, transposed, dtype = readers[version](file)
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"a shape of {shape}")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header, which may raise any exception
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no complete .npy file ({why[:100]})") from None
    return shape, transposed, dtype


def _largest(stored, largest: float):
    """Returns the largest magnitude that each element's scale allows, in float64."""
    import jax.numpy as jnp

    from ..scaled import ScaledArray

    ones = jnp.ones(stored.shape, jnp.float32)
    scale = np.asarray(ScaledArray(ones, stored.scale, stored.block).value())
    return scale.astype(np.float64) * largest


def report(x: np.ndarray, y: np.ndarray, largest: float | np.ndarray) -> str:
    """Describes a cast: SQNR and largest relative error of finite numbers; overflow and flushes."""
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    kept = finite & np.isfinite(y)
    unit = np.abs(wide[kept]).max(initial=0.0) or 1.0  # so that no square leaves float64's range
    signal, noise = wide[kept] / unit, (y[kept] - wide[kept]) / unit
    power, error = float(np.sum(signal**2)), float(np.sum(noise**2))
    sqnr = f"{10 * np.log10(power / error):.1f} dB" if power and error else "exact"
    if error and not power:
        sqnr = "none"
    nonzero = signal != 0
    relative = np.abs(noise[nonzero] / signal[nonzero]).max(initial=0.0)
    over = int(np.sum(finite & (np.abs(wide) > largest)))
    flushed = int(np.sum((wide != 0) & (y == 0)))
    return (
        f"{x.size} numbers, SQNR {sqnr}, largest relative error {relative:.3g}, "
        f"{over} beyond the largest number, {flushed} flushed to zero"
    )
