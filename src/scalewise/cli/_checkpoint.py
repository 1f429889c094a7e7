"""A `.safetensors` checkpoint cast tensor by tensor, and the report of what a cast did."""

from pathlib import Path
from typing import Any

import numpy as np
import typer


def cast_checkpoint(data: Path, to: str, out: Path | None, rounding: str) -> None:
    """Quantizes the float tensors of a checkpoint, or of one .npy, and writes them with scales.

    float32, float16 and bfloat16 tensors of at least one dimension are quantized; others are
    copied as they are, and it says so.
    """
    import jax.numpy as jnp  # takes a second to import: not for --help

    from ..formats import BLOCK_FORMATS
    from ..formats import format as format_
    from ..scaled import load_safetensors, quantize, save_safetensors

    block = BLOCK_FORMATS.get(to.lower().replace("-", "_"))
    fmt = block or format_(to)
    element = block.element if block else format_(to)
    target = out or data.with_name(f"{data.stem}.{fmt.name}.safetensors")
    if target.resolve() == data.resolve():
        raise ValueError(f"{target} is the input itself; give another --out")
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
    """The floats of a .npy file."""
    try:
        x = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no complete .npy file ({error})") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        kind = x.dtype if isinstance(x, np.ndarray) else "several arrays"
        raise ValueError(f"{path} holds {kind}; accepted: float16, float32 or float64")
    return x


def _largest(stored, largest: float):
    """The largest magnitude that each element's scale allows, in float64."""
    import jax.numpy as jnp

    from ..scaled import ScaledArray

    ones = jnp.ones(stored.shape, jnp.float32)
    scale = np.asarray(ScaledArray(ones, stored.scale, stored.block).value())
    return scale.astype(np.float64) * largest


def report(x: np.ndarray, y: np.ndarray, largest: float | np.ndarray) -> str:
    """What the cast did: SQNR and relative error over what stays finite, and what did not."""
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
