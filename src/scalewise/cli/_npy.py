"""Reads a `.npy` file of floats, and reports the error of a cast."""

import os
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np

from .._output import check_source, check_target


def target_of(data: Path, out: Path | None, name: str) -> Path:
    """Returns the file to write: ``out``, or one of that name beside the data, but not the data."""
    target = out or data.with_name(name)
    with suppress(OSError):  # one of them doesn't exist
        if os.path.samefile(target, data):
            raise ValueError(f"{target} is the input itself; give another --out")
    check_target(target)
    return target


def read(path: Path) -> np.ndarray:
    check_source(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of headers that Python 2 wrote, of sizes that overflow
            x = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(x, np.ndarray):
            raise ValueError("no single array")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header, which may raise any exception
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no complete .npy file ({why[:100]})") from None
    if x.dtype.kind != "f" or x.dtype.itemsize > 8:
        raise ValueError(f"{path} holds {x.dtype}; expected float16, float32 or float64")
    return np.array(x, x.dtype.newbyteorder("="))


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
    lost = int(np.sum(finite & ~np.isfinite(y)))
    return (
        f"{x.size} numbers, SQNR {sqnr}, largest relative error {relative:.3g}, "
        f"{over} beyond the largest number, {flushed} flushed to zero"
        + f", {lost} not finite any more"
        * bool(lost)
    )
